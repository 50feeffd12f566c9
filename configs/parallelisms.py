r"""Every kind of parallelism and their important products, on one small model.

  python -m launch.verify --config=configs/parallelisms.py
  python -m launch.verify --config=configs/parallelisms.py:experts
  python -m launch.compare --config=configs/parallelisms.py --strategy=pipeline_1f1b,fsdp

The text after ":" picks the model: ``dense`` (the default), or ``experts``, a mixture of experts
with the strategies that can split it.

Expected: verify passes for every strategy on eight emulated devices.
"""

from spmdlab.config import Experiment
from spmdlab.lookup import pick
from spmdlab.models.config import DecoderConfig, MoeConfig
from spmdlab.strategies import Context, Data, Expert, Fsdp, Pipeline, Tensor
from spmdlab.workload import BatchConfig

DENSE = {
    "data": Data(8),
    "fsdp": Fsdp(8),
    "zero1": Fsdp(8, zero=1),
    "tensor": Tensor(4) * Data(2),
    "tensor_sequence": Tensor(4, sequence="on") * Data(2),
    "context_ring": Context(4) * Data(2),
    "context_all_to_all": Context(4, method="all_to_all") * Data(2),
    "pipeline_gpipe": Pipeline(2, "gpipe", microbatches=2) * Data(4),
    "pipeline_1f1b": Pipeline(4, "1f1b", microbatches=4) * Data(2),
    "pipeline_circular": Pipeline(2, "circular", microbatches=2, repeats=2) * Fsdp(4),
    "fsdp_tensor": Fsdp(4) * Tensor(2),
    "data_fsdp_tensor": Data(2) * Fsdp(2) * Tensor(2),
    "fsdp_context_tensor": Fsdp(2) * Context(2) * Tensor(2),
    "pipeline_fsdp_tensor": Pipeline(2, "1f1b", microbatches=4) * Fsdp(2) * Tensor(2),
    "pipeline_context": Pipeline(2, "1f1b", microbatches=2) * Context(2) * Fsdp(2),
    "fsdp_accumulated": (Fsdp(4) * Tensor(2)).with_options(accumulate=2, remat="full"),
}

EXPERTS = {
    "data": Data(8),
    "expert": Expert(4) * Data(2),
    "fsdp_expert": Fsdp(2) * Expert(4),
    "expert_tensor": Fsdp(2) * Expert(2) * Tensor(2),
    "pipeline_expert": Pipeline(2, "1f1b", microbatches=2) * Expert(2) * Fsdp(2),
}

MODELS = {
    "dense": (DENSE, None),
    "experts": (EXPERTS, MoeConfig(num_experts=4, experts_per_token=2)),
}


def get_config(model: str = "dense") -> Experiment:
    strategies, moe = pick(MODELS, model, "model")
    return Experiment(
        model=DecoderConfig(
            vocab_size=256,
            num_layers=4,
            embed_dim=64,
            num_heads=4,
            num_kv_heads=4,
            head_dim=16,
            mlp_dim=128,
            moe=moe,
        ),
        batch=BatchConfig(global_batch=16, seq_len=64),
        strategies=dict(strategies),
        targets=("cpu:8",),
    )
