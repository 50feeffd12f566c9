"""Where data comes from: a record per stage, chained by content hashes (SHA-256)."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from spmdlab.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """What one stage made of what."""

    stage: str
    version: str
    """The rule it followed, in words that change when the rule does."""

    inputs: tuple[str, ...]
    """Hashes of what it was given: the outputs of stages before it."""

    output: str
    """Hash of the content it made."""

    counts: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Returns the record in the types JSON has."""
        return dataclasses.asdict(self) | {"inputs": list(self.inputs)}


def lineage_from_json(records: object) -> tuple[Lineage, ...]:
    """Returns the chain that a list of `Lineage.to_json` describes.

    Raises:
        ConfigError: It is no such list.
    """
    try:
        return tuple(Lineage(**record | {"inputs": tuple(record["inputs"])}) for record in records)
    except (TypeError, KeyError) as error:
        raise ConfigError(f"no lineage, which is a list of one record per stage: {error}") from None


def content_hash(array: np.ndarray) -> str:
    """Returns the hash of an array's type, shape and values, whatever the machine's byte order."""
    portable = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    digest = hashlib.sha256(f"{portable.dtype.str} {array.shape}\n".encode())
    digest.update(portable.data if portable.size else b"")
    return digest.hexdigest()


def json_hash(value: object) -> str:
    """Returns the hash of anything JSON can say, of which the order of dict keys is no part."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def broken_links(chain: Sequence[Lineage]) -> list[str]:
    """Returns a sentence for each input that no earlier stage of the chain has made."""
    made: set[str] = set()
    found = []
    for record in chain:
        found += [
            f"{record.stage} reads {each[:12]}, which no stage before it made"
            for each in record.inputs
            if each not in made
        ]
        made.add(record.output)
    return found


def first_difference(before: Sequence[Lineage], now: Sequence[Lineage]) -> str | None:
    """Returns the first stage that differs and why, as far as the records tell; None if none does.

    A stage is to blame whose rule changed, or whose output changed while its inputs did not.
    """
    old: Mapping[str, Lineage] = {record.stage: record for record in before}
    for record in now:
        if record.stage not in old:
            return f"{record.stage}: not in the earlier lineage"
        past = old[record.stage]
        if past.version != record.version:
            return f"{record.stage}: its rule was {past.version!r} and is {record.version!r}"
        if past.output != record.output:
            same = past.inputs == record.inputs
            counts = _changed_counts(past.counts, record.counts)
            what = (
                "the source changed"
                if not record.inputs
                else (
                    "same input and same rule, another output: its code changed"
                    if same
                    else "another input"
                )
            )
            return (
                f"{record.stage}: {what} ({past.output[:12]} -> {record.output[:12]}"
                f"{'; ' if counts else ''}{counts})"
            )
    missing = [stage for stage in old if stage not in {record.stage for record in now}]
    return f"{missing[0]}: no longer there" if missing else None


def _changed_counts(before: Mapping[str, int], now: Mapping[str, int]) -> str:
    names: Iterable[str] = dict.fromkeys([*before, *now])
    return ", ".join(
        f"{name} {before.get(name)} -> {now.get(name)}"
        for name in names
        if before.get(name) != now.get(name)
    )
