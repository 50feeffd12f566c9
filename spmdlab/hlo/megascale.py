"""Collectives between slices, as TPU programs print them.

A program compiled for several slices covers one: its replica groups count the positions of a
slice.  What crosses to the others stands as a host transfer, a ``send`` and a ``recv`` that the
megascale runtime turns into one collective over DCN; a rendezvous name joins the two.
"""

import dataclasses
import re

from spmdlab.hlo.program import Computation, Instruction

_TYPE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]+)"')
_KINDS = {"ONE_TO_ONE": "collective-permute", "PERMUTE": "collective-permute"}


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """One end of a collective between slices."""

    kind: str
    """As an HLO opcode: all-reduce, all-gather, reduce-scatter, all-to-all."""
    rendezvous: str


def transfer(instruction: Instruction) -> Transfer | None:
    """The collective that a send or recv belongs to; None if it is no megascale transfer."""
    if instruction.opcode not in ("send", "recv"):
        return None
    attributes = instruction.attributes.get("frontend_attributes", "")
    kind, name = _TYPE.search(attributes), _RENDEZVOUS.search(attributes)
    if not kind or not name:
        return None
    return Transfer(_KINDS.get(kind[1], kind[1].lower().replace("_", "-")), name[1])


def awaited(scope: Computation, done: Instruction) -> Transfer | None:
    """The collective whose result a recv-done waits for."""
    if done.opcode != "recv-done" or not done.operands:
        return None
    return transfer(scope.by_name[done.operands[0]])


def sent_value(scope: Computation, done: Instruction) -> Instruction | None:
    """The value that went into the collective whose result a recv-done waits for."""
    found = awaited(scope, done)
    if found is None:
        return None
    for instruction in scope.instructions:
        if instruction.opcode == "send" and transfer(instruction) == found:
            return scope.by_name[instruction.operands[0]]
    return None
