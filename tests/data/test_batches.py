import itertools

import numpy as np
import pytest

from spmdlab.data import batches
from spmdlab.data.batches import byte_batches
from spmdlab.errors import ConfigError


@pytest.fixture
def small_corpus(monkeypatch):
    """100 bytes, each its own position."""
    monkeypatch.setattr(batches, "tokens", lambda split: np.arange(100, dtype=np.uint8))


def rows(num_steps, **options):
    options = {"seq_len": 10, "seed": 0, **options}
    steps = itertools.islice(byte_batches("train", **options), num_steps)
    return np.concatenate([batch["tokens"] for batch in steps])


@pytest.mark.usefixtures("small_corpus")
def test_an_epoch_has_every_window_once_and_the_next_another_order():
    """99 bytes have a successor, so 9 windows of 10."""
    found = rows(6, global_batch=3)
    first, second = found[:9, 0], found[9:, 0]
    assert sorted(first) == sorted(second) == list(range(0, 90, 10))
    assert list(first) != list(second)


@pytest.mark.usefixtures("small_corpus")
def test_examples_do_not_depend_on_the_batch_size_or_where_a_run_resumes():
    expected = rows(12, global_batch=2)
    np.testing.assert_array_equal(expected, rows(3, global_batch=8))
    np.testing.assert_array_equal(expected[16:], rows(1, global_batch=8, first_step=2))
    assert not np.array_equal(expected, rows(12, global_batch=2, seed=1))


@pytest.mark.usefixtures("small_corpus")
def test_targets_are_the_tokens_one_later():
    batch = next(byte_batches("train", global_batch=4, seq_len=10, seed=0))
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)
    assert {name: (array.shape, str(array.dtype)) for name, array in batch.items()} == {
        "tokens": ((4, 10), "int32"),
        "targets": ((4, 10), "int32"),
        "weights": ((4, 10), "float32"),
    }


@pytest.mark.usefixtures("small_corpus")
def test_refuses_a_sequence_longer_than_the_corpus():
    assert rows(1, global_batch=1, seq_len=99).shape == (1, 99)
    with pytest.raises(ConfigError, match=r"seq_len=100 .* has 100 bytes, so at most 99 work"):
        byte_batches("train", global_batch=1, seq_len=100, seed=0)
