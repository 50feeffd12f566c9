"""Replays a schedule: what hides behind what.

One clock for the device's compute, one for each link of the torus, the DCN, and the DMA
engines.  Actions are taken in schedule order.  What is synchronous holds the compute clock
until it ends; what is asynchronous occupies its links from its start on, and at its ``done``
the compute clock waits for whatever is left: that wait is exposed time.
"""

import dataclasses
from collections.abc import Sequence

from spmdlab.cost.ledger import Action, Ledger, Row

MAX_EVENTS = 50_000
"""Events kept for the picture of a timeline."""


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One bar of the timeline: the first iteration of every loop."""

    name: str
    track: str
    """compute, collective, copy, or exposed."""
    start_s: float
    duration_s: float
    row: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepTime:
    """Three times of one step, in seconds: ideal <= replay <= no overlap."""

    ideal: float
    """Perfect overlap: the busiest clock alone."""
    replay: float
    """The schedule as the compiler wrote it."""
    no_overlap: float
    """Everything one after the other."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """A replayed ledger.  Seconds are per device and step."""

    step_s: StepTime
    compute_s: float
    collective_s: float
    copy_s: float
    """Asynchronous copies between memories; synchronous ones are compute."""
    exposed_collective_s: float
    exposed_copy_s: float
    exposed_s: tuple[float, ...]
    """Per row of the ledger: seconds of the step that only this row takes."""
    events: tuple[Event, ...]


def replay(ledger: Ledger) -> Timeline:
    """Replays the ledger's schedule."""
    return _Replay(ledger).run()


@dataclasses.dataclass(slots=True)
class _Clocks:
    compute: float = 0.0
    links: dict[str, float] = dataclasses.field(default_factory=dict)
    ends: dict[int, float] = dataclasses.field(default_factory=dict)
    """Row of a start -> when it ends."""

    def free_at(self, resources: Sequence[str]) -> float:
        return max((self.links.get(name, 0.0) for name in resources), default=0.0)

    def occupy(self, resources: Sequence[str], end: float) -> None:
        for name in resources:
            self.links[name] = end


class _Replay:
    def __init__(self, ledger: Ledger) -> None:
        self.rows = ledger.rows
        self.schedule = ledger.schedule
        self.exposed = [0.0] * len(ledger.rows)
        self.busy: dict[str, float] = {}
        self.used: dict[int, frozenset[str]] = {}
        self.events: list[Event] = []

    def run(self) -> Timeline:
        clocks = _Clocks()
        self._run(self.schedule, clocks, 1.0, True)
        # A step ends when all it started has ended.
        end = max([clocks.compute, *clocks.links.values()])
        kinds = {"compute": 0.0, "collective": 0.0, "copy": 0.0}
        for index, row in enumerate(self.rows):
            kinds[self._track(index, row)] += row.seconds * row.count
        busiest = max(kinds["compute"], *self.busy.values(), 0.0)
        total = sum(kinds.values())
        waits = {"compute": 0.0, "collective": 0.0, "copy": 0.0}
        for index, row in enumerate(self.rows):
            waits[self._track(index, row)] += self.exposed[index]
        return Timeline(
            # The three agree by construction; min and max only absorb rounding.
            step_s=StepTime(min(busiest, end), end, max(total, end)),
            compute_s=kinds["compute"],
            collective_s=kinds["collective"],
            copy_s=kinds["copy"],
            exposed_collective_s=waits["collective"],
            exposed_copy_s=waits["copy"],
            exposed_s=tuple(self.exposed),
            events=tuple(self.events),
        )

    def _track(self, index: int, row: Row) -> str:
        if row.wire is not None:
            return "collective"
        return "copy" if row.opcode.endswith("-start") else "compute"

    def _run(self, actions: Sequence[Action], clocks: _Clocks, times: float, show: bool) -> None:
        """Runs actions once; ``times`` is how often this stretch happens in the step."""
        for action in actions:
            if action.kind == "loop":
                self._loop(action, clocks, times, show)
            elif action.kind == "done":
                self._wait(action.row, clocks, times, show)
            elif action.kind == "start":
                self._start(action, clocks, times, show)
            else:
                self._work(action, clocks, times, show)

    def _loop(self, action: Action, clocks: _Clocks, times: float, show: bool) -> None:
        """The first iteration meets what is under way outside; the second stands for the rest."""
        used = self._used(action)
        for number, stands_for in enumerate((1.0, action.trips - 1)):
            if number >= action.trips:
                break
            before = clocks.compute
            busy = {name: max(0.0, clocks.links.get(name, 0.0) - before) for name in used}
            self._run(action.body, clocks, times * stands_for, show and number == 0)
            skipped = (clocks.compute - before) * (stands_for - 1)
            for name in used:
                # What is still under way moves along, further if each iteration adds to it.
                grown = clocks.links[name] - clocks.compute - busy[name]
                clocks.links[name] += skipped + max(0.0, grown) * (stands_for - 1)
            clocks.compute += skipped

    def _used(self, loop: Action) -> frozenset[str]:
        """The links and engines that a loop occupies."""
        if id(loop) not in self.used:
            names = {name for action in loop.body for name in action.resources}
            inner = (self._used(a) for a in loop.body if a.kind == "loop" and a.trips > 0)
            self.used[id(loop)] = frozenset(names.union(*inner))
        return self.used[id(loop)]

    def _work(self, action: Action, clocks: _Clocks, times: float, show: bool) -> None:
        row = self.rows[action.row]
        start = clocks.compute
        begin = max(start, clocks.free_at(action.resources))
        clocks.compute = begin + row.seconds
        clocks.occupy(action.resources, clocks.compute)
        self._busy(action, row, times)
        if row.wire is not None:
            self.exposed[action.row] += (clocks.compute - start) * times
            self._event("collective", action.row, begin, row.seconds, show)
            self._event("exposed", action.row, start, clocks.compute - start, show)
        else:
            self.exposed[action.row] += row.seconds * times
            self._event("compute", action.row, start, row.seconds, show)

    def _start(self, action: Action, clocks: _Clocks, times: float, show: bool) -> None:
        row = self.rows[action.row]
        begin = max(clocks.compute, clocks.free_at(action.resources))
        end = begin + row.seconds
        clocks.occupy(action.resources, end)
        clocks.ends[action.row] = end
        self._busy(action, row, times)
        track = "collective" if row.wire is not None else "copy"
        self._event(track, action.row, begin, row.seconds, show)

    def _wait(self, row: int, clocks: _Clocks, times: float, show: bool) -> None:
        end = clocks.ends.pop(row, clocks.compute)
        wait = max(0.0, end - clocks.compute)
        self._event("exposed", row, clocks.compute, wait, show)
        self.exposed[row] += wait * times
        clocks.compute += wait

    def _busy(self, action: Action, row: Row, times: float) -> None:
        for name in action.resources:
            self.busy[name] = self.busy.get(name, 0.0) + row.seconds * times

    def _event(self, track: str, row: int, start: float, duration: float, show: bool) -> None:
        if show and duration > 0 and len(self.events) < MAX_EVENTS:
            self.events.append(Event(self.rows[row].name, track, start, duration, row))
