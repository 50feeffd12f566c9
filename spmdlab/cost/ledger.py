"""The ledger: one row per instruction that a step executes, with its price.

The walk follows the schedule from the entry through loops (multiplied by their trip counts),
calls and fusions, and leaves two things: rows, which add up to the step, and a schedule of
actions, which `spmdlab.timeline` replays.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from spmdlab.cost.compute import Compute, ComputeCost
from spmdlab.cost.flops import Flops
from spmdlab.cost.network import Network, axis_key
from spmdlab.cost.phase import Phases
from spmdlab.cost.traffic import Traffic, traffic
from spmdlab.hardware.chips import Chip
from spmdlab.hardware.topology import Placement
from spmdlab.hlo.collectives import COLLECTIVES, DMA_STARTS, Collectives, Role
from spmdlab.hlo.loops import Loops
from spmdlab.hlo.megascale import awaited
from spmdlab.hlo.owners import Owners, parameter_name
from spmdlab.hlo.program import Computation, Instruction, Program
from spmdlab.hlo.shapes import HOST

_SILENT = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all optimization-barrier domain "
    "add-dependency partition-id replica-id get-dimension-size".split()
)

# Host memory is reached over PCIe.  Assumed: one direction of PCIe 4 x16, shared by nobody.
HOST_BYTES_PER_S = 3.2e10


@dataclasses.dataclass(frozen=True, slots=True)
class Wire:
    """What only a collective's row has."""

    mesh_axes: tuple[str, ...]
    whole_axes: bool
    """False if the groups hold only part of the devices along these axes."""
    axis_key: str
    link: str
    dtype: str
    payload_bytes: float
    """Bytes of the array concerned, one execution."""
    wire_bytes: float
    """Bytes one device sends, one execution."""
    algorithm: str


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One instruction.  Figures are per device and execution."""

    name: str
    computation: str
    opcode: str
    kind: str
    """dot, convolution, elementwise, custom call, copy, host transfer, or the collective."""
    count: float
    """Executions per step."""
    counted: bool
    """False inside a loop whose trip count is unknown: ``count`` then takes it as one."""
    flops: Flops
    hbm_bytes: float
    seconds: float
    op_name: str
    source: str
    parameter: str | None
    phase: str
    wire: Wire | None = None


@dataclasses.dataclass(slots=True)
class Action:
    """One entry of the schedule."""

    kind: Literal["run", "start", "done", "loop"]
    row: int = -1
    """Index into `Ledger.rows`; of a done, that of its start."""
    resources: tuple[str, ...] = ()
    """Links or DMA engines that an asynchronous or collective action occupies."""
    trips: float = 1.0
    body: list["Action"] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Ledger:
    """A priced program."""

    rows: tuple[Row, ...]
    schedule: list[Action]
    unmodelled: tuple[str, ...]

    @property
    def collectives(self) -> tuple[Row, ...]:
        """The rows of collectives."""
        return tuple(row for row in self.rows if row.wire is not None)

    def flops(self) -> Flops:
        """Of the step, per device."""
        return sum((row.flops * row.count for row in self.rows), Flops())

    def hbm_bytes(self) -> float:
        """Of the step, per device."""
        return sum(row.hbm_bytes * row.count for row in self.rows)

    def wire_bytes(self) -> dict[str, float]:
        """Bytes one device sends in a step, by mesh axis (axes of one collective joined by +)."""
        totals: dict[str, float] = {}
        for row in self.rows:
            if row.wire is not None:
                key = row.wire.axis_key
                totals[key] = totals.get(key, 0.0) + row.wire.wire_bytes * row.count
        return totals


def price(
    program: Program, chip: Chip, placement: Placement, *, relays: Sequence[str] = ()
) -> Ledger:
    """Prices a program on a chip, its mesh positions placed on the topology.

    Args:
        program: Optimised HLO.
        chip: What each position is.
        placement: Where each position sits.
        relays: Files that are never named as a source, see `Program.source`.

    Raises:
        HloError: A replica group names devices that the placement lacks.
    """
    return _Pricer(program, chip, placement, relays).run()


class _Pricer:
    def __init__(
        self, program: Program, chip: Chip, placement: Placement, relays: Sequence[str]
    ) -> None:
        self.relays = relays
        self.program = program
        self.compute = Compute(program, chip)
        devices = max(program.num_partitions, program.num_replicas)
        self.network = Network(placement, chip, devices)
        self.collectives = Collectives(program)
        self.loops = Loops(program)
        self.owners = Owners(program)
        self.phases = Phases(program)
        self.hbm_rate = chip.hbm_bytes_per_s * chip.hbm_efficiency
        self.rows: list[Row] = []
        self.notes: dict[str, None] = {}

    def run(self) -> Ledger:
        if not self.program.is_scheduled:
            self._note("the module is not scheduled: replayed in the order it is printed")
        schedule = self._walk(self.program.entry, 1.0, True)
        return Ledger(tuple(self.rows), schedule, (*self.notes, *self.compute.notes()))

    def _note(self, text: str) -> None:
        self.notes[text] = None

    def _walk(self, scope: Computation, count: float, counted: bool) -> list[Action]:
        actions: list[Action] = []
        started: dict[str, int] = {}
        for instruction in scope.instructions:
            opcode = instruction.opcode
            if opcode in _SILENT:
                continue
            role = self.collectives.role(scope, instruction)
            if role.collective is not None:
                actions.append(self._collective(scope, instruction, role, count, counted))
                if role.part == "start":
                    name = role.collective.rendezvous or instruction.name
                    started[name] = actions[-1].row
            elif opcode in DMA_STARTS:
                actions.append(self._dma(scope, instruction, count, counted))
                started[instruction.name] = actions[-1].row
            elif role.part == "done" or opcode.endswith("-done"):
                start = self._start_of(scope, instruction, started)
                if start is not None:
                    actions.append(Action("done", start))
            elif opcode == "while":
                actions.append(self._loop(scope, instruction, count, counted))
            elif opcode == "conditional":
                actions += self._branches(instruction, count, counted)
            elif opcode in ("call", "async-start", "call-start"):
                for name in instruction.called:
                    actions += self._walk(self.program.computations[name], count, counted)
            elif not opcode.endswith("-update"):
                cost = self.compute.price(scope, instruction)
                row = self._row(scope, instruction, _kind(instruction, cost), cost, count, counted)
                actions.append(Action("run", row))
        return actions

    def _collective(
        self, scope: Computation, instruction: Instruction, role: Role, count: float, counted: bool
    ) -> Action:
        collective = role.collective
        assert collective is not None
        wired = self.network.price(collective)
        partial = not wired.mesh_axes.whole and wired.mesh_axes.axes
        if partial and collective.kind != "collective-permute":
            axes = "+".join(wired.mesh_axes.axes)
            self._note(f"some groups hold only part of the devices along {axes} (whole_axes false)")
        if collective.kind in ("send", "recv") and not collective.groups:
            self._note(f"{instruction.name}: the text names no source and target, not priced")
        moved = traffic(self.program, scope, instruction)
        if role.part == "start":
            moved = Traffic(hbm=collective.operand_bytes + collective.result_bytes)
        additions = collective.kind in ("all-reduce", "reduce-scatter")
        flops = self.compute.price(scope, instruction).flops if additions else Flops()
        wire = Wire(
            mesh_axes=wired.mesh_axes.axes,
            whole_axes=wired.mesh_axes.whole,
            axis_key=axis_key(wired.mesh_axes),
            link=wired.link,
            dtype=collective.dtype,
            payload_bytes=collective.payload_bytes,
            wire_bytes=wired.wire_bytes,
            algorithm=collective.algorithm,
        )
        cost = ComputeCost(flops, moved, wired.seconds)
        row = self._row(
            scope, instruction, collective.kind, cost, count, counted, wire=wire, inner=role.inner
        )
        return Action("start" if role.part == "start" else "run", row, wired.resources)

    def _dma(
        self, scope: Computation, instruction: Instruction, count: float, counted: bool
    ) -> Action:
        moved = traffic(self.program, scope, instruction)
        shapes = [*instruction.shape.arrays, *(o.shape for o in scope.operands(instruction))]
        host = moved.host > 0 or any(shape.bytes_in(HOST) for shape in shapes)
        if host:
            seconds = max(moved.host / HOST_BYTES_PER_S, moved.hbm / self.hbm_rate)
        else:
            seconds = moved.hbm / self.hbm_rate
        kind = "host transfer" if host else "copy"
        cost = ComputeCost(Flops(), moved, seconds)
        row = self._row(scope, instruction, kind, cost, count, counted)
        return Action("start", row, ("pcie",) if host else ("dma",))

    def _loop(
        self, scope: Computation, instruction: Instruction, count: float, counted: bool
    ) -> Action:
        trips = self.loops.trip_count(scope, instruction)
        if trips is None:
            where = self.program.source(instruction, self.relays)
            self._note(
                f"loop {instruction.name}: trip count unknown (its end depends on data), counted "
                f"once{f', {where}' if where else ''}"
            )
        name = instruction.attributes.get("body", "").strip().lstrip("%")
        body = self.program.computations.get(name)
        inside = count * (1 if trips is None else trips)
        actions = self._walk(body, inside, counted and trips is not None) if body else []
        return Action("loop", trips=1.0 if trips is None else float(trips), body=actions)

    def _branches(self, instruction: Instruction, count: float, counted: bool) -> list[Action]:
        """Takes the branch with the most seconds: an upper bound."""
        best: tuple[float, list[Action], list[Row]] | None = None
        before = self.rows
        for name in instruction.called:
            self.rows = list(before)
            actions = self._walk(self.program.computations[name], count, counted)
            seconds = sum(r.seconds * r.count for r in self.rows[len(before) :])
            if best is None or seconds > best[0]:
                best = (seconds, actions, self.rows)
        self.rows = best[2] if best else before
        if len(instruction.called) > 1:
            self._note(f"conditional {instruction.name}: its most expensive branch is counted")
        return best[1] if best else []

    def _start_of(
        self, scope: Computation, done: Instruction, started: dict[str, int]
    ) -> int | None:
        """The row of the start that ``done`` waits for: its nearest ancestor that started."""
        if sent := awaited(scope, done):
            return started.get(sent.rendezvous)
        frontier, seen = list(done.operands), set()
        while frontier:
            name = frontier.pop(0)
            if name in started:
                return started[name]
            instruction = scope.by_name[name]
            passes = instruction.opcode in ("get-tuple-element", "tuple", "bitcast") or (
                instruction.opcode.endswith("-update") or self.collectives.carries(instruction)
            )
            if name not in seen and passes:
                seen.add(name)
                frontier += instruction.operands
        return None

    def _row(
        self,
        scope: Computation,
        instruction: Instruction,
        kind: str,
        cost: ComputeCost,
        count: float,
        counted: bool,
        *,
        wire: Wire | None = None,
        inner: Instruction | None = None,
    ) -> int:
        named = instruction if instruction.op_name or inner is None else inner
        self.rows.append(
            Row(
                name=instruction.name,
                computation=scope.name,
                opcode=instruction.opcode,
                kind=kind,
                count=count,
                counted=counted,
                flops=cost.flops,
                hbm_bytes=cost.traffic.hbm,
                seconds=cost.seconds,
                op_name=named.op_name,
                source=self.program.source(named, self.relays),
                parameter=parameter_name(self.owners.of(scope, instruction)),
                phase=self.phases.of(named),
                wire=wire,
            )
        )
        return len(self.rows) - 1


def _kind(instruction: Instruction, cost: ComputeCost) -> str:
    opcode = instruction.opcode
    if opcode == "custom-call":
        return "custom call"
    if opcode in COLLECTIVES:
        return opcode
    if cost.flops.matmul:
        convolved = "conv" in instruction.op_name.rsplit("/", 1)[-1]
        return "convolution" if convolved else "dot"
    moves = opcode in ("copy", "transpose", "slice", "dynamic-slice", "dynamic-update-slice",
                       "concatenate", "pad", "reverse", "gather")  # fmt: skip
    return "copy" if moves and not cost.flops.total else "elementwise"
