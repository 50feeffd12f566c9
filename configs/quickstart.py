r"""A small decoder on eight devices: five ways to share one step.

  python -m launch.compare --config=configs/quickstart.py
  python -m launch.compare --config=configs/quickstart.py --config.batch.seq_len=128
  python -m launch.train --config=configs/quickstart.py:train --strategy=fsdp_tensor --out=out/run

Needs no accelerator: ``cpu:8`` is emulated, ``v5e:2x4`` is compiled ahead of time.

Expected: two rows per strategy.  Data parallelism moves each gradient once; FSDP moves each
weight twice and its gradient once, and keeps an eighth of the state; tensor parallelism moves
activations, four times a layer, which costs most at this size.

Expected of ``:train``, a smaller model on the sources of Python's standard library as bytes: a loss
on the valid split below 1.6 nats per byte after 300 steps, in under five minutes on two cores.
"""

from spmdlab.config import Experiment
from spmdlab.errors import ConfigError
from spmdlab.models.config import DecoderConfig
from spmdlab.strategies import Data, Fsdp, Tensor
from spmdlab.training import TrainingConfig
from spmdlab.workload import BatchConfig, OptimizerConfig

STRATEGIES = {
    "data": Data(8),
    "fsdp": Fsdp(8),
    "tensor": Tensor(8),
    "fsdp_tensor": Fsdp(4) * Tensor(2),
    "data_fsdp_tensor": Data(2) * Fsdp(2) * Tensor(2),
}


def get_config(size: str = "compare") -> Experiment:
    if size == "train":
        return small()
    if size != "compare":
        raise ConfigError(f"size {size!r} is unknown.  Known: compare, train.")
    return Experiment(
        model=DecoderConfig(
            vocab_size=256,
            num_layers=4,
            embed_dim=512,
            num_heads=8,
            num_kv_heads=8,
            head_dim=64,
            mlp_dim=1536,
        ),
        batch=BatchConfig(global_batch=64, seq_len=256),
        strategies=dict(STRATEGIES),
        targets=("cpu:8", "v5e:2x4"),
    )


def small() -> Experiment:
    return Experiment(
        model=DecoderConfig(
            vocab_size=256,
            num_layers=2,
            embed_dim=128,
            num_heads=8,
            num_kv_heads=8,
            head_dim=16,
            mlp_dim=384,
        ),
        batch=BatchConfig(global_batch=32, seq_len=128),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20),
        training=TrainingConfig(
            steps=300, log_every=10, evaluate_every=50, evaluate_batches=8, checkpoint_every=50
        ),
        strategies=dict(STRATEGIES),
        targets=("cpu:8",),
    )
