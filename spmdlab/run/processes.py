"""What a training process sets up, and what several must agree on.

With one process nothing is exchanged.
"""

import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from spmdlab.targets import prepare_environment
from spmdlab.verify import hang

SLOW_STEP_S = 600.0
"""Emulated devices that wait longer for each other in one collective are taken to hang."""


def prepare(targets: Sequence[str]) -> None:
    """Sets up a process before JAX's first use.

    Unless told otherwise, XLA ends the process where one of its CPU devices is a minute late,
    which on few cores a large step can be.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} {hang.xla_flags(SLOW_STEP_S)}"
    os.environ["XLA_FLAGS"] = flags.strip()
    prepare_environment(targets)


def is_first() -> bool:
    """Whether this process writes what all have in common."""
    return jax.process_index() == 0


def together(name: str) -> None:
    """Waits until all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def of_first(value: int) -> int:
    """Returns the first process's value, in all of them."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def of_any(number: int) -> int:
    """Returns the largest process's value, in all of them: a signal may reach only one."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.process_allgather(np.int32(number)).max())
