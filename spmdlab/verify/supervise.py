"""Verifies strategies in processes that may hang, and turns outcomes into rows.  No JAX."""

import os
import pathlib
import tempfile
from typing import Any

from spmdlab import pool
from spmdlab.config import Experiment
from spmdlab.errors import ConfigError
from spmdlab.lookup import pick
from spmdlab.report import progress
from spmdlab.strategies.product import as_strategy
from spmdlab.units import text_of_seconds
from spmdlab.verify import hang

VERIFY_STRATEGY = "spmdlab.verify.run:verify_strategy"
PREPARE = "spmdlab.verify.supervise:prepare"

DTYPES = {"float32": "float32", "float64": "float64"}
STEPS = 3
TIMEOUT_S = 300.0
STEP_SHARE = 0.2
"""Of the time that a strategy may take, what one step of the compiled program may."""

USER_MISTAKES = {"ConfigError", "ShardingError", "TargetError"}
"""Errors by which a strategy is refused rather than wrong."""

Row = dict[str, Any]


def prepare(num_devices: int, dtype: str, step_timeout_s: float) -> None:
    """Sets up a worker, before JAX's first use."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {hang.xla_flags(step_timeout_s)}"
    os.environ["XLA_FLAGS"] = flags.strip()
    from spmdlab.targets import prepare_environment

    prepare_environment([f"cpu:{num_devices}"])
    if dtype == "float64":
        import jax

        jax.config.update("jax_enable_x64", True)


def verify_rows(
    experiment: Experiment,
    *,
    dtype: str = "float32",
    steps: int = STEPS,
    jobs: int,
    timeout_s: float = TIMEOUT_S,
    watcher: progress.Watcher,
) -> list[Row]:
    """Returns a row of ``verification.json`` for each strategy, in their order.

    Args:
        experiment: Checked already.
        dtype: A key of `DTYPES`.
        steps: Optimizer steps; each is compared.
        jobs: Strategies at a time.
        timeout_s: What one strategy may take, and a fifth of it each step; then its process
            is ended.
        watcher: Is told of the progress.

    Raises:
        ConfigError: An argument makes no sense.
    """
    pick(DTYPES, dtype, "dtype")
    for name, value in (("steps", steps), ("timeout", timeout_s), ("jobs", jobs)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    names = list(experiment.strategies)
    most = max(as_strategy(each).num_devices for each in experiment.strategies.values())
    rows: dict[int, Row] = {}
    with tempfile.TemporaryDirectory(prefix="spmdlab-verify-") as scratch:
        folders = [pathlib.Path(scratch) / str(index) for index in range(len(names))]
        for folder in folders:
            folder.mkdir()
        options = {"dtype": dtype, "steps": steps, "step_timeout_s": STEP_SHARE * timeout_s}
        calls = [
            pool.Call(
                function=VERIFY_STRATEGY,
                args=(experiment, name),
                kwargs={**options, "scratch": str(folder)},
            )
            for name, folder in zip(names, folders, strict=True)
        ]
        outcomes = pool.run(
            calls,
            jobs=jobs,
            setup=pool.Call(function=PREPARE, args=(most, dtype, STEP_SHARE * timeout_s)),
            started=lambda index: watcher.started(names[index]),
            timeout_s=timeout_s,
        )
        for index, outcome in outcomes:
            if isinstance(outcome, pool.Done):
                row = outcome.value
            else:
                row = _row_of_failure(experiment, names[index], outcome, folders[index])
            rows[index] = row
            watcher.finished(names[index], _note(row), outcome=_kind(row))
    return [rows[index] for index in range(len(names))]


def _row_of_failure(
    experiment: Experiment, name: str, failed: pool.Failed, folder: pathlib.Path
) -> Row:
    strategy = as_strategy(experiment.strategies[name])
    message, error_type = failed.message, failed.error_type
    if said := hang.stuck(folder):
        message, error_type = said, "TimedOut"
    if failed.error_type in ("TimedOut", "WorkerDied"):
        message += hang.explain(folder, failed.log_tail)
    elif not failed.expected:
        message = f"internal error: {failed.error_type}: {message}"
    return {
        "strategy": name,
        "target": f"cpu:{strategy.num_devices}",
        "mesh": dict(strategy.mesh_axes),
        "status": "error",
        "error": message,
        "error_type": error_type,
        "findings": [],
        "steps": [],
        "log_tail": list(failed.log_tail),
    }


def _kind(row: Row) -> str:
    """Returns a row's outcome in the words of `progress.Watcher`."""
    if row["status"] == "ok":
        return "done"
    return "refused" if row["error_type"] in USER_MISTAKES else "failed"


def _note(row: Row) -> str:
    if row["status"] == "error":
        return f"error: {row['error']}"
    took = text_of_seconds(row["seconds"])
    if row["status"] == "ok":
        return f"the same in {took}"
    causes = ", ".join(dict.fromkeys(each["cause"] for each in row["findings"]))
    return f"MISMATCH ({causes}) in {took}"
