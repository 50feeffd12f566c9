"""The interface every parallelism implements, and the checks they share."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, Protocol, runtime_checkable

from spmdlab.errors import ConfigError

Rules = Mapping[str, tuple[str, ...]]
"""Logical axis -> mesh axes its dim is split over, outermost first.  ``()``: replicated."""


Method = Literal["ring", "all_to_all"]
"""How attention reaches tokens on other devices; see `spmdlab.strategies.context.Context`."""

Order = Literal["zigzag", "contiguous"]
"""Which stretches of a sequence a device holds; see `spmdlab.strategies.context.Context`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SequenceSplit:
    """One sequence over several devices, and how attention reaches the others' tokens."""

    axis: str
    """Mesh axis; the rules split ``act_len`` over it, and over nothing else."""

    ways: int
    method: Method
    order: Order


@runtime_checkable
class Parallelism(Protocol):
    """One way to split work.  Frozen, hashable data: it holds no arrays and no mesh.

    A class of your own with these two methods is all it takes; there is no table to join.
    Five more are used where they exist: ``gradient_rules()`` and ``optimizer_rules()``, when
    gradients of weights, or optimizer state, are laid out differently from the weights;
    ``sequence_split()``, a `SequenceSplit`, when attention must reach tokens on other devices;
    ``pipeline_schedule()``, when it runs the layers as a pipeline over a mesh axis ``stage``; and
    ``text()``, the words that `strategy_from_text` should read back (default: ``axis=size``).
    """

    def axes(self) -> Mapping[str, int]:
        """The mesh axes it owns, with their sizes.

        Ours come first to last as in `spmdlab.axes.MESH_AXES`; an axis of another name stands
        just outside ``tensor``.
        """
        ...

    def rules(self) -> Rules:
        """The logical axes it claims.  An axis left out is not claimed, and free for others."""
        ...


def check_ways(name: str, ways: int) -> None:
    """Raises ConfigError unless ``ways`` can be the size of a mesh axis."""
    if isinstance(ways, bool) or not isinstance(ways, int) or ways < 1:
        raise ConfigError(f"{name}({ways!r}): the size of a mesh axis is a whole number, 1 or more")


def check_choice(name: str, option: str, value: object, choices: tuple[object, ...]) -> None:
    """Raises ConfigError unless ``value`` is one of ``choices``."""
    if value not in choices or isinstance(value, bool):
        known = ", ".join(repr(choice) for choice in choices)
        raise ConfigError(f"{name}: {option}={value!r} is unknown.  Known: {known}.")
