"""A mixture of experts under each strategy against one device: loss, gradients, what is dropped."""

import functools

import jax
import numpy as np
import pytest

from spmdlab.compile import jitted_step, lay_out
from spmdlab.errors import ShardingError
from spmdlab.models.config import MoeConfig
from spmdlab.strategies import Data, Expert, Fsdp, Pipeline, Strategy, Tensor, as_strategy
from spmdlab.targets import parse_target
from spmdlab.train.state import abstract_state, init_state
from spmdlab.train.step import make_step
from spmdlab.workload import Workload
from tests.train import test_step

B, T, V, B1 = test_step.B, test_step.T, test_step.V, test_step.B1

# As in test_step: B * T roundings of the longest sum.  An expert sums over fewer.
TOLERANCE = test_step.TOLERANCE

MOES = {
    # Room for three quarters of an expert's share of half a sequence: much is dropped.
    "tight": {"capacity_factor": 0.75, "group_size": T // 2},
    "tight_by_group": {
        "capacity_factor": 0.75,
        "group_size": T // 2,
        "load_balance_over": "group",
    },
    "roomy": {"capacity_factor": 4.0},
    "dropless": {"dispatch": "dropless"},
    "unbalanced": {"dispatch": "dropless", "load_balance_weight": 0.0},
    "six": {"num_experts": 6},
}


def workload(moe: str, **changes) -> Workload:
    # A heavy load-balance loss, so that a fault in its gradient shows.
    config = MoeConfig(**{"num_experts": 8, "load_balance_weight": 0.5, **MOES[moe]})
    load = test_step.workload(**changes)
    load.model.moe = config
    return load


@functools.cache
def fresh(**changes):
    load = workload("tight", **changes)
    return jax.device_get(init_state(load, jax.random.key(0)))


@functools.cache
def alone(moe: str, accumulate: int = 1, **changes):
    strategy = as_strategy(Data(1)).with_options(accumulate=accumulate)
    step = jax.jit(make_step(workload(moe, **changes), strategy))
    return test_step.observed(*step(fresh(**changes), test_step.random_batch()))


def on_the_mesh(strategy, moe: str, **changes):
    load, strategy = workload(moe, **changes), as_strategy(strategy)
    layout = lay_out(load, strategy, parse_target("cpu:8"))
    state = jax.device_put(fresh(**changes), layout.shardings(fresh(**changes)))
    batch = test_step.random_batch()
    batch = jax.device_put(batch, layout.shardings(batch, "batch"))
    return test_step.observed(*jitted_step(load, strategy, layout)(state, batch))


STRATEGIES: dict[str, Strategy] = {
    "expert": as_strategy(Expert(8)),
    "fsdp_tensor": Fsdp(4) * Tensor(2),
    "fsdp_expert_tensor": Fsdp(2) * Expert(2) * Tensor(2, sequence="on"),
    "zero1_expert": (Data(2) * Fsdp(2, zero=1) * Expert(2)).with_options(remat="full"),
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_strategy_computes_what_one_device_does(strategy):
    """The same tokens are dropped on any mesh: groups are parts of sequences."""
    found = on_the_mesh(strategy, "tight")
    test_step.check_same(found, alone("tight"))
    assert 0.1 < found[1]["dropped_fraction"] < 0.9


@pytest.mark.parametrize(
    "strategy", [Expert(8), Fsdp(2) * Expert(2) * Tensor(2, sequence="on")], ids=str
)
def test_without_a_capacity_too(strategy):
    found = on_the_mesh(strategy, "dropless")
    test_step.check_same(found, alone("dropless"))
    assert found[1]["dropped_fraction"] == 0


def test_other_models_too():
    strategy = (Expert(4) * Tensor(2)).with_options(remat="dots")
    changes = {"layers": "unrolled", "mlp": "plain", "embeddings": "tied", "dropout": 0.5}
    test_step.check_same(on_the_mesh(strategy, "tight", **changes), alone("tight", **changes))


def test_microbatches_balance_each_on_its_own():
    strategy = (Fsdp(2) * Expert(4)).with_options(accumulate=2)
    test_step.check_same(on_the_mesh(strategy, "tight"), alone("tight", accumulate=2))


@pytest.mark.parametrize(
    ("strategy", "moe", "layers"),
    [
        (Pipeline(2, "1f1b", microbatches=4) * Expert(2) * Data(2), "tight", 2),
        (Pipeline(2, "circular", microbatches=4) * Fsdp(2) * Tensor(2), "dropless", 4),
        (
            (Pipeline(2, "gpipe", microbatches=2) * Expert(2) * Fsdp(2)).with_options(accumulate=2),
            "tight",
            2,
        ),
    ],
    ids=str,
)
def test_a_pipelines_microbatches_do_as_well(strategy, moe, layers):
    """Each stage's routers reach the loss, the metrics and the gradients of what is before them."""
    found = on_the_mesh(strategy, moe, num_layers=layers)
    test_step.check_same(found, alone(moe, accumulate=4, num_layers=layers))


def test_balanced_by_group_microbatches_change_nothing():
    test_step.check_same(alone("tight_by_group", accumulate=2), alone("tight_by_group"))


def test_room_for_all_is_dropless():
    test_step.check_same(alone("roomy"), alone("dropless"))


def test_the_load_balance_loss_is_part_of_the_loss():
    _, without = alone("unbalanced")
    _, metrics = alone("dropless")
    assert metrics.keys() == without.keys() >= {"loss", "grad_norm", "tokens"}
    assert metrics["load_balance"] == pytest.approx(without["load_balance"])
    assert 1 <= metrics["load_balance"] < 8
    expected = without["loss"] + 0.5 * metrics["load_balance"]
    assert metrics["loss"] == pytest.approx(expected, rel=TOLERANCE)


def test_a_decoder_without_experts_reports_what_it_did_before():
    assert test_step.alone()[1].keys() == {"loss", "grad_norm", "tokens"}


def test_weights_start_the_same_on_any_mesh():
    load = workload("tight")
    layout = lay_out(load, Fsdp(2) * Expert(2) * Tensor(2), parse_target("cpu:8"))
    state = init_state(load, jax.random.key(0), layout.shardings(abstract_state(load)))
    jax.tree.map(np.testing.assert_array_equal, state["params"], fresh()["params"])
    gate = state["params"]["layers"]["mlp"]["gate"]
    assert gate.shape == (test_step.LAYERS, 8, 32, 64)
    assert gate.addressable_shards[0].data.shape == (test_step.LAYERS, 4, 16, 32)


def test_refuses_experts_that_do_not_divide_and_models_without_any():
    target = parse_target("cpu:8")
    with pytest.raises(ShardingError, match=r"'expert' of size 6 does not divide 4 ways"):
        lay_out(workload("six"), Data(2) * Expert(4), target)
    with pytest.raises(ShardingError, match="splits nothing it should"):
        lay_out(test_step.workload(), as_strategy(Expert(8)), target)
