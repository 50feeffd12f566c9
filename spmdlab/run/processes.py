"""What several processes must agree on.  With one, nothing is exchanged."""

import jax
import numpy as np
from jax.experimental import multihost_utils


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
