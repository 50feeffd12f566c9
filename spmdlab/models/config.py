"""Sizes of a decoder, and what follows from them in closed form.  No JAX."""

import dataclasses
import math
from typing import Literal, get_args

Mlp = Literal["gated", "plain"]
Embeddings = Literal["tied", "untied"]
Layers = Literal["scanned", "unrolled"]
Attention = Literal["dot", "flash"]
FloatType = Literal["float32", "bfloat16", "float64"]
Dispatch = Literal["capacity", "dropless"]
Balance = Literal["batch", "group"]


@dataclasses.dataclass(kw_only=True, slots=True)
class MoeConfig:
    """A mixture of experts in place of each layer's MLP, see `spmdlab.models.moe`."""

    num_experts: int

    experts_per_token: int = 2
    """Each token goes to the experts of its largest router probabilities."""

    dispatch: Dispatch = "capacity"
    """``capacity``: an expert takes a fixed number of tokens of each group, and what is over is
    dropped.  ``dropless``: every expert computes every token, and the router's weights pick;
    exact, at ``num_experts / experts_per_token`` times the products."""

    capacity_factor: float = 1.25
    """An expert's places in a group, over its share if all experts were chosen equally often.
    From ``num_experts / experts_per_token`` on nothing is dropped."""

    group_size: int | None = None
    """Tokens that compete for places: consecutive ones of a sequence.  None: the sequence.
    Never a device's share, so that what is dropped does not depend on the mesh."""

    load_balance_weight: float = 0.01
    """Factor of the load-balance loss in the loss; it is 1 where experts share equally."""

    load_balance_over: Balance = "batch"
    """What the load is measured over.  ``batch``: all tokens of a microbatch, on all devices;
    ``accumulate``, and a pipeline's microbatches, then change the loss.  ``group``: each group,
    and the mean is taken; the same however the batch is cut."""

    def problems(self) -> list[str]:
        """Everything wrong with these values, one sentence each."""
        found = []
        for name in ("num_experts", "experts_per_token", "group_size"):
            value = getattr(self, name)
            if name == "group_size" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                found.append(f"model.moe.{name} must be a positive whole number, got {value!r}")
        if found:
            return found
        if self.experts_per_token > self.num_experts:
            found.append(
                f"model.moe.experts_per_token must be at most num_experts ({self.num_experts}), "
                f"got {self.experts_per_token}"
            )
        if not self.capacity_factor > 0:
            found.append(f"model.moe.capacity_factor must be above 0, got {self.capacity_factor}")
        if not self.load_balance_weight >= 0:
            found.append(
                f"model.moe.load_balance_weight must be at least 0, got {self.load_balance_weight}"
            )
        for name, kind in (("dispatch", Dispatch), ("load_balance_over", Balance)):
            if (value := getattr(self, name)) not in get_args(kind):
                known = ", ".join(get_args(kind))
                found.append(f"model.moe.{name} must be one of {known}, got {value!r}")
        return found

    def capacity(self, group_size: int) -> int:
        """Places an expert has for a group; never more than there are tokens.

        >>> MoeConfig(num_experts=8, experts_per_token=2, capacity_factor=1.25).capacity(64)
        20
        """
        # Rounded first: 1.1 * 10 is a little more than 11.
        share = self.capacity_factor * self.experts_per_token * group_size / self.num_experts
        return min(group_size, math.ceil(round(share, 6)))


@dataclasses.dataclass(kw_only=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer: RMSNorm, RoPE, grouped-query attention, an MLP."""

    vocab_size: int
    """Token ids.  The byte corpus needs at least 256."""

    num_layers: int

    embed_dim: int
    """Width of the residual stream."""

    num_heads: int
    """Query heads."""

    num_kv_heads: int
    """Key and value heads; each serves ``num_heads / num_kv_heads`` query heads."""

    head_dim: int
    """Width of one head.  Even, because RoPE turns pairs."""

    mlp_dim: int
    """Hidden width of the feed-forward layer, or of one expert."""

    mlp: Mlp = "gated"
    """``gated``: ``(silu(x @ gate) * (x @ up)) @ down``.  ``plain``: ``gelu(x @ up) @ down``."""

    embeddings: Embeddings = "untied"
    """``tied``: the head is the embedding table, transposed."""

    layers: Layers = "scanned"
    """``scanned``: one loop over stacked weights; compile time does not grow with depth."""

    dropout: float = 0.0
    """Chance that a value a block adds to the residual stream is dropped."""

    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    param_dtype: FloatType = "float32"
    """Dtype of the stored weights and of the optimizer state."""

    compute_dtype: FloatType = "bfloat16"
    """Dtype of matrix products, and of weights and gradients on the wire."""

    attention: Attention = "dot"
    """``dot``: scores of all pairs, in plain JAX.  ``flash``: JAX's Pallas kernel for TPU, which
    never holds them; on other platforms the same as ``dot``.  Lengths and heads are multiples of
    128.  A ring over split sequences (`Context`) computes blocks in plain JAX under both."""

    moe: MoeConfig | None = None
    """Experts in place of each layer's MLP; None: one MLP for all tokens."""

    def problems(self) -> list[str]:
        """Everything wrong with these values, one sentence each."""
        found = []
        sizes = "vocab_size num_layers embed_dim num_heads num_kv_heads head_dim mlp_dim"
        for name in sizes.split():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                found.append(f"model.{name} must be a positive whole number, got {value!r}")
        if found:
            return found
        if self.num_heads % self.num_kv_heads:
            ways = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            found.append(
                f"model.num_kv_heads ({self.num_kv_heads}) must divide "
                f"model.num_heads ({self.num_heads}): one of {', '.join(map(str, ways))}"
            )
        if self.head_dim % 2:
            found.append(f"model.head_dim must be even, got {self.head_dim}")
        if not 0.0 <= self.dropout < 1.0:
            found.append(f"model.dropout must be at least 0 and below 1, got {self.dropout}")
        for name in ("rope_theta", "norm_eps"):
            if not getattr(self, name) > 0:
                found.append(f"model.{name} must be above 0, got {getattr(self, name)}")
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                found.append(f"model.{name} must be one of {', '.join(choices)}, got {value!r}")
        return found + (self.moe.problems() if self.moe else [])

    @property
    def layer_matmul_params(self) -> int:
        """Parameters of one layer that stand in a matrix product (all but the norms')."""
        return self._layer_matmul_params(self.moe.num_experts if self.moe else 1)

    def _layer_matmul_params(self, num_mlps: int) -> int:
        """The same with this many MLPs; and a router, if there are experts."""
        attention = self.embed_dim * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        mlp = self.embed_dim * self.mlp_dim * (3 if self.mlp == "gated" else 2)
        router = self.embed_dim * self.moe.num_experts if self.moe else 0
        return attention + num_mlps * mlp + router

    @property
    def matmul_params(self) -> int:
        """Parameters that stand in a matrix product: layers and head, not the lookup.

        A tied table counts once, as the head.
        """
        return self.num_layers * self.layer_matmul_params + self.embed_dim * self.vocab_size

    @property
    def active_matmul_params(self) -> int:
        """The same, counting of the experts only those that one token goes through."""
        layer = self._layer_matmul_params(self.moe.experts_per_token if self.moe else 1)
        return self.num_layers * layer + self.embed_dim * self.vocab_size

    @property
    def num_params(self) -> int:
        """All parameters, a tied table once."""
        norms = (2 * self.num_layers + 1) * self.embed_dim
        lookup = self.embed_dim * self.vocab_size if self.embeddings == "untied" else 0
        return self.matmul_params + norms + lookup

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOPs per token, forward and backward, at this sequence length."""
        attention = 12 * self.num_layers * self.num_heads * self.head_dim * seq_len / 2
        return 6 * self.active_matmul_params + attention

    def model_flops(self, *, global_batch: int, seq_len: int) -> float:
        """Model FLOPs of one optimizer step over all devices.

        Six per matrix-product parameter that a token meets (two forward, four backward; of
        experts those it is sent to, dropped or not, and the router), plus
        attention's two products over the causal half of the pairs,
        ``12 * layers * heads * head_dim * seq_len**2 * global_batch / 2``.  Not counted:
        the embedding lookup, norms, softmax, the optimizer, and anything recomputed.

        Source: PaLM, appendix B, https://arxiv.org/abs/2204.02311, which counts the full
        square of attention; the causal half is MaxText's count since July 2025.
        """
        return self.flops_per_token(seq_len) * seq_len * global_batch


_CHOICES = {
    "mlp": get_args(Mlp),
    "embeddings": get_args(Embeddings),
    "layers": get_args(Layers),
    "attention": get_args(Attention),
    "param_dtype": get_args(FloatType),
    "compute_dtype": get_args(FloatType),
}
