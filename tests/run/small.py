"""A decoder of one layer, small enough to train many times, and what its runs leave behind."""

import json
import pathlib

import jax
import numpy as np

from spmdlab.compile import lay_out
from spmdlab.config import Experiment
from spmdlab.models.config import DecoderConfig
from spmdlab.run.checkpoint import Checkpoints
from spmdlab.strategies import Data, Fsdp, Tensor
from spmdlab.strategies.product import as_strategy
from spmdlab.targets import parse_target
from spmdlab.train.state import paths
from spmdlab.training import TrainingConfig
from spmdlab.workload import BatchConfig, OptimizerConfig, Workload

STEPS = 20


def experiment(*, optimizer: dict | None = None, seq_len: int = 16, **training) -> Experiment:
    # With so large an eps Adam does not turn a tiny gradient's sign into a whole step, so that
    # strategies, which round differently, stay together.
    return Experiment(
        model=DecoderConfig(
            vocab_size=256,
            num_layers=1,
            embed_dim=32,
            num_heads=4,
            num_kv_heads=4,
            head_dim=8,
            mlp_dim=64,
            compute_dtype="float32",
        ),
        batch=BatchConfig(global_batch=8, seq_len=seq_len),
        optimizer=OptimizerConfig(**{"learning_rate": 0.1, "eps": 0.1, **(optimizer or {})}),
        training=TrainingConfig(
            **{
                "steps": STEPS,
                "log_every": 1,
                "evaluate_every": 6,
                "evaluate_batches": 2,
                "checkpoint_every": 4,
                **training,
            }
        ),
        strategies={
            "data": Data(8),
            "fsdp": Fsdp(8),
            "tensor": Fsdp(2) * Tensor(4),
            "one": Data(1),
        },
    )


def lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def arrays(folder: pathlib.Path, step: int, config: Experiment) -> dict[str, np.ndarray]:
    """A checkpoint's arrays by path, read on one device."""
    load = Workload(model=config.model, batch=config.batch, optimizer=config.optimizer)
    checkpoints = Checkpoints(folder / "checkpoints", keep=1)
    layout = lay_out(load, as_strategy(Data(1)), parse_target("cpu:1"))
    state = checkpoints.restore(step, load, layout)
    checkpoints.close()
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    return dict(zip(jax.tree.leaves(paths(state)), leaves, strict=True))
