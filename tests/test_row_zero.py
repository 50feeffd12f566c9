"""Compiled steps of two microbatches under ZeRO-1 and ZeRO-2: where gradients are whole.

Sizes are those of `tests.test_row`.
"""

import functools
from typing import Any

import pytest

from spmdlab.row import compile_row
from spmdlab.strategies import Fsdp
from tests.test_row import LAYER, SCALES, SMALL, TARGETS, D, L, N, V, experiment

MICROBATCHES = 2
REST = 2 * V * D  # table and head


@functools.cache
def row(zero: int, target: str) -> dict[str, Any]:
    each = experiment()
    each.strategies = {"it": Fsdp(N, zero=zero).with_options(accumulate=MICROBATCHES)}
    return compile_row(each, "it", target)


def reductions(zero: int, target: str) -> dict[str, dict[str, float]]:
    """Kind -> parts of the parameters -> times reduced in a step, scales apart."""
    found: dict[str, dict[str, float]] = {"all-reduce": {}, "reduce-scatter": {}}
    for c in row(zero, target)["collectives"]:
        if c["kind"] in found:
            for name in (c["parameter"] or "").split(", "):
                if name and "norm" not in name:
                    by = found[c["kind"]]
                    by[name] = by.get(name, 0) + c["count"]
    return found


@TARGETS
@pytest.mark.parametrize("zero", [1, 2])
def test_weights_are_whole_and_moments_split_under_both(zero, target):
    memory = row(zero, target)["memory"]
    assert memory["params"] == 4 * (L * LAYER + REST + SCALES)
    assert memory["optimizer"] == 2 * 4 * ((L * LAYER + REST) / N + SCALES) + 8
    gathers = [c for c in row(zero, target)["collectives"] if c["kind"] == "all-gather"]
    assert sum(c["payload_bytes"] for c in gathers) == 4 * (L * LAYER + REST)
    assert {(c["phase"], c["count"]) for c in gathers} == {("update", 1)}  # of new weights


@TARGETS
def test_zero_1_accumulates_whole_gradients_and_zero_2_its_share(target):
    """All but an N-th of the accumulator is saved, and of one microbatch's layers, stacked."""
    saved = row(1, target)["memory"]["temp"] - row(2, target)["memory"]["temp"]
    accumulator, stacked = 4 * (L * LAYER + REST), 4 * L * LAYER
    if target == "cpu:8":
        assert saved == pytest.approx((accumulator + stacked) * (N - 1) / N, abs=SMALL)
    else:  # arrays of several lives share memory: the peak need not be where both are alive
        assert saved > accumulator / 2


@TARGETS
def test_what_is_reduced_inside_the_loop_over_microbatches(target):
    """Layers in every microbatch under both: JAX reduces a gradient where it arises.

    The TPU's compiler scatters what ZeRO-2 sums.  What ZeRO-1 sums whole it may take out of the
    loop, and does with table and head: one sum a step, and scattered, for all that is done with
    it is the update of a share.  The CPU's compiler does neither.
    """
    one, two = reductions(1, target), reductions(2, target)
    layers = {name: count for name, count in one["all-reduce"].items() if "layers" in name}
    assert len(layers) == 7
    assert set(layers.values()) == {MICROBATCHES * L}
    times = {
        zero: {
            name: sum(by.get(f"params.{name}", 0) for by in found.values())
            for name in ("embed.table", "head.kernel")
        }
        for zero, found in ((1, one), (2, two))
    }
    each = dict.fromkeys(times[1], MICROBATCHES)
    assert times[2] == each
    if target == "cpu:8":
        assert one == two
        assert times[1] == each
    else:
        assert times[1] == dict.fromkeys(times[1], 1)
        scattered = {name for name in two["reduce-scatter"] if "layers" in name}
        assert scattered == layers.keys() - {"params.layers.attention.out"}  # sliced after its sum
        assert not [name for name in one["reduce-scatter"] if "layers" in name]
