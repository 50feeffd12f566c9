"""Trains one strategy on one target."""

import contextlib
import os
from typing import Any

from spmdlab import pool
from spmdlab.config import Experiment
from spmdlab.errors import RunError
from spmdlab.lab import workers
from spmdlab.lab.explanation import as_exception
from spmdlab.lab.selection import select
from spmdlab.report import training as report


def train(
    experiment: Experiment,
    *,
    strategy: str | None = None,
    target: str | None = None,
    out: str | os.PathLike[str],
    resume: bool = False,
    watcher: report.Watcher | None = None,
) -> dict[str, Any]:
    """Trains in another process until the steps are done, the target is reached, or a signal.

    A first SIGTERM, SIGINT or SIGHUP makes it save and end, to be resumed; a second ends it at
    once.

    Args:
        experiment: What to train, on which data, for how long.
        strategy: A name or a text form, as in `compare`; the experiment's first by default.
        target: ``cpu:8`` or ``local``; the experiment's first by default.
        out: The run's directory.
        resume: Whether to go on with the run that is in it, under any strategy and target.
        watcher: Is told of the progress; by default it is shown on stderr.

    Returns:
        What ``result.json`` holds, and ``signal``, the one that interrupted it, if any.

    Raises:
        SpmdlabError: The experiment is wrong, cannot be laid out, or does not belong to ``out``.
        RunError: The process died, or a checkpoint cannot be written or read.
    """
    experiment = select(
        experiment,
        strategies=[next(iter(experiment.strategies), "") if strategy is None else strategy],
        targets=[next(iter(experiment.targets), "") if target is None else target],
    )
    (name,), (target,) = experiment.strategies, experiment.targets
    label = f"{name} on {target}"
    call = pool.Call(
        function=workers.TRAIN,
        args=(experiment, name, target, os.fspath(out)),
        kwargs={"resume": resume},
    )
    setup = pool.Call(function=workers.PREPARE_TO_TRAIN, args=(experiment.targets,))
    with contextlib.ExitStack() as stack:
        if watcher is None:
            watcher = stack.enter_context(report.on_stderr(experiment.training.steps))
        ended = pool.run_one(call, doing="training", setup=setup, told=watcher)
    outcome = ended.outcome
    if isinstance(outcome, pool.Done):
        result = outcome.value
        return result | {"signal": ended.signal} if result["signal"] and ended.signal else result
    if outcome.error_type == "WorkerDied":
        if ended.signal is not None:
            return {"status": "interrupted", "signal": ended.signal, "last_checkpoint": None}
        raise RunError(f"{label}: {outcome.message}; what it saved is in {os.fspath(out)!r}")
    raise as_exception(outcome, label)
