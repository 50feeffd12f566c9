"""A sequence split over devices: which tokens each holds, and attention over the exchange.

Dims:  B batch   T tokens   H query heads   N key and value heads   K head size
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from spmdlab.errors import ShardingError
from spmdlab.models.weights import Axes, Layout
from spmdlab.strategies.base import SequenceSplit

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

HEADS: Axes = ("act_batch", "act_len", "act_heads", "act_head_dim")
KV_HEADS: Axes = ("act_batch", "act_len", "act_kv_heads", "act_head_dim")


def positions(seq_len: int, layout: Layout) -> jax.Array:
    """Returns the place in its sequence of each token, int32, in the order of the layout.

    Zigzag over two devices holds chunks 0 and 3, then 1 and 2:

    >>> from types import SimpleNamespace
    >>> split = SequenceSplit(axis="context", ways=2, method="ring", order="zigzag")
    >>> positions(8, Layout(shards=SimpleNamespace(sequence_split=split))).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    place_T = jnp.arange(seq_len, dtype=jnp.int32)
    split = layout.sequence_split
    if split is None or split.order == "contiguous":
        return place_T
    _check_chunks(seq_len, split)
    chunk = seq_len // (2 * split.ways)
    device_T, within_T = place_T // (2 * chunk), place_T % (2 * chunk)
    late_T = (2 * split.ways - 1 - device_T) * chunk + within_T - chunk
    return jnp.where(within_T < chunk, device_T * chunk + within_T, late_T)


def in_layout_order(x_BT: jax.Array, axes: Axes, layout: Layout) -> jax.Array:
    """Returns an array in reading order with its tokens in the order of the layout.

    Args:
        x_BT: Tokens stand along dim 1; more dims may follow.
        axes: Logical axes of its dims.
        layout: Says the order; without a split, or contiguous, nothing moves.
    """
    return _reordered(x_BT, axes, layout, _to_zigzag)


def in_reading_order(x_BT: jax.Array, axes: Axes, layout: Layout) -> jax.Array:
    """Undoes `in_layout_order`."""
    return _reordered(x_BT, axes, layout, _from_zigzag)


def _reordered(
    x_BT: jax.Array,
    axes: Axes,
    layout: Layout,
    move: Callable[[jax.Array, SequenceSplit], jax.Array],
) -> jax.Array:
    split = layout.sequence_split
    if split is None or split.order == "contiguous":
        return x_BT
    _check_chunks(x_BT.shape[1], split)
    return layout.locally(lambda x: move(x, split), [axes], axes)(x_BT)


def _check_chunks(seq_len: int, split: SequenceSplit) -> None:
    chunks = 2 * split.ways
    if seq_len % chunks:
        below = seq_len - seq_len % chunks
        sizes = f"{below} and {below + chunks}" if below else str(chunks)
        raise ShardingError(
            f"dim 'act_len' of size {seq_len} does not divide into 2 x {split.ways} chunks over "
            f"{split.axis}={split.ways}, which order=zigzag needs.  Nearest sizes that do: "
            f"{sizes}.  order=contiguous needs a multiple of {split.ways}."
        )


def _homes(ways: int, first: int) -> list[tuple[int, int]]:
    """Where devices in reading order send their first (0) or second (1) chunk.

    Chunk k belongs to device k, or 2 * ways - 1 - k.  Of two chunks with these numbers one is
    even, so all even chunks go to different devices, and all odd ones do.
    """
    chunks = [2 * device + first for device in range(ways)]
    return [(device, min(k, 2 * ways - 1 - k)) for device, k in enumerate(chunks)]


def _to_zigzag(x_BT: jax.Array, split: SequenceSplit) -> jax.Array:
    first, second = jnp.split(x_BT, 2, axis=1)
    even = jax.lax.ppermute(first, split.axis, _homes(split.ways, 0))
    odd = jax.lax.ppermute(second, split.axis, _homes(split.ways, 1))
    is_even = jax.lax.axis_index(split.axis) % 2 == 0
    early, late = jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)
    return jnp.concatenate([early, late], axis=1)


def _from_zigzag(x_BT: jax.Array, split: SequenceSplit) -> jax.Array:
    early, late = jnp.split(x_BT, 2, axis=1)
    is_even = jax.lax.axis_index(split.axis) % 2 == 0
    even, odd = jnp.where(is_even, early, late), jnp.where(is_even, late, early)
    back = [[(home, device) for device, home in _homes(split.ways, first)] for first in (0, 1)]
    first = jax.lax.ppermute(even, split.axis, back[0])
    second = jax.lax.ppermute(odd, split.axis, back[1])
    return jnp.concatenate([first, second], axis=1)


def exchange_attend(
    q_BTHK: jax.Array,
    k_BSNK: jax.Array,
    v_BSNK: jax.Array,
    attend: Attend,
    layout: Layout,
    *,
    checked: bool = True,
) -> jax.Array:
    """Returns ``attend`` of whole sequences, on each device for a part of the heads.

    Four all-to-alls: queries, keys and values from tokens to heads, and the result back.

    Args:
        q_BTHK: Queries, split by length.
        k_BSNK: Keys; where there are too few heads for the devices, they are repeated.
        v_BSNK: Values.
        attend: Attention on one device.
        layout: Says how the sequence is split.
        checked: See `spmdlab.models.weights.Shards.locally`; False if ``attend`` is a kernel.

    Raises:
        ShardingError: The query heads do not divide.
    """
    split = layout.sequence_split
    assert split is not None
    num_heads, tensor = q_BTHK.shape[2], layout.ways("act_heads")
    ways = tensor * split.ways
    if num_heads % ways:
        fits = max(n for n in range(1, num_heads + 1) if num_heads % (tensor * n) == 0)
        raise ShardingError(
            f"dim 'act_heads' of size {num_heads} does not divide {ways} ways over "
            f"{split.axis}={split.ways}"
            + (f" and the {tensor} ways heads are split already" if tensor > 1 else "")
            + f", which method=all_to_all needs.  Most ways of {split.axis} that do: {fits}.  "
            "method=ring needs no heads."
        )
    k_BSNK, v_BSNK, kv_axes = shared_heads(k_BSNK, v_BSNK, ways, layout)

    def local(q_BTHK: jax.Array, k_BSNK: jax.Array, v_BSNK: jax.Array) -> jax.Array:
        def swap(x: jax.Array, split_dim: int, join_dim: int) -> jax.Array:
            return jax.lax.all_to_all(x, split.axis, split_dim, join_dim, tiled=True)

        return swap(attend(*(swap(x, 2, 1) for x in (q_BTHK, k_BSNK, v_BSNK))), 1, 2)

    run = layout.locally(local, [HEADS, kv_axes, kv_axes], HEADS, checked=checked)
    return run(q_BTHK, k_BSNK, v_BSNK)


def shared_heads(
    k_BSNK: jax.Array, v_BSNK: jax.Array, ways: int, layout: Layout
) -> tuple[jax.Array, jax.Array, Axes]:
    """Returns keys and values repeated until their heads divide ``ways``, and their axes.

    Never more often than needed.  Neighbouring query heads share a head as before.
    """
    N = k_BSNK.shape[2]
    times = math.lcm(N, ways) // N
    if times == 1 and layout.ways("act_kv_heads") == layout.ways("act_heads"):
        return k_BSNK, v_BSNK, KV_HEADS
    k_BSNK, v_BSNK = (
        layout.activation(jnp.repeat(x, times, axis=2), *HEADS) for x in (k_BSNK, v_BSNK)
    )
    return k_BSNK, v_BSNK, HEADS
