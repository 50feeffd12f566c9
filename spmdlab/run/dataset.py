"""The byte corpus as numbered examples, and batches of them in an order that a seed decides."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from spmdlab.data.corpus import Split, tokens
from spmdlab.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lineage:
    """One stage's record."""

    stage: str
    version: str
    inputs: tuple[str, ...]
    output: str
    counts: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Returns the record in the types JSON has."""
        return dataclasses.asdict(self) | {"inputs": list(self.inputs)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """Windows of one split of the corpus."""

    split: Split
    seq_len: int

    @functools.cached_property
    def _bytes(self) -> np.ndarray:
        return tokens(self.split)

    @property
    def num_examples(self) -> int:
        """Windows that fit."""
        return (len(self._bytes) - 1) // self.seq_len

    def example(self, index: int) -> dict[str, np.ndarray]:
        """``tokens`` and ``targets`` int32, ``weights`` float32, each [seq_len]."""
        start = index * self.seq_len
        row = self._bytes[start : start + self.seq_len + 1].astype(np.int32)
        return {
            "tokens": row[:-1],
            "targets": row[1:],
            "weights": np.ones(self.seq_len, np.float32),
        }

    def example_id(self, index: int) -> str:
        """From the content alone."""
        start = index * self.seq_len
        return hashlib.sha256(self._bytes[start : start + self.seq_len + 1]).hexdigest()[:16]

    @functools.cached_property
    def lineage(self) -> tuple[Lineage, ...]:
        """How the split came about."""
        digest = hashlib.sha256(self._bytes.tobytes() + str(self.seq_len).encode()).hexdigest()
        return (
            Lineage(
                stage="split",
                version="1",
                inputs=(),
                output=digest,
                counts={"examples": self.num_examples},
            ),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedBatch:
    """One step's examples."""

    step: int
    ids: list[str]
    """Of all rows of the step."""
    rows: dict[str, np.ndarray]
    """Of the rows asked for, in their order."""


def open_dataset(
    config: None, *, seq_len: int, split: Split, vocab_size: int | None = None
) -> Dataset:
    """Returns one split.

    Raises:
        ConfigError: It is shorter than one sequence.
    """
    del config, vocab_size
    dataset = Dataset(split=split, seq_len=seq_len)
    if dataset.num_examples < 1:
        most = len(tokens(split)) - 1
        raise ConfigError(f"batch.seq_len={seq_len} is longer than the {split} corpus; use {most}")
    return dataset


def loader(
    dataset: Dataset,
    *,
    global_batch: int,
    seed: int,
    first_step: int = 0,
    rows: np.ndarray | None = None,
) -> Iterator[LoadedBatch]:
    """Yields batches for ever, each example once per epoch, from position ``first_step`` on."""
    orders: dict[int, np.ndarray] = {}

    def place(n: int) -> int:
        epoch, rest = divmod(n, dataset.num_examples)
        if epoch not in orders:
            orders.pop(epoch - 2, None)
            orders[epoch] = np.random.default_rng([seed, epoch]).permutation(dataset.num_examples)
        return int(orders[epoch][rest])

    wanted = np.arange(global_batch) if rows is None else rows
    step = first_step
    while True:
        indices = [place(n) for n in range(step * global_batch, (step + 1) * global_batch)]
        examples = [dataset.example(indices[row]) for row in wanted]
        yield LoadedBatch(
            step=step,
            ids=[dataset.example_id(index) for index in indices],
            rows={name: np.stack([each[name] for each in examples]) for name in examples[0]},
        )
        step += 1
