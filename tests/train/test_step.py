"""One step of each strategy against one device: the loss and every parameter's gradient."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdlab.compile import jitted_step, lay_out
from spmdlab.errors import ConfigError
from spmdlab.models.config import DecoderConfig
from spmdlab.strategies.data import Data
from spmdlab.strategies.fsdp import Fsdp
from spmdlab.strategies.product import Strategy, as_strategy
from spmdlab.strategies.tensor import Tensor
from spmdlab.targets import parse_target
from spmdlab.train.state import abstract_batch, abstract_state, init_state, paths
from spmdlab.train.step import make_step
from spmdlab.workload import BatchConfig, OptimizerConfig, Workload

B, T, V = 16, 16, 64
LAYERS = 2
B1 = 0.9

# Strategies add the same float32 terms in another order.  The longest sum is a weight's
# gradient over all B * T tokens: if every rounding goes the same way that moves it by B * T
# units of 6e-8, of the largest gradient of that parameter.  A wrong factor, a missing or
# doubled reduction, moves it by at least an eighth.
TOLERANCE = B * T * float(np.finfo(np.float32).eps) / 2

SIZES = {
    "vocab_size": V,
    "num_layers": LAYERS,
    "embed_dim": 32,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 4,
    "mlp_dim": 64,
    "compute_dtype": "float32",
}

STRATEGIES = {
    "data": Data(8),
    "fsdp": Fsdp(8),
    "tensor": Tensor(8),
    "tensor_sequence": Tensor(8, sequence="on"),
    "fsdp_tensor": Fsdp(4) * Tensor(2),
    "data_fsdp_tensor": Data(2) * Fsdp(2) * Tensor(2, sequence="on"),
    "zero1": Fsdp(8, zero=1),
    "zero2": Fsdp(8, zero=2),
    "accumulate": (Data(2) * Fsdp(2) * Tensor(2)).with_options(accumulate=2, remat="full"),
}


def workload(**changes) -> Workload:
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
def compiled(strategy: Strategy, **changes):
    load = workload(**changes)
    layout = lay_out(load, strategy, parse_target("cpu:8"))
    state, batch = abstract_state(load), abstract_batch(load, 8)
    shardings = (layout.shardings(state), layout.shardings(batch, "batch"))

    def place(leaf, sharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    abstract = jax.tree.map(place, (state, batch), shardings)
    return jitted_step(load, strategy, layout).lower(*abstract).compile(), shardings


@functools.cache
def fresh(**changes):
    """A fresh state in host memory, which no step can donate."""
    return jax.device_get(init_state(workload(**changes), jax.random.key(0)))


@functools.cache
def alone(**changes):
    """Gradients and metrics of one device, which knows no constraint."""
    step = jax.jit(make_step(workload(**changes), as_strategy(Data(1))))
    return observed(*step(fresh(**changes), random_batch()))


def observed(state, metrics):
    grads = jax.tree.map(lambda mu: np.asarray(mu) / (1 - B1), state["optimizer"]["adam"].mu)
    names, values = jax.tree.leaves(paths(grads)), jax.tree.leaves(grads)
    return dict(zip(names, values, strict=True)), {k: float(v) for k, v in metrics.items()}


def on_the_mesh(strategy, **changes):
    program, (state_shardings, batch_shardings) = compiled(as_strategy(strategy), **changes)
    state = jax.device_put(fresh(**changes), state_shardings)
    return observed(*program(state, jax.device_put(random_batch(), batch_shardings)))


def check_same(found, expected):
    (grads, metrics), (expected_grads, expected_metrics) = found, expected
    assert metrics == pytest.approx(expected_metrics, rel=TOLERANCE)
    assert grads.keys() == expected_grads.keys()
    for path, grad in expected_grads.items():
        largest = np.abs(grad).max()
        assert largest > 0, path
        np.testing.assert_allclose(grads[path], grad, atol=TOLERANCE * largest, err_msg=path)


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_strategy_computes_what_one_device_does(strategy):
    check_same(on_the_mesh(strategy), alone())


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": "unrolled", "mlp": "plain", "embeddings": "tied"},
        {"num_kv_heads": 2, "dropout": 0.5},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_other_models_too(changes):
    """Dropout draws the same bits on any mesh; two KV heads are fewer than the four ways."""
    kv = "replicate" if "num_kv_heads" in changes else "split"
    strategy = Fsdp(2) * Tensor(4, sequence="on", kv=kv)
    check_same(on_the_mesh(strategy, **changes), alone(**changes))


def test_unrolled_layers_have_the_scanned_ones_gradients():
    scanned, metrics = alone()
    unrolled, same_metrics = alone(layers="unrolled")
    stacked = {}
    for path, grad in scanned.items():
        for layer in range(LAYERS if path.startswith("layers.") else 0):
            stacked[path.replace("layers.", f"layers.{layer}.", 1)] = grad[layer]
        if not path.startswith("layers."):
            stacked[path] = grad
    check_same((unrolled, same_metrics), (stacked, metrics))


def collectives(strategy, kinds: str) -> list[str]:
    """Lines of the compiled step with a collective of these kinds (alternatives of a regex)."""
    text = compiled(as_strategy(strategy))[0].as_text()
    return [line for line in text.splitlines() if re.search(rf" ({kinds})(-start)?\(", line)]


def test_fsdp_gathers_each_layers_weights_forward_and_backward():
    """Seven matrices a layer, once in each loop's body, and their names in the metadata."""
    names = ["attention/key", "attention/out", "attention/query", "attention/value"]
    names += ["mlp/down", "mlp/gate", "mlp/up"]
    gathers = collectives(Fsdp(8), "all-gather")
    paths = [re.search(r'op_name="([^"]*)"', line)[1] for line in gathers]
    inside = [path for path in paths if "while/body" in path]
    weight = re.compile(r"(attention|mlp)/\w+(?=/)")
    backward = [weight.search(path)[0] for path in inside if "transpose" in path]
    forward = [weight.search(path)[0] for path in inside if "transpose" not in path]
    assert sorted(forward) == names
    assert sorted(backward) == names


def test_tensor_parallelism_gathers_nothing():
    """Neither weights, nor the logits of the whole vocabulary."""
    assert collectives(Tensor(8), "all-gather|all-to-all|collective-permute") == []


def test_cutting_the_batch_into_microbatches_moves_no_tokens():
    strategy = STRATEGIES["accumulate"]
    assert collectives(strategy, "all-to-all|collective-permute") == []
    assert [line for line in collectives(strategy, "all-gather") if " s32[" in line] == []


def test_dropout_differs_from_step_to_step():
    step = jax.jit(make_step(workload(dropout=0.5), as_strategy(Data(1))))
    state, batch = fresh(dropout=0.5), random_batch()
    losses = [float(step({**state, "step": jnp.int32(n)}, batch)[1]["loss"]) for n in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


def test_refuses_microbatches_that_do_not_divide_the_batch():
    step = make_step(workload(), as_strategy(Data(1)).with_options(accumulate=3))
    with pytest.raises(ConfigError, match=r"16 sequences does not divide into accumulate=3 .* 15"):
        jax.eval_shape(step, abstract_state(workload()), abstract_batch(workload(), 1))


def test_refuses_an_unknown_remat_policy():
    with pytest.raises(ConfigError, match="Unknown remat policy 'fulll'"):
        make_step(workload(), as_strategy(Data(1)).with_options(remat="fulll"))
