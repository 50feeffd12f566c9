r"""Llama 3.1 70B on 256 chips.

  python -m launch.compare --config=configs/decoder_70b.py
  python -m launch.compare --config=configs/decoder_70b.py:v5p

The text after ":" picks one chip; without it every strategy meets v5p and v6e, each a slice of
256.

Expected: 6 rows, a minute or two each on a CPU core: 80 layers compile as fast as 8.
"""

from spmdlab.config import Experiment
from spmdlab.lookup import pick
from spmdlab.models.config import DecoderConfig
from spmdlab.strategies import Fsdp, Tensor
from spmdlab.strategies.product import as_strategy
from spmdlab.workload import BatchConfig

TARGETS = {
    "all": ("v5p:4x8x8", "v6e:16x16"),
    "v5p": ("v5p:4x8x8",),
    "v6e": ("v6e:16x16",),
}

LAYOUTS = {
    "fsdp": Fsdp(256),
    "fsdp_tensor": Fsdp(32) * Tensor(8),
    "fsdp_tensor_sequence": Fsdp(32) * Tensor(8, sequence="on"),
}


def get_config(chip: str = "all") -> Experiment:
    return Experiment(
        model=DecoderConfig(
            vocab_size=128_256,
            num_layers=80,
            embed_dim=8192,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            mlp_dim=28_672,
            attention="flash",
            rope_theta=500_000.0,
        ),
        batch=BatchConfig(per_device_batch=1, seq_len=4096),
        strategies={
            name: as_strategy(layout).with_options(remat="full") for name, layout in LAYOUTS.items()
        },
        targets=pick(TARGETS, chip, "chip"),
    )
