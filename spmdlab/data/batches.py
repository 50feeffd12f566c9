"""Batches of bytes.  Example number n is the same whatever the batch size or the mesh."""

from collections.abc import Iterator

import numpy as np

from spmdlab.data.corpus import Split, tokens
from spmdlab.errors import ConfigError

Batch = dict[str, np.ndarray]
"""``tokens`` and ``targets`` int32, ``weights`` float32; each of shape [batch, seq_len]."""


def byte_batches(
    split: Split, *, global_batch: int, seq_len: int, seed: int, first_step: int = 0
) -> Iterator[Batch]:
    """Yields batches for ever, each window of the corpus once per epoch.

    Step s holds the examples ``s * global_batch`` up to ``(s + 1) * global_batch``.  A
    run that resumes at a step, on any number of processes, sees what it would have seen.

    Args:
        split: Which part of the corpus.
        global_batch: Sequences per step, over all devices.
        seq_len: Bytes per sequence.
        seed: Decides the order of the windows, epoch by epoch.
        first_step: The step to begin with.

    Raises:
        ConfigError: The corpus is shorter than one sequence.
    """
    corpus = tokens(split)
    num_windows = (len(corpus) - 1) // seq_len
    if num_windows < 1:
        raise ConfigError(
            f"batch.seq_len={seq_len} is longer than the {split} corpus; "
            f"it has {len(corpus)} bytes, so at most {len(corpus) - 1} work."
        )
    return _batches(corpus, num_windows, global_batch, seq_len, seed, first_step)


def _batches(
    corpus: np.ndarray, num_windows: int, global_batch: int, seq_len: int, seed: int, step: int
) -> Iterator[Batch]:
    orders: dict[int, np.ndarray] = {}

    def window(example: int) -> int:
        epoch, place = divmod(example, num_windows)
        if epoch not in orders:
            orders.pop(epoch - 2, None)
            orders[epoch] = np.random.default_rng([seed, epoch]).permutation(num_windows)
        return int(orders[epoch][place])

    while True:
        first = step * global_batch
        starts = [window(n) * seq_len for n in range(first, first + global_batch)]
        rows = np.stack([corpus[start : start + seq_len + 1] for start in starts])
        yield {
            "tokens": rows[:, :-1].astype(np.int32),
            "targets": rows[:, 1:].astype(np.int32),
            "weights": np.ones((global_batch, seq_len), np.float32),
        }
        step += 1
