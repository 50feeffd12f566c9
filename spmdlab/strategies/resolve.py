"""Turns logical axes into a PartitionSpec, refusing anything ambiguous."""

import math
from collections.abc import Iterator, Mapping, Sequence

from jax.sharding import PartitionSpec

from spmdlab.axes import LOGICAL_AXES
from spmdlab.errors import ShardingError
from spmdlab.strategies.base import Rules

_KV_AXES = ("kv_heads", "act_kv_heads")


def partition_spec(
    path: str,
    shape: Sequence[int],
    logical_axes: Sequence[str | None],
    rules: Rules,
    mesh_shape: Mapping[str, int],
) -> PartitionSpec:
    """Returns the spec of one array, one entry per dim; None where a dim stays whole.

    Args:
        path: The array's dotted name, used only in messages.
        shape: Its global shape.
        logical_axes: One logical axis per dim of ``shape``; None for a dim no rule may split.
        rules: See `spmdlab.strategies.base.Rules`.
        mesh_shape: Mesh axis -> number of devices along it.

    Raises:
        ShardingError: A logical axis has no rule, a rule names a mesh axis that the mesh does
            not have, a mesh axis would split two dims, a dim does not divide evenly, or there
            are not as many logical axes as dims.  One error lists everything wrong.

    >>> rules = {"embed": ("fsdp",), "mlp": ()}
    >>> tuple(partition_spec("w", (8, 6), ("embed", "mlp"), rules, {"fsdp": 4}))
    ('fsdp', None)
    """
    if found := list(spec_problems(path, shape, logical_axes, rules, mesh_shape)):
        raise ShardingError("  ".join(found))
    return PartitionSpec(*(_entry(rules[axis]) if axis else None for axis in logical_axes))


def _entry(mesh_axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return mesh_axes[0] if len(mesh_axes) == 1 else tuple(mesh_axes) or None


def spec_problems(
    path: str,
    shape: Sequence[int],
    logical_axes: Sequence[str | None],
    rules: Rules,
    mesh_shape: Mapping[str, int],
) -> Iterator[str]:
    """Everything that keeps the array from being laid out, one sentence each."""
    if len(shape) != len(logical_axes):
        yield (
            f"{path}: {len(logical_axes)} logical axes {_names(logical_axes)} for "
            f"{len(shape)} dims of shape {tuple(shape)}.  Name each dim once."
        )
        return
    taken: dict[str, tuple[int, str]] = {}
    for dim, (size, axis) in enumerate(zip(shape, logical_axes, strict=True)):
        if axis is None:
            continue
        where = f"{path}: dim {dim} {axis!r}"
        if axis not in rules:
            yield f"{where} has no rule: map it to () to replicate it.{_known(axis, rules)}"
            continue
        if missing := [m for m in rules[axis] if m not in mesh_shape]:
            yield (
                f"{where} is split over mesh axis {missing[0]!r}, which the mesh does not have.  "
                f"It has {', '.join(mesh_shape) or 'none'}."
            )
            continue
        for mesh_axis in rules[axis]:
            if mesh_axis in taken:
                other_dim, other = taken[mesh_axis]
                yield (
                    f"{where} and dim {other_dim} {other!r} are both split over mesh axis "
                    f"{mesh_axis!r}: it can split one dim of an array."
                )
            taken.setdefault(mesh_axis, (dim, axis))
        ways = math.prod(mesh_shape[m] for m in rules[axis])
        if size % ways:
            over = " x ".join(f"{m}={mesh_shape[m]}" for m in rules[axis])
            yield f"{where} of size {size} does not divide {ways} ways over {over}." + _advice(
                axis, size, ways
            )


def _advice(axis: str, size: int, ways: int) -> str:
    """The values nearest to what was asked that would work."""
    below = size - size % ways
    sizes = f"{below} and {below + ways}" if below else str(ways)
    fewer = next(n for n in range(min(ways, size), 0, -1) if size % n == 0) if size else 1
    text = f"  Nearest sizes that do: {sizes}.  Most ways that divide {size}: {fewer}."
    if axis in _KV_AXES:
        text += (
            "  A head is never cut: to keep every key and value head on every device, use "
            'kv="replicate" (as text, kv=replicate).'
        )
    return text


def _known(axis: str, rules: Rules) -> str:
    if axis in LOGICAL_AXES:
        return ""
    return f"  Axes with a rule: {', '.join(rules)}."


def _names(logical_axes: Sequence[str | None]) -> str:
    return f"({', '.join(map(str, logical_axes))})"
