"""Token embedding and head.

Dims:  B batch   T sequence   D model   V vocabulary
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spmdlab.models.config import DecoderConfig
from spmdlab.models.weights import INSIDE, Layout, matrix


class Embed(nnx.Module):
    """A table with one row per token id; the head too, where embeddings are tied.

    The table is laid out for use *before* the lookup, like every other weight: whole
    rows, the vocabulary split if the head's is.  Each device then looks up the rows it
    holds and the results are summed: one all-reduce of the residual stream, as in
    Megatron.  Left to the partitioner, a table split by width over the very devices that
    split the batch gives a lookup split by width, which is then turned round to a split by
    sequence: an extra all-to-all, or an involuntary full rematerialization.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        D, V = config.embed_dim, config.vocab_size
        axes = ("vocab", "embed")
        self.table = matrix(rngs, (V, D), axes, fan_in=D, dtype=config.param_dtype)
        self.dtype = config.compute_dtype

    def __call__(self, tokens_BT: jax.Array, layout: Layout) -> jax.Array:
        """Returns the rows of the tokens, in the residual stream's layout."""
        tokens_BT = layout.activation(tokens_BT, "act_batch", "act_len")
        x_BTD = _look_up(layout.weight(self, "table", self.dtype), tokens_BT, layout)
        # Pinned inside first: split by length at once, the partitioner gathers the table.
        return layout.leave(layout.activation(x_BTD, *INSIDE))

    def table_gradient(self, dx_BTD: jax.Array, tokens_BT: jax.Array, layout: Layout) -> jax.Array:
        """Returns the gradient of the table from that of the rows looked up.

        The lookup's backward pass on its own, for where the lookup was elsewhere.
        """
        dx_BTD = layout.constrain(dx_BTD, INSIDE)
        parts = layout.ways("act_batch")
        # One table for each part of the batch, then their sum: inside a region that is manual
        # over some axis, the partitioner would otherwise gather the batch.
        dx_PBTD = dx_BTD.reshape(parts, -1, *dx_BTD.shape[1:])
        dx_PBTD = layout.constrain(dx_PBTD, (INSIDE[0], None, *INSIDE[1:]))
        tokens_PBT = tokens_BT.reshape(parts, -1, tokens_BT.shape[1])
        tokens_PBT = layout.constrain(tokens_PBT, (INSIDE[0], None, INSIDE[1]))
        wide = jnp.promote_types(dx_BTD.dtype, jnp.float32)
        table_axes = (INSIDE[0], "act_vocab", "act_embed")
        zeros_PVD = jnp.zeros((parts, self.table.shape[0], dx_BTD.shape[-1]), wide)
        zeros_PVD = layout.constrain(zeros_PVD, table_axes)
        drows_PVD = jax.vmap(lambda rows, at, dx: rows.at[at].add(dx))(
            zeros_PVD, tokens_PBT, dx_PBTD.astype(wide)
        )
        drows_VD = layout.constrain(drows_PVD, table_axes).sum(axis=0)
        return layout.weight_gradient(self, "table", drows_VD.astype(self.dtype))

    def logits(self, x_BTD: jax.Array, layout: Layout) -> jax.Array:
        """Returns the tied head's output, as `Head`."""
        return _logits(layout.product("BTD,VD->BTV", x_BTD, self, "table"), layout)


class Head(nnx.Module):
    """Projects to one logit per token id."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        D, V = config.embed_dim, config.vocab_size
        axes = ("embed", "vocab")
        self.kernel = matrix(rngs, (D, V), axes, fan_in=D, dtype=config.param_dtype)

    def __call__(self, x_BTD: jax.Array, layout: Layout) -> jax.Array:
        """Returns logits in float32 or wider."""
        return _logits(layout.product("BTD,DV->BTV", x_BTD, self, "kernel"), layout)


def _logits(x_BTV: jax.Array, layout: Layout) -> jax.Array:
    x_BTV = layout.activation(x_BTV, "act_batch", "act_len", "act_vocab")
    return x_BTV.astype(jnp.promote_types(x_BTV.dtype, jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _look_up(table_VD: jax.Array, tokens_BT: jax.Array, layout: Layout) -> jax.Array:
    """Returns rows of the table; their gradients are added up in float32 or wider.

    A frequent token's row is the sum of thousands of terms, more than bfloat16 can count.
    """
    del layout
    return table_VD[tokens_BT]


def _look_up_fwd(
    table_VD: jax.Array, tokens_BT: jax.Array, layout: Layout
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # The empty slice carries the table's height and dtype through to the backward pass.
    return _look_up(table_VD, tokens_BT, layout), (table_VD[:, :0], tokens_BT)


def _look_up_bwd(
    layout: Layout, residuals: tuple[jax.Array, jax.Array], dx_BTD: jax.Array
) -> tuple[jax.Array, np.ndarray]:
    table_V0, tokens_BT = residuals
    dtable_VD = _add_rows(dx_BTD, tokens_BT, table_V0.shape[0], layout)
    return dtable_VD.astype(table_V0.dtype), np.zeros(tokens_BT.shape, jax.dtypes.float0)


def _add_rows(dx_BTD: jax.Array, tokens_BT: jax.Array, height: int, layout: Layout) -> jax.Array:
    """Returns a table of ``height`` rows, each the sum of the rows of its tokens."""
    wide = jnp.promote_types(dx_BTD.dtype, jnp.float32)
    zeros_VD = jnp.zeros((height, dx_BTD.shape[-1]), wide)
    # Whole rows, as in use: the layout at rest would be carried back into the scatter, and
    # turn its updates round from a split by sequence to a split by width.
    zeros_VD = layout.activation(zeros_VD, "act_vocab", "act_embed")
    dtable_VD = zeros_VD.at[tokens_BT].add(dx_BTD.astype(wide))
    return layout.activation(dtable_VD, "act_vocab", "act_embed")


_look_up.defvjp(_look_up_fwd, _look_up_bwd)
