import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdlab.errors import ConfigError
from spmdlab.models.config import DecoderConfig
from spmdlab.models.params import apply, init_params
from spmdlab.models.remat import REMAT

SIZES = {
    "vocab_size": 32,
    "num_layers": 2,
    "embed_dim": 16,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "mlp_dim": 32,
    "compute_dtype": "float32",
}
TOKENS_BT = jax.random.randint(jax.random.key(1), (2, 8), 0, 32)


def loss(config: DecoderConfig, remat: str):
    def of(params):
        key = jax.random.key(2) if config.dropout else None
        logits = apply(config, params, TOKENS_BT, dropout_key=key, remat=remat)
        return jnp.square(logits).mean()

    return of


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        pytest.param({}, [*REMAT], id="scanned"),
        pytest.param({"layers": "unrolled"}, ["none", "full"], id="unrolled"),
        pytest.param({"dropout": 0.5}, ["full"], id="dropout"),
    ],
)
def test_every_policy_gives_the_same_gradients(changes, names):
    """Recomputing repeats the same operations, dropout's draws too: equal to an ulp or so."""
    config = DecoderConfig(**SIZES, **changes)
    params = init_params(config, jax.random.key(0))
    expected = jax.jit(jax.grad(loss(config, "keep_weights")))(params)
    for name in set(names) - {"keep_weights"}:
        found = jax.jit(jax.grad(loss(config, name)))(params)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected
        )


def saved_elements(remat: str) -> int:
    """Elements that one step of the loop over layers hands to the backward pass."""
    config = DecoderConfig(**SIZES, dropout=0.1)
    params = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    _, backward = jax.eval_shape(lambda p: jax.vjp(loss(config, remat), p), params)
    return sum(leaf.size for leaf in jax.tree.leaves(backward))


def test_policies_save_less_and_less():
    sizes = [saved_elements(name) for name in ("none", "dots", "names", "full")]
    assert sizes == sorted(set(sizes), reverse=True)


def test_an_unknown_policy_is_named():
    config = DecoderConfig(**SIZES)
    params = init_params(config, jax.random.key(0))
    with pytest.raises(ConfigError, match=r"Unknown remat policy 'ful'.  Did you mean 'full'\?"):
        loss(config, "ful")(params)
