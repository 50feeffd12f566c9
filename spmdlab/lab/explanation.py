"""Says what each part of one step is for: of a step of ours, or of any HLO text."""

import contextlib
import os
from typing import Any

from spmdlab import errors, pool
from spmdlab.config import Experiment
from spmdlab.dump import read_hlo_text
from spmdlab.errors import CompileError, HloError, SpmdlabError
from spmdlab.lab import workers
from spmdlab.lab.comparison import note
from spmdlab.lab.selection import select
from spmdlab.lab.workers import setup
from spmdlab.report import files, progress
from spmdlab.report.perfetto import perfetto_trace
from spmdlab.report.rows import Row

LEDGER_FILE = "ledger.json"
EXPLANATION_FILES = (LEDGER_FILE, "timeline.perfetto.json")


def explain(
    experiment: Experiment,
    *,
    strategy: str | None = None,
    target: str | None = None,
    out: str | os.PathLike[str] | None = None,
    watcher: progress.Watcher | None = None,
) -> Row:
    """Compiles one strategy for one target and says what each part of its step is for.

    Args:
        experiment: Where strategy and target come from.
        strategy: A name or a text form, as in `compare`; the experiment's first by default.
        target: The experiment's first by default.
        out: Folder for ``ledger.json`` and ``timeline.perfetto.json``.
        watcher: As in `compare`.

    Returns:
        The row of `compare`, with ``ledger`` (what ``ledger.json`` holds) and
        ``timeline_events`` besides.  A step that could be compiled is explained even if it
        needs more memory than there is; its ``error`` says so.

    Raises:
        SpmdlabError: The experiment is wrong, or the step cannot be compiled.
    """
    experiment = select(
        experiment,
        strategies=[next(iter(experiment.strategies), "") if strategy is None else strategy],
        targets=[next(iter(experiment.targets), "") if target is None else target],
    )
    (name,), (target,) = experiment.strategies, experiment.targets
    if out is not None:
        files.check_folder(out, EXPLANATION_FILES)
    call = pool.Call(
        function=workers.COMPILE_ROW, args=(experiment, name, target), kwargs={"detail": True}
    )
    label = f"{name} on {target}"
    with contextlib.ExitStack() as stack:
        if watcher is None:
            watcher = stack.enter_context(progress.on_stderr(1))
        watcher.started(label)
        [(_, outcome)] = pool.run([call], jobs=1, setup=setup(experiment))
        if isinstance(outcome, pool.Failed):
            watcher.finished(label, outcome.message, outcome="refused")
            raise as_exception(outcome, label)
        row = outcome.value
        watcher.finished(label, note(row), outcome="done")
    if out is not None:
        process = f"one device: {label} (of a loop, the first iteration)"
        trace = perfetto_trace(row["timeline_events"], process=process)
        texts = (files.json_text(row["ledger"]), files.json_text(trace))
        files.write_files(out, dict(zip(EXPLANATION_FILES, texts, strict=True)))
    return row


def analyze(
    hlo: str | os.PathLike[str],
    *,
    target: str,
    mesh: str | None = None,
    out: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Prices any optimised HLO text as if it ran on ``target``; compiles nothing.

    Args:
        hlo: The file, plain text or gzip.
        target: As in `Experiment.targets`.
        mesh: Mesh axes and sizes, outermost first, as in ``"data=16 fsdp=16"``; without it
            collectives are attributed to what the text itself says of its mesh.
        out: Folder for ``ledger.json``.

    Returns:
        What ``ledger.json`` holds.

    Raises:
        SpmdlabError: The file is no HLO text, or target and mesh do not agree with it.
    """
    if out is not None:
        files.check_folder(out, [LEDGER_FILE])
    text = read_hlo_text(hlo)
    try:
        ledger = pool.Call(function=workers.ANALYZE_HLO, args=(text, target, mesh))()
    except HloError as error:
        raise HloError(f"HLO file {os.fspath(hlo)!r}: {error}") from error
    if out is not None:
        files.write_files(out, {LEDGER_FILE: files.json_text(ledger)})
    return ledger


def as_exception(failed: pool.Failed, label: str) -> Exception:
    """Returns what to raise for a job that failed in another process."""
    if failed.expected:
        kind = getattr(errors, failed.error_type, SpmdlabError)
        return kind(f"{label}: {failed.message}")
    if failed.error_type == "WorkerDied":
        return CompileError(f"{label}: {failed.message}")
    return RuntimeError("\n".join(["in the compiling process:", *failed.log_tail]))
