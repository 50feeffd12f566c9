"""The sharding plan: every array's partition spec and what it takes on a device."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmdlab.axes import LOGICAL_AXES
from spmdlab.errors import ShardingError
from spmdlab.strategies.base import Parallelism
from spmdlab.strategies.product import Strategy, as_strategy
from spmdlab.strategies.resolve import partition_spec, spec_problems

Role = Literal["param", "optimizer", "batch", "step"]
ROLES: tuple[Role, ...] = ("param", "optimizer", "batch", "step")

_SHOWN = 3
"""Problems written out in one error; the rest are counted."""


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayAxes:
    """One array a step takes in: its size, and what its dims mean."""

    path: str
    """Dotted name, like ``params.layers.mlp.gate``; no two arrays share one."""
    shape: tuple[int, ...]
    """Global."""
    dtype: str
    logical_axes: tuple[str | None, ...]
    """One per dim; None for a dim no rule may split."""
    role: Role

    @property
    def global_bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """Where every array goes under one strategy."""

    specs: Mapping[str, PartitionSpec]
    """Path -> partition spec, one entry per dim."""
    local_shapes: Mapping[str, tuple[int, ...]]
    """Path -> shape of one device's piece."""
    local_bytes: Mapping[str, int]
    """Role -> bytes on each device; every role is there."""
    replicated: Mapping[str, tuple[str, ...]]
    """Path -> mesh axes longer than 1 over which the array is copied; every path is there."""
    unmatched: tuple[str, ...]
    """Claims on weights that no array here has a dim for, as ``logical -> mesh axes``."""


def plan(
    arrays: Iterable[ArrayAxes],
    strategy: Strategy | Parallelism,
    *,
    activation_axes: Iterable[str] = (),
) -> ShardingPlan:
    """Resolves every array under a strategy, or says all that stands in the way.

    Args:
        arrays: Parameters, optimizer state, batch and step counter.
        strategy: A strategy or a lone parallelism.
        activation_axes: Logical axes that activations have and no array has, so that a rule
            for one of them counts as matched.

    Raises:
        ShardingError: An array cannot be laid out (see `partition_spec`); or a parallelism of
            more than one device that claims dims of weights splits none of them (one that claims
            dims of activations only: none of those), so that its devices would repeat each
            other's work; or a rule for a logical axis outside our vocabulary matches nothing (a
            typing error, most likely).  One line: three problems, and how many more; a problem
            that several arrays share counts once, under the name of a parameter if there is one.

    The rules are checked against what is given: those for weights when there are parameters,
    those for activations when there are batch arrays or ``activation_axes`` as well.
    """
    strategy = as_strategy(strategy)
    arrays = list(arrays)
    mesh_shape = strategy.mesh_axes
    rules_of = {role: strategy.rules() for role in ROLES}
    rules_of["optimizer"] = strategy.optimizer_rules()
    problems = _path_problems(arrays)
    alike: dict[str, list[str]] = {}
    known = [array for array in arrays if array.role in ROLES]
    for array in sorted(known, key=lambda array: ROLES.index(array.role)):
        # Moments have their weight's problem, and keys their values': say it once.
        for problem in spec_problems(
            "", array.shape, array.logical_axes, rules_of[array.role], mesh_shape
        ):
            alike.setdefault(problem, []).append(array.path)
    problems += [_named(problem, paths) for problem, paths in alike.items()]
    there = {axis for array in arrays for axis in array.logical_axes if axis}
    activation_axes = set(activation_axes)
    roles = {array.role for array in arrays}
    problems += _claim_problems(
        strategy,
        there | activation_axes,
        weights="param" in roles,
        activations=bool(activation_axes) or "batch" in roles,
    )
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        shown = "; ".join(problem.rstrip(".") for problem in problems[:_SHOWN])
        raise ShardingError(f"{strategy}: {shown}{more}.")
    specs = {
        array.path: partition_spec(
            array.path, array.shape, array.logical_axes, rules_of[array.role], mesh_shape
        )
        for array in arrays
    }
    local_shapes = {
        array.path: local_shape(array.shape, specs[array.path], mesh_shape) for array in arrays
    }
    local_bytes = dict.fromkeys(ROLES, 0)
    for array in arrays:
        itemsize = jnp.dtype(array.dtype).itemsize
        local_bytes[array.role] += math.prod(local_shapes[array.path]) * itemsize
    return ShardingPlan(
        specs=specs,
        local_shapes=local_shapes,
        local_bytes=dict(local_bytes),
        replicated={path: _copied_over(spec, mesh_shape) for path, spec in specs.items()},
        unmatched=tuple(_unmatched(strategy, there)),
    )


def local_shape(
    shape: Sequence[int], spec: PartitionSpec, mesh_shape: Mapping[str, int]
) -> tuple[int, ...]:
    """Shape of one device's piece; ``spec`` divides ``shape`` evenly.

    >>> local_shape((8, 6, 4), PartitionSpec(("data", "fsdp"), None), {"data": 2, "fsdp": 4})
    (1, 6, 4)
    """
    ways = [math.prod(mesh_shape[axis] for axis in _axes(entry)) for entry in spec]
    ways += [1] * (len(shape) - len(ways))
    return tuple(size // n for size, n in zip(shape, ways, strict=True))


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def _copied_over(spec: PartitionSpec, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    used = {axis for entry in spec for axis in _axes(entry)}
    return tuple(axis for axis, size in mesh_shape.items() if size > 1 and axis not in used)


def _named(problem: str, paths: Sequence[str]) -> str:
    """A problem of all arrays at ``paths``, under the name of the first."""
    others = f" and {len(paths) - 1} more like it" if len(paths) > 1 else ""
    return f"{paths[0]}{others}{problem}"


def _path_problems(arrays: Sequence[ArrayAxes]) -> list[str]:
    seen: set[str] = set()
    found = []
    for array in arrays:
        if array.path in seen:
            found.append(f"{array.path}: two arrays have this path; give each its own.")
        seen.add(array.path)
        if array.role not in ROLES:
            found.append(f"{array.path}: unknown role {array.role!r}; known: {', '.join(ROLES)}.")
    return found


def _claim_problems(
    strategy: Strategy, there: set[str], *, weights: bool, activations: bool
) -> list[str]:
    """Parallelisms that split nothing they should, and rules for axes nobody has.

    ``weights`` and ``activations`` say whether ``there`` shows the dims of these.
    """
    found = []
    for part, claims in strategy.claims():
        split = [logical for logical, mesh_axes in claims.items() if mesh_axes]
        of_weights = [name for name in split if not is_activation(name)]
        seen = of_weights if weights and of_weights else split if weights and activations else []
        if unknown := [name for name in seen if name not in LOGICAL_AXES and name not in there]:
            found.append(
                f"{part} has a rule for {unknown[0]!r}, which no array has a dim for; dims here "
                f"are {', '.join(sorted(there))}."
            )
        elif seen and math.prod(part.axes().values()) > 1 and not there & set(seen):
            found.append(
                f"{part} splits nothing it should: no array has a dim "
                f"{' or '.join(map(repr, seen))}; dims here are {', '.join(sorted(there))}."
            )
    return found


def is_activation(logical_axis: str) -> bool:
    """Whether a logical axis names a dim of activations, by its prefix."""
    return logical_axis.startswith("act_")


def _unmatched(strategy: Strategy, there: set[str]) -> list[str]:
    return [
        f"{logical} -> {', '.join(mesh_axes)}"
        for _, claims in strategy.claims()
        for logical, mesh_axes in claims.items()
        if mesh_axes and logical not in there and not is_activation(logical)
    ]
