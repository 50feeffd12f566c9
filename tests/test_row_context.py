"""Compiled steps with split sequences: what the ring and the exchange send, counted by hand.

L layers   W ways of context   B batch on a device   T tokens   H, N heads   K head size
"""

import functools
import importlib.util
from collections import Counter
from typing import Any

import pytest

from spmdlab.config import Experiment
from spmdlab.models.config import DecoderConfig
from spmdlab.row import compile_row
from spmdlab.strategies import Context, Data, Fsdp, Strategy
from spmdlab.workload import BatchConfig
from tests.test_row import ITEMSIZE, TARGETS

L, D, F, H, N, K, V, B, T = 3, 128, 256, 8, 4, 16, 256, 8, 128
W = 4
STRATEGIES = {
    "ring": Context(W) * Fsdp(2),
    "contiguous": Context(W, order="contiguous") * Data(2),
    "exchange": Context(W, method="all_to_all") * Data(2),
}


def experiment(strategy: Strategy, seq_len: int = T, **changes: Any) -> Experiment:
    model = {"vocab_size": V, "num_layers": L, "embed_dim": D, "num_heads": H, "num_kv_heads": N}
    model |= {"head_dim": K, "mlp_dim": F, **changes}
    return Experiment(
        model=DecoderConfig(**model),
        batch=BatchConfig(global_batch=B, seq_len=seq_len),
        strategies={"it": strategy},
        targets=("cpu:8", "v5e:2x4"),
    )


@functools.cache
def row(strategy: str, target: str) -> dict[str, Any]:
    return compile_row(experiment(STRATEGIES[strategy]), "it", target)


def sent(strategy: str, target: str, kind: str) -> Counter:
    """(phase, bytes of one) -> how often it runs in a step; only over ``context``."""
    found: Counter = Counter()
    for c in row(strategy, target)["collectives"]:
        if c["kind"] == kind:
            assert c["mesh_axes"] == ["context"], c["op_name"]
            found[c["phase"], c["payload_bytes"] / c["count"]] += c["count"]
    return found


@TARGETS
def test_keys_and_values_go_round_the_ring_twice_and_their_gradients_once(target):
    """W - 1 hops each way for keys and values; gradients make one more, to come home.

    Gradients travel in float32, but for that last hop.  The zigzag moves tokens, targets and
    weights in two chunks each, once a step.
    """
    block = B // 2 * T // W * N * K
    narrow, wide = block * ITEMSIZE[target], block * 4
    hops = Counter({("forward", narrow): 2 * (W - 1) * L})
    hops["backward", narrow] += 2 * (W - 1) * L + 2 * L
    hops["backward", wide] += 2 * (W - 1) * L
    hops["update", B // 2 * T // (2 * W) * 4] += 2 * 3
    assert sent("ring", target, "collective-permute") == hops
    kinds = {c["kind"] for c in row("ring", target)["collectives"] if "context" in c["mesh_axes"]}
    assert kinds == {"collective-permute", "all-reduce"}  # of gradients, and of the loss


@TARGETS
def test_the_exchange_swaps_tokens_for_heads_and_back(target):
    """Queries and the result, keys and values; the same backwards."""
    queries, keys = (B // 2 * T // W * heads * K * ITEMSIZE[target] for heads in (H, N))
    swaps = Counter()
    for phase in ("forward", "backward"):
        swaps[phase, queries] += 2 * L
        swaps[phase, keys] += 2 * L
    assert sent("exchange", target, "all-to-all") == swaps
    kinds = {
        c["kind"] for c in row("exchange", target)["collectives"] if "context" in c["mesh_axes"]
    }
    assert kinds == {"all-to-all", "all-reduce"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_zigzag_halves_what_the_ring_computes(strategy):
    """Of (2 W)^2 blocks of chunks, zigzag computes 2 W + 1 on each device, contiguous 4 W.

    A block is two products forwards and five backwards, where scores are computed again; the
    exchange has whole squares, and with everything saved four backwards.
    """
    layer = D * K * (2 * H + 2 * N) + 3 * D * F
    weights = 6 * B * T * (L * layer + V * D) / 8
    chunk = T // (2 * W)
    blocks = {"ring": (2 * W + 1) * 7, "contiguous": 4 * W * 7, "exchange": 4 * W * 6}[strategy]
    attention = blocks * 2 * chunk**2 * H * K * B // 2 * L
    assert row(strategy, "cpu:8")["matmul_flops"] == weights + attention


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_the_exchange_runs_the_kernel_on_whole_sequences():
    """Splash attention of H / W heads, priced from its shapes: half the square of all T tokens.

    Two products forwards, three for the queries' gradient, four for that of keys and values.
    """
    T, K = 512, 128
    found = compile_row(
        experiment(STRATEGIES["exchange"], T, head_dim=K, attention="flash"), "it", "v5e:2x4"
    )
    layer = D * K * (2 * H + 2 * N) + 3 * D * F
    weights = 6 * B * T * (L * layer + V * D) / 8
    kernel = (2 + 3 + 4) * 2 * T**2 / 2 * K * H // W * B // 2 * L
    assert found["matmul_flops"] == pytest.approx(weights + kernel, rel=1e-3)
    swaps = [c for c in found["collectives"] if c["kind"] == "all-to-all"]
    assert sum(c["count"] for c in swaps) == (4 + 4) * L
