import itertools
import re

import jax
import pytest

from spmdlab.models.config import DecoderConfig
from spmdlab.models.params import init_params

SIZES = {
    "vocab_size": 96,
    "num_layers": 3,
    "embed_dim": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_dim": 48,
}


@pytest.mark.parametrize(
    ("mlp", "embeddings", "layers"),
    list(itertools.product(("gated", "plain"), ("tied", "untied"), ("scanned", "unrolled"))),
)
def test_num_params_is_the_trees(mlp, embeddings, layers):
    config = DecoderConfig(**SIZES, mlp=mlp, embeddings=embeddings, layers=layers)
    params = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    assert config.num_params == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_model_flops_by_hand():
    """Every product of one sequence, forward; backward is twice that."""
    config = DecoderConfig(**SIZES, mlp="gated", embeddings="untied")
    T, D, H, N, K, F, V = 16, 32, 4, 2, 8, 48, 96
    projections = 2 * T * D * H * K + 2 * (2 * T * D * N * K) + 2 * T * H * K * D
    pairs = T * T / 2  # the causal half
    scores_and_context = 2 * (2 * pairs * H * K)
    mlp = 3 * (2 * T * D * F)
    head = 2 * T * D * V
    forward = 3 * (projections + scores_and_context + mlp) + head
    assert config.model_flops(global_batch=5, seq_len=T) == 5 * 3 * forward


def test_llama_2_7b_has_its_published_size():
    """6,738,415,616 parameters: the figure of the published checkpoint."""
    config = DecoderConfig(
        vocab_size=32_000,
        num_layers=32,
        embed_dim=4096,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        mlp_dim=11_008,
    )
    assert config.num_params == 6_738_415_616


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, r"num_kv_heads \(3\) must divide model.num_heads \(4\): one of 1, 2"),
        ({"head_dim": 7}, "head_dim must be even, got 7"),
        ({"num_layers": 0}, "num_layers must be a positive whole number, got 0"),
        ({"mlp": "gatd"}, "mlp must be one of gated, plain, got 'gatd'"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"norm_eps": 0.0}, "norm_eps must be above 0"),
    ],
)
def test_names_what_is_wrong(change, message):
    [problem] = DecoderConfig(**{**SIZES, **change}).problems()
    assert re.search(message, problem)


def test_sound_sizes_have_no_problems():
    assert DecoderConfig(**SIZES).problems() == []
