"""Finds the collectives of a program, each logical one once.

One collective can be printed several ways: an opcode (``all-gather``), a pair of opcodes
(``all-gather-start``/``-done``), an async wrapper that calls a computation, a TPU fusion that
holds an all-reduce and a dynamic-slice (a reduce-scatter), or a TPU async collective fusion:
a start fusion, compute fusions that carry the same collective along, and a done fusion, all
with one ``channel_id``.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from spmdlab.hlo.groups import Groups, replica_groups, source_target_pairs
from spmdlab.hlo.megascale import awaited, transfer
from spmdlab.hlo.program import Computation, Instruction, Program

COLLECTIVES = frozenset(
    "all-gather all-reduce reduce-scatter all-to-all ragged-all-to-all collective-permute "
    "collective-broadcast send recv".split()
)
DMA_STARTS = frozenset(
    "copy-start slice-start dynamic-slice-start dynamic-update-slice-start".split()
)
_WRAPPERS = frozenset(
    f"{kind}-{part}" for kind in ("async", "call") for part in ("start", "update", "done")
)
_SLICES = frozenset({"dynamic-slice", "slice"})

Part = Literal["sync", "start", "done", "none"]


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One logical collective."""

    kind: str
    """all-gather, all-reduce, reduce-scatter, all-to-all, collective-permute, send or recv."""
    dtype: str
    """Element type on the wire; several are joined with "+"."""
    operand_bytes: int
    """Bytes that one device puts in."""
    result_bytes: int
    """Bytes that one device gets out."""
    groups: Groups
    """Replica groups, or the (source, target) pairs of a permute."""
    algorithm: str
    """What the compiler chose, as it prints it; "" where it does not say."""
    rendezvous: str = ""
    """Of a collective between slices: the name that joins its two ends.  It has no groups."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of the array concerned: the gathered, unscattered or exchanged array."""
        return max(self.operand_bytes, self.result_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Role:
    """How an instruction takes part in a collective."""

    part: Part
    collective: Collective | None = None
    inner: Instruction | None = None
    """The instruction that is the collective itself, when it stands inside a fusion."""


_NOT = Role("none")


class Collectives:
    """Answers, for any instruction of a program, which part of which collective it is."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._num_devices = max(program.num_partitions, program.num_replicas)
        self._inner: dict[str, dict[Instruction, Computation]] = {}
        # Channels whose collective runs through a TPU async collective fusion.
        self._async_channels = {
            inner.channel_id
            for computation in program.computations.values()
            for instruction in computation.instructions
            if self._async_marker(instruction) == "AsyncCollectiveStart"
            for _, inner in self._inside(instruction)
        }

    def role(self, computation: Computation, instruction: Instruction) -> Role:
        """The role of ``instruction`` (an instruction of ``computation``)."""
        opcode = instruction.opcode
        if opcode in ("send", "recv", "send-done", "recv-done"):
            between = self._between_slices(computation, instruction)
            if between is not None:
                return between
        if opcode in ("send", "recv"):
            return self._transfer(computation, instruction)
        if opcode in COLLECTIVES:
            return Role("sync", self._describe(computation, instruction, instruction, None))
        base, _, suffix = opcode.rpartition("-")
        if base in COLLECTIVES and suffix in ("start", "done"):
            if suffix == "done":
                return Role("done")
            return Role("start", self._describe(computation, instruction, instruction, None))
        if opcode in _WRAPPERS:
            return self._wrapper(computation, instruction, suffix)
        if opcode == "fusion":
            return self._fusion(computation, instruction)
        return _NOT

    def _transfer(self, computation: Computation, instruction: Instruction) -> Role:
        """A send or recv: it only starts one where something waits for its end."""
        if instruction.attributes.get("is_host_transfer") == "true":
            return _NOT
        done = f"{instruction.opcode}-done"
        users = computation.users.get(instruction.name, ())
        part: Part = "start" if any(user.opcode == done for user in users) else "sync"
        return Role(part, self._describe(computation, instruction, instruction, None))

    def _between_slices(self, computation: Computation, instruction: Instruction) -> Role | None:
        """The role in a collective over DCN; None if the instruction is in none."""
        if awaited(computation, instruction):
            return Role("done")
        if instruction.opcode == "send-done":  # what matters is the other end's answer
            sent = computation.by_name[instruction.operands[0]]
            return Role("none") if transfer(sent) else None
        found = transfer(instruction)
        if found is None or instruction.opcode == "recv":
            return Role("none") if found else None
        shape = computation.by_name[instruction.operands[0]].shape
        collective = Collective(
            kind=found.kind,
            dtype=shape.dtype,
            operand_bytes=shape.num_bytes,
            result_bytes=shape.num_bytes,
            groups=(),
            algorithm="megascale",
            rendezvous=found.rendezvous,
        )
        return Role("start", collective)

    def _wrapper(self, computation: Computation, instruction: Instruction, suffix: str) -> Role:
        start: Instruction = instruction
        for _ in range(64):  # follow done -> update -> start
            if start.called or not start.operands:
                break
            start = computation.by_name[start.operands[0]]
        inner = next(self._inside(start), None)
        if inner is None:
            return _NOT
        if suffix == "start":
            return self._found("start", computation, instruction, inner)
        return Role("done") if suffix == "done" else _NOT

    def _fusion(self, computation: Computation, instruction: Instruction) -> Role:
        inner = next(self._inside(instruction), None)
        if inner is None:
            return _NOT
        marker = self._async_marker(instruction)
        if marker == "AsyncCollectiveStart":
            return self._found("start", computation, instruction, inner)
        if marker == "AsyncCollectiveDone":
            return Role("done")
        if inner[1].channel_id in self._async_channels:
            return _NOT  # compute that carries the collective along
        return self._found("sync", computation, instruction, inner)

    def _found(
        self,
        part: Part,
        computation: Computation,
        instruction: Instruction,
        inner: tuple[Computation, Instruction],
    ) -> Role:
        collective = self._describe(computation, instruction, inner[1], inner[0])
        return Role(part, collective, inner[1])

    def carries(self, instruction: Instruction) -> bool:
        """Whether this is compute inside which an async collective proceeds."""
        return instruction.opcode == "fusion" and any(
            inner.channel_id in self._async_channels for _, inner in self._inside(instruction)
        )

    def _async_marker(self, instruction: Instruction) -> str:
        if instruction.opcode != "fusion" or not instruction.called:
            return ""
        for inner in self._program.computations[instruction.called[0]].instructions:
            if inner.custom_call_target.startswith("AsyncCollective"):
                return inner.custom_call_target
        return ""

    def _contains(self, computation: str) -> dict[Instruction, Computation]:
        """The collectives inside a computation and those it calls, with where they stand."""
        if computation in self._inner:
            return self._inner[computation]
        scope = self._program.computations[computation]
        found: dict[Instruction, Computation] = {}
        for instruction in scope.instructions:
            if instruction.opcode.removesuffix("-start") in COLLECTIVES:
                found[instruction] = scope
            elif instruction.opcode in ("fusion", "call", "async-start", "call-start"):
                for called in instruction.called:
                    found |= self._contains(called)
        self._inner[computation] = found
        return found

    def _inside(self, instruction: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        if instruction.opcode.startswith(("fusion", "async-", "call-")):
            for called in instruction.called:
                yield from ((scope, found) for found, scope in self._contains(called).items())

    def _describe(
        self,
        outer: Computation,
        instruction: Instruction,
        inner: Instruction,
        scope: Computation | None,
    ) -> Collective:
        """Facts of ``inner``, the collective itself, found as or inside ``instruction``."""
        kind = inner.opcode.removesuffix("-start")
        home = scope or outer
        operands = [operand.shape for operand in home.operands(inner)]
        operand_bytes = sum(shape.num_bytes for shape in operands)
        shape = inner.shape
        if inner.opcode.endswith("-start") and shape.is_tuple and kind not in ("all-reduce",):
            # (operands, results, contexts...): the results are the second element.
            shape = shape.parts[1] if len(shape.parts) > 1 else shape.parts[0]
        result_bytes = shape.num_bytes
        if kind in ("send", "recv"):
            shape = operands[0] if kind == "send" and operands else shape.arrays[0]
            operand_bytes = result_bytes = shape.num_bytes
        groups = (
            source_target_pairs(inner.attributes)
            if kind in ("collective-permute", "send", "recv")
            else replica_groups(inner.attributes, self._num_devices)
        )
        if kind == "all-reduce" and scope is not None and self._scatters(scope, inner):
            kind = "reduce-scatter"
            result_bytes = operand_bytes // max(1, len(groups[0]))
        dtypes = dict.fromkeys(s.dtype for o in operands for s in o.arrays)
        return Collective(
            kind=kind,
            dtype="+".join(dtypes) or shape.dtype,
            operand_bytes=operand_bytes,
            result_bytes=result_bytes,
            groups=groups,
            algorithm=_algorithm(instruction) or _algorithm(inner),
        )

    def _scatters(self, scope: Computation, all_reduce: Instruction) -> bool:
        """Whether only slices of the sum are kept: what makes it a reduce-scatter."""
        users = list(scope.users.get(all_reduce.name, ()))
        leaves: list[Instruction] = []
        while users:
            user = users.pop()
            if user.opcode in ("get-tuple-element", "bitcast", "reshape", "copy", "convert"):
                users += scope.users.get(user.name, ())
            else:
                leaves.append(user)
        return bool(leaves) and all(self._is_slice(leaf) for leaf in leaves)

    def _is_slice(self, instruction: Instruction) -> bool:
        if instruction.opcode in _SLICES:
            return True
        return instruction.opcode == "fusion" and any(
            inner.opcode in _SLICES
            for called in instruction.called
            for inner in self._program.computations[called].instructions
        )


def _algorithm(instruction: Instruction) -> str:
    config = instruction.backend_config.get("collective_algorithm_config", {})
    if not isinstance(config, dict):
        return ""
    parts = [str(config.get(key, "")).strip() for key in ("emitter", "strategy")]
    return " ".join(filter(None, parts))
