"""Moves layers between the stage that stores them and the stage that runs them."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmdlab.models.params import Params
from spmdlab.pipeline.schedule import Schedule
from spmdlab.pipeline.slots import homeward_permutes
from spmdlab.train.stage import STAGE, Stages, get_slot


def movers(
    schedule: Schedule, stages: Stages
) -> tuple[Callable[[Params], Params], Callable[[Params], Params]]:
    """Functions that move the layers to where they run, and their gradients back."""
    split = PartitionSpec(STAGE)
    rounds = homeward_permutes(schedule.stages, schedule.repeats)

    def move(tree: Params, *, back: bool) -> Params:
        me = jax.lax.axis_index(STAGE)

        def one(param: jax.Array) -> jax.Array:
            chunks = param.reshape(schedule.repeats, -1, *param.shape[1:])
            moved = jnp.zeros_like(chunks)
            for edges in rounds:
                ends = [(t, s, to, at) if back else (s, t, at, to) for s, t, at, to in edges]
                take = dict((source, at) for source, _, at, _ in ends)
                place = dict((target, to) for _, target, _, to in ends)
                order = range(schedule.stages)
                sent = get_slot(chunks, jnp.array([take[i] for i in order])[me])
                pairs = [(source, target) for source, target, _, _ in ends]
                stays = all(source == target for source, target in pairs)
                came = sent if stays else jax.lax.ppermute(sent, STAGE, pairs)
                moved = jax.lax.dynamic_update_index_in_dim(
                    moved, came, jnp.array([place[i] for i in order])[me], 0
                )
            return moved.reshape(param.shape)

        return jax.tree.map(one, tree)

    def mover(back: bool) -> Callable[[Params], Params]:
        run = stages.manually(STAGE, functools.partial(move, back=back), (split,), split)

        def moved(tree: Params) -> Params:
            with jax.named_scope("pipeline_layers"):
                return run(tree)

        return moved

    return mover(False), mover(True)
