"""Numbered examples of one split."""

import dataclasses
import functools
import hashlib
from typing import Protocol

import numpy as np

from spmdlab.data.config import DataConfig
from spmdlab.data.ingest import BYTE_VOCAB, clean, ingest
from spmdlab.data.lineage import Lineage, content_hash, json_hash
from spmdlab.data.split import Placed, Split, split
from spmdlab.errors import ConfigError


class Dataset(Protocol):
    """What can be loaded and audited: tokens, or anything else that is arrays."""

    @property
    def num_examples(self) -> int: ...

    @property
    def lineage(self) -> tuple[Lineage, ...]:
        """How it came about; the last record's output is the hash of these examples."""
        ...

    def example(self, index: int) -> dict[str, np.ndarray]:
        """Returns one example: name -> array, of the same shapes for every example."""
        ...

    def example_id(self, index: int) -> str:
        """Returns a name that follows from the example's content alone."""
        ...

    def group(self, index: int) -> str:
        """Returns what must not be torn between splits: the source file, the design family."""
        ...


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TokenDataset:
    """Windows of ``seq_len`` tokens over a split's documents, one after the other.

    A zero byte ends each text.  What is left after the last whole window is not used.
    """

    tokens: np.ndarray
    """[length], uint8 or int32."""

    starts: np.ndarray
    """[documents], where each begins in ``tokens``."""

    groups: tuple[str, ...]
    """[documents]."""

    seq_len: int
    before: tuple[Lineage, ...]
    """Of the split."""

    @property
    def num_examples(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    @functools.cached_property
    def lineage(self) -> tuple[Lineage, ...]:
        windows = Lineage(
            stage="examples",
            version=f"windows of {self.seq_len} 1",
            inputs=(self.before[-1].output,),
            output=json_hash([content_hash(self.tokens), self.seq_len]),
            counts={"tokens": len(self.tokens), "examples": self.num_examples},
        )
        return (*self.before, windows)

    def example(self, index: int) -> dict[str, np.ndarray]:
        """``tokens``, ``targets`` (the tokens one later) int32, ``weights`` float32: [seq_len]."""
        window = self._window(index).astype(np.int32)
        return {
            "tokens": window[:-1],
            "targets": window[1:],
            "weights": np.ones(self.seq_len, np.float32),
        }

    def example_id(self, index: int) -> str:
        window = np.ascontiguousarray(self._window(index), dtype="<i4")
        return hashlib.sha256(window.data).hexdigest()[:16]

    def group(self, index: int) -> str:
        """The group of the document in which the window begins."""
        document = np.searchsorted(self.starts, index * self.seq_len, side="right") - 1
        return self.groups[document]

    def _window(self, index: int) -> np.ndarray:
        if not 0 <= index < self.num_examples:
            raise IndexError(f"example {index} of {self.num_examples}")
        start = index * self.seq_len
        return self.tokens[start : start + self.seq_len + 1]


def open_dataset(
    config: DataConfig, *, seq_len: int, split: Split = "train", vocab_size: int | None = None
) -> TokenDataset:
    """Returns one split of a source of tokens.

    Args:
        config: The source, and how it is divided.
        seq_len: Tokens per example.
        split: Which part.
        vocab_size: The model's; None where there is no model.

    Raises:
        ConfigError: The source cannot be read (see `spmdlab.data.ingest.ingest`), the split is
            empty or shorter than one sequence, or a token id is not in the vocabulary.
    """
    placed, lineage = prepared(
        config.source, config.valid_percent, config.test_percent, config.near_duplicate
    )
    if vocab_size is not None:
        _check_vocab(config, placed, vocab_size)
    parts = [each for each in placed if each.split == split]
    if not parts:
        num_groups = len({each.group for each in placed})
        raise ConfigError(
            f"data.source={config.source!r} has no {split} split: its {num_groups} groups of "
            f"documents fell elsewhere at data.valid_percent={config.valid_percent:g} and "
            f"data.test_percent={config.test_percent:g}; change these, or use a larger source"
        )
    contents = [_ended(each.document.content) for each in parts]
    starts = np.cumsum([0, *(len(content) for content in contents[:-1])])
    dataset = TokenDataset(
        tokens=np.concatenate(contents),
        starts=starts,
        groups=tuple(each.group for each in parts),
        seq_len=seq_len,
        before=lineage,
    )
    if dataset.num_examples < 1:
        num_tokens = len(dataset.tokens)
        raise ConfigError(
            f"batch.seq_len={seq_len} is longer than the {split} split of data.source="
            f"{config.source!r}; it has {num_tokens} tokens, so at most {num_tokens - 1} work."
        )
    return dataset


@functools.cache
def prepared(
    source: str, valid_percent: float, test_percent: float, near_duplicate: float
) -> tuple[tuple[Placed, ...], tuple[Lineage, ...]]:
    """Returns a source's documents, placed, and their lineage.  A process reads a source once."""
    config = DataConfig(
        source=source,
        valid_percent=valid_percent,
        test_percent=test_percent,
        near_duplicate=near_duplicate,
    )
    documents, ingested = ingest(source)
    documents, cleaned = clean(documents, ingested)
    placed, divided = split(documents, cleaned, config)
    return tuple(placed), (ingested, cleaned, divided)


def _ended(content: np.ndarray) -> np.ndarray:
    return np.append(content, np.uint8(0)) if content.dtype == np.uint8 else content


def _check_vocab(config: DataConfig, placed: tuple[Placed, ...], vocab_size: int) -> None:
    if placed[0].document.content.dtype == np.uint8:
        largest = BYTE_VOCAB - 1
    else:
        largest = max(int(each.document.content.max()) for each in placed)
    if largest >= vocab_size:
        raise ConfigError(
            f"model.vocab_size={vocab_size} has no token {largest}, which data.source="
            f"{config.source!r} may hold; at least {largest + 1} works"
        )
