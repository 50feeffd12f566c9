"""Verifies that every strategy computes what one device computes."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from spmdlab import __version__
from spmdlab.config import Experiment
from spmdlab.lab.selection import refuse_if_all_refused, select, version
from spmdlab.lab.workers import default_jobs
from spmdlab.report import files, progress
from spmdlab.verify import supervise


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
            jobs=default_jobs() if jobs is None else jobs,
            timeout_s=timeout_s,
            watcher=watcher,
        )
    refuse_if_all_refused(rows)
    verification = {
        "spmdlab": __version__,
        "jax": version("jax"),
        "config": experiment.to_json(),
        "dtype": dtype,
        "rows": rows,
    }
    if out is not None:
        files.write_files(out, {"verification.json": files.json_text(verification)})
    return verification
