"""Worker processes that may die without taking anything else along.

A compiler can abort its process (a failed check), be killed for want of memory, and write to file
descriptor 2 whatever it likes.  So the caller stays small and imports no accelerator library;
each worker imports it once, does job after job, and is replaced when it dies.

The workers are started with ``python -m spmdlab.pool FD`` and spoken to over a socket, since
`multiprocessing` would run the caller's main module again in each.
"""

import collections
import contextlib
import dataclasses
import faulthandler
import importlib
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import connection
from typing import Any

import cloudpickle

from spmdlab import errors

TAIL_LINES = 20
"""Lines of a worker's log that a failure carries."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A function named ``module:name``, imported where it is called, and its arguments."""

    function: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self) -> Any:
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)(*self.args, **self.kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """A job that returned."""

    value: Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A job that raised, or whose worker died."""

    error_type: str
    """Name of the exception's class; "WorkerDied" or "TimedOut" where there was none."""

    message: str
    """One line."""

    expected: bool
    """Whether it is a `SpmdlabError`: something the user can act on, no bug of ours."""

    needed_bytes: float | None = None
    """As in `spmdlab.errors.DoesNotFit`."""

    capacity_bytes: float | None = None
    """As in `spmdlab.errors.DoesNotFit`."""

    log_tail: tuple[str, ...] = ()
    """The traceback of an unexpected exception, or the last lines of the worker's log."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What a job says of itself while it runs."""

    value: Any


_caller: "list[connection.Connection]" = []
"""In a worker, the way to its caller."""


def tell(value: Any) -> None:
    """Says something to the caller of `run_one` while a job runs; nobody else listens."""
    for pipe in _caller:
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(cloudpickle.dumps(Told(value=value)))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How the one job of `run_one` ended."""

    outcome: Done | Failed

    signal: int | None
    """The signal that this process was sent meanwhile, and passed on."""


def run_one(
    call: Call,
    *,
    doing: str,
    setup: Call | None = None,
    told: Callable[[Any], None] = lambda value: None,
) -> Ended:
    """Returns how a long job ended that may be asked to end early.

    A signal that would end this process is passed on to the worker as SIGTERM, and what the job
    then does is waited for; a second one ends both at once.

    Args:
        call: What to do.
        doing: What the process is called should it die: "training".
        setup: Called before.
        told: Is given what the job says by `tell`.
    """
    with tempfile.TemporaryDirectory(prefix="spmdlab-") as logs:
        worker = _Worker(pathlib.Path(logs), setup, doing)
        with _passing_on(worker) as numbers:
            try:
                worker.take(collections.deque([(0, call)]), lambda index: None)
                while isinstance(outcome := worker.outcome(), Told):
                    told(outcome.value)
            finally:
                worker.kill()
        return Ended(outcome=outcome, signal=next(iter(numbers), None))


@contextlib.contextmanager
def _passing_on(worker: "_Worker") -> Iterator[list[int]]:
    """Gives a worker the signals of this process, if this is the thread that may."""
    numbers: list[int] = []
    before: dict[int, Any] = {}

    def pass_on(number: int, frame: Any) -> None:
        numbers.append(number)
        if len(numbers) > 1:
            sys.exit(128 + number)
        worker.ask_to_end()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, pass_on)
    try:
        yield numbers
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(
    calls: Sequence[Call],
    *,
    jobs: int,
    setup: Call | None = None,
    started: Callable[[int], None] = lambda index: None,
    timeout_s: float | None = None,
) -> Iterator[tuple[int, Done | Failed]]:
    """Yields the index and the outcome of each call, as they end.

    Args:
        calls: What to do; begun in this order.
        jobs: Workers at most.
        setup: Called once in each worker, before its first job; its failure fails that job.
        started: Told the index of a call when a worker takes it up.
        timeout_s: A worker that has a call in hand for longer is killed.
    """
    waiting = collections.deque(enumerate(calls))
    workers: set[_Worker] = set()
    with tempfile.TemporaryDirectory(prefix="spmdlab-") as logs:
        try:
            for _ in range(min(jobs, len(calls))):
                workers.add(_Worker(pathlib.Path(logs), setup))
            for worker in workers:
                worker.take(waiting, started)
            while busy := {worker.pipe: worker for worker in workers if worker.index is not None}:
                began = min(worker.began_s for worker in busy.values())
                rest_s = None if timeout_s is None else began + timeout_s - time.monotonic()
                ready = connection.wait(list(busy), None if rest_s is None else max(0.0, rest_s))
                for worker in [busy[pipe] for pipe in ready] or _oldest(busy.values()):
                    index = worker.index
                    outcome = worker.outcome() if ready else worker.give_up()
                    if isinstance(outcome, Told):
                        continue
                    yield index, outcome
                    if worker.dead:
                        workers.remove(worker)
                        if not waiting:
                            continue
                        worker = _Worker(pathlib.Path(logs), setup)
                        workers.add(worker)
                    worker.take(waiting, started)
        finally:
            for worker in workers:
                worker.kill()


def _oldest(workers: "Iterable[_Worker]") -> "list[_Worker]":
    return [min(workers, key=lambda worker: worker.began_s)]


class _Worker:
    """The caller's end of one process."""

    def __init__(self, logs: pathlib.Path, setup: Call | None, doing: str = "compiling") -> None:
        self._doing = doing
        self.index: int | None = None
        self.dead = False
        self.began_s = 0.0
        self.pipe, theirs = connection.Pipe()
        handle, name = tempfile.mkstemp(suffix=".log", dir=logs)
        self._log = pathlib.Path(name)
        self._mark = 0
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "spmdlab.pool", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=handle,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(_search_path())},
            )
        finally:
            os.close(handle)
            theirs.close()
        self._send(setup)

    def take(
        self, waiting: "collections.deque[tuple[int, Call]]", started: Callable[[int], None]
    ) -> None:
        """Begins the next call, if there is one."""
        self.index = None
        if not waiting:
            return
        self.index, call = waiting.popleft()
        self._mark = self._log.stat().st_size
        self.began_s = time.monotonic()
        started(self.index)
        self._send(call)

    def outcome(self) -> "Done | Failed | Told":
        """Returns what came of the call in hand, or what it says before; marks the dead."""
        try:
            outcome = self.pipe.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            self.dead = True
            return self._obituary()
        if isinstance(outcome, Failed) and not outcome.log_tail:
            return dataclasses.replace(outcome, log_tail=self._log_tail())
        return outcome

    def give_up(self) -> Failed:
        """Ends the process, which has had its time; returns what to say of it."""
        self.dead = True
        after_s = time.monotonic() - self.began_s
        self.kill()
        message = f"no answer after {after_s:.0f} s; the process was killed"
        return Failed(
            error_type="TimedOut", message=message, expected=False, log_tail=self._log_tail()
        )

    def ask_to_end(self) -> None:
        """Sends SIGTERM, which a job may heed as it likes."""
        self._process.terminate()

    def kill(self) -> None:
        """Ends the process; it has nothing to save."""
        self._process.kill()
        self._process.wait()
        self.pipe.close()

    def _send(self, message: Call | None) -> None:
        # A worker that is already dead is noticed when its outcome is read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send_bytes(cloudpickle.dumps(message))

    def _obituary(self) -> Failed:
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self.pipe.close()
        if code == -signal.SIGKILL:
            how = "was killed (SIGKILL), most often because the machine ran out of memory"
        elif code < 0:
            how = f"died of {signal.Signals(-code).name}"
        else:
            how = f"exited with code {code}"
        tail = self._log_tail()
        said = _telling_line(tail)
        return Failed(
            error_type="WorkerDied",
            message=f"the {self._doing} process {how}" + (f"; it said: {said}" if said else ""),
            expected=False,
            log_tail=tail,
        )

    def _log_tail(self) -> tuple[str, ...]:
        with self._log.open("rb") as file:
            file.seek(self._mark)
            text = file.read().decode("utf-8", "replace")
        return tuple(text.splitlines()[-TAIL_LINES:])


def _telling_line(log: Sequence[str]) -> str:
    """Returns the line of a dead process's log that is most likely the reason."""
    marks = ("check failed", "fatal", "error", "abort")
    for mark in marks:
        for line in log:
            # faulthandler's own lines say that it died, which we know.
            if mark in line.lower() and not line.startswith(("Fatal Python error", "  File")):
                return " ".join(line.split())[:300]
    return ""


def _search_path() -> list[str]:
    """Returns where this process finds modules, for a worker to find the same ones."""
    ours = str(pathlib.Path(__file__).resolve().parents[1])
    paths = [os.path.abspath(path) for path in sys.path]
    return paths if ours in paths else [ours, *paths]


def _serve(pipe: connection.Connection) -> None:
    """The worker: does what it is sent until the caller is gone."""
    setup = pickle.loads(pipe.recv_bytes())
    _caller.append(pipe)
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        try:
            call = pickle.loads(message)
            if setup is not None:
                setup()
                setup = None
            answer = cloudpickle.dumps(Done(value=call()))
        except Exception as error:
            answer = cloudpickle.dumps(_failure(error))
        try:
            pipe.send_bytes(answer)
        except BrokenPipeError:
            return


def _failure(error: Exception) -> Failed:
    expected = isinstance(error, errors.SpmdlabError)
    return Failed(
        error_type=type(error).__name__,
        message=" ".join(str(error).split()),
        expected=expected,
        needed_bytes=getattr(error, "needed_bytes", None),
        capacity_bytes=getattr(error, "capacity_bytes", None),
        log_tail=() if expected else tuple("".join(traceback.format_exception(error)).split("\n")),
    )


def _follow(caller: int) -> None:
    """Ends this process, whatever it is compiling, soon after its caller was killed."""
    while os.getppid() == caller:
        time.sleep(0.5)
    os._exit(1)


def _main() -> None:
    faulthandler.enable()
    # When memory runs out, the kernel should end a worker and not the caller.
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/oom_score_adj").write_text("500")
    # Ctrl-C reaches the whole group; the caller then kills its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    _serve(connection.Connection(int(sys.argv[1])))


if __name__ == "__main__":
    # Run as a module this file is `__main__`; what it sends must be the importable classes.
    importlib.import_module("spmdlab.pool")._main()
