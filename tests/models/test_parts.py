"""A decoder in parts equals the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdlab.models import parts
from spmdlab.models.config import DecoderConfig
from spmdlab.models.params import apply, init_params
from spmdlab.models.weights import Layout

CONFIG = {
    "vocab_size": 16,
    "num_layers": 3,
    "embed_dim": 8,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
    "mlp_dim": 16,
    "dropout": 0.5,
    "compute_dtype": "float32",
}


@pytest.mark.parametrize("embeddings", ["tied", "untied"])
def test_parts_in_a_row_are_the_decoder(embeddings):
    config = DecoderConfig(**CONFIG, embeddings=embeddings)
    params, layout = init_params(config, jax.random.key(0)), Layout()
    tokens, key = jnp.arange(12, dtype=jnp.int32).reshape(2, 6) % 5, jax.random.key(1)
    keys = jax.random.split(key, 3)
    x = parts.embed(config, params, tokens, layout)
    for layers in (slice(0, 1), slice(1, 3)):
        some = jax.tree.map(lambda param, layers=layers: param[layers], params["layers"])
        x, _ = parts.run_layers(config, some, x, keys[layers], "none", layout)
    head = {name: params[name] for name in parts.head_names(config)}
    expected = apply(config, params, tokens, dropout_key=key)
    np.testing.assert_allclose(parts.logits(config, head, x, layout), expected, rtol=1e-5)


def test_the_tables_gradient_adds_up_the_rows_of_each_token():
    config = DecoderConfig(**CONFIG)
    tokens = jnp.array([[1, 3, 3], [3, 0, 1]])
    dx = jax.random.normal(jax.random.key(0), (2, 3, 8))
    expected = np.zeros((16, 8), np.float32)
    np.add.at(expected, np.asarray(tokens), np.asarray(dx))
    found = parts.table_gradient(config, dx, tokens, Layout())
    np.testing.assert_allclose(found, expected, rtol=1e-6)
