"""Weights: how one is made, and how it goes from its layout at rest to its layout in use."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from spmdlab.strategies.base import SequenceSplit

Axes = tuple[str | None, ...]
Constrain = Callable[[jax.Array, Axes], jax.Array]
"""Lays an array out by the logical axes of its dims; None is a dim that stays whole."""

AXIS_IN_USE = {
    "embed": "act_embed",
    "mlp": "act_mlp",
    "heads": "act_heads",
    "kv_heads": "act_kv_heads",
    "head_dim": "act_head_dim",
    "vocab": "act_vocab",
    "norm": "act_embed",
    "expert": "act_expert",
    "router": "act_router",
}
"""A weight in use is laid out like the activations it meets.

So a dim split only to save memory (FSDP's) is gathered, and one split to share the work
(tensor parallelism's) stays split, without the model knowing which is which.
"""

GATHERED = "gathered"
"""Checkpoint name of all that can be had again by communication alone."""

PINNED = "pinned"
"""Checkpoint name of activations, in the dtype and the layout they are kept in."""

RESIDUAL: Axes = ("act_batch", "act_res_len", "act_embed")
INSIDE: Axes = ("act_batch", "act_len", "act_embed")


class Shards(Protocol):
    """What runs on each device's own part of arrays, where the partitioner cannot look inside."""

    sequence_split: SequenceSplit | None
    """How attention reaches tokens on other devices; None: sequences are whole."""

    def ways(self, axis: str) -> int:
        """Parts that the dims of a logical axis are split into."""
        ...

    def locally(
        self,
        function: Callable[..., Any],
        axes_in: Sequence[Axes],
        axes_out: Axes | list[Axes],
        *,
        checked: bool = True,
    ) -> Callable[..., Any]:
        """Returns ``function`` run on each device's parts.

        What it needs of other parts it fetches itself, over the axis of `sequence_split`.

        Args:
            function: Takes and returns parts of arrays.
            axes_in: Logical axes of each argument.
            axes_out: Of the result; a list says that there are several.
            checked: Whether JAX proves that what leaves whole is equal on all devices.  Kernels
                do not say over which axes their results vary, so there it cannot; within a
                pipeline all their arrays must then be split over the same mesh axes.
        """
        ...


def unconstrained(x: jax.Array, axes: Axes) -> jax.Array:
    """Leaves ``x`` as it is: the layout on one device."""
    del axes
    return x


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model lays out what it computes.  Holds functions, so the model sees no mesh."""

    constrain: Constrain = unconstrained
    """Lays out activations, and weights."""

    constrain_gradient: Constrain | None = None
    """Lays out gradients of weights; None: as the weights."""

    shards: Shards | None = None
    """Runs functions on each device's own part; None: there is one device."""

    def ways(self, axis: str) -> int:
        """Parts that the dims of a logical axis are split into."""
        return self.shards.ways(axis) if self.shards else 1

    @property
    def sequence_split(self) -> SequenceSplit | None:
        """How attention reaches tokens on other devices; None: sequences are whole."""
        return self.shards.sequence_split if self.shards else None

    def locally(
        self,
        function: Callable[..., Any],
        axes_in: Sequence[Axes],
        axes_out: Axes | list[Axes],
        *,
        checked: bool = True,
    ) -> Callable[..., Any]:
        """Returns ``function`` run on each device's parts of its arguments; see `Shards`."""
        if self.shards is None:
            return function
        return self.shards.locally(function, axes_in, axes_out, checked=checked)

    def turned(self, x: jax.Array, axes: Axes, axes_back: Axes) -> jax.Array:
        """Lays ``x`` out by ``axes``, and its cotangent, on the way back, by ``axes_back``."""
        return _relayout(x, self.constrain, axes, self.constrain, axes_back)

    def activation(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Pins an activation, and its cotangent, to the layout of its logical axes."""
        return checkpoint_name(self.constrain(x, axes), PINNED)

    def enter(self, x_BTD: jax.Array) -> jax.Array:
        """From the residual stream into attention, MLP or head.

        The two directions differ: with the residual stream split by length, forward
        gathers and backward reduce-scatters; a plain constraint would reduce the whole
        cotangent first, and slice it afterwards.
        """
        # Saved here, before the gather; pinned again, or the saved value drifts to gathered.
        x_BTD = checkpoint_name(x_BTD, PINNED)
        x_BTD = _relayout(x_BTD, self.constrain, RESIDUAL, self.constrain, RESIDUAL)
        y = _relayout(x_BTD, self.constrain, INSIDE, self.constrain, RESIDUAL)
        return checkpoint_name(y, GATHERED)

    def leave(self, x_BTD: jax.Array) -> jax.Array:
        """From attention, MLP or lookup back to the residual stream."""
        y = _relayout(x_BTD, self.constrain, RESIDUAL, self.constrain, INSIDE)
        return checkpoint_name(y, PINNED)

    def weight(self, module: nnx.Module, name: str, dtype: str) -> jax.Array:
        """Returns the weight ``module.name`` in ``dtype``, laid out for use.

        The cast comes first and is pinned there, so that half the bytes are gathered and
        half are reduced.  The gradient goes straight to the layout at rest: a
        reduce-scatter, inside the loop over layers.
        """
        param = getattr(module, name)
        value = param[...]
        # A scan over layers takes the first dim away from the array, not from its names.
        at_rest = tuple(param.logical_axes)[-value.ndim :]
        in_use = tuple(AXIS_IN_USE[axis] if axis else None for axis in at_rest)
        gradient = self.constrain_gradient or self.constrain
        with jax.named_scope(name):
            cast = _relayout(value.astype(dtype), self.constrain, at_rest, gradient, at_rest)
            used = _relayout(cast, self.constrain, in_use, gradient, at_rest)
            return checkpoint_name(used, GATHERED)

    def weight_gradient(self, module: nnx.Module, name: str, d_used: jax.Array) -> jax.Array:
        """Returns the gradient of a weight from that of `weight`, as the backward pass does."""
        param = getattr(module, name)
        gradient = self.constrain_gradient or self.constrain
        with jax.named_scope(name):
            return gradient(d_used, tuple(param.logical_axes)).astype(param.dtype)

    def product(self, equation: str, x: jax.Array, module: nnx.Module, name: str) -> jax.Array:
        """Returns ``einsum(equation, x, module.name)`` in the dtype of ``x``.

        The product, its gradients and what they move stand under the weight's name in the
        compiled program.
        """
        weight = self.weight(module, name, str(x.dtype))
        with jax.named_scope(name):
            return jnp.einsum(equation, x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _relayout(
    x: jax.Array, constrain: Constrain, axes: Axes, constrain_back: Constrain, axes_back: Axes
) -> jax.Array:
    """Lays ``x`` out by ``axes``, and its cotangent by ``axes_back``."""
    del constrain_back, axes_back
    return constrain(x, axes)


def _relayout_fwd(
    x: jax.Array, constrain: Constrain, axes: Axes, constrain_back: Constrain, axes_back: Axes
) -> tuple[jax.Array, None]:
    del constrain_back, axes_back
    return constrain(x, axes), None


def _relayout_bwd(
    constrain: Constrain,
    axes: Axes,
    constrain_back: Constrain,
    axes_back: Axes,
    residuals: None,
    cotangent: jax.Array,
) -> tuple[jax.Array]:
    del constrain, axes, residuals
    return (constrain_back(cotangent, axes_back),)


_relayout.defvjp(_relayout_fwd, _relayout_bwd)


def matrix(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: Axes, *, fan_in: int, dtype: str
) -> nnx.Param:
    """Returns a parameter drawn evenly from a range round 0, with variance ``1 / fan_in``.

    Evenly, because the draw is then the same to the bit however the array is split: random
    bits are turned into numbers by exact operations and one product.  A normal draw goes
    through a polynomial, whose last bits change with the layout.

    ``axes`` names each dim.  The name is metadata of our own, so Flax does nothing with it
    behind our back.
    """
    unit = jax.random.uniform(rngs.params(), shape, dtype, minval=-1, maxval=1)
    return nnx.Param(unit * (3 / fan_in) ** 0.5, logical_axes=axes)
