"""Composition: what merges, what conflicts, and a parallelism of a user's own."""

import dataclasses

import pytest

from spmdlab.errors import ConfigError
from spmdlab.strategies import (
    Context,
    Data,
    Fsdp,
    SequenceSplit,
    Strategy,
    Tensor,
    as_strategy,
)


@dataclasses.dataclass(frozen=True)
class Ring:
    """A user's own: splits tokens inside the blocks."""

    ways: int

    def axes(self):
        return {"ring": self.ways}

    def rules(self):
        return {"act_len": ("ring",), "act_res_len": ("ring",)}


@dataclasses.dataclass(frozen=True)
class SplitsOnlyByWord(Ring):
    """Says that its sequences are split, and splits the batch."""

    def rules(self):
        return {"act_batch": ("ring",)}

    def sequence_split(self):
        return SequenceSplit(axis="ring", ways=self.ways, method="ring", order="zigzag")


@dataclasses.dataclass(frozen=True)
class Claims:
    """A user's own, with any axes and rules."""

    own: tuple
    claims: tuple

    def axes(self):
        return dict(self.own)

    def rules(self):
        return dict(self.claims)


def test_batch_is_split_by_all_who_claim_it_in_mesh_order():
    assert (Fsdp(4) * Data(2)).rules()["act_batch"] == ("data", "fsdp")


def test_a_users_own_axis_splits_the_batch_inside_ours():
    strategy = Claims((("apple", 2),), (("act_batch", ("apple",)),)) * Data(2)
    assert strategy.rules()["act_batch"] == ("data", "apple")
    two = Claims((("data", 2), ("apple", 2)), (("act_batch", ("apple", "data")),))
    assert as_strategy(two).rules()["act_batch"] == ("data", "apple")


def test_weights_go_where_their_parallelism_says():
    rules = (Fsdp(4) * Tensor(2)).rules()
    batch = {"act_batch", "act_expert_batch"}
    assert {axis for axis, m in rules.items() if m == ("fsdp",)} == {"embed", *batch}
    assert {axis for axis, m in rules.items() if m == ("tensor",)} == {
        *("mlp", "heads", "kv_heads", "vocab"),
        *("act_mlp", "act_heads", "act_kv_heads", "act_vocab"),
    }
    assert rules["norm"] == rules["act_embed"] == rules["act_res_len"] == rules["act_len"] == ()


def test_sequence_parallelism_splits_only_the_residual_stream():
    changed = {
        axis: mesh_axes
        for axis, mesh_axes in Tensor(2, sequence="on").rules().items()
        if Tensor(2).rules().get(axis) != mesh_axes
    }
    assert changed == {"act_res_len": ("tensor",)}
    assert Tensor(2, sequence=True) == Tensor(2, sequence="on")
    assert Tensor(2, sequence=False) == Tensor(2)


def test_context_splits_lengths_inside_and_between_blocks():
    strategy = Tensor(2, sequence="on") * Context(4)
    assert strategy.rules()["act_len"] == ("context",)
    assert strategy.rules()["act_res_len"] == ("context", "tensor")
    assert strategy.sequence_split == Context(4).sequence_split()
    assert (Context(1) * Data(2)).sequence_split is None
    assert (Ring(2) * Data(2)).sequence_split is None


def test_replicated_kv_heads_are_stated():
    rules = as_strategy(Tensor(4, kv="replicate")).rules()
    assert rules["kv_heads"] == rules["act_kv_heads"] == ()
    assert rules["heads"] == rules["act_heads"] == ("tensor",)


def test_zero_splits_optimizer_state_then_gradients_then_weights():
    one, two, three = (as_strategy(Fsdp(4, zero=zero)) for zero in (1, 2, 3))
    whole, split = one.rules(), three.rules()
    assert whole["embed"] == ()
    assert split == {**whole, "embed": ("fsdp",)}
    assert whole["act_batch"] == ("fsdp",)
    for strategy, weights, gradients in (
        (one, whole, whole),
        (two, whole, split),
        (three, split, split),
    ):
        assert strategy.rules() == weights
        assert strategy.gradient_rules() == gradients
        assert strategy.optimizer_rules() == split


def test_gradients_of_a_users_own_are_laid_out_like_its_weights():
    strategy = as_strategy(Claims((("x", 2),), (("embed", ("x",)),)))
    assert strategy.gradient_rules() == strategy.rules()


def test_a_users_own_parallelism_composes_from_either_side():
    strategy = Data(2) * Ring(4) * Tensor(2, sequence="on")
    assert Ring(4) * (Data(2) * Tensor(2, sequence="on")) == strategy
    assert list(strategy.mesh_axes.items()) == [("data", 2), ("ring", 4), ("tensor", 2)]
    assert strategy.rules()["act_res_len"] == ("ring", "tensor")
    assert strategy.rules()["act_len"] == ("ring",)
    assert str(strategy) == "data=2 ring=4 tensor=2 sequence=on"


def test_options_go_along_and_factors_must_agree():
    left = as_strategy(Data(2)).with_options(remat="full", compiler_options={"xla_a": 1})
    right = as_strategy(Tensor(2)).with_options(accumulate=4, compiler_options={"xla_b": "true"})
    both = left * right
    assert (both.remat, both.accumulate) == ("full", 4)
    assert both.compiler_options == (("xla_a", 1), ("xla_b", True))
    assert both == right * left
    with pytest.raises(ConfigError, match="remat is 'full' and 'dots'"):
        left * as_strategy(Fsdp(2)).with_options(remat="dots")
    with pytest.raises(ConfigError, match="accumulate is 4 and 2"):
        right * as_strategy(Fsdp(2)).with_options(accumulate=2)
    with pytest.raises(ConfigError, match="xla_a is 1 and 2"):
        left * as_strategy(Fsdp(2)).with_options(compiler_options={"xla_a": 2})


def test_with_options_keeps_what_it_is_not_given():
    strategy = as_strategy(Data(2)).with_options(remat="full", accumulate=2)
    assert strategy.with_options(accumulate=1) == as_strategy(Data(2)).with_options(remat="full")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda: Data(2) * Data(4), "both own mesh axis 'data'", id="axis-twice"),
        pytest.param(
            lambda: Fsdp(2) * Claims((("x", 2),), (("embed", ("x",)),)),
            "both claim logical axis 'embed'",
            id="claim-twice",
        ),
        pytest.param(
            lambda: Fsdp(2, zero=1) * Claims((("x", 2),), (("embed", ("x",)),)),
            "both claim logical axis 'embed'",
            id="claim-twice-in-optimizer-state",
        ),
        pytest.param(
            lambda: Data(2) * Claims((("x", 2),), (("mlp", ("data",)),)),
            "maps 'mlp' to 'data'; .* owns: x",
            id="not-its-axis",
        ),
        pytest.param(
            lambda: Data(2) * Claims((("x", 2),), (("mlp", "x"),)), "is a tuple", id="text-rule"
        ),
        pytest.param(lambda: Data(2) * Claims((), ()), "owns no mesh axis", id="no-axis"),
        pytest.param(lambda: Data(2) * Claims((("x", 0),), ()), "1 or more", id="no-ways"),
        pytest.param(lambda: Data(2) * Claims([("x", 2)], ()), "hashable", id="unhashable"),
        pytest.param(lambda: Data(0), r"Data\(0\).*1 or more", id="zero"),
        pytest.param(lambda: Tensor(True), "whole number", id="bool"),
        pytest.param(lambda: Fsdp(2.0), "whole number", id="float"),
        pytest.param(lambda: Fsdp(2, zero=4), "zero=4 is unknown.  Known: 1, 2, 3", id="zero-4"),
        pytest.param(lambda: Tensor(2, kv="copy"), "Known: 'split', 'replicate'", id="kv"),
        pytest.param(lambda: Tensor(2, sequence="yes"), "Known: 'off', 'on'", id="sequence"),
        pytest.param(lambda: as_strategy("fsdp=4"), "strategy_from_text", id="text"),
        pytest.param(lambda: as_strategy(Data), r"Data\(8\)", id="class"),
        pytest.param(
            lambda: SplitsOnlyByWord(2) * Data(2),
            "names mesh axis 'ring', but 'act_len' is split over none",
            id="sequence-split",
        ),
        pytest.param(lambda: Data(2) * 3, "3 is no strategy", id="number"),
        pytest.param(lambda: Strategy(()), r"Data\(1\)", id="empty"),
        pytest.param(lambda: Strategy((Data(1),), remat="a b"), "remat", id="remat"),
        pytest.param(lambda: Strategy((Data(1),), accumulate=0), "accumulate=0", id="accumulate"),
        pytest.param(
            lambda: Strategy((Data(1),), compiler_options=(("foo", 1),)),
            "begin with 'xla_'",
            id="o",
        ),
        pytest.param(
            lambda: Strategy((Data(1),), compiler_options=(("xla_a", 1), ("xla_a", 2))),
            "given twice",
            id="option-twice",
        ),
        pytest.param(
            lambda: Strategy((Data(1),), compiler_options=(("xla_a", "x y"),)), "spaces", id="space"
        ),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
