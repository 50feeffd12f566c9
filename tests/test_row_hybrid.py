"""Hybrid sharding, compiled for two slices: weights split inside a slice, copied between slices.

Sizes are those of `tests.test_row`.  The TPU moves bfloat16, but for the table's gradient.
"""

import importlib.util

import pytest

from spmdlab.row import compile_row
from spmdlab.strategies import Data, Fsdp
from tests.test_row import LAYER, REDUCTIONS, SCALES, SMALL, D, L, N, V, experiment, total

SLICES = 2


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_only_shards_of_gradients_cross_between_slices():
    """Inside a slice as under FSDP alone; then each device sums its N-th with its one peer."""
    each = experiment()
    each.strategies = {"hybrid": Data(SLICES) * Fsdp(N)}
    found = compile_row(each, "hybrid", f"{SLICES}*v5e:2x4")
    links = {(*c["mesh_axes"], c["link"]) for c in found["collectives"]}
    assert links == {("fsdp", "ici"), ("data", "dcn")}

    weights = (2 * L * LAYER + 2 * V * D) * 2
    assert total(found, "all-gather", ["fsdp"], least=SMALL) == weights
    gradients = (L * LAYER + V * D) * 2 + V * D * 4
    assert 0 <= total(found, REDUCTIONS, ["fsdp"]) - gradients - SCALES * 4 < SMALL
    assert total(found, "reduce-scatter", ["fsdp"]) > gradients / 2

    assert {c["kind"] for c in found["collectives"] if c["link"] == "dcn"} == {"all-reduce"}
    assert total(found, "all-reduce", ["data"], least=SMALL) == gradients / N
    crossing = 2 * (SLICES - 1) / SLICES * gradients / N
    assert 0 <= found["wire_bytes"]["data"] - crossing < 2 * SMALL
