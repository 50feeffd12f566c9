"""AdamW with clipping by the global norm, from Optax."""

import optax

from spmdlab.models.config import DecoderConfig
from spmdlab.models.params import Params, param_axes
from spmdlab.workload import OptimizerConfig


def optimizer(config: OptimizerConfig, model: DecoderConfig) -> optax.GradientTransformation:
    """Returns `optax.adamw` behind `optax.clip_by_global_norm`, its parts named.

    The names stand in the paths of the optimizer's state (``optimizer.adam.mu.…``).
    """
    rate: float | optax.Schedule = config.learning_rate
    if config.warmup_steps:
        # The first step counts as 1 of warmup_steps; from 0 it would change nothing.
        rate = optax.linear_schedule(
            config.learning_rate / config.warmup_steps,
            config.learning_rate,
            config.warmup_steps - 1,
        )
    return optax.named_chain(
        ("clip", optax.clip_by_global_norm(config.clip_norm)),
        ("adam", optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)),
        ("decay", optax.add_decayed_weights(config.weight_decay, mask=_decays(model))),
        ("rate", optax.scale_by_learning_rate(rate)),
    )


def _decays(model: DecoderConfig) -> Params:
    def is_matrix(tree: Params | tuple[str, ...]) -> Params | bool:
        if isinstance(tree, tuple):
            return "norm" not in tree
        return {name: is_matrix(branch) for name, branch in tree.items()}

    return is_matrix(param_axes(model))
