"""Causal attention over a ring of devices, each holding a stretch of the sequence.

Queries stay where they are; keys and values go once round.  Forwards a device adds up what it
receives by a running softmax in float32.  Backwards they go round again, and their gradients
with them, so that no block of scores or received keys is ever kept: what is saved is this
device's own queries, keys, values, result, and one log-sum per query and head.  Memory on top is
two blocks of keys and values (the one in use, the one arriving), their gradients in float32, and
the scores of one block.

A device's stretch is cut into P parts: one if contiguous, an early and a late one if zigzag.
No position is sent: the hop says whose keys these are, and the order which positions those are.

Dims:  B batch   P parts   T queries of a part   S keys of a part   N key and value heads
       G query heads of each   K head size
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from spmdlab.models.sequence import HEADS, shared_heads
from spmdlab.models.weights import Axes, Layout
from spmdlab.strategies.base import SequenceSplit

Index = int | jax.Array
Block = tuple[Index, Index, str | jax.Array | None]
"""Part of the queries, part of the keys, and which pairs count: None all, "causal" those that
look back or at themselves, else all or none."""

Arrays = tuple[jax.Array, ...]
Visit = Callable[[Arrays, Arrays, list[Block]], Arrays]


def ring_attend(
    q_BTHK: jax.Array, k_BSNK: jax.Array, v_BSNK: jax.Array, layout: Layout
) -> jax.Array:
    """Returns causal attention, shaped like ``q_BTHK``, named ``context`` for `remat`.

    Args:
        q_BTHK: Queries, in the order of the layout.
        k_BSNK: Keys; query head h uses head ``h // (H / N)``.
        v_BSNK: Values.
        layout: Says how the sequence is split.
    """
    k_BSNK, v_BSNK, kv_axes = shared_heads(k_BSNK, v_BSNK, layout.ways("act_heads"), layout)
    return _ring(q_BTHK * q_BTHK.shape[-1] ** -0.5, k_BSNK, v_BSNK, layout, kv_axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _ring(
    q_BTHK: jax.Array, k_BSNK: jax.Array, v_BSNK: jax.Array, layout: Layout, kv_axes: Axes
) -> jax.Array:
    return _ring_fwd(q_BTHK, k_BSNK, v_BSNK, layout, kv_axes)[0]


def _ring_fwd(
    q_BTHK: jax.Array, k_BSNK: jax.Array, v_BSNK: jax.Array, layout: Layout, kv_axes: Axes
) -> tuple[jax.Array, Arrays]:
    def local(*qkv: jax.Array) -> Arrays:
        return _forward(*qkv, layout.sequence_split)

    run = layout.locally(local, [HEADS, kv_axes, kv_axes], [HEADS, _log_sum_axes(kv_axes)])
    # Both are named: with one of them missing, the backward pass would go round once more.
    y_BTHK, log_sum = (checkpoint_name(x, "context") for x in run(q_BTHK, k_BSNK, v_BSNK))
    return y_BTHK, (q_BTHK, k_BSNK, v_BSNK, y_BTHK, log_sum)


def _ring_bwd(layout: Layout, kv_axes: Axes, residuals: Arrays, dy_BTHK: jax.Array) -> Arrays:
    def local(*arrays: jax.Array) -> Arrays:
        return _backward(*arrays, layout.sequence_split)

    axes_in = [HEADS, kv_axes, kv_axes, HEADS, _log_sum_axes(kv_axes), HEADS]
    return tuple(layout.locally(local, axes_in, [HEADS, kv_axes, kv_axes])(*residuals, dy_BTHK))


_ring.defvjp(_ring_fwd, _ring_bwd)


def _log_sum_axes(kv_axes: Axes) -> Axes:
    batch, length, heads, _ = kv_axes
    return (batch, length, heads, None, None)


def _forward(
    q_BTHK: jax.Array, k_BSNK: jax.Array, v_BSNK: jax.Array, split: SequenceSplit
) -> tuple[jax.Array, jax.Array]:
    """Returns attention of this device's queries, and the log of their sums, BPNGT."""
    P, N = _num_parts(split), k_BSNK.shape[2]
    q_BPTNGK = _grouped(q_BTHK, P, N)
    B, _, T, _, G, K = q_BPTNGK.shape
    wide = _wide(q_BTHK)

    def visit(totals: Arrays, kv: Arrays, blocks: list[Block]) -> Arrays:
        for part, of_keys, seen in blocks:
            k_BSNK, v_BSNK = (_part(x, of_keys) for x in kv)
            y, largest, sums = (_part(x, part) for x in totals)
            scores = _scores(_part(q_BPTNGK, part), k_BSNK, seen)
            new = jnp.maximum(largest, scores.max(axis=-1))
            probs = jnp.exp(scores - new[..., None])
            shrink = jnp.exp(largest - new)
            added = _einsum("BNGTS,BSNK->BNGTK", probs.astype(v_BSNK.dtype), v_BSNK)
            fresh = (y * shrink[..., None] + added, new, sums * shrink + probs.sum(axis=-1))
            totals = tuple(_put(x, each, part) for x, each in zip(totals, fresh, strict=True))
        return totals

    def step(hop: Index, totals: Arrays, kv: Arrays) -> tuple[Arrays, Arrays]:
        """Passes on what was received before; both can run at once."""
        return visit(totals, kv, _blocks(hop, split)), _send(kv, split)

    zeros = jnp.zeros((B, P, N, G, T, K), wide)
    totals: Arrays = (zeros, jnp.full_like(zeros[..., 0], -jnp.inf), zeros[..., 0])
    kv: Arrays = tuple(_in_parts(x, P) for x in (k_BSNK, v_BSNK))
    totals, kv = step(0, totals, kv)
    if split.ways > 2:  # a loop that never runs would still be compiled
        totals, kv = jax.lax.fori_loop(
            1, split.ways - 1, lambda hop, carry: step(hop, *carry), (totals, kv)
        )
    y, largest, sums = visit(totals, kv, _blocks(split.ways - 1, split))
    y_BPTNGK = jnp.moveaxis(y / sums[..., None], 4, 2)
    return y_BPTNGK.reshape(q_BTHK.shape).astype(v_BSNK.dtype), largest + jnp.log(sums)


def _backward(
    q_BTHK: jax.Array,
    k_BSNK: jax.Array,
    v_BSNK: jax.Array,
    y_BTHK: jax.Array,
    log_sum_BPNGT: jax.Array,
    dy_BTHK: jax.Array,
    split: SequenceSplit,
) -> Arrays:
    """Returns the cotangents of queries, keys and values."""
    P, N = _num_parts(split), k_BSNK.shape[2]
    wide = _wide(q_BTHK)
    q_BPTNGK, dy_BPTNGK = (_grouped(x, P, N) for x in (q_BTHK, dy_BTHK))
    inner_BTH = jnp.sum(y_BTHK.astype(wide) * dy_BTHK.astype(wide), axis=-1)
    inner_BPNGT = jnp.moveaxis(_grouped(inner_BTH[..., None], P, N)[..., 0], 2, 4)

    def visit(grads: Arrays, kv: Arrays, blocks: list[Block]) -> Arrays:
        for part, of_keys, seen in blocks:
            q, dy = _part(q_BPTNGK, part), _part(dy_BPTNGK, part)
            k, v = (_part(x, of_keys) for x in kv)
            log_sum, inner = _part(log_sum_BPNGT, part), _part(inner_BPNGT, part)
            probs = jnp.exp(_scores(q, k, seen) - log_sum[..., None])
            dprobs = _einsum("BTNGK,BSNK->BNGTS", dy, v)
            dscores = (probs * (dprobs - inner[..., None])).astype(q.dtype)
            dq = _einsum("BNGTS,BSNK->BTNGK", dscores, k)
            dk = _einsum("BNGTS,BTNGK->BSNK", dscores, q)
            dv = _einsum("BNGTS,BTNGK->BSNK", probs.astype(dy.dtype), dy)
            at = (part, of_keys, of_keys)
            grads = tuple(
                _put(total, _part(total, i) + more, i)
                for total, more, i in zip(grads, (dq, dk, dv), at, strict=True)
            )
        return grads

    def step(hop: Index, dq: jax.Array, dkv: Arrays, kv: Arrays) -> tuple[jax.Array, Arrays]:
        """Adds this device's share to gradients that arrive meanwhile."""
        dq, *share = visit((dq, *map(jnp.zeros_like, dkv)), kv, _blocks(hop, split))
        arrived = _send(dkv, split)
        return dq, tuple(jnp.add(a, b) for a, b in zip(arrived, share, strict=True))

    def looped(hop: Index, carry: tuple[jax.Array, Arrays, Arrays]) -> tuple:
        dq, dkv, kv = carry
        return *step(hop, dq, dkv, kv), _send(kv, split)

    kv: Arrays = tuple(_in_parts(x, P) for x in (k_BSNK, v_BSNK))
    zeros = tuple(jnp.zeros(x.shape, wide) for x in (q_BPTNGK, *kv))
    dq, *dkv = visit(zeros, kv, _blocks(0, split))
    carry = (dq, tuple(dkv), _send(kv, split))
    if split.ways > 2:
        carry = jax.lax.fori_loop(1, split.ways - 1, looped, carry)
    dq, dkv = step(split.ways - 1, *carry)
    # The last hop brings them home, added up and so as narrow as they will be.
    dk, dv = _send(tuple(g.astype(k_BSNK.dtype) for g in dkv), split)
    like = (q_BTHK, k_BSNK, v_BSNK)
    return tuple(
        g.reshape(x.shape).astype(x.dtype) for g, x in zip((dq, dk, dv), like, strict=True)
    )


def _blocks(hop: Index, split: SequenceSplit) -> list[Block]:
    """What this device computes with keys that have made ``hop`` hops; 0 is its own.

    Zigzag, device i with the keys of device j: its late queries see all early keys.  If j is
    before i, its early queries see those too; if after, its late queries see the late keys as
    well.  All whole blocks, and two of them for everyone.
    """
    if isinstance(hop, int) and hop == 0:
        own: list[Block] = [(0, 0, "causal")]
        return own if split.order == "contiguous" else [*own, (1, 0, None), (1, 1, "causal")]
    before = jax.lax.axis_index(split.axis) >= hop
    if split.order == "contiguous":
        return [(0, 0, before)]
    part = jnp.where(before, 0, 1)
    return [(1, 0, None), (part, part, None)]


def _send(arrays: Arrays, split: SequenceSplit) -> Arrays:
    """To the next device of the ring, from the one before."""
    ring = [(i, (i + 1) % split.ways) for i in range(split.ways)]
    return tuple(jax.lax.ppermute(x, split.axis, ring) for x in arrays)


def _scores(q_BTNGK: jax.Array, k_BSNK: jax.Array, seen: str | jax.Array | None) -> jax.Array:
    scores_BNGTS = _einsum("BTNGK,BSNK->BNGTS", q_BTNGK, k_BSNK)
    if seen is None:
        return scores_BNGTS
    if isinstance(seen, str):
        T, S = scores_BNGTS.shape[-2:]
        seen = (jnp.arange(T)[:, None] >= jnp.arange(S)[None])[None, None, None]
    return jnp.where(seen, scores_BNGTS, -jnp.inf)


def _einsum(equation: str, *arrays: jax.Array) -> jax.Array:
    """The product, added up in float32 or wider."""
    return jnp.einsum(equation, *arrays, preferred_element_type=_wide(arrays[0]))


def _wide(x: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _num_parts(split: SequenceSplit) -> int:
    return 2 if split.order == "zigzag" else 1


def _in_parts(x_BT: jax.Array, num_parts: int) -> jax.Array:
    B, T, *rest = x_BT.shape
    return x_BT.reshape(B, num_parts, T // num_parts, *rest)


def _grouped(x_BTHK: jax.Array, num_parts: int, num_kv_heads: int) -> jax.Array:
    B, P, T, H, K = _in_parts(x_BTHK, num_parts).shape
    return x_BTHK.reshape(B, P, T, num_kv_heads, H // num_kv_heads, K)


def _part(x_BP: jax.Array, index: Index) -> jax.Array:
    if isinstance(index, int):
        return x_BP[:, index]
    return jax.lax.dynamic_index_in_dim(x_BP, index, axis=1, keepdims=False)


def _put(x_BP: jax.Array, part: jax.Array, index: Index) -> jax.Array:
    if isinstance(index, int):
        return x_BP.at[:, index].set(part)
    return jax.lax.dynamic_update_index_in_dim(x_BP, part, index, axis=1)
