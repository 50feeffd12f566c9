"""Sizes of a decoder, and what follows from them in closed form.  No JAX."""

import dataclasses
from typing import Literal, get_args

Mlp = Literal["gated", "plain"]
Embeddings = Literal["tied", "untied"]
Layers = Literal["scanned", "unrolled"]
Attention = Literal["dot", "flash"]
FloatType = Literal["float32", "bfloat16", "float64"]


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
    """Hidden width of the feed-forward layer."""

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
        return found

    @property
    def layer_matmul_params(self) -> int:
        """Parameters of one layer that stand in a matrix product (all but the norms')."""
        attention = self.embed_dim * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        mlp = self.embed_dim * self.mlp_dim * (3 if self.mlp == "gated" else 2)
        return attention + mlp

    @property
    def matmul_params(self) -> int:
        """Parameters that stand in a matrix product: layers and head, not the lookup.

        A tied table counts once, as the head.
        """
        return self.num_layers * self.layer_matmul_params + self.embed_dim * self.vocab_size

    @property
    def num_params(self) -> int:
        """All parameters, a tied table once."""
        norms = (2 * self.num_layers + 1) * self.embed_dim
        lookup = self.embed_dim * self.vocab_size if self.embeddings == "untied" else 0
        return self.matmul_params + norms + lookup

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOPs per token, forward and backward, at this sequence length."""
        attention = 12 * self.num_layers * self.num_heads * self.head_dim * seq_len / 2
        return 6 * self.matmul_params + attention

    def model_flops(self, *, global_batch: int, seq_len: int) -> float:
        """Model FLOPs of one optimizer step over all devices.

        Six per matrix-product parameter and token (two forward, four backward), plus
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
