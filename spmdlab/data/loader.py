"""Batches in an order that the data and a seed decide: not the strategy, not the processes."""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from spmdlab.data.dataset import Dataset

if TYPE_CHECKING:
    import grain

_THREADS = 2
_STEPS_AHEAD = 4
_ENDLESS = 2**62
"""Steps in a source that ends when its reader does."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadedBatch:
    """One step's examples."""

    step: int

    ids: list[str]
    """[global_batch], of all rows of the step, also of those that other processes load."""

    rows: dict[str, np.ndarray]
    """Name -> [rows asked for, ...]."""


def example_order(dataset: Dataset, seed: int) -> "grain.MapDataset[int]":
    """Returns example numbers by position, for ever: each once per epoch, each epoch anew.

    Any position can be asked for at once; the order is Grain's shuffle, with a seed made of the
    hash of the examples and the seed given.
    """
    import grain  # Brings jax in.

    mixed = hashlib.sha256(f"{dataset.lineage[-1].output} {seed}".encode()).digest()
    positions = grain.MapDataset.range(dataset.num_examples)
    return positions.shuffle(seed=int.from_bytes(mixed[:4], "big"))


def loader(
    dataset: Dataset,
    *,
    global_batch: int,
    seed: int,
    first_step: int = 0,
    rows: np.ndarray | Sequence[slice] | None = None,
) -> Iterator[LoadedBatch]:
    """Returns batches for ever; threads make the next ones ahead.

    Step s holds positions ``s * global_batch`` up to ``(s + 1) * global_batch`` of
    `example_order`, so that a run which resumes at a step, on any number of processes, sees
    what it would have seen.

    Args:
        dataset: What to load.
        global_batch: Examples per step, over all devices.
        seed: Of the order.
        first_step: The step to begin with.
        rows: The rows of the global batch that this process needs, in this order; all if None.

    Raises:
        IndexError: A row is not one of the global batch's.
    """
    import grain  # Brings jax in.

    every = np.arange(global_batch)
    if rows is None:
        wanted = every
    elif isinstance(rows, np.ndarray):
        wanted = every[rows]
    else:
        wanted = np.concatenate([every[each] for each in rows])
    steps = _Steps(dataset, example_order(dataset, seed), global_batch, wanted)
    options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_STEPS_AHEAD)
    return iter(grain.MapDataset.source(steps)[first_step:].to_iter_dataset(options))


class _Steps:
    """Batches by step, as a source for Grain."""

    def __init__(
        self,
        dataset: Dataset,
        order: "grain.MapDataset[int]",
        global_batch: int,
        wanted: np.ndarray,
    ) -> None:
        self._dataset, self._order = dataset, order
        self._global_batch, self._wanted = global_batch, wanted

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, step: int) -> LoadedBatch:
        first = step * self._global_batch
        numbers = [self._order[first + row] for row in range(self._global_batch)]
        examples = [self._dataset.example(numbers[row]) for row in self._wanted]
        return LoadedBatch(
            step=step,
            ids=[self._dataset.example_id(number) for number in numbers],
            rows={name: np.stack([each[name] for each in examples]) for name in examples[0]},
        )
