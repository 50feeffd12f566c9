"""Expert parallelism in compiled steps: what moves over ``expert``, by hand.

L layers   D width   F hidden   V vocabulary   B batch   T tokens   E experts   K of them chosen
"""

import importlib.util
from typing import Any

import pytest

from spmdlab.config import Experiment
from spmdlab.models.config import DecoderConfig, MoeConfig
from spmdlab.row import compile_row
from spmdlab.strategies import Data, Expert, Fsdp, Tensor, strategy_from_text
from spmdlab.workload import BatchConfig

L, D, F, V, B, T, E, K = 3, 128, 256, 512, 16, 128, 8, 2
C = 40  # places: 1.25 times the share of T * K choices that an expert has
HEADS, HEAD = 8, 16
N = 8

TARGETS = pytest.mark.parametrize(
    "target",
    [
        "cpu:8",
        pytest.param(
            "v5e:2x4",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
            ),
        ),
    ],
)
ITEMSIZE = {"cpu:8": 4, "v5e:2x4": 2}  # XLA's CPU backend widens bfloat16 on the wire

STRATEGIES = {
    "expert": Expert(8),
    "fsdp_expert": (Fsdp(2) * Expert(4)).with_options(remat="full"),
    "fsdp_expert_tensor": Fsdp(2) * Expert(2) * Tensor(2),
}


@pytest.fixture(scope="module")
def row():
    found: dict[tuple[str, ...], dict[str, Any]] = {}

    def of(strategy: str, target: str, dispatch: str = "capacity") -> dict[str, Any]:
        experiment = Experiment(
            model=DecoderConfig(
                vocab_size=V,
                num_layers=L,
                embed_dim=D,
                num_heads=HEADS,
                num_kv_heads=HEADS,
                head_dim=HEAD,
                mlp_dim=F,
                moe=MoeConfig(num_experts=E, experts_per_token=K, dispatch=dispatch),
            ),
            batch=BatchConfig(global_batch=B, seq_len=T),
            strategies=STRATEGIES,
            targets=(target,),
        )
        key = strategy, target, dispatch
        if key not in found:
            found[key] = compile_row(experiment, strategy, target)
        return found[key]

    return of


def of_kind(row, kind, axes, least=0):
    return [
        c
        for c in row["collectives"]
        if c["kind"] == kind and c["mesh_axes"] == axes and c["payload_bytes"] / c["count"] > least
    ]


@TARGETS
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tokens_go_to_experts_and_back_by_all_to_all(row, target, strategy):
    """In each layer one to them and one back, forwards and again backwards.

    Two more where the backward pass does the layer again.  Each moves a device's share of E * C
    rows for every sequence, and keeps its own part.
    """
    found = row(strategy, target)
    moves = [c for c in found["collectives"] if c["kind"] == "all-to-all"]
    assert all(c["mesh_axes"] == ["expert"] and c["count"] == L for c in moves)
    ways = found["mesh"]
    share = B // (ways["expert"] * ways.get("fsdp", 1))
    rows = share * E * C * D * ITEMSIZE[target]
    times = 6 if strategy == "fsdp_expert" else 4
    assert [c["payload_bytes"] for c in moves] == [L * rows] * times
    assert [c["phase"] for c in moves].count("forward") == 2
    for move in moves:
        sent = (ways["expert"] - 1) / ways["expert"] * move["payload_bytes"]
        assert move["wire_bytes"] == pytest.approx(sent)


@TARGETS
def test_experts_stay_where_they_are_and_other_weights_are_reduced(row, target):
    """No weight is gathered; gradients of experts are whole where they are."""
    found = row("expert", target)
    assert of_kind(found, "all-gather", ["expert"]) == []
    reduced = sum(c["payload_bytes"] for c in of_kind(found, "all-reduce", ["expert"]))
    attention = 4 * D * HEADS * HEAD * ITEMSIZE[target]
    scales, router = 2 * D * 4, D * E * 4
    once = V * D * 4 + V * D * ITEMSIZE[target] + D * 4  # table's in float32, head's, last scale
    assert 0 <= reduced - (L * (attention + scales + router) + once) < 4096


@TARGETS
@pytest.mark.parametrize("strategy", ["expert", "fsdp_expert_tensor"])
def test_matmul_flops_follow_from_the_model(row, target, strategy):
    """Experts' products on E * C rows a sequence, and five that place rows and bring them back.

    Forwards one each; backwards one to place, and two to bring back, whose weights learn.
    """
    found = row(strategy, target)
    dense = 6 * B * T * (L * (4 * D * HEADS * HEAD + D * E) + V * D)
    attention = 3 * 4 * L * B * T * T * HEADS * HEAD
    experts = 6 * L * B * E * C * 3 * D * F
    placing = 5 * 2 * L * B * T * E * C * D
    # Router and placing are not split by tensor: each of its devices does them for itself.
    ways = found["mesh"].get("tensor", 1)
    again = (ways - 1) * (placing + 6 * B * T * L * D * E)
    total = dense + attention + experts + placing + again
    assert found["matmul_flops"] == pytest.approx(total / N, rel=0.01)
    active = dense + attention / 2 + 6 * L * B * T * K * 3 * D * F
    assert found["model_flops"] == active / N


@pytest.mark.parametrize("dispatch", ["capacity", "dropless"])
def test_weights_take_their_share(row, dispatch):
    memory = row("expert", "cpu:8", dispatch)["memory"]
    experts = L * E * 3 * D * F
    others = L * (4 * D * HEADS * HEAD + D * E) + 2 * V * D + (2 * L + 1) * D
    assert memory["params"] == (experts / N + others) * 4


@TARGETS
def test_without_a_capacity_tokens_are_gathered_and_sums_scattered(row, target):
    """Fewer bytes than E copies of each token: each device needs every token once."""
    found = row("expert", target, "dropless")
    tokens = B * T * D * ITEMSIZE[target]
    gathers = of_kind(found, "all-gather", ["expert"])
    assert {c["payload_bytes"] for c in gathers} == {L * tokens}
    assert len([c for c in gathers if c["phase"] == "forward"]) == 1
    # The CPU backend forms no reduce-scatter.
    kind = "all-reduce" if target == "cpu:8" else "reduce-scatter"
    sums = of_kind(found, kind, ["expert"], least=tokens - 1)
    assert [c["phase"] for c in sums].count("forward") == 1
    experts = 6 * L * B * T * E * 3 * D * F
    assert found["matmul_flops"] == pytest.approx(
        (experts + 6 * B * T * (L * (4 * D * HEADS * HEAD + D * E) + V * D)) / N
        + 3 * 4 * L * B * T * T * HEADS * HEAD / N,
        rel=0.01,
    )


def test_text_and_rules():
    strategy = Data(2) * Fsdp(2) * Expert(4) * Tensor(2)
    assert str(strategy) == "data=2 fsdp=2 expert=4 tensor=2"
    assert strategy_from_text("tensor=2 expert=4 data=2 fsdp=2") == strategy
    rules = strategy.rules()
    assert rules["act_batch"] == ("data", "fsdp", "expert")
    assert rules["act_expert_batch"] == ("data", "fsdp")
    assert rules["expert"] == rules["act_expert"] == ("expert",)
    assert rules["embed"] == ("fsdp",)
    assert rules["mlp"] == ("tensor",)
