"""Cross-entropy that never gathers the vocabulary.

Dims:  B batch   T sequence   V vocabulary
"""

import jax
import jax.numpy as jnp


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Returns minus the log-probability of each target, in nats, shaped BT.

    The target's logit is picked by comparing and summing: with the vocabulary split over
    devices that is a local sum and a small all-reduce, where indexing would gather all
    logits.
    """
    largest_BT1 = jax.lax.stop_gradient(logits_BTV.max(axis=-1, keepdims=True))
    shifted_BTV = logits_BTV - largest_BT1
    log_sum_BT = jnp.log(jnp.sum(jnp.exp(shifted_BTV), axis=-1))
    ids_V = jnp.arange(logits_BTV.shape[-1], dtype=targets_BT.dtype)
    is_target_BTV = targets_BT[..., None] == ids_V[None, None]
    return log_sum_BT - jnp.sum(jnp.where(is_target_BTV, shifted_BTV, 0), axis=-1)
