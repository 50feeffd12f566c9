"""Causal grouped-query attention.

Dims:  B batch   T query length   S key length   D model   H query heads
       N key and value heads   K head size
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from spmdlab.models.config import DecoderConfig
from spmdlab.models.flash import flash_attend
from spmdlab.models.ring import ring_attend
from spmdlab.models.rope import Rotation
from spmdlab.models.sequence import exchange_attend
from spmdlab.models.weights import Layout, matrix


class Attention(nnx.Module):
    """Projects to heads, lets each position look back, projects out."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        D, H, N, K = config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim
        dtype = config.param_dtype
        kv_axes = ("embed", "kv_heads", "head_dim")
        self.attend = ATTEND[config.attention]
        self.query = matrix(rngs, (D, H, K), ("embed", "heads", "head_dim"), fan_in=D, dtype=dtype)
        self.key = matrix(rngs, (D, N, K), kv_axes, fan_in=D, dtype=dtype)
        self.value = matrix(rngs, (D, N, K), kv_axes, fan_in=D, dtype=dtype)
        self.out = matrix(
            rngs, (H, K, D), ("heads", "head_dim", "embed"), fan_in=H * K, dtype=dtype
        )

    def __call__(self, x_BTD: jax.Array, rotate: Rotation, layout: Layout) -> jax.Array:
        """Returns what attention adds to the residual stream; input and output inside."""

        def heads(name: str, axis: str) -> jax.Array:
            y = layout.product("BTD,DHK->BTHK", x_BTD, self, name)
            return layout.activation(y, "act_batch", "act_len", axis, "act_head_dim")

        q_BTHK = checkpoint_name(rotate(heads("query", "act_heads")), "query")
        k_BSNK = checkpoint_name(rotate(heads("key", "act_kv_heads")), "key")
        v_BSNK = checkpoint_name(heads("value", "act_kv_heads"), "value")
        y_BTHK = self._attend(q_BTHK, k_BSNK, v_BSNK, layout)
        return layout.product("BTHK,HKD->BTD", y_BTHK, self, "out")

    def _attend(
        self, q_BTHK: jax.Array, k_BSNK: jax.Array, v_BSNK: jax.Array, layout: Layout
    ) -> jax.Array:
        split = layout.sequence_split
        if split is not None and split.method == "ring":
            return ring_attend(q_BTHK, k_BSNK, v_BSNK, layout)
        if split is not None:
            alone = functools.partial(self.attend, layout=Layout())
            plain = self.attend is attend
            y_BTHK = exchange_attend(q_BTHK, k_BSNK, v_BSNK, alone, layout, checked=plain)
        else:
            y_BTHK = self.attend(q_BTHK, k_BSNK, v_BSNK, layout)
        return checkpoint_name(y_BTHK, "context")


def attend(q_BTHK: jax.Array, k_BSNK: jax.Array, v_BSNK: jax.Array, layout: Layout) -> jax.Array:
    """Returns causal attention, shaped like ``q_BTHK``.  The softmax runs in float32.

    Query head h uses key and value head ``h // (H / N)``.  These are repeated to H heads
    rather than the queries grouped to N: repeated heads split over a mesh axis whether
    the N are split or whole, and the products are the same.
    """

    def repeated(x_BSNK: jax.Array) -> jax.Array:
        B, S, N, K = x_BSNK.shape
        group = q_BTHK.shape[2] // N
        x = jnp.broadcast_to(x_BSNK[:, :, :, None], (B, S, N, group, K)).reshape(B, S, -1, K)
        return layout.activation(x, "act_batch", "act_len", "act_heads", "act_head_dim")

    k_BSHK, v_BSHK = repeated(k_BSNK), repeated(v_BSNK)
    scores_BHTS = jnp.einsum("BTHK,BSHK->BHTS", q_BTHK * q_BTHK.shape[-1] ** -0.5, k_BSHK)
    scores_BHTS = scores_BHTS.astype(jnp.promote_types(scores_BHTS.dtype, jnp.float32))
    T, S = scores_BHTS.shape[-2:]
    may_look_TS = jnp.arange(T)[:, None] >= jnp.arange(S)[None]
    scores_BHTS = jnp.where(may_look_TS[None, None], scores_BHTS, -jnp.inf)
    probs_BHTS = jax.nn.softmax(scores_BHTS, axis=-1).astype(v_BSHK.dtype)
    y_BTHK = jnp.einsum("BHTS,BSHK->BTHK", probs_BHTS, v_BSHK)
    return layout.activation(y_BTHK, "act_batch", "act_len", "act_heads", "act_head_dim")


def flash(q_BTHK: jax.Array, k_BSNK: jax.Array, v_BSNK: jax.Array, layout: Layout) -> jax.Array:
    """The same through a Pallas kernel where the program is for TPU, see `flash_attend`."""

    def otherwise(q_BTHK: jax.Array, k_BSNK: jax.Array, v_BSNK: jax.Array) -> jax.Array:
        return attend(q_BTHK, k_BSNK, v_BSNK, layout)

    y_BTHK = flash_attend(q_BTHK, k_BSNK, v_BSNK, layout, otherwise)
    return layout.activation(y_BTHK, "act_batch", "act_len", "act_heads", "act_head_dim")


ATTEND = {"dot": attend, "flash": flash}
"""`DecoderConfig.attention` -> what computes it."""
