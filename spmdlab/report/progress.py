"""What happens while rows are made, on stderr: a live display, or plain lines in a file."""

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Watcher(Protocol):
    """Is told what starts and ends."""

    def started(self, label: str) -> None:
        """A worker took the job up."""
        ...

    def finished(self, label: str, note: str, *, outcome: str) -> None:
        """The job is done; ``note`` says in few words what came of it.

        ``outcome`` is "done", "failed", or "refused" where the user has to change something.
        """
        ...


class Silent:
    """Shows nothing."""

    def started(self, label: str) -> None: ...

    def finished(self, label: str, note: str, *, outcome: str) -> None: ...


class Lines:
    """Prints a line per finished job.

    Refusals wait until anything else has happened: when every job is refused, the one line that
    says so is all that stderr shall hold.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._count = 0
        self._waiting: list[str] | None = []
        self._began = time.monotonic()

    def started(self, label: str) -> None: ...

    def finished(self, label: str, note: str, *, outcome: str) -> None:
        self._count += 1
        elapsed_s = time.monotonic() - self._began
        line = f"[{self._count}/{self._total}] {elapsed_s:.0f} s  {label}: {note}"
        if outcome == "refused" and self._waiting is not None:
            self._waiting.append(line)
            return
        for each in [*(self._waiting or []), line]:
            self._console.print(each, markup=False, soft_wrap=True)
        self._waiting = None


class Live:
    """A bar, and a line for each job that a worker has in hand."""

    def __init__(self, progress: Progress, total: int, doing: str) -> None:
        self._progress = progress
        self._total = total
        self._count = 0
        self._all = progress.add_task(doing, total=total, note=f"0/{total}")
        self._running: dict[str, TaskID] = {}

    def started(self, label: str) -> None:
        self._running[label] = self._progress.add_task(f"  {escape(label)}", total=None, note="")

    def finished(self, label: str, note: str, *, outcome: str) -> None:
        if (task := self._running.pop(label, None)) is not None:
            self._progress.remove_task(task)
        self._count += 1
        self._progress.update(self._all, advance=1, note=f"{self._count}/{self._total}")
        if outcome == "done":
            self._progress.console.print(f"{label}: {note}", markup=False, style="dim")


@contextlib.contextmanager
def on_stderr(total: int, *, doing: str = "compiling") -> Iterator[Watcher]:
    """Watches ``total`` jobs; leaves only the finished jobs' lines on the screen."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield Lines(console, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield Live(progress, total, doing)
