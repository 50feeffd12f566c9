import jax
import pytest

from spmdlab.models.config import DecoderConfig
from spmdlab.models.params import init_params, param_axes

SIZES = {
    "vocab_size": 32,
    "num_layers": 11,
    "embed_dim": 16,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "mlp_dim": 32,
}


@pytest.mark.parametrize("layers", ["scanned", "unrolled"])
def test_every_dim_of_every_parameter_has_a_logical_axis_of_its_size(layers):
    sizes = {
        "vocab": 32,
        "layers": 11,
        "embed": 16,
        "norm": 16,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 8,
        "mlp": 32,
    }
    config = DecoderConfig(**SIZES, layers=layers)
    params = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    axes = param_axes(config)
    shapes = jax.tree.map(lambda param, names: tuple(sizes[name] for name in names), params, axes)
    assert shapes == jax.tree.map(lambda param: param.shape, params)


def test_unrolled_layers_are_named_by_number():
    config = DecoderConfig(**SIZES, layers="unrolled")
    assert param_axes(config)["layers"]["10"]["mlp"]["gate"] == ("embed", "mlp")
    config.layers = "scanned"
    assert param_axes(config)["layers"]["mlp"]["gate"] == ("layers", "embed", "mlp")
