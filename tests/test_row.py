"""One compiled step of each basic strategy: every collective is on the axis it should be on.

The expected counts and bytes are derived here from the sizes of the model:

  L layers   D width   F hidden   H heads   K head size   V vocabulary   B batch   T tokens

Each layer has four weights of D * H * K elements (query, key, value, out) and three of D * F
(gate, up, down); the table and the head have V * D each; there are 2 L + 1 norm scales of D.
"""

import importlib.util
from typing import Any

import pytest

from spmdlab.config import Experiment
from spmdlab.models.config import DecoderConfig
from spmdlab.row import compile_row
from spmdlab.strategies import Data, Fsdp, Tensor
from spmdlab.workload import BatchConfig

L, D, F, H, K, V, B, T = 3, 256, 512, 8, 32, 512, 16, 128
N = 8
LAYER = 4 * D * H * K + 3 * D * F
SCALES = (2 * L + 1) * D
SMALL = 4096  # bytes: scalars and norms, which are combined with whatever is near

TPU = pytest.param(
    "v5e:2x4",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
    ),
)
TARGETS = pytest.mark.parametrize("target", ["cpu:8", TPU])
ITEMSIZE = {"cpu:8": 4, "v5e:2x4": 2}  # XLA's CPU backend widens bfloat16 on the wire

STRATEGIES = {
    "data": Data(N),
    "fsdp": Fsdp(N),
    "tensor": Tensor(N),
    "fsdp_tensor": Fsdp(4) * Tensor(2),
}


def experiment(**changes: Any) -> Experiment:
    model = {"vocab_size": V, "num_layers": L, "embed_dim": D, "num_heads": H, "num_kv_heads": H}
    model |= {"head_dim": K, "mlp_dim": F, **changes}
    return Experiment(
        model=DecoderConfig(**model),
        batch=BatchConfig(global_batch=B, seq_len=T),
        strategies=STRATEGIES,
        targets=("cpu:8", "v5e:2x4"),
    )


@pytest.fixture(scope="module")
def row():
    """Compiles each strategy and target once."""
    found: dict[tuple[str, str], dict[str, Any]] = {}

    def of(strategy: str, target: str) -> dict[str, Any]:
        key = strategy, target
        if key not in found:
            found[key] = compile_row(experiment(), strategy, target, detail=True)
        return found[key]

    return of


def total(row: dict[str, Any], kinds: str, axes: list[str], *, least: float = 0) -> float:
    """Payload bytes of the collectives of some kinds over exactly these axes."""
    return sum(
        c["payload_bytes"]
        for c in row["collectives"]
        if c["kind"] in kinds.split()
        and c["mesh_axes"] == axes
        and c["payload_bytes"] / c["count"] > least
    )


REDUCTIONS = "all-reduce reduce-scatter"


@TARGETS
def test_data_parallelism_reduces_each_gradient_once(row, target):
    """All weights once; the table's gradient is summed in float32, the scales' too."""
    found = row("data", target)
    assert {axis for c in found["collectives"] for axis in c["mesh_axes"]} == {"data"}
    assert {c["kind"] for c in found["collectives"]} == {"all-reduce"}
    gradients = (L * LAYER + V * D) * ITEMSIZE[target] + (V * D + SCALES) * 4
    assert 0 <= total(found, "all-reduce", ["data"]) - gradients < SMALL
    wire = 2 * (N - 1) / N * total(found, "all-reduce", ["data"])
    assert found["wire_bytes"]["data"] == pytest.approx(wire)


@TARGETS
def test_fsdp_gathers_weights_twice_and_reduces_gradients_once(row, target):
    """Layers are gathered forwards and again backwards, table and head once."""
    found = row("fsdp", target)
    assert {axis for c in found["collectives"] for axis in c["mesh_axes"]} == {"fsdp"}
    weights = (2 * L * LAYER + 2 * V * D) * ITEMSIZE[target]
    assert total(found, "all-gather", ["fsdp"]) == weights
    gradients = (L * LAYER + V * D) * ITEMSIZE[target] + (V * D + SCALES) * 4
    assert 0 <= total(found, REDUCTIONS, ["fsdp"]) - gradients < SMALL
    if target != "cpu:8":  # the CPU backend forms no reduce-scatter
        assert total(found, "reduce-scatter", ["fsdp"]) > gradients / 2


@TARGETS
def test_tensor_parallelism_reduces_activations(row, target):
    """Forwards one sum after the lookup and two in each layer."""
    found = row("tensor", target)
    assert {axis for c in found["collectives"] for axis in c["mesh_axes"]} == {"tensor"}
    activation = B * T * D * ITEMSIZE[target]
    sums = [c for c in found["collectives"] if c["payload_bytes"] / c["count"] >= activation]
    forward = [c for c in sums if c["phase"] == "forward"]
    assert sum(c["payload_bytes"] for c in forward) == (2 * L + 1) * activation
    assert sorted(c["count"] for c in forward) == [1, L, L]
    backward = sum(c["payload_bytes"] for c in sums if c["phase"] == "backward")
    # The CPU backend sums the parts of query, key and value, and of gate and up, one by one.
    assert backward == ((5 * L + 1) if target == "cpu:8" else (2 * L + 1)) * activation
    assert all(c["parameter"] is None for c in sums)


@TARGETS
def test_a_product_puts_weights_on_fsdp_and_activations_on_tensor(row, target):
    found = row("fsdp_tensor", target)
    weights = (2 * L * LAYER + 2 * V * D) * ITEMSIZE[target] // 2  # each tensor half by itself
    assert total(found, "all-gather", ["fsdp"]) == weights
    gradients = (L * LAYER + V * D) * ITEMSIZE[target] // 2 + V * D * 4 // 2
    assert 0 <= total(found, REDUCTIONS, ["fsdp"]) - gradients <= SCALES * 4 + SMALL
    activation = B // 4 * T * D * ITEMSIZE[target]
    forward = sum(
        c["payload_bytes"]
        for c in found["collectives"]
        if c["mesh_axes"] == ["tensor"] and c["phase"] == "forward"
        if c["payload_bytes"] / c["count"] >= activation
    )
    assert forward == (2 * L + 1) * activation


@TARGETS
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_equals_what_the_compiler_says(row, target, strategy):
    """Arguments from the closed form: weights, two moments, tokens."""
    memory = row(strategy, target)["memory"]
    params = L * LAYER + 2 * V * D + SCALES
    split = 1 if strategy == "data" else N
    whole = SCALES if split > 1 else 0  # scales are small and stay whole
    expected = ((params - whole) / split + whole) * 4
    assert memory["params"] == expected
    assert memory["optimizer"] == 2 * expected + 8  # two moments; two step counters
    ways = {"tensor": 1, "fsdp_tensor": 4}.get(strategy, N)
    assert memory["batch"] == 3 * B * T * 4 / ways
    held = sum(memory[key] for key in ("params", "optimizer", "batch", "padding"))
    settled = held + memory["output"] - memory["alias"]
    assert memory["peak"] == settled + memory["temp"]
    assert memory["output"] - memory["alias"] < 4096  # the state is donated; metrics are new


@TARGETS
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sums_equal_their_parts(row, target, strategy):
    found = row(strategy, target)
    ledger = found["ledger"]
    parts = ledger["instructions"]
    assert sum(i["flops"] for i in parts) == pytest.approx(found["flops"])
    assert sum(i["hbm_bytes"] for i in parts) == pytest.approx(found["hbm_bytes"])
    busy = found["compute_s"] + found["collective_s"] + ledger["totals"]["copy_s"]
    assert sum(i["seconds"] for i in parts) == pytest.approx(busy)
    exposed = sum(c["exposed_seconds"] for c in found["collectives"])
    assert exposed == pytest.approx(found["exposed_collective_s"])
    step = found["step_s"]
    assert step["ideal"] <= step["replay"] <= step["no_overlap"]
    assert found["hfu"] >= found["mfu"] > 0


@TARGETS
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_matmul_flops_follow_from_the_model(row, target, strategy):
    """Six per weight and token, and attention over the whole square: dot attention skips none."""
    found = row(strategy, target)
    tokens = B * T
    products = 6 * tokens * (L * LAYER + V * D) + 3 * 4 * L * B * T * T * H * K
    assert found["matmul_flops"] == pytest.approx(products / N, rel=0.01)
    assert found["model_flops"] == pytest.approx(
        (6 * tokens * (L * LAYER + V * D) + 3 * 4 * L * B * T * T * H * K / 2) / N
    )


@TARGETS
def test_attribution_names_the_weight_and_a_line_of_the_model(row, target):
    gathers = [c for c in row("fsdp", target)["collectives"] if c["kind"] == "all-gather"]
    layer = {
        f"params.layers.{module}.{name}": module
        for module, names in {
            "attention": "query key value out",
            "mlp": "gate up down",
        }.items()
        for name in names.split()
    }
    for parameter, module in layer.items():
        mine = [c for c in gathers if c["parameter"] == parameter]
        assert {c["phase"] for c in mine} == {"forward", "backward"}, parameter
        assert sum(c["count"] for c in mine) == 2 * L
        assert all(f"models/{module}.py:" in c["source"] for c in mine)
    assert {c["parameter"] for c in gathers} == {*layer, "params.embed.table", "params.head.kernel"}


@TARGETS
def test_scanned_equals_unrolled(row, target):
    """The loop's trip count is applied: three layers cost what three written out cost."""
    unrolled = compile_row(experiment(layers="unrolled"), "tensor", target)
    scanned = row("tensor", target)
    assert scanned["matmul_flops"] == pytest.approx(unrolled["matmul_flops"], rel=1e-3)
    assert scanned["model_flops"] == unrolled["model_flops"]
    activation = B * T * D * ITEMSIZE[target]
    sums = [
        sum(c["payload_bytes"] for c in each["collectives"] if c["payload_bytes"] >= activation)
        for each in (scanned, unrolled)
    ]
    assert sums[0] == pytest.approx(sums[1], rel=0.01)


@TARGETS
def test_nested_loops_multiply(row, target):
    """Two microbatches of half the size do the same products, in a loop around the layers' loop."""
    twice = experiment()
    twice.strategies = {"accumulated": STRATEGIES["fsdp"].with_options(accumulate=2)}
    found = compile_row(twice, "accumulated", target)
    once = row("fsdp", target)
    assert found["matmul_flops"] == pytest.approx(once["matmul_flops"], rel=0.01)
    gathers = [c for c in found["collectives"] if c["kind"] == "all-gather"]
    inside = [c for c in gathers if c["parameter"] == "params.layers.mlp.gate"]
    assert sum(c["count"] for c in inside) == 2 * 2 * L
