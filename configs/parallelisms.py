r"""Every kind of parallelism and their important products, on one small model.

  python -m launch.verify --config=configs/parallelisms.py
  python -m launch.verify --config=configs/parallelisms.py:experts
  python -m launch.compare --config=configs/parallelisms.py:pod --strategy=pipeline_1f1b,fsdp

The text after ":" picks the model: ``dense`` (the default), or ``experts``, a mixture of experts
with the strategies that can split it; ``pod`` and ``pod_experts`` are the same on 64 chips.

Expected: verify passes for every strategy on eight emulated devices, and every strategy compiles
for the pod.
"""

from spmdlab.config import Experiment
from spmdlab.lookup import pick
from spmdlab.models.config import DecoderConfig, MoeConfig
from spmdlab.strategies import Context, Data, Expert, Fsdp, Pipeline, Strategy, Tensor
from spmdlab.workload import BatchConfig


def dense(n: int) -> dict[str, Strategy]:
    """Strategies of n * n * n devices."""
    return {
        "data": Data(n**3),
        "fsdp": Fsdp(n**3),
        "zero1": Fsdp(n**3, zero=1),
        "zero2": Fsdp(n**3, zero=2),
        # Weights split inside a slice, copied between slices: only shards of gradients cross.
        "hybrid": Data(n) * Fsdp(n**2),
        "tensor": Tensor(n**2) * Data(n),
        "tensor_sequence": Tensor(n**2, sequence="on") * Data(n),
        "context_ring": Context(n**2) * Data(n),
        "context_all_to_all": Context(n**2, method="all_to_all") * Data(n),
        "pipeline_gpipe": Pipeline(n, "gpipe", microbatches=n) * Data(n**2),
        "pipeline_1f1b": Pipeline(n**2, "1f1b", microbatches=n**2) * Data(n),
        "pipeline_circular": Pipeline(n, "circular", microbatches=n, repeats=2) * Fsdp(n**2),
        "fsdp_tensor": Fsdp(n**2) * Tensor(n),
        "data_fsdp_tensor": Data(n) * Fsdp(n) * Tensor(n),
        "fsdp_context_tensor": Fsdp(n) * Context(n) * Tensor(n),
        "pipeline_fsdp_tensor": Pipeline(n, "1f1b", microbatches=2 * n) * Fsdp(n) * Tensor(n),
        "pipeline_context": Pipeline(n, "1f1b", microbatches=n) * Context(n) * Fsdp(n),
        "fsdp_accumulated": (Fsdp(n**2) * Tensor(n)).with_options(accumulate=2, remat="full"),
    }


def experts(n: int) -> dict[str, Strategy]:
    """The same, for a mixture of n * n experts."""
    return {
        "data": Data(n**3),
        "expert": Expert(n**2) * Data(n),
        "fsdp_expert": Fsdp(n) * Expert(n**2),
        "expert_tensor": Fsdp(n) * Expert(n) * Tensor(n),
        "pipeline_expert": Pipeline(n, "1f1b", microbatches=n) * Expert(n) * Fsdp(n),
    }


MODELS = {
    "dense": (dense, 2, "cpu:8"),
    "experts": (experts, 2, "cpu:8"),
    "pod": (dense, 4, "v5p:4x4x4"),
    "pod_experts": (experts, 4, "v5p:4x4x4"),
}


def get_config(model: str = "dense") -> Experiment:
    strategies, n, target = pick(MODELS, model, "model")
    mixture = MoeConfig(num_experts=n**2, experts_per_token=2)
    return Experiment(
        model=DecoderConfig(
            vocab_size=256,
            num_layers=n**2,
            embed_dim=16 * n**2,
            num_heads=n**2,
            num_kv_heads=n**2,
            head_dim=16,
            mlp_dim=32 * n**2,
            moe=mixture if strategies is experts else None,
        ),
        batch=BatchConfig(global_batch=2 * n**3, seq_len=64),
        strategies=strategies(n),
        targets=(target,),
    )
