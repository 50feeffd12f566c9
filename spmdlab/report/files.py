"""Writes results whole or not at all."""

import contextlib
import json
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

from spmdlab.errors import ConfigError


def json_text(value: Any) -> str:
    """Returns JSON; a number that is not finite, which JSON cannot say, becomes null.

    >>> print(json_text({"a": (1, float("nan"))}), end="")
    {
     "a": [
      1,
      null
     ]
    }
    """
    return json.dumps(_finite(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def json_line(value: Any) -> str:
    """Returns JSON in one line, for a file of such lines; see `json_text`."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def check_folder(folder: str | os.PathLike[str], names: Iterable[str] = ()) -> pathlib.Path:
    """Returns the folder's path; leaves nothing behind.  Called before the work, not after it.

    Args:
        folder: Where files shall go.
        names: The files.

    Raises:
        ConfigError: It has no name, is a file, or lies where this user may not write; or one of
            the names is a folder already.
    """
    if not os.fspath(folder):
        raise ConfigError("the folder for the results has no name; '.' is this one")
    path = pathlib.Path(folder)
    there = path
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise ConfigError(f"cannot write to {str(path)!r}: {str(there)!r} is not a folder")
    for name in names:
        if (path / name).is_dir():
            raise ConfigError(f"cannot write {str(path / name)!r}: it is a folder")
    try:
        # Tried, not asked: root may do everything, but not on every file system.
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=there):
            return path
    except OSError as error:
        raise ConfigError(f"cannot write to {str(path)!r}: {error.strerror or error}") from error


def write_files(folder: str | os.PathLike[str], texts: Mapping[str, str]) -> list[pathlib.Path]:
    """Writes all files or, where one cannot be written, leaves all of them as they were.

    Each is written under a temporary name in ``folder`` (made if missing), then renamed.

    Args:
        folder: Where.
        texts: File name -> what it shall hold.

    Returns:
        The files' paths.

    Raises:
        ConfigError: The folder cannot be written.
    """
    path = check_folder(folder, texts)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=path) as staging:
            return _move_in(pathlib.Path(staging), path, texts)
    except OSError as error:
        raise ConfigError(f"cannot write to {str(path)!r}: {error.strerror or error}") from error


def _move_in(
    staging: pathlib.Path, folder: pathlib.Path, texts: Mapping[str, str]
) -> list[pathlib.Path]:
    for name, text in texts.items():
        with (staging / name).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    with contextlib.ExitStack() as undo:
        for name in texts:
            final, before = folder / name, staging / f"{name}.before"
            if final.exists():
                shutil.copy2(final, before)
                undo.callback(os.replace, before, final)
            else:
                undo.callback(final.unlink, missing_ok=True)
            os.replace(staging / name, final)
        undo.pop_all()
    return [folder / name for name in texts]
