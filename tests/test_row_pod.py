"""Steps compiled for 64 chips: every collective is on the axis it should be on, by hand.

S stages   M microbatches   W ways of context   L layers, N of them on a stage   D width
H heads   K head size   V vocabulary   B batch   T tokens
"""

import functools
import importlib.util
from collections import Counter
from typing import Any

import pytest

from spmdlab.config import Experiment
from spmdlab.models.config import DecoderConfig, MoeConfig
from spmdlab.pipeline.simulate import simulate
from spmdlab.row import compile_row
from spmdlab.strategies import Context, Expert, Fsdp, Pipeline, Strategy, Tensor
from spmdlab.workload import BatchConfig

S, M, W, FSDP, TENSOR = 4, 4, 4, 2, 2
L, D, H, K, V, B, T = 8, 64, 4, 16, 256, 16, 128
N = L // S
FORWARDS = BACKWARDS = M + S - 1  # the last of S stages begins S - 1 ticks after the first
PIPELINE = Pipeline(S, "1f1b", microbatches=M)
BF16, F32 = 2, 4

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


def compiled(strategy: Strategy, **changes: Any) -> list[dict[str, Any]]:
    sizes = {"vocab_size": V, "num_layers": L, "embed_dim": D, "num_heads": H, "num_kv_heads": H}
    experiment = Experiment(
        model=DecoderConfig(**{**sizes, "head_dim": K, "mlp_dim": 2 * D, **changes}),
        batch=BatchConfig(global_batch=B, seq_len=T),
        strategies={"it": strategy},
        targets=("v5p:4x4x4",),
    )
    return compile_row(experiment, "it", "v5p:4x4x4")["collectives"]


@functools.cache
def pipelined() -> list[dict[str, Any]]:
    return compiled(PIPELINE * Context(W) * Fsdp(FSDP) * Tensor(TENSOR))


def permutes(word: str, axes: list[str]) -> Counter:
    """Bytes of one -> how often a step runs it; only where ``word`` is in its name."""
    found: Counter = Counter()
    for c in pipelined():
        if c["kind"] == "collective-permute" and word in (c["op_name"] or ""):
            assert c["mesh_axes"] == axes, c["op_name"]
            found[c["payload_bytes"] / c["count"]] += c["count"]
    return found


RESIDUAL = B // M // FSDP * T // W * D * BF16
"""Bytes of a microbatch's residual stream on one device."""


def test_a_stage_sends_in_every_tick_forwards_and_in_every_tick_backwards():
    expected = simulate(PIPELINE.pipeline_schedule())
    assert (expected.forward_ticks, expected.backward_ticks) == (FORWARDS, BACKWARDS)
    assert permutes("to_the_next", ["stage"]) == {RESIDUAL: FORWARDS}
    assert permutes("to_the_one_before", ["stage"]) == {RESIDUAL: BACKWARDS}


def test_keys_and_values_go_round_the_ring_in_every_tick():
    """W - 1 hops for keys and for values forwards.

    A backward does these again, and then once more as it goes back, with gradients in float32;
    one more hop, in bfloat16, takes gradients home.
    """
    block = B // M // FSDP * T // W * H // TENSOR * K
    hops = 2 * (W - 1) * N
    sent = permutes("attention/shard_map", ["context"])
    assert sent == {
        block * BF16: FORWARDS * hops + BACKWARDS * (2 * hops + 2 * N),
        block * F32: BACKWARDS * hops,
    }


def test_weights_are_gathered_over_fsdp_and_activations_summed_over_tensor():
    """In each layer seven weights: forwards, forwards again, and as it goes back.

    Two sums of activations in each of these.  Gradients are summed once a layer and tick.
    """
    gathers: Counter = Counter()
    gradients: Counter = Counter()
    for c in pipelined():
        if "params.layers" not in (c["parameter"] or "") or "norm" in c["parameter"]:
            continue
        for name in c["parameter"].split(", "):
            if c["kind"] == "all-gather":
                gathers[name, *c["mesh_axes"]] += c["count"]
            else:
                gradients[name, *c["mesh_axes"]] += c["count"]
    assert len(gathers) == 7
    assert {axis for _, axis in gathers} == {"fsdp"}
    assert set(gathers.values()) == {(FORWARDS + 2 * BACKWARDS) * N}
    assert gradients == {
        (name, axis): BACKWARDS * N for name, _ in gathers for axis in ("fsdp", "context")
    }
    sums = [
        c
        for c in pipelined()
        if c["kind"] == "all-reduce" and "layers" in (c["op_name"] or "")
        if c["parameter"] is None
    ]
    assert {(*c["mesh_axes"], c["payload_bytes"] / c["count"]) for c in sums} == {
        ("tensor", RESIDUAL)
    }
    assert sum(c["count"] for c in sums) == 2 * (FORWARDS + 2 * BACKWARDS) * N


def test_tokens_go_to_experts_and_back_in_every_layer():
    """Two all-to-alls a layer forwards, two where the backward pass does it again, two back.

    Each moves a device's share of C places of each expert for every sequence.
    """
    experts, chosen = 8, 2
    C = 5 * T * chosen // experts // 4  # 1.25 times an expert's share of the choices
    strategy = (Fsdp(2) * Expert(8) * Tensor(4)).with_options(remat="full")
    moe = MoeConfig(num_experts=experts, experts_per_token=chosen)
    moves = [c for c in compiled(strategy, moe=moe) if c["kind"] == "all-to-all"]
    assert {tuple(c["mesh_axes"]) for c in moves} == {("expert",)}
    phases = Counter()
    for c in moves:
        phases[c["phase"]] += c["count"]
        assert c["payload_bytes"] / c["count"] == B // (2 * 8) * experts * C * D * BF16
    assert phases == {"forward": 2 * L, "backward": 4 * L}
