"""Plans: bytes per device by role, all problems in one line, rules nobody matches."""

import dataclasses

import pytest
from jax.sharding import PartitionSpec as P

from spmdlab.errors import ShardingError
from spmdlab.strategies import Data, Fsdp, Tensor
from spmdlab.strategies.plan import ArrayAxes, plan

D, F, B, T = 8, 16, 16, 4


def arrays(role_axes=("embed", "mlp"), shape=(D, F)):
    """A weight in float32, its two moments, a batch of tokens and the step counter."""
    return [
        ArrayAxes("params.up", shape, "float32", role_axes, "param"),
        ArrayAxes("optimizer.mu.up", shape, "float32", role_axes, "optimizer"),
        ArrayAxes("optimizer.nu.up", shape, "bfloat16", role_axes, "optimizer"),
        ArrayAxes("batch.tokens", (B, T), "int32", ("act_batch", "act_len"), "batch"),
        ArrayAxes("step", (), "int32", (), "step"),
    ]


@pytest.mark.parametrize(
    ("strategy", "weight_ways", "moment_ways", "batch_ways"),
    [
        (Data(8), 1, 1, 8),
        (Fsdp(8), 8, 8, 8),
        (Fsdp(8, zero=1), 1, 8, 8),
        (Fsdp(8, zero=2), 1, 8, 8),
        (Tensor(8), 8, 8, 1),
        (Fsdp(4) * Tensor(2), 8, 8, 4),
        (Data(2) * Fsdp(2, zero=1) * Tensor(2), 2, 4, 4),
    ],
    ids=str,
)
def test_bytes_per_device(strategy, weight_ways, moment_ways, batch_ways):
    found = plan(arrays(), strategy)
    assert found.local_bytes == {
        "param": 4 * D * F // weight_ways,
        "optimizer": (4 + 2) * D * F // moment_ways,
        "batch": 4 * B * T // batch_ways,
        "step": 4,
    }


def test_specs_local_shapes_and_what_is_copied():
    found = plan(arrays(), Data(2) * Fsdp(2, zero=1) * Tensor(2))
    assert found.specs["params.up"] == P(None, "tensor")
    assert found.specs["optimizer.mu.up"] == P("fsdp", "tensor")
    assert found.specs["batch.tokens"] == P(("data", "fsdp"), None)
    assert found.specs["step"] == P()
    assert found.local_shapes["optimizer.nu.up"] == (D // 2, F // 2)
    assert found.replicated["params.up"] == ("data", "fsdp")
    assert found.replicated["optimizer.mu.up"] == ("data",)
    assert found.replicated["batch.tokens"] == ("tensor",)


def test_an_axis_of_one_device_copies_nothing():
    assert plan(arrays(), Data(1) * Tensor(2)).replicated["params.up"] == ()


def test_weight_rules_nothing_here_needs_are_stated():
    assert plan(arrays(), Fsdp(4)).unmatched == ()
    assert set(plan(arrays(), Tensor(2)).unmatched) == {
        "heads -> tensor",
        "kv_heads -> tensor",
        "vocab -> tensor",
    }


def test_all_problems_are_listed_three_in_full():
    five = [ArrayAxes(f"w{i}", (5 + 4 * i,), "float32", ("embed",), "param") for i in range(5)]
    with pytest.raises(ShardingError, match=r"^fsdp=4: w0: .*; w1: .*; w2: .*; and 2 more\.$"):
        plan(five, Fsdp(4))


def test_a_problem_arrays_share_is_said_once_under_the_parameters_name():
    found = [array for array in arrays(shape=(7, F)) if array.role != "batch"]
    message = r"^fsdp=4: params.up and 2 more like it: dim 0 'embed' of size 7 [^;]*\.$"
    with pytest.raises(ShardingError, match=message):
        plan(reversed(found), Fsdp(4))


def test_an_unknown_role_is_refused():
    with pytest.raises(ShardingError, match="step: unknown role 'state'; known: param, optimizer"):
        plan([ArrayAxes("step", (), "int32", (), "state")], Data(2))


@pytest.mark.parametrize(
    ("strategy", "axes", "message"),
    [
        pytest.param(Tensor(2), ("embed", "embed2"), "'embed2' has no rule", id="no-rule"),
        pytest.param(Tensor(2), ("embed", "norm"), "no array has a dim 'heads' or 'mlp'", id="tp"),
        pytest.param(Fsdp(4), ("mlp", "norm"), "no array has a dim 'embed'; dims", id="fsdp"),
        pytest.param(Fsdp(4, zero=1), ("mlp", "norm"), "no array has a dim 'embed'", id="zero-1"),
    ],
)
def test_a_parallelism_that_splits_no_weight_it_claims_is_refused(strategy, axes, message):
    """Also FSDP that still splits the batch: its weights would stay whole without a word."""
    with pytest.raises(ShardingError, match=message):
        plan(arrays(axes), strategy)


def test_a_parallelism_of_activations_must_find_one():
    with pytest.raises(
        ShardingError, match="splits nothing it should: no array has a dim 'act_mlp'"
    ):
        plan(arrays(), Data(2) * Typo("act_mlp"))
    assert plan(arrays(), Data(2) * Typo("act_mlp"), activation_axes=["act_mlp"])


def test_one_device_needs_nothing_to_split():
    assert plan(arrays(("embed", "norm")), Tensor(1)).local_bytes["param"] == 4 * D * F


@dataclasses.dataclass(frozen=True)
class Typo:
    """A user's own, with a rule for an axis of the user's own."""

    logical: str

    def axes(self):
        return {"mine": 2}

    def rules(self):
        return {self.logical: ("mine",)}


def test_a_rule_for_an_axis_nobody_has_is_refused_unless_an_activation_has_it():
    with pytest.raises(ShardingError, match=r"rule for 'patchs', which no array has.*embed, mlp"):
        plan(arrays(), Data(2) * Typo("patchs"))
    assert plan(arrays(("embed", "patches")), Data(2) * Typo("patches"))
    assert plan(arrays(), Data(2) * Typo("act_patches"), activation_axes=["act_patches"])


def test_state_alone_is_planned_without_asking_what_activations_have():
    state = [array for array in arrays() if array.role != "batch"]
    assert plan(state, Data(8)).local_bytes["batch"] == 0


def test_two_arrays_of_one_path_are_refused():
    with pytest.raises(ShardingError, match="step: two arrays have this path"):
        plan([*arrays(), ArrayAxes("step", (), "int32", (), "step")], Data(2))
