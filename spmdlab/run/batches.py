"""Batches on their devices: each process loads the rows that its devices hold, one step ahead."""

import dataclasses
import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

T = TypeVar("T")
Shardings = Mapping[str, NamedSharding]
"""Array's name -> where it lies."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedBatch:
    """One step's batch."""

    position: int
    """Of the data, from 0."""
    ids: list[str]
    """Examples of all global rows, in their order."""
    arrays: dict[str, jax.Array]
    """Name -> global array."""


def rows_held(shardings: Shardings, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the global rows (dim 0) that this process's devices hold, in order, each once."""
    held = [
        np.arange(shape[0])[index[0]]
        for sharding in shardings.values()
        for index in sharding.addressable_devices_indices_map(shape).values()
    ]
    return np.unique(np.concatenate(held))


def place(
    rows: Mapping[str, np.ndarray], held: np.ndarray, shardings: Shardings, global_batch: int
) -> dict[str, jax.Array]:
    """Returns global arrays made of the rows that this process holds.

    Args:
        rows: Name -> [len(held), ...].
        held: Their global numbers, in order.
        shardings: Of the global arrays.
        global_batch: Their dim 0.
    """

    def placed(local: np.ndarray, sharding: NamedSharding) -> jax.Array:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            first, last, _ = index[0].indices(global_batch)
            start = int(np.searchsorted(held, first))
            return local[(slice(start, start + last - first), *index[1:])]

        shape = (global_batch, *local.shape[1:])
        return jax.make_array_from_callback(shape, sharding, part)

    return {name: placed(local, shardings[name]) for name, local in rows.items()}


def placed_batches(
    loaded: Iterator[Any], held: np.ndarray, shardings: Shardings, global_batch: int
) -> Iterator[PlacedBatch]:
    """Yields each loaded batch, placed."""
    for batch in loaded:
        yield PlacedBatch(
            position=batch.step,
            ids=batch.ids,
            arrays=place(batch.rows, held, shardings, global_batch),
        )


class Ahead(Generic[T]):
    """An iterator whose next item is made while the last one is in use.

    Ends when closed.  An exception of the iterator is raised where its item would have been.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=1)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._make, name="input", daemon=True)
        self._thread.start()

    def __next__(self) -> T:
        item, error = self._ready.get()
        if error is not None:
            raise error
        return item

    def close(self) -> None:
        """Makes no more items; returns when the last one has been made."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.1)
            except queue.Empty:
                continue

    def _make(self) -> None:
        try:
            for item in self._items:
                self._ready.put((item, None))
                if self._closed.is_set():
                    return
            raise StopIteration
        except BaseException as error:
            self._ready.put((None, error))
