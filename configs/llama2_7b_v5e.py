r"""Llama 2 7B on one v5e-256 slice: FSDP over all chips, everything recomputed.

  python -m launch.compare --config=configs/llama2_7b_v5e.py

The sizes MaxText's ``llama2-7b`` has: 32 layers, 2048 tokens, 4 sequences per device.

Expected: one row, in about two minutes on two CPU cores.  Each layer's weights (405 MB in
bfloat16) are gathered twice, forward and backward, and their gradients reduce-scattered.
"""

from spmdlab.config import Experiment
from spmdlab.models.config import DecoderConfig
from spmdlab.strategies import Fsdp
from spmdlab.strategies.product import as_strategy
from spmdlab.workload import BatchConfig


def get_config() -> Experiment:
    return Experiment(
        model=DecoderConfig(
            vocab_size=32_000,
            num_layers=32,
            embed_dim=4096,
            num_heads=32,
            num_kv_heads=32,
            head_dim=128,
            mlp_dim=11_008,
            attention="flash",
        ),
        batch=BatchConfig(per_device_batch=4, seq_len=2048),
        strategies={"fsdp": as_strategy(Fsdp(256)).with_options(remat="full")},
        targets=("v5e:16x16",),
    )
