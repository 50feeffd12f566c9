"""Rotary position embedding.

Dims:  B batch   T sequence   H heads   K head size   R pairs, K / 2
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Rotation:
    """Cosine and sine of each position's angle for each pair, float32."""

    cos_TR: jax.Array
    sin_TR: jax.Array

    def __call__(self, x_BTHK: jax.Array) -> jax.Array:
        """Turns the pair (i, i + K / 2) of every head by its position's angle.

        A product of two turned heads depends only on how far apart their positions are.
        """
        wide = jnp.promote_types(x_BTHK.dtype, jnp.float32)
        first, second = jnp.split(x_BTHK.astype(wide), 2, axis=-1)
        cos, sin = (table_TR[None, :, None] for table_TR in (self.cos_TR, self.sin_TR))
        turned = [first * cos - second * sin, second * cos + first * sin]
        return jnp.concatenate(turned, axis=-1).astype(x_BTHK.dtype)


def rotation(position_T: jax.Array, head_dim: int, *, theta: float) -> Rotation:
    """Returns the rotation of these positions.

    Source: Su et al. 2021, https://arxiv.org/abs/2104.09864; halves instead of neighbours
    as in GPT-NeoX and Llama's Hugging Face form.
    """
    exponent_R = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angle_TR = position_T.astype(jnp.float32)[:, None] / theta ** exponent_R[None]
    return Rotation(cos_TR=jnp.cos(angle_TR), sin_TR=jnp.sin(angle_TR))
