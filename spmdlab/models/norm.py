"""Root-mean-square norm.

Dims:  B batch   T sequence   D model
"""

import jax
import jax.numpy as jnp
from flax import nnx

from spmdlab.models.weights import Layout


class RmsNorm(nnx.Module):
    """Divides by the root mean square over D, then scales.

    Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
    """

    def __init__(self, embed_dim: int, *, eps: float, param_dtype: str):
        self.scale = nnx.Param(jnp.ones(embed_dim, param_dtype), logical_axes=("norm",))
        self.eps = eps

    def __call__(self, x_BTD: jax.Array, layout: Layout) -> jax.Array:
        """Returns the normed ``x_BTD`` in its dtype; computes in float32 or wider.

        Any dims may stand before D.
        """
        wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
        x = x_BTD.astype(wide)
        mean_BT1 = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        scale_D = layout.weight(self, "scale", str(wide))
        scale = scale_D.reshape((1,) * (x.ndim - 1) + scale_D.shape)
        y_BTD = x * jax.lax.rsqrt(mean_BT1 + self.eps) * scale
        return y_BTD.astype(x_BTD.dtype)
