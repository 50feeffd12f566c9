import dataclasses

import pytest

from spmdlab.errors import ConfigError
from spmdlab.models.config import DecoderConfig, MoeConfig
from spmdlab.workload import BatchConfig, OptimizerConfig, Workload

MODEL = DecoderConfig(
    vocab_size=32,
    num_layers=1,
    embed_dim=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_dim=32,
)


def workload(**batch):
    return Workload(model=MODEL, batch=BatchConfig(seq_len=8, **batch))


def test_a_global_batch_stays_and_a_per_device_batch_grows_with_the_devices():
    assert [workload(global_batch=6).global_batch(n) for n in (1, 8)] == [6, 6]
    assert [workload(per_device_batch=2).global_batch(n) for n in (1, 8)] == [2, 16]
    assert workload(per_device_batch=0.25).global_batch(8) == 2


@pytest.mark.parametrize("num_devices", [1, 6])
def test_refuses_a_part_of_a_sequence(num_devices):
    with pytest.raises(ConfigError, match=f"on {num_devices} devices gives .* a whole number"):
        workload(per_device_batch=0.25).global_batch(num_devices)


@pytest.mark.parametrize("sizes", [{}, {"global_batch": 8, "per_device_batch": 1}])
def test_wants_exactly_one_batch_size(sizes):
    [problem] = workload(**sizes).problems()
    assert "exactly one of batch.global_batch and batch.per_device_batch" in problem


def test_lists_all_that_is_wrong():
    wrong = Workload(
        model=MODEL,
        batch=BatchConfig(global_batch=0, seq_len=-1),
        optimizer=OptimizerConfig(learning_rate=0.0, b2=1.0),
    )
    names = ["batch.global_batch", "batch.seq_len", "optimizer.learning_rate", "optimizer.b2"]
    assert [problem.split(" ")[0] for problem in wrong.problems()] == names


def test_flops_scale_with_the_global_batch():
    once = MODEL.model_flops(global_batch=1, seq_len=8)
    assert workload(per_device_batch=2).global_model_flops(8) == 16 * once


def test_names_a_group_of_tokens_that_does_not_divide_the_sequence():
    model = dataclasses.replace(MODEL, moe=MoeConfig(num_experts=4, group_size=3))
    [problem] = Workload(model=model, batch=BatchConfig(global_batch=8, seq_len=8)).problems()
    assert problem == "model.moe.group_size (3) must divide batch.seq_len (8)"
