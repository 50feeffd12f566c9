"""A mixture of experts in place of the MLP: a router sends each token to a few of them.

With a capacity, tokens travel as in GShard: a product with a 0/1 array puts each token in its
places among the experts' rows, and a product with the router's weights brings results back.
Between the two the rows are laid out by expert, which moves them by one all-to-all each way.

Tokens that compete for an expert's places form a group: a part of a sequence, whatever the mesh.

Source: Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668.

Dims:  B batch   T sequence   N groups of a sequence   S tokens of a group   D model
       E experts   C places an expert has for a group   F hidden
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from spmdlab.errors import ConfigError
from spmdlab.models.config import DecoderConfig, MoeConfig
from spmdlab.models.weights import GATHERED, Axes, Layout, matrix

GROUPS: Axes = ("act_batch", "act_len", None)
"""B, N, S outside the experts.  Where a strategy splits the sequence it splits N, whole groups."""

TOKENS: Axes = ("act_batch", None, "act_len")
"""The same where tokens do not compete, and a group is a whole sequence."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """What the routers did, mean over layers.  Scalars, in float32 or wider."""

    load_balance: jax.Array
    """1 if all experts got equally many tokens, up to ``num_experts`` if one got all."""

    dropped_fraction: jax.Array
    """Choices (of one expert by one token) that found no place, over all choices."""


class Moe(nnx.Module):
    """Experts, each like `spmdlab.models.mlp.Mlp`, and the router that picks among them."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        assert config.moe is not None
        self.moe = config.moe
        D, F, E = config.embed_dim, config.mlp_dim, config.moe.num_experts
        dtype = config.param_dtype
        self.router = matrix(rngs, (D, E), ("embed", "router"), fan_in=D, dtype=dtype)
        into, out = ("expert", "embed", "mlp"), ("expert", "mlp", "embed")
        if config.mlp == "gated":
            self.gate = matrix(rngs, (E, D, F), into, fan_in=D, dtype=dtype)
        self.up = matrix(rngs, (E, D, F), into, fan_in=D, dtype=dtype)
        self.down = matrix(rngs, (E, F, D), out, fan_in=F, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, layout: Layout) -> tuple[jax.Array, Routing]:
        """Returns what the layer adds to the residual stream (inside), and how it routed.

        Raises:
            ConfigError: ``group_size`` does not divide the sequence, or a device's part of it; or
                the strategy changes the order of tokens where that decides which are dropped.
        """
        B, T, D = x_BTD.shape
        S = self.moe.group_size or T
        if T % S:
            raise ConfigError(f"model.moe.group_size ({S}) must divide the sequence length ({T})")
        split = layout.sequence_split
        reordered = split is not None and split.order != "contiguous"
        if reordered and self._tokens is GROUPS:
            raise ConfigError(
                "which tokens find a place with an expert depends on their order, and "
                f"{split.axis}={split.ways} order={split.order} changes it; use order=contiguous, "
                "or model.moe.dispatch='dropless' without group_size"
            )
        ways = layout.ways("act_len")
        if self._tokens is GROUPS and T // S % ways:
            raise ConfigError(
                f"model.moe.group_size={self.moe.group_size}: a sequence of {T} tokens has "
                f"{T // S} groups, which do not divide over the {ways} ways sequences are split; "
                f"use a divisor of {T // ways}, or model.moe.dispatch='dropless' without group_size"
            )
        x_BNSD = layout.activation(x_BTD.reshape(B, T // S, S, D), *self._tokens, "act_embed")
        probs_BNSE = self._probabilities(x_BNSD, layout)
        rank_BNSE = ranks(probs_BNSE, self.moe.experts_per_token)
        weight_BNSE = mixing_weights(probs_BNSE, rank_BNSE, self.moe.experts_per_token)
        weight_BNSE = weight_BNSE.astype(x_BTD.dtype)
        weight_BNSE = layout.activation(weight_BNSE, *self._tokens, "act_router")
        if self.moe.dispatch == "capacity":
            place_BNSE = places(rank_BNSE, self.moe.experts_per_token, self.moe.capacity(S))
            dropped = jnp.sum((rank_BNSE > 0) & (place_BNSE == 0), dtype=probs_BNSE.dtype)
            y_BNSD = self._placed(x_BNSD, weight_BNSE, place_BNSE, layout)
        else:
            dropped = jnp.zeros((), probs_BNSE.dtype)
            y_BNSD = self._everywhere(x_BNSD, weight_BNSE, layout)
        routing = Routing(
            load_balance=load_balance(probs_BNSE, rank_BNSE, self.moe),
            dropped_fraction=dropped / (B * T * self.moe.experts_per_token),
        )
        return y_BNSD.reshape(B, T, D), routing

    @property
    def _tokens(self) -> Axes:
        """Logical axes of B, N and S outside the experts."""
        compete = self.moe.dispatch == "capacity" or self.moe.group_size
        return GROUPS if compete else TOKENS

    @property
    def _expert_tokens(self) -> Axes:
        """The same inside."""
        return ("act_expert_batch", *self._tokens[1:])

    def _probabilities(self, x_BNSD: jax.Array, layout: Layout) -> jax.Array:
        """The router's softmax.  Float32 throughout: a choice must not hang on 8 bits."""
        wide = jnp.promote_types(x_BNSD.dtype, jnp.float32)
        router_DE = layout.weight(self, "router", str(wide))
        with jax.named_scope("router"):
            highest = jax.lax.Precision.HIGHEST  # else a TPU multiplies in bfloat16
            logits_BNSE = jnp.einsum(
                "BNSD,DE->BNSE", x_BNSD.astype(wide), router_DE, precision=highest
            )
            logits_BNSE = layout.activation(logits_BNSE, *self._tokens, "act_router")
            return jax.nn.softmax(logits_BNSE, axis=-1)

    def _placed(
        self, x_BNSD: jax.Array, weight_BNSE: jax.Array, place_BNSE: jax.Array, layout: Layout
    ) -> jax.Array:
        """Each expert computes the tokens that have a place with it."""
        C = self.moe.capacity(x_BNSD.shape[2])
        rows = (None, *self._tokens[:2], None)
        expert_rows = ("act_expert", *self._expert_tokens[:2], None)
        with jax.named_scope("dispatch"):
            places_C = jnp.arange(1, C + 1)[None, None, None, None]
            has_BNSEC = (place_BNSE[..., None] == places_C).astype(x_BNSD.dtype)
            has_BNSEC = layout.activation(has_BNSEC, *self._tokens, "act_router", None)
            x_EBNCD = jnp.einsum("BNSEC,BNSD->EBNCD", has_BNSEC, x_BNSD)
            x_EBNCD = layout.activation(x_EBNCD, *rows, "act_embed")
            x_EBNCD = layout.activation(x_EBNCD, *expert_rows, "act_embed")
        h_EBNCF = self._hidden("EBNCD,EDF->EBNCF", x_EBNCD, expert_rows, layout)
        y_EBNCD = layout.product("EBNCF,EFD->EBNCD", h_EBNCF, self, "down")
        with jax.named_scope("combine"):
            y_EBNCD = layout.activation(y_EBNCD, *expert_rows, "act_embed")
            y_EBNCD = layout.activation(y_EBNCD, *rows, "act_embed")
            back_BNSEC = has_BNSEC * weight_BNSE[..., None]
            y_BNSD = jnp.einsum("BNSEC,EBNCD->BNSD", back_BNSEC, y_EBNCD)
            return layout.activation(y_BNSD, *self._tokens, "act_embed")

    def _everywhere(self, x_BNSD: jax.Array, weight_BNSE: jax.Array, layout: Layout) -> jax.Array:
        """Each expert computes every token; what was not chosen counts nothing.

        Tokens are gathered over the devices that share experts, and the sums over experts
        scattered back: fewer bytes than sending each token to every expert.
        """
        outside, inside = (*self._tokens, "act_embed"), (*self._expert_tokens, "act_embed")
        hidden = ("act_expert", *self._expert_tokens)
        with jax.named_scope("dispatch"):
            x_BNSD = checkpoint_name(layout.turned(x_BNSD, inside, outside), GATHERED)
            weight_EBNS = layout.activation(jnp.moveaxis(weight_BNSE, -1, 0), *hidden)
        h_EBNSF = self._hidden("BNSD,EDF->EBNSF", x_BNSD, hidden, layout)
        h_EBNSF = h_EBNSF * weight_EBNS[..., None]
        y_BNSD = layout.product("EBNSF,EFD->BNSD", h_EBNSF, self, "down")
        with jax.named_scope("combine"):
            return layout.turned(y_BNSD, outside, inside)

    def _hidden(self, equation: str, x: jax.Array, rows: Axes, layout: Layout) -> jax.Array:
        def hidden(name: str) -> jax.Array:
            y = layout.activation(layout.product(equation, x, self, name), *rows, "act_mlp")
            return checkpoint_name(y, f"mlp_{name}")

        up = hidden("up")
        return jax.nn.silu(hidden("gate")) * up if hasattr(self, "gate") else jax.nn.gelu(up)


def ranks(probs_BNSE: jax.Array, num_chosen: int) -> jax.Array:
    """Returns 1 for each token's likeliest expert, 2 for the next ..., 0 for those not chosen.

    One maximum after the other: unlike a sort that needs nothing but the token itself, so it
    runs however tokens are split.  Of equals the first expert wins.
    """
    left_BNSE = jax.lax.stop_gradient(probs_BNSE)
    experts_E = jnp.arange(probs_BNSE.shape[-1])[None, None, None]
    rank_BNSE = jnp.zeros(probs_BNSE.shape, jnp.int32)
    for rank in range(1, num_chosen + 1):
        best_BNSE = experts_E == jnp.argmax(left_BNSE, axis=-1, keepdims=True)
        rank_BNSE = jnp.where(best_BNSE, rank, rank_BNSE)
        left_BNSE = jnp.where(best_BNSE, -1, left_BNSE)
    return rank_BNSE


def mixing_weights(probs_BNSE: jax.Array, rank_BNSE: jax.Array, num_chosen: int) -> jax.Array:
    """Returns the chosen experts' probabilities, scaled to add up to 1.

    A token's only expert keeps its probability, as in Switch: scaled it would always be 1, and
    the router would learn nothing.

    Source: Jiang et al. 2024, https://arxiv.org/abs/2401.04088, a softmax over the chosen logits.
    """
    chosen_BNSE = jnp.where(rank_BNSE > 0, probs_BNSE, 0)
    if num_chosen == 1:
        return chosen_BNSE
    return chosen_BNSE / jnp.sum(chosen_BNSE, axis=-1, keepdims=True)


def places(rank_BNSE: jax.Array, num_chosen: int, capacity: int) -> jax.Array:
    """Returns each chosen token's place with its expert, from 1; 0 where it has none.

    All first choices come before all second ones, and of equal rank the earlier token.
    """
    place_BNSE = jnp.zeros_like(rank_BNSE)
    before_BN1E = jnp.zeros_like(rank_BNSE[:, :, :1])
    for rank in range(1, num_chosen + 1):
        chosen_BNSE = (rank_BNSE == rank).astype(jnp.int32)
        place_BNSE += chosen_BNSE * (before_BN1E + jnp.cumsum(chosen_BNSE, axis=2))
        before_BN1E += jnp.sum(chosen_BNSE, axis=2, keepdims=True)
    return jnp.where(place_BNSE <= capacity, place_BNSE, 0)


def load_balance(probs_BNSE: jax.Array, rank_BNSE: jax.Array, moe: MoeConfig) -> jax.Array:
    """Returns the number of experts times the sum of each one's share times mean probability.

    A share is the expert's part of all choices, dropped or not.
    Both are means over all tokens, of all devices, or over each group.  A mean over each
    device's tokens would be another loss on every mesh.

    Source: Fedus et al. 2021, https://arxiv.org/abs/2101.03961, equation 4.
    """
    over = (0, 1, 2) if moe.load_balance_over == "batch" else (2,)
    share_E = jnp.mean((rank_BNSE > 0).astype(probs_BNSE.dtype), axis=over) / moe.experts_per_token
    return moe.num_experts * jnp.mean(jnp.sum(share_E * jnp.mean(probs_BNSE, axis=over), axis=-1))
