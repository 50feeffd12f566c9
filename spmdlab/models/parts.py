"""A decoder in parts, each a function of its own parameters: for a pipeline to run them apart.

Dims:  B batch   T sequence   D model   V vocabulary   L layers
"""

from typing import Any

import jax
from flax import nnx

from spmdlab.models.config import DecoderConfig
from spmdlab.models.decoder import run_stacked
from spmdlab.models.moe import Routing
from spmdlab.models.params import Params, abstract_decoder, filled
from spmdlab.models.rope import rotation
from spmdlab.models.sequence import positions
from spmdlab.models.weights import Layout


def embed(config: DecoderConfig, params: Params, tokens_BT: jax.Array, layout: Layout) -> jax.Array:
    """Returns the embedded tokens, from ``params["embed"]``."""
    with jax.named_scope("embed"):
        return _part(config, params, "embed")(tokens_BT, layout)


def table_gradient(
    config: DecoderConfig, dx_BTD: jax.Array, tokens_BT: jax.Array, layout: Layout
) -> jax.Array:
    """Returns the gradient of ``embed.table``, from that of the embedded tokens."""
    with jax.named_scope("embed"):
        return abstract_decoder(config).embed.table_gradient(dx_BTD, tokens_BT, layout)


def run_layers(
    config: DecoderConfig,
    layers: Params,
    x_BTD: jax.Array,
    keys_L: jax.Array | None,
    remat: str,
    layout: Layout,
) -> tuple[jax.Array, Routing | None]:
    """Returns the residual stream after some layers, stacked as ``params["layers"]`` is.

    Beside it the mean over them of what their routers did, if there are experts.

    Args:
        config: The whole decoder's.
        layers: Any number of them.
        x_BTD: The residual stream before them.
        keys_L: A dropout key for each; None switches dropout off.
        remat: A name in `spmdlab.models.remat.REMAT`.
        layout: How arrays are laid out.
    """
    place_T = positions(x_BTD.shape[1], layout)
    rotate = rotation(place_T, config.head_dim, theta=config.rope_theta)
    with jax.named_scope("layers"):
        block = filled(abstract_decoder(config).layers, layers)
        return run_stacked(block, x_BTD, keys_L, rotate, remat, layout)


def head_names(config: DecoderConfig) -> tuple[str, ...]:
    """The parameters that `logits` needs."""
    return ("norm", "embed" if config.embeddings == "tied" else "head")


def logits(config: DecoderConfig, params: Params, x_BTD: jax.Array, layout: Layout) -> jax.Array:
    """Returns logits_BTV from the last layer's residual stream."""
    with jax.named_scope("norm"):
        x_BTD = layout.enter(_part(config, params, "norm")(x_BTD, layout))
    with jax.named_scope("head"):
        if config.embeddings == "tied":
            return _part(config, params, "embed").logits(x_BTD, layout)
        return _part(config, params, "head")(x_BTD, layout)


def _part(config: DecoderConfig, params: Params, name: str) -> Any:
    part: nnx.Module = getattr(abstract_decoder(config), name)
    return filled(part, params[name])
