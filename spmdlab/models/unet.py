"""A U-Net for images of tiles.  Knows logical axes, and no mesh.

Each level halves the image; on the way back up, what comes from below is added to what the same
level saw on the way down.  Norms are taken over the channels of a tile alone, so that nothing but
convolutions looks at other tiles: an image split over devices exchanges edges, and no more.

Source: Ronneberger et al. 2015, https://arxiv.org/abs/1505.04597; its skips are concatenated,
ours are added, which is a concatenation whose two halves have their own 1x1 weights before.

Dims:  B batch   H height   W width   C channels   F hidden channels   O channels out   K window
"""

import jax
import jax.numpy as jnp
from flax import nnx

from spmdlab.models.norm import RmsNorm
from spmdlab.models.unet_config import WINDOW, UNetConfig
from spmdlab.models.weights import Constrain, Layout, matrix, unconstrained

IMAGE = ("act_batch", "act_height", "act_width", "act_embed")
HIDDEN = ("act_batch", "act_height", "act_width", "act_mlp")
PREDICTION = ("act_batch", "act_height", "act_width", None)


class Block(nnx.Module):
    """Two 3x3 convolutions, the first twice as wide, added to what came in."""

    def __init__(self, config: UNetConfig, width: int, *, rngs: nnx.Rngs):
        C, F, K, dtype = width, 2 * width, WINDOW, config.param_dtype
        self.norm = RmsNorm(C, eps=config.norm_eps, param_dtype=dtype)
        into, out = (None, None, "embed", "mlp"), (None, None, "mlp", "embed")
        self.up = matrix(rngs, (K, K, C, F), into, fan_in=K * K * C, dtype=dtype)
        self.down = matrix(rngs, (K, K, F, C), out, fan_in=K * K * F, dtype=dtype)

    def __call__(self, x_BHWC: jax.Array, layout: Layout) -> jax.Array:
        """Returns the image after this block, of the same shape."""
        h_BHWC = layout.activation(self.norm(x_BHWC, layout), *IMAGE)
        h_BHWF = layout.activation(_convolved(h_BHWC, self, "up", layout), *HIDDEN)
        h_BHWF = jax.nn.silu(h_BHWF)
        y_BHWC = _convolved(h_BHWF, self, "down", layout)
        return layout.activation(x_BHWC + y_BHWC, *IMAGE)


class Level(nnx.Module):
    """One size of image: a block on the way down, the levels below, a block on the way up."""

    def __init__(self, config: UNetConfig, level: int, *, rngs: nnx.Rngs):
        width, dtype = config.channels[level], config.param_dtype
        self.before = Block(config, width, rngs=rngs)
        self.is_last = level == len(config.channels) - 1
        if not self.is_last:
            wide = config.channels[level + 1]
            axes = ("embed", None)
            self.into = matrix(rngs, (width, wide), axes, fan_in=width, dtype=dtype)
            self.below = Level(config, level + 1, rngs=rngs)
            self.back = matrix(rngs, (wide, width), axes, fan_in=wide, dtype=dtype)
            self.after = Block(config, width, rngs=rngs)

    def __call__(self, x_BHWC: jax.Array, layout: Layout) -> jax.Array:
        """Returns the image after this level and all below it, of the same shape."""
        with jax.named_scope("before"):
            x_BHWC = self.before(x_BHWC, layout)
        if self.is_last:
            return x_BHWC
        small = layout.product(
            "BHWC,CD->BHWD", layout.activation(_halved(x_BHWC), *IMAGE), self, "into"
        )
        with jax.named_scope("below"):
            small = self.below(layout.activation(small, *IMAGE), layout)
        back = layout.activation(layout.product("BHWD,DC->BHWC", small, self, "back"), *IMAGE)
        with jax.named_scope("after"):
            return self.after(layout.activation(x_BHWC + _doubled(back), *IMAGE), layout)


class UNet(nnx.Module):
    """Features of tiles in, predictions for tiles out."""

    def __init__(self, config: UNetConfig, *, rngs: nnx.Rngs):
        C, dtype = config.channels[0], config.param_dtype
        self.embed = matrix(
            rngs, (config.in_channels, C), (None, "embed"), fan_in=config.in_channels, dtype=dtype
        )
        self.level = Level(config, 0, rngs=rngs)
        self.norm = RmsNorm(C, eps=config.norm_eps, param_dtype=dtype)
        self.head = matrix(rngs, (C, config.out_channels), ("embed", None), fan_in=C, dtype=dtype)
        self.compute_dtype = config.compute_dtype

    def __call__(
        self,
        features_BHWC: jax.Array,
        *,
        constrain: Constrain = unconstrained,
        constrain_gradient: Constrain | None = None,
    ) -> jax.Array:
        """Returns predictions_BHWO, in float32 or wider."""
        layout = Layout(constrain, constrain_gradient)
        x_BHWC = features_BHWC.astype(self.compute_dtype)
        with jax.named_scope("embed"):
            x_BHWC = layout.product("BHWI,IC->BHWC", x_BHWC, self, "embed")
            x_BHWC = layout.activation(x_BHWC, *IMAGE)
        with jax.named_scope("level"):
            x_BHWC = self.level(x_BHWC, layout)
        with jax.named_scope("norm"):
            x_BHWC = layout.activation(self.norm(x_BHWC, layout), *IMAGE)
        y_BHWO = layout.activation(
            layout.product("BHWC,CO->BHWO", x_BHWC, self, "head"), *PREDICTION
        )
        return y_BHWO.astype(jnp.promote_types(y_BHWO.dtype, jnp.float32))


def squared_error(predictions_BHWO: jax.Array, labels_BHWO: jax.Array) -> jax.Array:
    """Returns the squared error of each tile, mean over its channels, shaped BHW."""
    return jnp.mean(jnp.square(predictions_BHWO - labels_BHWO), axis=-1)


def _convolved(x_BHWC: jax.Array, module: nnx.Module, name: str, layout: Layout) -> jax.Array:
    """A convolution that keeps the image's size, zeros beyond its edge."""
    weight = layout.weight(module, name, str(x_BHWC.dtype))
    with jax.named_scope(name):
        return jax.lax.conv_general_dilated(
            x_BHWC, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )


def _halved(x_BHWC: jax.Array) -> jax.Array:
    """The mean of each 2x2 tiles."""
    B, H, W, C = x_BHWC.shape
    return x_BHWC.reshape(B, H // 2, 2, W // 2, 2, C).mean(axis=(2, 4))


def _doubled(x_BHWC: jax.Array) -> jax.Array:
    """Each tile four times."""
    B, H, W, C = x_BHWC.shape
    x = jnp.broadcast_to(x_BHWC[:, :, None, :, None], (B, H, 2, W, 2, C))
    return x.reshape(B, 2 * H, 2 * W, C)
