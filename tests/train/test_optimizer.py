import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmdlab.models.config import DecoderConfig
from spmdlab.models.params import init_params
from spmdlab.train.optimizer import optimizer
from spmdlab.workload import OptimizerConfig

MODEL = DecoderConfig(
    vocab_size=32,
    num_layers=1,
    embed_dim=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_dim=32,
)


def updates(transformation, params, steps=3):
    state = transformation.init(params)
    for _ in range(steps):
        grads = jax.tree.map(jnp.cos, params)
        update, state = transformation.update(grads, state, params)
        params = optax.apply_updates(params, update)
    return params


def test_is_adamw_behind_a_clip_that_spares_the_norms():
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, clip_norm=0.01)
    params = init_params(MODEL, jax.random.key(0))
    is_matrix = {
        "embed": True,
        "head": True,
        "layers": {"attention": True, "attention_norm": False, "mlp": True, "mlp_norm": False},
        "norm": False,
    }
    adamw = optax.adamw(0.1, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.5, mask=is_matrix)
    expected = updates(optax.chain(optax.clip_by_global_norm(0.01), adamw), params)
    found = updates(optimizer(config, MODEL), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


def test_warm_up_rises_to_the_full_rate():
    """Constant gradients move Adam by the learning rate at each step: 1/2, 2/2, 2/2."""
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=2, weight_decay=0.0)
    transformation = optimizer(config, MODEL)
    params = init_params(MODEL, jax.random.key(0))
    state, moved = transformation.init(params), []
    for _ in range(3):
        update, state = transformation.update(jax.tree.map(jnp.ones_like, params), state, params)
        moved.append(float(update["norm"]["scale"][0]))
    np.testing.assert_allclose(moved, [-0.5, -1, -1], rtol=1e-5)
