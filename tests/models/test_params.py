import jax
import pytest

from spmdlab.models.config import DecoderConfig, MoeConfig
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


@pytest.mark.parametrize("moe", [None, MoeConfig(num_experts=5)], ids=["mlp", "moe"])
@pytest.mark.parametrize("layers", ["scanned", "unrolled"])
def test_every_dim_of_every_parameter_has_a_logical_axis_of_its_size(layers, moe):
    sizes = {
        "vocab": 32,
        "layers": 11,
        "embed": 16,
        "norm": 16,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 8,
        "mlp": 32,
        "expert": 5,
        "router": 5,
    }
    config = DecoderConfig(**SIZES, layers=layers, moe=moe)
    params = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    axes = param_axes(config)
    shapes = jax.tree.map(lambda param, names: tuple(sizes[name] for name in names), params, axes)
    assert shapes == jax.tree.map(lambda param: param.shape, params)


def test_unrolled_layers_are_named_by_number():
    config = DecoderConfig(**SIZES, layers="unrolled")
    assert param_axes(config)["layers"]["10"]["mlp"]["gate"] == ("embed", "mlp")
    config.layers = "scanned"
    assert param_axes(config)["layers"]["mlp"]["gate"] == ("layers", "embed", "mlp")


def test_weights_have_mean_0_and_variance_1_over_the_terms_they_are_summed_with():
    """Within 5 standard errors, of the mean and (at most) of the variance."""
    sizes = {**SIZES, "num_layers": 1, "vocab_size": 256, "embed_dim": 64, "mlp_dim": 256}
    params = init_params(DecoderConfig(**sizes), jax.random.key(0))
    for weight, terms in [
        (params["embed"]["table"], 64),
        (params["head"]["kernel"], 64),
        (params["layers"]["mlp"]["down"], 256),
        (params["layers"]["attention"]["out"], 2 * 8),
    ]:
        error = 5 / weight.size**0.5
        assert abs(float(weight.mean())) < error * terms**-0.5
        assert float(weight.var()) == pytest.approx(1 / terms, rel=error)
