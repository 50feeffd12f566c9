"""The loss on the valid split: over its tokens, by their weights."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spmdlab.compile import Layout
from spmdlab.data.dataset import Dataset
from spmdlab.data.loader import loader
from spmdlab.mesh import MeshShards, constrainer
from spmdlab.run.batches import PlacedBatch, Shardings, place
from spmdlab.strategies.product import Strategy
from spmdlab.train.step import loss_and_grads
from spmdlab.workload import Workload


def jitted_evaluation(workload: Workload, strategy: Strategy, layout: Layout) -> Any:
    """Returns ``(params, batch) -> (summed loss, tokens)``, without dropout, under ``jax.jit``.

    The loss is the model's own: of experts, without the load balance.  The gradient that
    `loss_and_grads` also makes is not asked for, so the compiler leaves it out (but not in a
    pipeline, whose schedule interleaves both).
    """
    rules = strategy.rules()

    def evaluate(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        found = loss_and_grads(
            workload,
            strategy,
            params,
            batch,
            constrain=constrainer(layout.mesh, rules),
            shards=MeshShards(layout.mesh, rules, strategy.sequence_split),
        )
        loss = found.loss
        if found.routing is not None:
            loss -= workload.model.moe.load_balance_weight * found.routing.load_balance
        return loss * found.tokens, found.tokens

    return jax.jit(evaluate, out_shardings=NamedSharding(layout.mesh, PartitionSpec()))


def evaluation_batches(
    dataset: Dataset,
    *,
    num_batches: int,
    global_batch: int,
    seed: int,
    held: np.ndarray,
    shardings: Shardings,
) -> list[PlacedBatch]:
    """Returns the batches of every evaluation: no example twice.

    Where the split has fewer examples than asked for, all are there, and the rows beyond them
    weigh nothing.
    """
    enough = math.ceil(dataset.num_examples / global_batch)
    batches = []
    loaded = loader(dataset, global_batch=global_batch, seed=seed, rows=held)
    for _ in range(min(num_batches, enough)):
        batch = next(loaded)
        rows = dict(batch.rows)
        first_time = batch.step * global_batch + held < dataset.num_examples
        rows["weights"] = rows["weights"] * first_time[:, None].astype(np.float32)
        arrays = place(rows, held, shardings, global_batch)
        batches.append(PlacedBatch(position=batch.step, ids=batch.ids, arrays=arrays))
    return batches


def valid_loss(program: Any, params: Any, batches: Sequence[PlacedBatch]) -> float:
    """Returns the mean loss in nats per token."""
    sums = jax.device_get([program(params, batch.arrays) for batch in batches])
    losses, tokens = (np.sum(np.asarray(each, np.float64)) for each in zip(*sums, strict=True))
    return float(losses / tokens)
