"""The pipeline strategy: its words, its numbers, its table."""

import pytest

from spmdlab.errors import ConfigError
from spmdlab.pipeline.schedule import gpipe, schedule_from_text
from spmdlab.strategies import Data, Pipeline, Tensor, as_strategy, strategy_from_text


def test_text_names_schedule_and_microbatches():
    strategy = Pipeline(4, "1f1b", microbatches=8) * Tensor(2)
    assert str(strategy) == "stage=4 schedule=1f1b microbatches=8 tensor=2"
    assert strategy_from_text(str(strategy)) == strategy
    assert strategy.mesh_axes == {"stage": 4, "tensor": 2}
    assert strategy.rules()["layers"] == ("stage",)


def test_circular_goes_round_twice_unless_told():
    assert Pipeline(2, "circular", 4) == Pipeline(2, "circular", 4, 2)
    assert str(as_strategy(Pipeline(2, "circular", 4, 3))).endswith("microbatches=4 repeats=3")


def test_a_strategy_has_its_pipelines_schedule():
    assert (Data(2) * Pipeline(2, "gpipe", 3)).pipeline == gpipe(2, 3)
    assert as_strategy(Data(2)).pipeline is None


def test_a_table_of_ones_own_brings_its_numbers():
    table = schedule_from_text(["F0 . B0", ". F0+B0 ."], "mine")
    strategy = as_strategy(Pipeline(2, table))
    assert strategy.pipeline is table
    assert str(strategy) == "stage=2 schedule=mine microbatches=1"
    with pytest.raises(ConfigError, match="ways=4, but the table has 2"):
        Pipeline(4, table)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stage=4", "needs microbatches="),
        ("stage=4 schedule=1f1d microbatches=8", "Did you mean '1f1b'"),
        ("stage=4 schedule=circular microbatches=6", "no multiple of 4 stages; 4 or 8"),
        ("stage=0 microbatches=8", "1 or more"),
        ("data=4 microbatches=8", "microbatches= is an option of stage"),
    ],
)
def test_refuses(text, message):
    with pytest.raises(ConfigError, match=message):
        strategy_from_text(text)
