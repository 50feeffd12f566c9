"""Feed-forward layer, gated or plain.

Dims:  B batch   T sequence   D model   F hidden
"""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from spmdlab.models.config import DecoderConfig
from spmdlab.models.weights import Layout, matrix


class Mlp(nnx.Module):
    """Computes ``(silu(x @ gate) * (x @ up)) @ down``, or ``gelu(x @ up) @ down``."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        D, F, dtype = config.embed_dim, config.mlp_dim, config.param_dtype
        if config.mlp == "gated":
            self.gate = matrix(rngs, (D, F), ("embed", "mlp"), fan_in=D, dtype=dtype)
        self.up = matrix(rngs, (D, F), ("embed", "mlp"), fan_in=D, dtype=dtype)
        self.down = matrix(rngs, (F, D), ("mlp", "embed"), fan_in=F, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, layout: Layout) -> jax.Array:
        """Returns what the layer adds to the residual stream; input and output inside."""

        def hidden(name: str) -> jax.Array:
            y = layout.product("BTD,DF->BTF", x_BTD, self, name)
            return layout.activation(y, "act_batch", "act_len", "act_mlp")

        up_BTF = checkpoint_name(hidden("up"), "mlp_up")
        if hasattr(self, "gate"):
            h_BTF = jax.nn.silu(checkpoint_name(hidden("gate"), "mlp_gate")) * up_BTF
        else:
            h_BTF = jax.nn.gelu(up_BTF)
        return layout.product("BTF,FD->BTD", h_BTF, self, "down")
