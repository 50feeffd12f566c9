"""Pipelines against one device, and what their compiled steps send and hold."""

import functools
import importlib.util
from typing import Any

import jax
import numpy as np
import pytest

from spmdlab.compile import compile_step, jitted_step, lay_out
from spmdlab.config import Experiment
from spmdlab.errors import ConfigError, ShardingError
from spmdlab.models.config import DecoderConfig
from spmdlab.pipeline.simulate import simulate
from spmdlab.row import compile_row
from spmdlab.strategies import Data, Pipeline, as_strategy, strategy_from_text
from spmdlab.targets import parse_target
from spmdlab.train.state import abstract_batch, abstract_state, init_state, paths
from spmdlab.train.step import make_step
from spmdlab.verify.run import verify_strategy
from spmdlab.workload import BatchConfig, OptimizerConfig, Workload
from tests.pipeline.tables import alternating

B, T, V = 16, 16, 64
B1 = 0.9

# The same float32 terms in another order.  The longest sum is a weight's gradient over all B * T
# tokens: if every rounding goes the same way that moves it by B * T units of 6e-8, of the largest
# gradient of that parameter.  One microbatch of eight left out or counted twice moves it by an
# eighth.
TOLERANCE = B * T * float(np.finfo(np.float32).eps) / 2

SIZES = {
    "vocab_size": V,
    "num_layers": 8,
    "embed_dim": 16,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_dim": 32,
    "compute_dtype": "float32",
}


def workload(**changes: Any) -> Workload:
    # No clipping, so that Adam's first moment after one step is (1 - b1) times the gradient.
    return Workload(
        model=DecoderConfig(**{**SIZES, **changes}),
        batch=BatchConfig(global_batch=B, seq_len=T),
        optimizer=OptimizerConfig(clip_norm=1e9, b1=B1),
    )


def random_batch() -> dict[str, np.ndarray]:
    """Rows with different numbers of tokens that count, so that means of means go wrong."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, V, (B, T + 1)).astype(np.int32)
    weights = (np.arange(T)[None] < rng.integers(1, T + 1, (B, 1))).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


@functools.cache
def fresh(**changes: Any) -> Any:
    return jax.device_get(init_state(workload(**changes), jax.random.key(0)))


@functools.cache
def alone(accumulate: int = 1, **changes: Any) -> Any:
    strategy = as_strategy(Data(1)).with_options(accumulate=accumulate)
    step = jax.jit(make_step(workload(**changes), strategy))
    return observed(*step(fresh(**changes), random_batch()))


def observed(state: Any, metrics: Any) -> Any:
    grads = jax.tree.map(lambda mu: np.asarray(mu) / (1 - B1), state["optimizer"]["adam"].mu)
    names, values = jax.tree.leaves(paths(grads)), jax.tree.leaves(grads)
    return dict(zip(names, values, strict=True)), {k: float(v) for k, v in metrics.items()}


def on_the_mesh(strategy: Any, **changes: Any) -> Any:
    load, strategy = workload(**changes), as_strategy(strategy)
    layout = lay_out(load, strategy, parse_target(f"cpu:{strategy.num_devices}"))
    shardings = layout.shardings(abstract_state(load))
    state = jax.device_put(fresh(**changes), shardings)
    batch = layout.shardings(abstract_batch(load, 1), "batch")
    return observed(
        *jitted_step(load, strategy, layout)(state, jax.device_put(random_batch(), batch))
    )


def check_same(found: Any, expected: Any) -> None:
    (grads, metrics), (expected_grads, expected_metrics) = found, expected
    assert metrics == pytest.approx(expected_metrics, rel=TOLERANCE)
    assert grads.keys() == expected_grads.keys()
    for path, grad in expected_grads.items():
        largest = np.abs(grad).max()
        assert largest > 0, path
        np.testing.assert_allclose(grads[path], grad, atol=TOLERANCE * largest, err_msg=path)


@pytest.mark.parametrize(
    "text",
    [
        "stage=2 schedule=gpipe microbatches=4 data=2",
        "stage=4 schedule=gpipe microbatches=8 fsdp=2",
        "stage=2 schedule=gpipe microbatches=4 tensor=2",
        "stage=4 schedule=circular microbatches=4 data=2",
        "stage=2 schedule=circular microbatches=4 fsdp=2",
        "stage=4 schedule=circular microbatches=4 tensor=2",
        "stage=4 schedule=1f1b microbatches=8 data=2",
        "stage=4 schedule=1f1b microbatches=8 fsdp=2",
        "stage=2 schedule=1f1b microbatches=8 tensor=2",
    ],
)
def test_every_schedule_computes_what_one_device_does(text):
    check_same(on_the_mesh(strategy_from_text(text)), alone())


@pytest.mark.parametrize(
    "text",
    [
        "stage=2 schedule=1f1b microbatches=4 repeats=2 fsdp=2 tensor=2 sequence=on remat=full",
        "stage=2 schedule=1f1b microbatches=2 data=2 fsdp=2 zero=1 accumulate=2",
        "stage=2 schedule=circular microbatches=4 fsdp=2 tensor=2 zero=2",
        "stage=2 schedule=1f1b microbatches=2 context=2 method=all_to_all fsdp=2",
        "stage=1 schedule=1f1b microbatches=2",
    ],
)
def test_products_and_options(text):
    check_same(on_the_mesh(strategy_from_text(text)), alone())


def test_dropout_and_tied_embeddings():
    """A mask depends on layer and microbatch: the same as if microbatches took turns."""
    changes = {"dropout": 0.5, "embeddings": "tied"}
    strategy = strategy_from_text("stage=2 schedule=circular microbatches=4 fsdp=2 tensor=2")
    check_same(on_the_mesh(strategy, **changes), alone(accumulate=4, **changes))


def test_a_table_of_ones_own():
    """The textbook's 1F1B, one forward or backward a tick."""
    check_same(on_the_mesh(Pipeline(4, alternating(4, 4)) * Data(2)), alone())


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ("stage=4 microbatches=4", {"num_layers": 6}, r"'layers' of size 6 .* stage=4"),
        (
            "stage=4 schedule=circular microbatches=4",
            {"num_layers": 12},
            "num_layers=12 layers do not divide over 4 stages with repeats=2; 8 or 16 layers",
        ),
        ("stage=2 microbatches=3", {}, "16 sequences does not divide into microbatches=3"),
        ("stage=2 microbatches=4", {"layers": "unrolled"}, "no array has a dim 'layers'"),
        ("stage=3 microbatches=4", {"num_layers": 6}, "seq_len=16 must divide by the 3 stages"),
    ],
)
def test_refuses_what_does_not_divide(text, changes, message):
    strategy = strategy_from_text(text)
    target = parse_target(f"cpu:{strategy.num_devices}")
    with pytest.raises((ConfigError, ShardingError), match=message):
        compile_step(workload(**changes), strategy, target)


def experiment(strategy: str, batch: int, seq_len: int = 64, **changes: Any) -> Experiment:
    sizes = {**SIZES, "compute_dtype": "bfloat16", "embed_dim": 64, "mlp_dim": 128, **changes}
    return Experiment(
        model=DecoderConfig(**sizes),
        batch=BatchConfig(global_batch=batch, seq_len=seq_len),
        strategies={"it": strategy_from_text(strategy)},
        targets=("cpu:8",),
    )


TPU = pytest.param(
    "v5e:2x4",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
    ),
)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("stage=4 schedule=1f1b microbatches=8 data=2", "cpu:8"),
        ("stage=4 schedule=gpipe microbatches=8 fsdp=2", "cpu:8"),
        ("stage=2 schedule=circular microbatches=4 fsdp=2 tensor=2", "cpu:8"),
        pytest.param("stage=4 schedule=1f1b microbatches=8 fsdp=2", *TPU.values, marks=TPU.marks),
    ],
)
def test_stages_send_what_the_simulator_says(text, target):
    """One permute for each tick that has a forward, one for each that has a backward.

    Each carries a microbatch's residual stream, over ``stage`` alone.  Besides, each microbatch
    is handed out to all stages for the head, and back.
    """
    found = compile_row(experiment(text, 32), "it", target)
    schedule = strategy_from_text(text).pipeline
    expected = simulate(schedule)
    ticks = [c for c in found["collectives"] if c["phase"] == "pipeline tick"]
    permutes = [
        c for c in ticks if c["kind"] == "collective-permute" and "/to_the_" in c["op_name"]
    ]
    assert all(c["mesh_axes"] == ["stage"] for c in permutes)
    onward = sum(c["count"] for c in permutes if "to_the_next" in c["op_name"])
    back = sum(c["count"] for c in permutes if "to_the_one_before" in c["op_name"])
    assert (onward, back) == (expected.forward_ticks, expected.backward_ticks)
    rows = 32 // schedule.microbatches * schedule.stages // 8
    ways = {"tensor": 2}.get("tensor" if "tensor" in text else "", 1)
    itemsize = 4 if target == "cpu:8" else 2  # XLA's CPU backend widens bfloat16 on the wire
    payload = rows * ways * 64 * 64 * itemsize
    assert {c["payload_bytes"] / c["count"] for c in permutes} == {payload}
    heads = [c for c in ticks if "head_tokens" in c["op_name"]]
    assert all(c["mesh_axes"] == ["stage"] for c in heads)
    with_head = sum(phase.ticks for phase in schedule.phases() if phase.head)
    assert with_head == schedule.microbatches or schedule.repeats > 1
    assert {(c["kind"] == "all-gather", c["count"]) for c in heads} == {
        (True, with_head),
        (False, with_head),
    }


@pytest.mark.parametrize("target", [TPU])
def test_the_kernel_runs_inside_a_stage(target):
    text = "stage=2 schedule=gpipe microbatches=2 fsdp=2 tensor=2"
    sizes = {"num_layers": 2, "head_dim": 128, "attention": "flash"}
    found = compile_row(experiment(text, 8, seq_len=128, **sizes), "it", target)
    kernels = "\n".join(found["unmodelled"])
    assert "splash_mha_fwd" in kernels
    assert "splash_mha_dq" in kernels
    assert "splash_mha_dkv" in kernels


def test_elsewhere_than_on_tpu_a_stage_runs_plain_attention():
    """And with the right gradients: both ways of computing it have one type."""
    text = "stage=2 schedule=gpipe microbatches=2 data=2"
    sizes = {"num_layers": 2, "head_dim": 128, "attention": "flash"}
    row = verify_strategy(experiment(text, 4, seq_len=128, **sizes), "it", steps=1)
    assert row["findings"] == []


def temporaries(schedule: str, microbatches: int) -> float:
    text = f"stage=4 schedule={schedule} microbatches={microbatches} data=2"
    each = experiment(text, 4 * microbatches)
    load = Workload(model=each.model, batch=each.batch, optimizer=each.optimizer)
    strategy = each.strategies["it"]
    return compile_step(load, strategy, parse_target("cpu:8")).memory.temp_bytes


def test_1f1b_stays_flat_as_microbatches_grow_and_gpipe_does_not():
    """GPipe holds 64 inputs for 8: 56 more, of 2 sequences on each device."""
    assert temporaries("1f1b", 64) == pytest.approx(temporaries("1f1b", 8), rel=0.05)
    grown = temporaries("gpipe", 64) - temporaries("gpipe", 8)
    one_input = 2 * 64 * 64 * 2
    assert grown >= 56 * one_input
