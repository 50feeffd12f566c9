"""A run's directory: what began it, what it saw, and what came of it.

| file | holds |
|---|---|
| ``run.json`` | config, versions, random numbers; a session for each time it began or resumed |
| ``lineage.json`` | where the data comes from, stage by stage |
| ``order.jsonl`` | ``{"step", "ids"}``: the examples at each position of the data, from 0 |
| ``metrics.jsonl`` | a line per logged step (from 1), a line per evaluation |
| ``checkpoints/STEP/`` | the state after that many steps, see `spmdlab.run.checkpoint` |
| ``result.json`` | how the last session ended |
"""

import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from spmdlab.errors import ConfigError
from spmdlab.report import files

RUN, LINEAGE, ORDER, METRICS, RESULT = (
    "run.json",
    "lineage.json",
    "order.jsonl",
    "metrics.jsonl",
    "result.json",
)
CHECKPOINTS = "checkpoints"
FREE = ("strategies", "targets", "chips", "training")
"""Parts of an experiment that may change when it resumes; all others decide what is computed."""

_LOCK = ".lock"


def check_new(folder: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the folder's path if no run is in it.

    Raises:
        ConfigError: There is a run, or the folder cannot be written.
    """
    path = files.check_folder(folder)
    for name in (RUN, CHECKPOINTS, METRICS, ORDER):
        if (path / name).exists():
            raise ConfigError(
                f"{str(path)!r} has a run in it ({name}); resume it (--resume), or name another "
                "folder"
            )
    return path


def read_run(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns ``run.json`` of the run that shall be resumed.

    Raises:
        ConfigError: There is none, or it cannot be read.
    """
    path = files.check_folder(folder) / RUN
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"there is no run in {str(path.parent)!r} (no {RUN}); to begin one, do not resume"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error


def fixed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parts of an experiment's JSON that a resumed run must have in common."""
    return {name: value for name, value in config.items() if name not in FREE}


def check_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ConfigError, naming each field and both values, where two dicts of JSON differ."""
    if differences := list(_differences(before, now, "")):
        raise ConfigError(
            "the run cannot be resumed with another workload: " + "; ".join(differences)
        )


def _differences(before: Any, now: Any, path: str) -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys([*before, *now]):
            inner = f"{path}.{name}" if path else name
            yield from _differences(before.get(name), now.get(name), inner)
    elif before != now:
        yield f"{path} was {_short(before)} and is {_short(now)}"


def _short(value: Any) -> str:
    """Hashes need not be read to their end."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:13]}..."


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[None]:
    """Keeps other processes out of the directory; ends with the process, however that ends.

    Raises:
        ConfigError: Another process has it.
    """
    with (folder / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is training in {str(folder)!r}") from None
        yield


class Journal:
    """A file of JSON lines that grows by whole lines."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._file = None

    def trim(self, keep: Callable[[Mapping[str, Any]], bool]) -> None:
        """Drops the lines that ``keep`` does not want, and one that was cut short."""
        if not self._path.exists():
            return
        kept = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                if keep(json.loads(line)):
                    kept.append(f"{line}\n")
        files.write_files(self._path.parent, {self._path.name: "".join(kept)})

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a line; a number that is not finite becomes null."""
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(files.json_line(record))
        self._file.flush()

    def close(self) -> None:
        """What is written stays written without it."""
        if self._file is not None:
            self._file.close()
            self._file = None
