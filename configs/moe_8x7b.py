r"""Mixtral 8x7B on 64 chips: experts beside FSDP and tensor parallelism.

  python -m launch.compare --config=configs/moe_8x7b.py
  python -m launch.compare --config=configs/moe_8x7b.py --config.model.moe.dispatch=dropless

Groups of 512 tokens compete for places: the products that put tokens in their places grow with
the group, and at 4096 would be a quarter of the experts' own.

Expected: three rows, some three to five minutes each on a busy CPU core.  FSDP alone gathers all
eight experts for every layer, though each token meets two; with ``expert=8`` tokens travel
instead of experts.
"""

from spmdlab.config import Experiment
from spmdlab.models.config import DecoderConfig, MoeConfig
from spmdlab.strategies import Expert, Fsdp, Tensor
from spmdlab.strategies.product import as_strategy
from spmdlab.workload import BatchConfig

LAYOUTS = {
    "fsdp": Fsdp(64),
    "fsdp_expert": Fsdp(8) * Expert(8),
    "fsdp_expert_tensor": Fsdp(4) * Expert(8) * Tensor(2),
}


def get_config() -> Experiment:
    return Experiment(
        model=DecoderConfig(
            vocab_size=32_000,
            num_layers=32,
            embed_dim=4096,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            mlp_dim=14_336,
            attention="flash",
            rope_theta=1_000_000.0,
            moe=MoeConfig(num_experts=8, experts_per_token=2, group_size=512),
        ),
        batch=BatchConfig(per_device_batch=1, seq_len=4096),
        strategies={
            name: as_strategy(layout).with_options(remat="full") for name, layout in LAYOUTS.items()
        },
        targets=("v5p:4x4x4",),
    )
