"""Attention over a ring: the softmax added up, the order undone, gradients brought home."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from spmdlab.mesh import MeshShards, build_mesh
from spmdlab.models.attention import attend
from spmdlab.models.ring import ring_attend
from spmdlab.models.sequence import exchange_attend, in_layout_order, in_reading_order, positions
from spmdlab.models.weights import Layout
from spmdlab.strategies import Context, Data, Strategy, Tensor, as_strategy
from spmdlab.targets import parse_target

B, T, H, N, K = 2, 24, 4, 2, 8
EPS = float(np.finfo(np.float32).eps)


def layout_of(strategy: Strategy) -> Layout:
    strategy = as_strategy(strategy)
    mesh = build_mesh(strategy, parse_target(f"cpu:{strategy.num_devices}"))
    return Layout(shards=MeshShards(mesh, strategy.rules(), strategy.sequence_split))


def arrays(*leading: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(*leading, B, T, heads, K) for heads in (H, N, N)]
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def zigzag(ways: int) -> np.ndarray:
    """Written out: device i holds chunk i, then chunk 2 * ways - 1 - i."""
    chunks = np.arange(T).reshape(2 * ways, -1)
    return np.concatenate([chunks[k] for i in range(ways) for k in (i, 2 * ways - 1 - i)])


@pytest.mark.parametrize("ways", [2, 3, 4, 6])
def test_the_order_is_zigzag_and_can_be_undone(ways):
    layout = layout_of(Context(ways))
    tokens_BT = jnp.arange(B * T).reshape(B, T)
    axes = ("act_batch", "act_len")
    moved_BT = jax.jit(lambda x: in_layout_order(x, axes, layout))(tokens_BT)
    np.testing.assert_array_equal(positions(T, layout), zigzag(ways))
    np.testing.assert_array_equal(moved_BT, tokens_BT[:, zigzag(ways)])
    back_BT = jax.jit(lambda x: in_reading_order(x, axes, layout))(moved_BT)
    np.testing.assert_array_equal(back_BT, tokens_BT)


def losses(strategy: Strategy, order: np.ndarray):
    """A loss that tells every position apart, on the mesh and on one device."""
    layout = layout_of(strategy)
    marks_T = jnp.arange(1.0, T + 1)[None, :, None, None]
    alone = functools.partial(attend, layout=Layout())

    def split(q, k, v):
        if layout.sequence_split.method == "ring":
            y = ring_attend(*(x[:, order] for x in (q, k, v)), layout)
        else:
            y = exchange_attend(q, k, v, alone, layout)
        return jnp.sum(jnp.sin(y[:, np.argsort(order)]) * marks_T)

    return split, lambda q, k, v: jnp.sum(jnp.sin(alone(q, k, v)) * marks_T)


@pytest.mark.parametrize(
    ("strategy", "order"),
    [
        (Context(3), zigzag(3)),
        (Context(4) * Tensor(2), zigzag(4)),
        (Context(3, order="contiguous"), np.arange(T)),
        (Context(4, method="all_to_all"), np.arange(T)),
    ],
    ids=["odd", "tensor", "contiguous", "exchange"],
)
def test_equals_attention_on_one_device(strategy, order):
    """An odd ring, several hops; grouped heads, repeated for the exchange where too few."""
    split, alone = (jax.value_and_grad(f, (0, 1, 2)) for f in losses(strategy, order))
    got, want = jax.jit(split)(*arrays()), alone(*arrays())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # The loss adds up B * T * H * K terms as large as T, a gradient fewer.
        np.testing.assert_allclose(a, b, atol=T * EPS * float(jnp.abs(b).max()), rtol=T * EPS)


def test_works_in_bfloat16_with_sums_in_float32():
    """A running sum in bfloat16 would be off by a hundredth and more; a rounding is 2 ** -8."""
    layout, order = layout_of(Context(4)), zigzag(4)
    q, k, v = (x.astype(jnp.bfloat16) for x in arrays())
    y = jax.jit(lambda *qkv: ring_attend(*(x[:, order] for x in qkv), layout))(q, k, v)
    assert y.dtype == jnp.bfloat16
    want = attend(*(x.astype(jnp.float32) for x in (q, k, v)), Layout())[:, order]
    largest = float(jnp.abs(v.astype(jnp.float32)).max())
    # Queries are scaled, probabilities and the result are rounded to eight bits.
    np.testing.assert_allclose(y.astype(jnp.float32), want, atol=3 * 2**-8 * largest)


def test_keeps_no_block_for_the_backward_pass():
    """Only queries, keys, values, the result, and one number per query and head."""
    layout = layout_of(Context(4))
    kept = jax.eval_shape(
        lambda *qkv: jax.vjp(lambda *qkv: ring_attend(*qkv, layout), *qkv)[1], *arrays()
    )
    sizes = [x.size for x in jax.tree.leaves(kept) if x.ndim]  # and the scale, a scalar
    assert sum(sizes) == B * T * (2 * H * K + 2 * N * K + H)


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_works_inside_a_function_that_is_manual_over_another_axis(method):
    """As in a pipeline: two of them side by side, over an axis attention does not know."""
    strategy = Data(2) * Context(2, method=method) * Tensor(2)
    rules = {**strategy.rules(), "act_batch": ()}
    mesh = build_mesh(strategy, parse_target("cpu:8"))
    layout = Layout(shards=MeshShards(mesh, rules, strategy.sequence_split))
    order = zigzag(2) if method == "ring" else np.arange(T)
    alone = functools.partial(attend, layout=Layout())

    def one(q, k, v):
        if method == "ring":
            return ring_attend(q[0], k[0], v[0], layout)[None]
        return exchange_attend(q[0], k[0], v[0], alone, layout)[None]

    outer = PartitionSpec("data")
    two = jax.shard_map(one, mesh=mesh, in_specs=(outer,) * 3, out_specs=outer, axis_names={"data"})
    given = arrays(2)
    moved = [x[:, :, order] for x in given]
    grads = jax.jit(jax.grad(lambda qkv: jnp.sum(jnp.sin(two(*qkv)))))(moved)
    expected = jax.grad(lambda qkv: jnp.sum(jnp.sin(jax.vmap(alone)(*qkv))))(given)
    for a, b in zip(grads, expected, strict=True):
        np.testing.assert_allclose(
            a, b[:, :, order], atol=T * EPS * float(jnp.abs(b).max()), rtol=T * EPS
        )
