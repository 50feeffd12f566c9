"""What a schedule takes, worked out from its table alone: bubble, live activations, transfers."""

import dataclasses
from collections.abc import Iterable, Iterator

from spmdlab.pipeline.schedule import Schedule


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """A schedule, run on paper.  All stages move in step, as in one SPMD program."""

    ticks: int
    forward_ticks: int
    """Ticks that hold a forward, each followed by one permute to the next stage."""
    backward_ticks: int
    """Ticks that hold a backward, each followed by one permute to the stage before."""
    bubble_fraction: float
    """Share of the stages' time in which they work on nothing."""
    live: tuple[int, ...]
    """Per stage, the most microbatches' inputs it holds at once."""
    live_cotangents: tuple[int, ...]
    """The same for cotangents that have come in and wait."""
    forward_transfers: int
    """Activations that one stage computes and another needs."""
    backward_transfers: int

    @property
    def permutes(self) -> int:
        """Collective-permutes that a step executes."""
        return self.forward_ticks + self.backward_ticks


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Something a stage keeps from one tick to another, both included."""

    stage: int
    microbatch: int
    chunk: int
    start: int
    stop: int


def simulate(schedule: Schedule, backward_cost: float = 3.0) -> Simulation:
    """Runs a schedule on paper.

    A tick takes as long as one forward if any stage has one, plus one backward if any has one.

    Args:
        schedule: What to run.
        backward_cost: Time of a chunk's backward, in forwards.  Three, because a stage keeps
            only its inputs and computes the forward again.

    >>> from spmdlab.pipeline.schedule import gpipe
    >>> round(simulate(gpipe(4, 12)).bubble_fraction, 9)
    0.2
    """
    phases = schedule.phases()
    forward_ticks = sum(phase.ticks for phase in phases if phase.forward)
    backward_ticks = sum(phase.ticks for phase in phases if phase.backward)
    took = forward_ticks + backward_cost * backward_ticks
    passes = schedule.microbatches * schedule.repeats
    busy = passes * (1 + backward_cost)
    crossings = 0
    if schedule.stages > 1:
        crossings = schedule.microbatches * (schedule.stages * schedule.repeats - 1)
    return Simulation(
        ticks=schedule.ticks,
        forward_ticks=forward_ticks,
        backward_ticks=backward_ticks,
        bubble_fraction=1 - busy / took,
        live=_peaks(inputs_held(schedule), schedule.stages),
        live_cotangents=_peaks(cotangents_held(schedule), schedule.stages),
        forward_transfers=crossings,
        backward_transfers=crossings,
    )


def inputs_held(schedule: Schedule) -> Iterator[Held]:
    """Yields every chunk's input, from the tick it is there to its backward."""
    at = ticks_of(schedule)
    takes_in = [phase for phase in schedule.phases() if phase.forward]
    arriving = [tick for phase in takes_in for tick in range(phase.start, phase.stop)]
    for (letter, microbatch, chunk), tick in at.items():
        if letter != "F":
            continue
        start = tick
        if chunk:
            start = _next(arriving, at["F", microbatch, chunk - 1])
        yield Held(chunk % schedule.stages, microbatch, chunk, start, at["B", microbatch, chunk])


def cotangents_held(schedule: Schedule) -> Iterator[Held]:
    """Yields the cotangent of every chunk's output but the last's, from its arrival to its use."""
    at = ticks_of(schedule)
    takes_in = [phase for phase in schedule.phases() if phase.backward]
    arriving = [tick for phase in takes_in for tick in range(phase.start, phase.stop)]
    last = schedule.stages * schedule.repeats - 1
    for (letter, microbatch, chunk), tick in at.items():
        if letter == "B" and chunk < last:
            start = _next(arriving, at["B", microbatch, chunk + 1])
            yield Held(chunk % schedule.stages, microbatch, chunk, start, tick)


def ticks_of(schedule: Schedule) -> dict[tuple[str, int, int], int]:
    """Returns ``("F" or "B", microbatch, chunk)`` -> tick, chunks counted along the model."""
    return {
        (letter, work.microbatch, work.repeat * schedule.stages + stage): tick
        for stage, tick, letter, work in schedule.work()
    }


def _next(ticks: list[int], after: int) -> int:
    return next(tick for tick in ticks if tick > after)


def _peaks(held: Iterable[Held], stages: int) -> tuple[int, ...]:
    changes: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
    for each in held:
        changes[each.stage] += [(each.start, 1), (each.stop + 1, -1)]
    peaks = []
    for events in changes:
        now = peak = 0
        for _, change in sorted(events):
            now += change
            peak = max(peak, now)
        peaks.append(peak)
    return tuple(peaks)
