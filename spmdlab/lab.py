"""The verbs: what a launch script or a notebook calls.

Each takes an experiment, does its work in other processes where a compiler is involved, and
returns the plain data that its JSON file holds.  With ``out`` it also writes the files.
"""

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from spmdlab import __version__, errors, pool
from spmdlab.config import LOCAL, Experiment
from spmdlab.dump import read_hlo_text
from spmdlab.errors import CompileError, ConfigError, HloError, SpmdlabError
from spmdlab.hardware.topology import parse_topology
from spmdlab.lookup import pick
from spmdlab.report import files, progress
from spmdlab.report.html import comparison_page
from spmdlab.report.perfetto import perfetto_trace
from spmdlab.report.rows import Row, failed_row, step_s
from spmdlab.strategies.product import as_strategy
from spmdlab.strategies.text import strategy_from_text
from spmdlab.units import text_of_seconds
from spmdlab.verify import supervise

# Named, not imported: they bring jax in, and this process stays small.
COMPILE_ROW = "spmdlab.row:compile_row"
ANALYZE_HLO = "spmdlab.row:analyze_hlo"
PREPARE = "spmdlab.targets:prepare_environment"

LEDGER_FILE = "ledger.json"
COMPARISON_FILES = ("comparison.json", "report.html")
EXPLANATION_FILES = (LEDGER_FILE, "timeline.perfetto.json")

MOST_JOBS = 4
"""Workers unless told otherwise: each compilation of a large model takes 1 to 2 GB."""


def compare(
    experiment: Experiment,
    *,
    strategies: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
    jobs: int | None = None,
    out: str | os.PathLike[str] | None = None,
    watcher: progress.Watcher | None = None,
) -> dict[str, Any]:
    """Compiles, prices and replays every strategy on every target.

    A row that cannot be had says why, and the others go on.

    Args:
        experiment: What to compare.
        strategies: Names of the experiment's strategies, or strategies in their text form
            (``"fsdp=4 tensor=2"``); all of the experiment's by default.
        targets: Instead of the experiment's.
        jobs: Compilations at a time; by default one per core, `MOST_JOBS` at most.
        out: Folder for ``comparison.json`` and ``report.html``.
        watcher: Is told of the progress; by default it is shown on stderr.

    Returns:
        What ``comparison.json`` holds.

    Raises:
        SpmdlabError: The experiment is wrong, or each row failed for a mistake of the user's.
            Then nothing is written.
    """
    experiment = select(experiment, strategies=strategies, targets=targets)
    if out is not None:
        files.check_folder(out, COMPARISON_FILES)
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs must be at least 1, got {jobs}")
    pairs = [(name, target) for target in experiment.targets for name in experiment.strategies]
    with contextlib.ExitStack() as stack:
        if watcher is None:
            watcher = stack.enter_context(progress.on_stderr(len(pairs)))
        rows = _compile_rows(experiment, pairs, jobs or _default_jobs(), watcher)
    _refuse_if_all_refused(rows)
    comparison = {
        "spmdlab": __version__,
        "jax": _version("jax"),
        "libtpu": _version("libtpu"),
        "config": experiment.to_json(),
        "rows": rows,
    }
    if out is not None:
        texts = (files.json_text(comparison), comparison_page(comparison))
        files.write_files(out, dict(zip(COMPARISON_FILES, texts, strict=True)))
    return comparison


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
    call = pool.Call(function=COMPILE_ROW, args=(experiment, name, target), kwargs={"detail": True})
    label = f"{name} on {target}"
    with contextlib.ExitStack() as stack:
        if watcher is None:
            watcher = stack.enter_context(progress.on_stderr(1))
        watcher.started(label)
        [(_, outcome)] = pool.run([call], jobs=1, setup=_setup(experiment))
        if isinstance(outcome, pool.Failed):
            watcher.finished(label, outcome.message, outcome="refused")
            raise _as_exception(outcome, label)
        row = outcome.value
        watcher.finished(label, _note(row), outcome="done")
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
        ledger = pool.Call(function=ANALYZE_HLO, args=(text, target, mesh))()
    except HloError as error:
        raise HloError(f"HLO file {os.fspath(hlo)!r}: {error}") from error
    if out is not None:
        files.write_files(out, {LEDGER_FILE: files.json_text(ledger)})
    return ledger


def verify(
    experiment: Experiment,
    *,
    strategies: Sequence[str] | None = None,
    steps: int = supervise.STEPS,
    dtype: str = "float32",
    jobs: int | None = None,
    timeout_s: float = supervise.TIMEOUT_S,
    out: str | os.PathLike[str] | None = None,
    watcher: progress.Watcher | None = None,
) -> dict[str, Any]:
    """Runs every strategy on emulated devices against one device, step by step.

    Compared are the initial state, the loss, each parameter's gradient, and what the optimizer
    makes of it, in full precision whatever the experiment says.  Targets do not matter.

    Args:
        experiment: What to verify.
        strategies: As in `compare`.
        steps: Optimizer steps, each from the state that the strategy made itself.
        dtype: "float32" or "float64", of weights and of all computation.
        jobs: Strategies at a time; by default one per core, `MOST_JOBS` at most.
        timeout_s: What one strategy may take; after that its row says where it hangs.
        out: Folder for ``verification.json``.
        watcher: As in `compare`.

    Returns:
        What ``verification.json`` holds; a row's ``status`` is ok, mismatch or error.

    Raises:
        SpmdlabError: The experiment is wrong, or each strategy is refused for a mistake of the
            user's.  Then nothing is written.
    """
    experiment = select(experiment, strategies=strategies)
    if out is not None:
        files.check_folder(out)
    with contextlib.ExitStack() as stack:
        if watcher is None:
            watcher = stack.enter_context(
                progress.on_stderr(len(experiment.strategies), doing="verifying")
            )
        rows = supervise.verify_rows(
            experiment,
            dtype=dtype,
            steps=steps,
            jobs=_default_jobs() if jobs is None else jobs,
            timeout_s=timeout_s,
            watcher=watcher,
        )
    _refuse_if_all_refused(rows)
    verification = {
        "spmdlab": __version__,
        "jax": _version("jax"),
        "config": experiment.to_json(),
        "dtype": dtype,
        "rows": rows,
    }
    if out is not None:
        files.write_files(out, {"verification.json": files.json_text(verification)})
    return verification


def select(
    experiment: Experiment,
    *,
    strategies: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
) -> Experiment:
    """Returns the experiment with only these strategies and targets, checked.

    Raises:
        ConfigError: A name is unknown, a text form does not parse, or the experiment is wrong.
    """
    chosen = experiment.strategies
    if strategies is not None:
        chosen = {}
        for text in strategies:
            known = text in experiment.strategies or "=" not in text
            chosen[text] = (
                pick(experiment.strategies, text, "strategy") if known else strategy_from_text(text)
            )
    selected = dataclasses.replace(
        experiment,
        strategies=chosen,
        targets=tuple(dict.fromkeys(experiment.targets if targets is None else targets)),
    )
    selected.check()
    return selected


def _compile_rows(
    experiment: Experiment,
    pairs: Sequence[tuple[str, str]],
    jobs: int,
    watcher: progress.Watcher,
) -> list[Row]:
    labels = [f"{name} on {target}" for name, target in pairs]
    calls = [pool.Call(function=COMPILE_ROW, args=(experiment, *pair)) for pair in pairs]
    rows: dict[int, Row] = {}
    outcomes = pool.run(
        calls,
        jobs=jobs,
        setup=_setup(experiment),
        started=lambda index: watcher.started(labels[index]),
    )
    for index, outcome in outcomes:
        if isinstance(outcome, pool.Done):
            row = outcome.value
        else:
            row = _row_of_failure(experiment, *pairs[index], outcome)
        rows[index] = row
        watcher.finished(labels[index], _note(row), outcome=_kind(row))
    return [rows[index] for index in range(len(pairs))]


def _row_of_failure(experiment: Experiment, name: str, target: str, failed: pool.Failed) -> Row:
    bug = "" if failed.expected or failed.error_type == "WorkerDied" else "internal error: "
    kind = f"{failed.error_type}: " if bug else ""
    return failed_row(
        strategy=name,
        target=target,
        error=f"{bug}{kind}{failed.message}",
        error_type=failed.error_type,
        chip=None if target == LOCAL else parse_topology(target).chip,
        mesh=as_strategy(experiment.strategies[name]).mesh_axes,
        status="does not fit" if failed.error_type == "DoesNotFit" else "error",
        needed_bytes=failed.needed_bytes,
        capacity_bytes=failed.capacity_bytes,
        log_tail=failed.log_tail,
    )


def _refuse_if_all_refused(rows: Sequence[Row]) -> None:
    """Raises where no row could be had and each for something the user has to change."""
    if not all(_kind(row) == "refused" for row in rows):
        return
    reasons = list(dict.fromkeys(row["error"] for row in rows))
    more = len(reasons) - 1
    and_more = f" (and {more} more such {'reason' if more == 1 else 'reasons'})" if more else ""
    first = next(row for row in rows if row["error"] == reasons[0])
    raise getattr(errors, first["error_type"])(
        f"{first['strategy']} on {first['target']}: {reasons[0]}{and_more}"
    )


def _kind(row: Row) -> str:
    """Returns a row's outcome in the words of `progress.Watcher`."""
    if row["status"] == "ok":
        return "done"
    return "refused" if row.get("error_type") in supervise.USER_MISTAKES else "failed"


def _note(row: Row) -> str:
    if row["status"] != "ok":
        return f"{row['status']}: {row['error']}"
    step, compile_s = text_of_seconds(step_s(row)), text_of_seconds(row.get("compile_s"))
    return f"step {step}, compiled in {compile_s}"


def _as_exception(failed: pool.Failed, label: str) -> Exception:
    if failed.expected:
        kind = getattr(errors, failed.error_type, SpmdlabError)
        return kind(f"{label}: {failed.message}")
    if failed.error_type == "WorkerDied":
        return CompileError(f"{label}: {failed.message}")
    return RuntimeError("\n".join(["in the compiling process:", *failed.log_tail]))


def _setup(experiment: Experiment) -> pool.Call:
    return pool.Call(function=PREPARE, args=(experiment.targets,))


def _default_jobs() -> int:
    return min(MOST_JOBS, len(os.sched_getaffinity(0)))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
