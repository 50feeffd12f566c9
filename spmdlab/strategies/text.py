"""Strategies as text, for the command line: ``"fsdp=4 tensor=2 sequence=on remat=full"``."""

import dataclasses
import re
from collections.abc import Callable, Mapping

from spmdlab.errors import ConfigError
from spmdlab.lookup import pick
from spmdlab.strategies.base import Parallelism
from spmdlab.strategies.context import Context
from spmdlab.strategies.data import Data
from spmdlab.strategies.expert import Expert
from spmdlab.strategies.fsdp import Fsdp
from spmdlab.strategies.pipeline import Pipeline
from spmdlab.strategies.product import Strategy, option_value
from spmdlab.strategies.spatial import Spatial
from spmdlab.strategies.tensor import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """How a parallelism is written: ``axis=ways``, then its options, each a word."""

    make: Callable[..., Parallelism]
    """Takes the ways, then the options by name."""
    options: Mapping[str, type] = dataclasses.field(default_factory=dict)
    """Option -> what its value is read as, ``int`` or ``str``."""


PARALLELISMS: dict[str, Words] = {
    "data": Words(make=Data),
    "stage": Words(make=Pipeline, options={"schedule": str, "microbatches": int, "repeats": int}),
    "fsdp": Words(make=Fsdp, options={"zero": int}),
    "expert": Words(make=Expert),
    "context": Words(make=Context, options={"method": str, "order": str}),
    "spatial": Words(make=Spatial),
    "tensor": Words(make=Tensor, options={"sequence": str, "kv": str}),
}
"""Mesh axis -> the parallelism that owns it.  A new one of ours adds a line here."""


def strategy_from_text(text: str, parallelisms: Mapping[str, Words] = PARALLELISMS) -> Strategy:
    """Reads what ``str(strategy)`` writes.  The order of the words does not matter.

    Args:
        text: Words ``name=value``: a parallelism and its ways, an option of one of them,
            ``remat``, ``accumulate``, or an option of XLA (``xla_...``).
        parallelisms: What can be named; add your own to read it from text.

    Raises:
        ConfigError: A word is unknown, twice there, or makes no sense.

    >>> str(strategy_from_text("remat=full tensor=2 fsdp=4"))
    'fsdp=4 tensor=2 remat=full'
    """
    words = _words(text)
    parts = []
    common: dict[str, object] = {}
    for axis, how in parallelisms.items():
        if axis not in words:
            continue
        ways = _number(axis, words.pop(axis))
        given = {
            name: _read(name, words.pop(name), kind)
            for name, kind in how.options.items()
            if name in words
        }
        parts.append(how.make(ways, **given))
    if "remat" in words:
        common["remat"] = words.pop("remat")
    if "accumulate" in words:
        common["accumulate"] = _number("accumulate", words.pop("accumulate"))
    xla = {name: option_value(words.pop(name)) for name in list(words) if name.startswith("xla_")}
    for name in words:
        _refuse(name, parallelisms)
    if not parts:
        raise ConfigError(
            f"Strategy {text!r} names no parallelism.  Known: {', '.join(parallelisms)}; "
            "for one device, write data=1."
        )
    return Strategy(tuple(parts), compiler_options=tuple(xla.items()), **common)  # type: ignore[arg-type]


def _words(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals or not name or not value:
            raise ConfigError(
                f"Strategy {text!r}: {word!r} is not of the form name=value, like fsdp=4 tensor=2."
            )
        if name in found:
            raise ConfigError(f"Strategy {text!r}: {name!r} is there twice.")
        found[name] = value
    return found


def _number(name: str, value: str) -> int:
    if not re.fullmatch(r"\d+", value):
        raise ConfigError(f"{name}={value}: {name} takes a whole number, 1 or more.")
    return int(value)


def _read(name: str, value: str, kind: type) -> int | str:
    return _number(name, value) if kind is int else value


def _refuse(name: str, parallelisms: Mapping[str, Words]) -> None:
    """Raises ConfigError for a word that nothing took."""
    for axis, how in parallelisms.items():
        if name in how.options:
            raise ConfigError(f"{name}= is an option of {axis}; add {axis}=N, or leave it out.")
    options = [option for how in parallelisms.values() for option in how.options]
    known = [*parallelisms, *options, "remat", "accumulate", "xla_..."]
    pick(dict.fromkeys(known), name, "word in a strategy")
