"""A decoder-only transformer.  Knows logical axes, and no mesh.

Dims:  B batch   T sequence   D model   V vocabulary   L layers
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from spmdlab.models.attention import Attention
from spmdlab.models.config import DecoderConfig
from spmdlab.models.embedding import Embed, Head
from spmdlab.models.mlp import Mlp
from spmdlab.models.moe import Moe, Routing
from spmdlab.models.norm import RmsNorm
from spmdlab.models.remat import rematerialized
from spmdlab.models.rope import Rotation, rotation
from spmdlab.models.sequence import in_layout_order, in_reading_order, positions
from spmdlab.models.weights import RESIDUAL, Constrain, Layout, Shards, unconstrained


class Block(nnx.Module):
    """One layer: attention and MLP (or experts), each normed before and added after."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.attention_norm = _norm(config)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = _norm(config)
        self.mlp = Moe(config, rngs=rngs) if config.moe else Mlp(config, rngs=rngs)
        self.dropout = config.dropout

    def __call__(
        self, x_BTD: jax.Array, key: jax.Array | None, rotate: Rotation, layout: Layout
    ) -> tuple[jax.Array, Routing | None]:
        """Returns the residual stream after this layer; ``key`` None means no dropout.

        Beside it what the router did, if there is one.
        """
        routing = None
        keys = (None, None) if key is None else jax.random.split(key)
        with jax.named_scope("attention_norm"):
            h_BTD = layout.enter(self.attention_norm(x_BTD, layout))
        with jax.named_scope("attention"):
            h_BTD = layout.leave(self.attention(h_BTD, rotate, layout))
            x_BTD = layout.activation(x_BTD + self._drop(h_BTD, keys[0], layout), *RESIDUAL)
        with jax.named_scope("mlp_norm"):
            h_BTD = layout.enter(self.mlp_norm(x_BTD, layout))
        with jax.named_scope("mlp"):
            h_BTD = self.mlp(h_BTD, layout)
            if isinstance(self.mlp, Moe):
                h_BTD, routing = h_BTD
            h_BTD = layout.leave(h_BTD)
            x_BTD = layout.activation(x_BTD + self._drop(h_BTD, keys[1], layout), *RESIDUAL)
        return x_BTD, routing

    def _drop(self, x_BTD: jax.Array, key: jax.Array | None, layout: Layout) -> jax.Array:
        if key is None or not self.dropout:
            return x_BTD
        B, T, D = x_BTD.shape
        # A key for each position, so that a token's mask goes with it in any order.
        key_T = jax.vmap(functools.partial(jax.random.fold_in, key))(positions(T, layout))
        draw = jax.vmap(functools.partial(jax.random.bernoulli, p=1 - self.dropout, shape=(B, D)))
        keep_BTD = layout.activation(draw(key_T).swapaxes(0, 1), *RESIDUAL)
        return jnp.where(keep_BTD, x_BTD / (1 - self.dropout), 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """What a decoder says about tokens."""

    logits_BTV: jax.Array
    """In float32 (or wider, if ``compute_dtype`` is)."""

    routing: Routing | None
    """Mean over layers; None where there are no experts."""


class Decoder(nnx.Module):
    """Token ids in, logits out."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.embed = Embed(config, rngs=rngs)
        keys = jax.random.split(rngs.params(), config.num_layers)
        self.scanned = config.layers == "scanned"
        if self.scanned:
            self.layers = _stacked(config, keys)
        else:
            blocks = [Block(config, rngs=nnx.Rngs(params=key)) for key in keys]
            self.layers = nnx.List(blocks)
        self.norm = _norm(config)
        if config.embeddings == "untied":
            self.head = Head(config, rngs=rngs)
        self.num_layers = config.num_layers
        self.head_dim, self.rope_theta = config.head_dim, config.rope_theta

    def __call__(self, tokens_BT: jax.Array, **options: Any) -> jax.Array:
        """Returns the logits of `run`, with the same options."""
        return self.run(tokens_BT, **options).logits_BTV

    def run(
        self,
        tokens_BT: jax.Array,
        *,
        constrain: Constrain = unconstrained,
        constrain_gradient: Constrain | None = None,
        shards: Shards | None = None,
        dropout_key: jax.Array | None = None,
        remat: str = "none",
        order: Literal["reading", "layout"] = "reading",
    ) -> Output:
        """Returns logits, and how tokens were routed to experts.

        Args:
            tokens_BT: Token ids.
            constrain: Lays out an array by the logical axes of its dims.
            constrain_gradient: The same for gradients of weights; None: as ``constrain``.
            shards: Runs kernels on each device's own part; None: there is one device.
            dropout_key: None switches dropout off.
            remat: A name in `spmdlab.models.remat.REMAT`.  An argument, because what to
                recompute belongs to the strategy.
            order: Of the tokens and of the logits.  ``layout``: the tokens stand as
                `spmdlab.models.sequence.in_layout_order` puts them, and the logits stay so.

        Raises:
            ConfigError: There is no remat policy of that name.
        """
        layout = Layout(constrain, constrain_gradient, shards)
        if order == "reading":
            tokens_BT = in_layout_order(tokens_BT, ("act_batch", "act_len"), layout)
        with jax.named_scope("embed"):
            x_BTD = self.embed(tokens_BT, layout)
        with jax.named_scope("layers"):
            x_BTD, routing = self._run_layers(x_BTD, dropout_key, remat, layout)
        with jax.named_scope("norm"):
            x_BTD = layout.enter(self.norm(x_BTD, layout))
        with jax.named_scope("head"):
            head = self.head if hasattr(self, "head") else self.embed.logits
            logits_BTV = head(x_BTD, layout)
        if order == "reading":
            axes = ("act_batch", "act_len", "act_vocab")
            logits_BTV = in_reading_order(logits_BTV, axes, layout)
        return Output(logits_BTV=logits_BTV, routing=routing)

    def _run_layers(
        self, x_BTD: jax.Array, dropout_key: jax.Array | None, remat: str, layout: Layout
    ) -> tuple[jax.Array, Routing | None]:
        place_T = positions(x_BTD.shape[1], layout)
        rotate = rotation(place_T, self.head_dim, theta=self.rope_theta)
        keys_L = None if dropout_key is None else jax.random.split(dropout_key, self.num_layers)
        if self.scanned:
            return run_stacked(self.layers, x_BTD, keys_L, rotate, remat, layout)
        layer, _ = _pure(self.layers[0], rotate, layout)
        layer = rematerialized(layer, remat, prevent_cse=True)
        routings = []
        for index, block in enumerate(self.layers):
            key = None if keys_L is None else keys_L[index]
            with jax.named_scope(str(index)):
                x_BTD, routing = layer(x_BTD, nnx.split(block)[1], key)
            routings.append(routing)
        return x_BTD, jax.tree.map(lambda *parts: sum(parts) / len(parts), *routings)


def run_stacked(
    block: Block,
    x_BTD: jax.Array,
    keys_L: jax.Array | None,
    rotate: Rotation,
    remat: str,
    layout: Layout,
) -> tuple[jax.Array, Routing | None]:
    """Returns the residual stream after the layers stacked in ``block``, and the mean routing.

    Raises:
        ConfigError: There is no remat policy of that name.
    """
    layer, stacked = _pure(block, rotate, layout)
    layer = rematerialized(layer, remat, prevent_cse=False)
    x_BTD, routing = jax.lax.scan(lambda x, xs: layer(x, *xs), x_BTD, (stacked, keys_L))
    return x_BTD, jax.tree.map(jnp.mean, routing)


def _pure(
    block: Block, rotate: Rotation, layout: Layout
) -> tuple[Callable[[jax.Array, nnx.State, jax.Array | None], Any], nnx.State]:
    """A block as a function of plain arrays, which JAX's own scan and checkpoint take."""
    graph, weights = nnx.split(block)

    def layer(x_BTD: jax.Array, weights: nnx.State, key: jax.Array | None) -> Any:
        return nnx.merge(graph, weights)(x_BTD, key, rotate, layout)

    return layer, weights


def _norm(config: DecoderConfig) -> RmsNorm:
    return RmsNorm(config.embed_dim, eps=config.norm_eps, param_dtype=config.param_dtype)


def _stacked(config: DecoderConfig, keys_L: jax.Array) -> Block:
    """Returns a block whose weights have a leading dim, ``layers``; equal to L blocks."""

    def weights(key: jax.Array) -> nnx.State:
        return nnx.split(Block(config, rngs=nnx.Rngs(params=key)))[1]

    block = nnx.merge(
        nnx.split(nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0))))[0],
        jax.vmap(weights)(keys_L),
    )
    for _, param in nnx.to_flat_state(nnx.state(block, nnx.Param)):
        param.set_metadata(logical_axes=("layers", *param.logical_axes))
    return block
