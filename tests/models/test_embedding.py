import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spmdlab.models.config import DecoderConfig
from spmdlab.models.embedding import Embed
from spmdlab.models.weights import Layout


def test_a_frequent_tokens_gradient_is_counted_in_float32():
    """A bfloat16 sum of ones stops at 256."""
    config = DecoderConfig(
        vocab_size=8,
        num_layers=1,
        embed_dim=4,
        num_heads=1,
        num_kv_heads=1,
        head_dim=4,
        mlp_dim=4,
        compute_dtype="bfloat16",
    )
    graph, state = nnx.split(Embed(config, rngs=nnx.Rngs(params=0)))
    tokens_BT = jnp.zeros((10, 100), jnp.int32).at[0, 0].set(3)
    grads = jax.grad(lambda s: nnx.merge(graph, s)(tokens_BT, Layout()).sum())(state)
    expected = np.zeros((8, 4))
    expected[0], expected[3] = 1000, 1  # 999 rounds to bfloat16's 1000
    np.testing.assert_array_equal(grads["table"][...], expected)
