"""Checkpoints: a run's state after a number of steps, whole or not there at all.

``checkpoints/STEP/`` holds ``state/`` (Orbax, one array per dotted path of the state, so the same
for every strategy), ``about.json`` and, written last, ``manifest.json``.  A folder without a
manifest is no checkpoint, and one that differs from its manifest is not restored.
"""

import concurrent.futures
import json
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from spmdlab.compile import Layout
from spmdlab.errors import RunError
from spmdlab.report import files
from spmdlab.run import manifest, processes
from spmdlab.train.state import State, abstract_state, by_path, paths
from spmdlab.workload import Workload

ABOUT, STATE = "about.json", "state"
NONE = -1
"""Stands for "no checkpoint" where processes agree on a number."""


class Checkpoints:
    """Those of one run.

    Writing goes on while the run does: `save` returns as soon as the state has left the devices;
    files are written, then hashed, then made to count, in a thread.
    """

    def __init__(self, folder: pathlib.Path, *, keep: int) -> None:
        self.last: int | None = None
        """The newest that counts."""
        self._folder = folder
        self._keep = keep
        self._orbax = ocp.StandardCheckpointer()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._saving: concurrent.futures.Future[int] | None = None

    def save(self, step: int, state: State, about: Mapping[str, Any]) -> None:
        """Begins to save; first waits for the save before this one.

        Args:
            step: How many steps the state has seen.
            state: May be donated as soon as this returns.
            about: What ``about.json`` shall hold.

        Raises:
            RunError: The save before this one failed, or this one cannot begin.
        """
        self.wait()
        names, leaves = jax.tree.leaves(paths(state)), jax.tree.leaves(state)
        arrays = dict(zip(names, leaves, strict=True))
        folder = self._folder / str(step)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._orbax.save((folder / STATE).absolute(), arrays)
        except (OSError, ValueError) as error:
            raise self._failed(step, error) from error
        self._saving = self._thread.submit(self._finish, step, dict(about))

    def wait(self) -> None:
        """Returns when nothing is being saved.

        Raises:
            RunError: The save failed; the checkpoints before it are still there.
        """
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        try:
            self.last = saving.result()
        except Exception as error:
            raise self._failed("the last save", error) from error

    def close(self) -> None:
        """Waits, and ends the threads."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._orbax.close()

    def newest_good(self, note: Callable[[str], None]) -> int | None:
        """Returns the newest checkpoint all of whose bytes are as written; None if there is none.

        Newer ones that are not are named in a note and set aside under another name, so that
        the run can save there again.
        """
        found = self._newest_good(note) if processes.is_first() else NONE
        found = processes.of_first(found)
        self.last = None if found == NONE else found
        return self.last

    def about(self, step: int) -> dict[str, Any]:
        """Returns a checkpoint's ``about.json``."""
        return json.loads((self._folder / str(step) / ABOUT).read_text(encoding="utf-8"))

    def restore(self, step: int, workload: Workload, layout: Layout) -> State:
        """Returns the state, laid out as asked for, whatever layout it was saved under.

        Raises:
            RunError: Orbax cannot read it as this workload's state.
        """
        tree = abstract_state(workload)
        target = {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout.sharding(path))
            for path, leaf in zip(jax.tree.leaves(paths(tree)), jax.tree.leaves(tree), strict=True)
        }
        folder = self._folder / str(step)
        try:
            found = self._orbax.restore((folder / STATE).absolute(), target)
        except (OSError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:300]
            raise RunError(f"checkpoint {folder}: cannot be restored: {reason}") from error
        return by_path(tree, found)

    def name(self, step: int | None) -> str | None:
        """Returns how a checkpoint is called in ``result.json``."""
        return None if step is None else f"{self._folder.name}/{step}"

    def _steps(self) -> list[int]:
        """All folders called like a checkpoint, newest first."""
        if not self._folder.is_dir():
            return []
        numbers = [int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()]
        return sorted(numbers, reverse=True)

    def _newest_good(self, note: Callable[[str], None]) -> int:
        for step in self._steps():
            folder = self._folder / str(step)
            reason = manifest.damage(folder)
            if reason is None:
                return step
            aside = folder.with_name(f"{step}.damaged")
            number = 1
            while aside.exists():
                number += 1
                aside = folder.with_name(f"{step}.damaged-{number}")
            folder.rename(aside)
            note(f"checkpoint {folder} is damaged: {reason}; set aside as {aside.name}")
        return NONE

    def _finish(self, step: int, about: dict[str, Any]) -> int:
        """Runs in the thread."""
        self._orbax.wait_until_finished()
        if processes.is_first():
            folder = self._folder / str(step)
            files.write_files(folder, {ABOUT: files.json_text(about)})
            manifest.write(folder)
            self._drop_old()
        return step

    def _drop_old(self) -> None:
        """Keeps the newest and the best; drops others, and saves that never finished."""
        complete = [n for n in self._steps() if manifest.is_complete(self._folder / str(n))]
        keep = set(complete[: self._keep])
        scored = [(loss, -n) for n in complete if (loss := self._valid_loss(n)) is not None]
        if scored:
            keep.add(-min(scored)[1])
        for step in self._steps():
            if step not in keep and step < complete[0]:
                folder = self._folder / str(step)
                # From here on it counts no more, should the rest be cut short.
                (folder / manifest.NAME).unlink(missing_ok=True)
                shutil.rmtree(folder)

    def _valid_loss(self, step: int) -> float | None:
        try:
            return self.about(step).get("valid_loss")
        except (OSError, ValueError):
            return None  # Damaged, which is found out where it matters: when it is restored.

    def _failed(self, what: int | str, error: Exception) -> RunError:
        reason = " ".join(str(error).split())[:300]
        what = f"checkpoint {what}" if isinstance(what, int) else what
        last = (
            "there is no checkpoint" if self.last is None else f"the last good one is {self.last}"
        )
        return RunError(f"{what} in {self._folder} failed: {reason}; {last}")
