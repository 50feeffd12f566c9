"""Faults planted in a real step on eight devices: each is found, and called by its name."""

import sys
from pathlib import Path

import pytest

from spmdlab.strategies import Data, Fsdp, Pipeline, Tensor
from spmdlab.verify.run import verify_strategy

sys.path.insert(0, str(Path(__file__).parent))
import faulty

TWO_PARTS = Data(8).with_options(accumulate=2)


def verified(fault, strategy=None, dropout=0.0):
    return verify_strategy(
        faulty.experiment(strategy, dropout), "it", steps=2, make=faulty.by_hand(fault)
    )


@pytest.mark.parametrize("strategy", [Data(8), TWO_PARTS], ids=str)
def test_without_a_fault_there_is_no_finding(strategy):
    row = verified("none", strategy)
    assert row["findings"] == []
    assert row["status"] == "ok"
    assert [step["step"] for step in row["steps"]] == [0, 1, 2]
    assert len(row["steps"][1]["gradient_errors"]) == 12


@pytest.mark.parametrize(
    ("fault", "cause", "words"),
    [
        ("twice", "reduced twice", "exactly 8 times one device's: summed twice over data"),
        ("doubled", "reduced twice", "exactly 2 times"),
        ("averaged", "reduction missing", "exactly 1/8"),
        ("dropped", "reduction missing", "never reduced: the devices' 8 copies differ, and add up"),
        ("first only", "reduction missing", "only shard of the batch 0 of 8 counts"),
        ("order", "shards permuted", "the 8 shards of dim 1 over data stand in order 7, 0, 1, 2"),
    ],
)
def test_a_wrong_reduction_is_named(fault, cause, words):
    row = verified(fault)
    assert row["status"] == "mismatch"
    gradients = [each for each in row["findings"] if each["what"] == "gradient"]
    assert {each["cause"] for each in gradients} == {cause}
    assert any(words in each["text"] for each in gradients), gradients[0]["text"]
    assert not [each for each in row["findings"] if each["what"] == "loss"]
    every = 12 if fault != "order" else 8  # Those whose last dim is split in eight.
    assert len(gradients) >= every


def test_a_microbatch_left_out_is_named():
    row = verified("microbatch", TWO_PARTS)
    gradients = [each for each in row["findings"] if each["what"] == "gradient"]
    assert {each["cause"] for each in gradients} == {"microbatch missing"}
    assert "microbatch 1 of 2 is missing" in gradients[0]["text"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("count", "averaged over 128, not over the batch's"),
        ("means", "each shard of the batch is averaged over its own tokens"),
    ],
)
def test_a_loss_averaged_over_the_wrong_count_is_named(fault, words):
    row = verified(fault)
    found = [each for each in row["findings"] if each["what"] in ("loss", "gradient")]
    assert {each["cause"] for each in found} == {"wrong count"}
    assert {each["what"] for each in found} == {"loss", "gradient"}
    assert words in found[0]["text"]


def test_random_numbers_folded_with_the_device_are_named():
    row = verified("rng", dropout=0.5)
    found = [each for each in row["findings"] if each["what"] in ("loss", "gradient")]
    assert {each["cause"] for each in found} == {"rng differs"}
    assert "right without dropout" in found[0]["text"]


def test_an_update_applied_twice_is_found_though_the_gradients_are_right():
    row = verified("update")
    assert {each["what"] for each in row["findings"]} == {"update"}
    assert {each["cause"] for each in row["findings"]} == {"reduced twice"}


@pytest.mark.parametrize(
    "strategy",
    [
        Fsdp(2) * Tensor(4, sequence="on"),
        (Data(2) * Fsdp(4)).with_options(accumulate=2),
        (Fsdp(4, zero=1) * Tensor(2)).with_options(accumulate=2),
        (Fsdp(4, zero=2) * Tensor(2)).with_options(accumulate=2),
        (Pipeline(1, "1f1b", microbatches=2) * Data(2)).with_options(accumulate=2),
    ],
    ids=str,
)
def test_the_real_step_is_right_with_dropout(strategy):
    row = verify_strategy(faulty.experiment(strategy, dropout=0.5), "it", steps=2)
    assert row["findings"] == []
