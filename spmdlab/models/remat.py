"""What the backward pass finds saved, and what it computes again, by name."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from spmdlab.lookup import pick
from spmdlab.models.weights import GATHERED

_POLICIES = jax.checkpoint_policies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remat:
    """One policy for a layer of the decoder."""

    saves: str
    """What is kept from the forward pass, for people."""

    policy: Callable[..., Any] | None
    """For `jax.checkpoint`; None keeps everything, and wraps nothing."""


def _all_but_gathered(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """Whether a value may be saved: anything that took computing.

    What is gathered must not be.  JAX names a value by a primitive of its own, so a policy
    by names alone would save the constraint's result that goes into the naming; and a
    weight's cast, saved, would be saved gathered by the partitioner.  So neither of these
    is saved, and the backward pass begins again with the weight at rest.  Activations are
    named `spmdlab.models.weights.PINNED` once cast and pinned, and saved by that name.
    """
    if primitive.name in ("sharding_constraint", "convert_element_type"):
        return False
    return parameters.get("name") != GATHERED


REMAT = {
    "none": Remat(
        saves="all that took computing; casts and gathers are done again",
        policy=_all_but_gathered,
    ),
    "dots": Remat(
        saves="results of products with weights",
        policy=_POLICIES.dots_with_no_batch_dims_saveable,
    ),
    "names": Remat(
        saves="query, key, value and attention's result per head",
        policy=_POLICIES.save_only_these_names("query", "key", "value", "context"),
    ),
    "full": Remat(saves="each layer's input", policy=_POLICIES.nothing_saveable),
    "keep_weights": Remat(saves="everything, gathered weights too", policy=None),
}
"""From the names a strategy may use to what they do."""


def rematerialized(
    layer: Callable[..., Any], name: str, *, prevent_cse: bool
) -> Callable[..., Any]:
    """Returns ``layer`` with the policy ``name`` on its backward pass.

    Args:
        layer: A pure function of arrays.
        name: A key of `REMAT`.
        prevent_cse: True outside a loop, where XLA would otherwise find the two copies of
            the forward pass and merge them, which undoes the policy.

    Raises:
        ConfigError: There is no such policy.
    """
    remat = pick(REMAT, name, "remat policy")
    if remat.policy is None:
        return layer
    return jax.checkpoint(layer, policy=remat.policy, prevent_cse=prevent_cse)
