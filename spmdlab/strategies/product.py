"""A strategy: the product of parallelisms, and the choices that are compared along with them."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from spmdlab.axes import LOGICAL_AXES, mesh_order
from spmdlab.errors import ConfigError
from spmdlab.pipeline.schedule import Schedule
from spmdlab.strategies.base import Parallelism, Rules, SequenceSplit, check_ways

OptionValue = str | int | float | bool

MERGED_AXES = ("act_batch", "act_res_len")
"""Logical axes that several parallelisms may claim: their mesh axes split the dim one after
the other, outermost first.  Batch splitting adds up (data x fsdp), and so does splitting the
residual stream's tokens (context x tensor).  Any other axis claimed twice is refused."""

_NUMBER = re.compile(r"[+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?")


class Composable:
    """Gives a parallelism the ``*`` that composes it with others into a `Strategy`."""

    __slots__ = ()

    def __mul__(self, other: Parallelism | Strategy) -> Strategy:
        return as_strategy(self) * other

    def __rmul__(self, other: Parallelism | Strategy) -> Strategy:
        return as_strategy(other) * as_strategy(self)

    def with_options(self, **options: Any) -> Strategy:
        """A strategy of this parallelism alone, see `Strategy.with_options`."""
        return as_strategy(self).with_options(**options)


@dataclasses.dataclass(frozen=True, slots=True)
class Strategy:
    """What is compared: where dims go, what is recomputed, and how XLA is told to compile.

    Equal however it was written: ``a * b == b * a``.

    Raises:
        ConfigError: Two parallelisms own one mesh axis or claim one logical axis, or a value
            makes no sense.
    """

    parallelisms: tuple[Parallelism, ...]
    """In mesh order, outermost first."""
    remat: str = "none"
    """Name of a policy of `spmdlab.models.remat`."""
    accumulate: int = 1
    """Parts the global batch is cut into, their gradients added up before one update."""
    compiler_options: tuple[tuple[str, OptionValue], ...] = ()
    """XLA's options, by name."""

    def __post_init__(self) -> None:
        for part in self.parallelisms:
            _check_part(part)
        ordered = tuple(sorted(self.parallelisms, key=_place))
        object.__setattr__(self, "parallelisms", ordered)
        object.__setattr__(self, "compiler_options", _options(self.compiler_options))
        if not self.parallelisms:
            raise ConfigError("A strategy needs a parallelism; for one device, write Data(1).")
        if not isinstance(self.remat, str) or not re.fullmatch(r"[a-z]\w*", self.remat):
            raise ConfigError(f"remat={self.remat!r} is no name of a policy, like 'none' or 'full'")
        if isinstance(self.accumulate, bool) or not isinstance(self.accumulate, int):
            raise ConfigError(f"accumulate={self.accumulate!r} must be a whole number, 1 or more")
        if self.accumulate < 1:
            raise ConfigError(f"accumulate={self.accumulate} must be 1 or more; 1 turns it off")
        self._check_axes()
        for of in _ALL_RULES:
            self._merge(of)
        self._check_sequence()

    def _check_axes(self) -> None:
        """Refuses a mesh axis that two parallelisms own."""
        owners: dict[str, Parallelism] = {}
        for part in self.parallelisms:
            for axis in part.axes():
                if axis in owners:
                    raise ConfigError(
                        f"{owners[axis]} and {part} both own mesh axis {axis!r}; keep one of them."
                    )
                owners[axis] = part

    def _check_sequence(self) -> None:
        """Refuses lengths that attention, which walks one axis, could not put together."""
        split = self.sequence_split
        if split and (found := self.rules()["act_len"]) != (split.axis,):
            raise ConfigError(
                f"{self}: sequence_split() names mesh axis {split.axis!r}, but 'act_len' is "
                f"split over {', '.join(found) or 'none'}; make them the same."
            )

    @property
    def sequence_split(self) -> SequenceSplit | None:
        """How sequences are split through attention; None: they are whole on each device."""
        found = [
            part.sequence_split() for part in self.parallelisms if hasattr(part, "sequence_split")
        ]
        return next((split for split in found if split is not None and split.ways > 1), None)

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Mesh axis -> size, outermost first."""
        sizes = {axis: n for part in self.parallelisms for axis, n in part.axes().items()}
        return {axis: sizes[axis] for axis in sorted(sizes, key=mesh_order)}

    @property
    def num_devices(self) -> int:
        """Devices the mesh needs."""
        return math.prod(self.mesh_axes.values())

    def rules(self) -> Rules:
        """Where every logical axis goes, of weights and activations.

        Complete over `spmdlab.axes.LOGICAL_AXES`: ``()`` says that a dim stays whole.
        ``act_expert_batch``, unless claimed, is ``act_batch`` less what experts are split over.
        """
        return self._merge(_rules)

    def gradient_rules(self) -> Rules:
        """The same for gradients of weights, which ZeRO-2 splits while the weights stay whole."""
        return self._merge(_gradient_rules)

    def optimizer_rules(self) -> Rules:
        """The same for optimizer state, the one thing that ZeRO-1 splits."""
        return self._merge(_optimizer_rules)

    @property
    def pipeline(self) -> Schedule | None:
        """The schedule of its pipeline; None if it has none."""
        found = [s() for p in self.parallelisms if (s := getattr(p, "pipeline_schedule", None))]
        return found[0] if found else None

    def claims(self) -> list[tuple[Parallelism, Rules]]:
        """Per parallelism, the logical axes it claims for weights or what belongs to them."""
        return [
            (part, {axis: to for of in _ALL_RULES for axis, to in of(part).items()})
            for part in self.parallelisms
        ]

    def _merge(self, rules_of: Callable[[Parallelism], Rules]) -> dict[str, tuple[str, ...]]:
        merged: dict[str, tuple[str, ...]] = dict.fromkeys(LOGICAL_AXES, ())
        claimed: dict[str, Parallelism] = {}
        for part in self.parallelisms:
            for axis, mesh_axes in rules_of(part).items():
                if not mesh_axes:
                    continue
                if axis in claimed and axis not in MERGED_AXES:
                    raise ConfigError(
                        f"{claimed[axis]} and {part} both claim logical axis {axis!r}; only "
                        f"{' and '.join(MERGED_AXES)} can be split by several parallelisms."
                    )
                claimed[axis] = part
                joined = (*merged.get(axis, ()), *mesh_axes)
                merged[axis] = tuple(sorted(joined, key=mesh_order))
        if "act_expert_batch" not in claimed:
            # Follows from the batch, so that a parallelism that splits it need not know experts.
            merged["act_expert_batch"] = tuple(
                axis for axis in merged["act_batch"] if axis not in merged["act_expert"]
            )
        return merged

    def with_options(
        self,
        *,
        remat: str | None = None,
        accumulate: int | None = None,
        compiler_options: Mapping[str, OptionValue]
        | Iterable[tuple[str, OptionValue]]
        | None = None,
    ) -> Strategy:
        """The same parallelisms with other choices; what is None stays as it is."""
        changes = {"remat": remat, "accumulate": accumulate, "compiler_options": compiler_options}
        given = {name: value for name, value in changes.items() if value is not None}
        return dataclasses.replace(self, **given)  # type: ignore[arg-type]

    def __mul__(self, other: Parallelism | Strategy) -> Strategy:
        other = as_strategy(other)
        both = {"parallelisms": (*self.parallelisms, *other.parallelisms)}
        for name in ("remat", "accumulate", "compiler_options"):
            both[name] = _either(name, getattr(self, name), getattr(other, name))
        return Strategy(**both)  # type: ignore[arg-type]

    def __rmul__(self, other: Parallelism | Strategy) -> Strategy:
        return as_strategy(other) * self

    def __str__(self) -> str:
        words = [_text(part) for part in self.parallelisms]
        if self.remat != "none":
            words.append(f"remat={self.remat}")
        if self.accumulate != 1:
            words.append(f"accumulate={self.accumulate}")
        words += [f"{name}={_option_text(value)}" for name, value in self.compiler_options]
        return " ".join(words)


def as_strategy(parts: object) -> Strategy:
    """Takes a `Strategy`, or one `Parallelism` on its own.

    Raises:
        ConfigError: It is neither.
    """
    if isinstance(parts, Strategy):
        return parts
    if isinstance(parts, Parallelism) and not isinstance(parts, type):
        return Strategy((parts,))
    hint = "  Use strategy_from_text for text." if isinstance(parts, str) else ""
    if isinstance(parts, type):
        hint = f"  Give it a size: {parts.__name__}(8)."
    raise ConfigError(f"{parts!r} is no strategy: it needs axes() and rules().{hint}")


def option_value(text: str) -> OptionValue:
    """Reads the value of a compiler option.

    >>> [option_value(text) for text in ("true", "-2", "0.5", "auto")]
    [True, -2, 0.5, 'auto']
    """
    if text in ("true", "True", "false", "False"):
        return text.lower() == "true"
    if not _NUMBER.fullmatch(text):
        return text
    number = float(text) if set(text) & set(".eE") else int(text)
    return number if math.isfinite(number) else text


def _option_text(value: OptionValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _options(
    options: Mapping[str, OptionValue] | Iterable[tuple[str, OptionValue]],
) -> tuple[tuple[str, OptionValue], ...]:
    """Sorted by name and typed, so that equal options make equal strategies."""
    pairs = list(options.items()) if isinstance(options, Mapping) else list(options)
    found: dict[str, OptionValue] = {}
    for name, value in pairs:
        if not isinstance(name, str) or not re.fullmatch(r"xla_\w+", name):
            raise ConfigError(f"compiler option {name!r} is no XLA option: those begin with 'xla_'")
        if not isinstance(value, str | int | float) or (
            isinstance(value, float) and not math.isfinite(value)
        ):
            raise ConfigError(f"compiler option {name}={value!r} must be text, a number or a bool")
        if isinstance(value, str) and (not value or re.search(r"\s", value)):
            raise ConfigError(f"compiler option {name}={value!r} must not be empty or hold spaces")
        if name in found:
            raise ConfigError(f"compiler option {name} is given twice")
        found[name] = option_value(value) if isinstance(value, str) else value
    return tuple(sorted(found.items()))


def _either(name: str, one: object, other: object) -> object:
    """The choice of two factors of a product: the one that differs from the default."""
    if name == "compiler_options":
        merged = dict(one)  # type: ignore[call-overload]
        for option, value in other:  # type: ignore[attr-defined]
            if merged.setdefault(option, value) != value:
                raise ConfigError(
                    f"The factors disagree: {option} is {merged[option]!r} and {value!r}."
                )
        return tuple(merged.items())
    default = {"remat": "none", "accumulate": 1}[name]
    if one not in (default, other) and other != default:
        raise ConfigError(f"The factors disagree: {name} is {one!r} and {other!r}.")
    return other if one == default else one


def _place(part: Parallelism) -> tuple[tuple[int, str], ...]:
    return tuple(sorted(map(mesh_order, part.axes())))


def _text(part: Parallelism) -> str:
    own = getattr(part, "text", None)
    return own() if own else " ".join(f"{axis}={size}" for axis, size in part.axes().items())


def _rules(part: Parallelism) -> Rules:
    return part.rules()


def _gradient_rules(part: Parallelism) -> Rules:
    return getattr(part, "gradient_rules", part.rules)()


def _optimizer_rules(part: Parallelism) -> Rules:
    return getattr(part, "optimizer_rules", part.rules)()


_ALL_RULES = (_rules, _gradient_rules, _optimizer_rules)


@functools.lru_cache(maxsize=1024)
def _check_sound(part: Parallelism) -> None:
    axes = part.axes()
    for axis, size in axes.items():
        if not isinstance(axis, str) or not re.fullmatch(r"[a-z]\w*", axis):
            raise ConfigError(f"{part}: mesh axis {axis!r} must be a lower-case name")
        check_ways(f"{part}: {axis}=", size)
    if not axes:
        raise ConfigError(f"{part} owns no mesh axis; axes() must name at least one.")
    for of in _ALL_RULES:
        for logical, mesh_axes in of(part).items():
            if isinstance(mesh_axes, str) or (unknown := [m for m in mesh_axes if m not in axes]):
                bad = mesh_axes if isinstance(mesh_axes, str) else unknown[0]
                raise ConfigError(
                    f"{part} maps {logical!r} to {bad!r}; a rule is a tuple of the mesh axes the "
                    f"parallelism owns: {', '.join(axes)}."
                )


def _check_part(part: object) -> None:
    """Raises ConfigError unless ``part`` is a parallelism we can compose and compare."""
    if not isinstance(part, Parallelism):
        raise ConfigError(f"{part!r} is no parallelism: it needs axes() and rules().")
    try:
        _check_sound(part)
    except TypeError as error:
        raise ConfigError(f"{part!r} must be frozen and hashable ({error}).") from error
