"""What the verbs have done in other processes.

Functions are named, not imported: they bring jax in, and the calling process stays small.
"""

import os

from spmdlab import pool
from spmdlab.config import Experiment

COMPILE_ROW = "spmdlab.row:compile_row"
ANALYZE_HLO = "spmdlab.row:analyze_hlo"
TRAIN = "spmdlab.run.trainer:train"
PREPARE_TO_TRAIN = "spmdlab.run.processes:prepare"
PREPARE = "spmdlab.targets:prepare_environment"

MOST_JOBS = 4
"""Workers unless told otherwise: each compilation of a large model takes 1 to 2 GB."""


def setup(experiment: Experiment) -> pool.Call:
    """Returns what a worker calls first, before its first job."""
    return pool.Call(function=PREPARE, args=(experiment.targets,))


def default_jobs() -> int:
    """Workers at a time: one per core, `MOST_JOBS` at most."""
    return min(MOST_JOBS, len(os.sched_getaffinity(0)))
