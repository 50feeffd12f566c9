import itertools
import re

import jax
import pytest

from spmdlab.models.config import DecoderConfig, MoeConfig
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
    ("mlp", "embeddings", "layers", "moe"),
    list(
        itertools.product(
            ("gated", "plain"),
            ("tied", "untied"),
            ("scanned", "unrolled"),
            (None, MoeConfig(num_experts=5)),
        )
    ),
)
def test_num_params_is_the_trees(mlp, embeddings, layers, moe):
    config = DecoderConfig(**SIZES, mlp=mlp, embeddings=embeddings, layers=layers, moe=moe)
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


def test_of_experts_model_flops_count_those_a_token_goes_to():
    """Two of eight, and the router; parameters count them all."""
    dense = DecoderConfig(**SIZES)
    config = DecoderConfig(**SIZES, moe=MoeConfig(num_experts=8, experts_per_token=2))
    T, D, F, L = 16, 32, 48, 3
    expert, router = 3 * D * F, D * 8
    sizes = {"global_batch": 5, "seq_len": T}
    more = config.model_flops(**sizes) - dense.model_flops(**sizes)
    assert more == 6 * 5 * T * L * (expert + router)  # one expert more than the one MLP
    assert config.num_params - dense.num_params == L * (7 * expert + router)


def test_mixtral_8x7b_has_its_published_size():
    """46,702,792,704 parameters: the figure of the published checkpoint."""
    config = DecoderConfig(
        vocab_size=32_000,
        num_layers=32,
        embed_dim=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=14_336,
        moe=MoeConfig(num_experts=8, experts_per_token=2),
    )
    assert config.num_params == 46_702_792_704


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 0}, "moe.num_experts must be a positive whole number, got 0"),
        ({"experts_per_token": 9}, r"experts_per_token must be at most num_experts \(8\), got 9"),
        ({"capacity_factor": 0.0}, "capacity_factor must be above 0"),
        ({"group_size": 0}, "group_size must be a positive whole number"),
        ({"load_balance_weight": -1.0}, "load_balance_weight must be at least 0"),
        ({"dispatch": "dropfree"}, "dispatch must be one of capacity, dropless, got 'dropfree'"),
        ({"load_balance_over": "mesh"}, "load_balance_over must be one of batch, group"),
    ],
)
def test_names_what_is_wrong_with_experts(change, message):
    moe = MoeConfig(**{"num_experts": 8, **change})
    [problem] = DecoderConfig(**SIZES, moe=moe).problems()
    assert re.search(message, problem)


def test_capacity_is_a_share_rounded_up_and_never_more_than_a_group():
    def capacity(factor, size):
        moe = MoeConfig(num_experts=8, experts_per_token=2, capacity_factor=factor)
        return moe.capacity(size)

    assert capacity(1.0, 64) == 16
    assert capacity(1.25, 6) == 2  # 1.875
    assert capacity(1.1, 40) == 11  # not 12, though 1.1 * 10 is a little more than 11
    assert capacity(100.0, 64) == 64


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
