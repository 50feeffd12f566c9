"""Compares every strategy on every target."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from spmdlab import __version__, pool
from spmdlab.config import LOCAL, Experiment
from spmdlab.errors import ConfigError
from spmdlab.hardware.topology import parse_topology
from spmdlab.lab import workers
from spmdlab.lab.selection import kind, refuse_if_all_refused, select, version
from spmdlab.lab.workers import default_jobs, setup
from spmdlab.report import files, progress
from spmdlab.report.html import comparison_page
from spmdlab.report.rows import Row, failed_row, step_s
from spmdlab.strategies.product import as_strategy
from spmdlab.units import text_of_seconds

COMPARISON_FILES = ("comparison.json", "report.html")


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
        rows = _compile_rows(experiment, pairs, jobs or default_jobs(), watcher)
    refuse_if_all_refused(rows)
    comparison = {
        "spmdlab": __version__,
        "jax": version("jax"),
        "libtpu": version("libtpu"),
        "config": experiment.to_json(),
        "rows": rows,
    }
    if out is not None:
        texts = (files.json_text(comparison), comparison_page(comparison))
        files.write_files(out, dict(zip(COMPARISON_FILES, texts, strict=True)))
    return comparison


def _compile_rows(
    experiment: Experiment,
    pairs: Sequence[tuple[str, str]],
    jobs: int,
    watcher: progress.Watcher,
) -> list[Row]:
    labels = [f"{name} on {target}" for name, target in pairs]
    calls = [pool.Call(function=workers.COMPILE_ROW, args=(experiment, *pair)) for pair in pairs]
    rows: dict[int, Row] = {}
    outcomes = pool.run(
        calls,
        jobs=jobs,
        setup=setup(experiment),
        started=lambda index: watcher.started(labels[index]),
    )
    for index, outcome in outcomes:
        if isinstance(outcome, pool.Done):
            row = outcome.value
        else:
            row = _row_of_failure(experiment, *pairs[index], outcome)
        rows[index] = row
        watcher.finished(labels[index], note(row), outcome=kind(row))
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


def note(row: Row) -> str:
    """Returns what the progress says of a finished row."""
    if row["status"] != "ok":
        return f"{row['status']}: {row['error']}"
    step, compile_s = text_of_seconds(step_s(row)), text_of_seconds(row.get("compile_s"))
    return f"step {step}, compiled in {compile_s}"
