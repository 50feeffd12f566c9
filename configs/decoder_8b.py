r"""Llama 3.1 8B on 256 chips: FSDP alone, with replicas, and with tensor parallelism.

  python -m launch.compare --config=configs/decoder_8b.py
  python -m launch.compare --config=configs/decoder_8b.py:v6e

The text after ":" picks one chip; without it every strategy meets v5e, v5p and v6e, each a
slice of 256.

Expected: 12 rows, about a minute each on a CPU core.
"""

from spmdlab.config import Experiment
from spmdlab.lookup import pick
from spmdlab.models.config import DecoderConfig
from spmdlab.strategies import Data, Fsdp, Tensor
from spmdlab.strategies.product import as_strategy
from spmdlab.workload import BatchConfig

TARGETS = {
    "all": ("v5e:16x16", "v5p:4x8x8", "v6e:16x16"),
    "v5e": ("v5e:16x16",),
    "v5p": ("v5p:4x8x8",),
    "v6e": ("v6e:16x16",),
}

LAYOUTS = {
    "fsdp": Fsdp(256),
    "data_fsdp": Data(4) * Fsdp(64),
    "fsdp_tensor": Fsdp(64) * Tensor(4),
    "fsdp_tensor_sequence": Fsdp(64) * Tensor(4, sequence="on"),
}


def get_config(chip: str = "all") -> Experiment:
    return Experiment(
        model=DecoderConfig(
            vocab_size=128_256,
            num_layers=32,
            embed_dim=4096,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            mlp_dim=14_336,
            attention="flash",
            rope_theta=500_000.0,
        ),
        batch=BatchConfig(per_device_batch=1, seq_len=4096),
        strategies={
            name: as_strategy(layout).with_options(remat="full") for name, layout in LAYOUTS.items()
        },
        targets=pick(TARGETS, chip, "chip"),
    )
