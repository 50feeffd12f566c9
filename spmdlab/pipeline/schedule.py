"""Pipeline schedules: who works on what, tick by tick.  Data, checked; nothing runs here.

The model's layers are cut into ``stages * repeats`` chunks in a row.  Chunk ``q`` lives on stage
``q % stages``, where it is that stage's repeat ``q // stages``.  In one tick a stage does at most
one forward and then one backward; what it computes reaches its neighbour for the next tick.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from spmdlab.errors import ConfigError
from spmdlab.lookup import pick


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Work:
    """One microbatch through one of a stage's chunks, in one direction."""

    microbatch: int
    repeat: int = 0
    """Which of the stage's chunks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """What one stage does in one tick; None is idle."""

    forward: Work | None = None
    backward: Work | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """Ticks in a row that run the same code on every stage."""

    start: int
    stop: int
    """The first tick that is not part of it."""
    forward: bool
    """Whether any stage has a forward here; then all stages run one, some on nothing."""
    backward: bool
    head: bool
    """Whether it is between the first and the last time that the last chunk's backward begins with
    the head and the loss.  With repeats not every such tick has one, but every one runs it."""

    @property
    def ticks(self) -> int:
        return self.stop - self.start


MOST_PHASES = 8
"""A table that alternates more often runs forward and backward in every tick instead."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A table of stages x ticks.

    Raises:
        ConfigError: The table is no pipeline: work is missing or done twice, or comes before
            what it needs.
    """

    table: tuple[tuple[Cell, ...], ...]
    """Per stage, per tick."""
    name: str = "table"

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", tuple(tuple(row) for row in self.table))
        _check(self)

    @property
    def stages(self) -> int:
        return len(self.table)

    @property
    def ticks(self) -> int:
        return len(self.table[0])

    @property
    def microbatches(self) -> int:
        return 1 + max(work.microbatch for _, _, _, work in self.work())

    @property
    def repeats(self) -> int:
        """Chunks per stage."""
        return 1 + max(work.repeat for _, _, _, work in self.work())

    def work(self) -> Iterator[tuple[int, int, str, Work]]:
        """Yields stage, tick, ``"F"`` or ``"B"``, and the work, of every cell that is not idle."""
        for stage, row in enumerate(self.table):
            for tick, cell in enumerate(row):
                if cell.forward:
                    yield stage, tick, "F", cell.forward
                if cell.backward:
                    yield stage, tick, "B", cell.backward

    def phases(self) -> tuple[Phase, ...]:
        """The runs of ticks that compile to one loop each, in order.

        >>> [phase.ticks for phase in one_forward_one_backward(4, 6).phases()]
        [3, 6, 3]
        """
        last = self.repeats - 1
        ends = [
            t for t, cell in enumerate(self.table[-1]) if (w := cell.backward) and w.repeat == last
        ]
        kinds = []
        for tick, column in enumerate(zip(*self.table, strict=True)):
            backward = any(cell.backward for cell in column)
            head = backward and ends[0] <= tick <= ends[-1]
            kinds.append((any(cell.forward for cell in column), backward, head))
        found: list[Phase] = []
        for tick, kind in enumerate(kinds):
            if found and (found[-1].forward, found[-1].backward, found[-1].head) == kind:
                found[-1] = dataclasses.replace(found[-1], stop=tick + 1)
            else:
                found.append(Phase(tick, tick + 1, *kind))
        if len(found) > MOST_PHASES:
            return (Phase(0, self.ticks, True, True, True),)
        return tuple(found)

    def __str__(self) -> str:
        """A row per stage, as `schedule_from_text` reads it."""
        cells = [[_cell_text(cell) for cell in row] for row in self.table]
        width = max(len(cell) for row in cells for cell in row)
        return "\n".join(" ".join(cell.ljust(width) for cell in row).rstrip() for row in cells)


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards.

    Source: Huang et al. 2019, https://arxiv.org/abs/1811.06965.

    >>> print(gpipe(2, 2))
    F0 F1 .  .  B0 B1
    .  F0 F1 B0 B1 .
    """
    return _from_orders("gpipe", stages, microbatches, 1, stages + microbatches - 1)


def circular(stages: int, microbatches: int, repeats: int = 2) -> Schedule:
    """All forwards, then all backwards, each microbatch going round ``repeats`` times.

    Each stage has ``repeats`` chunks, so the bubble is that much smaller; the stages are
    passed that many times more often.
    """
    ticks = stages + microbatches * repeats - 1
    return _from_orders("circular", stages, microbatches, repeats, ticks)


def one_forward_one_backward(stages: int, microbatches: int, repeats: int = 1) -> Schedule:
    """1F1B: a microbatch's backward begins in the tick in which its forward ends.

    Between warm-up and drain each stage does one forward and one backward a tick, so it never
    holds more inputs than there are ticks between the two: ``2 * (stages - stage) - 1`` for one
    repeat, whatever the number of microbatches.  (Stages that take turns, one doing a forward
    while its neighbour does a backward, hold ``stages - stage``.  In one SPMD program all run the
    same code, so each of their ticks would cost as much as one of ours, and there are twice as
    many.)  With ``repeats`` it is the interleaved form.

    Source: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473.

    >>> print(one_forward_one_backward(2, 3))
    F0    F1    F2+B0 B1    B2
    .     F0+B0 F1+B1 F2+B2 .
    """
    first = stages * repeats - 1
    return _from_orders("1f1b", stages, microbatches, repeats, first)


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": lambda stages, microbatches, repeats: gpipe(stages, microbatches),
    "circular": circular,
    "1f1b": one_forward_one_backward,
}
"""Name -> schedule of so many stages, microbatches and repeats."""


def make_schedule(name: str, stages: int, microbatches: int, repeats: int = 1) -> Schedule:
    """Returns a schedule of `SCHEDULES`.

    Raises:
        ConfigError: There is none of that name, or the numbers do not go together.
    """
    make = pick(SCHEDULES, name, "pipeline schedule")
    for what, value in (("stages", stages), ("microbatches", microbatches), ("repeats", repeats)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"pipeline {what}={value!r} must be a whole number, 1 or more")
    if name == "gpipe" and repeats != 1:
        raise ConfigError(
            f"schedule=gpipe goes through the stages once, repeats={repeats} does not; "
            "schedule=circular and schedule=1f1b can repeat."
        )
    if repeats > 1 and microbatches % stages:
        below = microbatches - microbatches % stages
        fits = f"{below} or {below + stages}" if below else f"{stages}"
        raise ConfigError(
            f"schedule={name} with repeats={repeats} sends microbatches round in groups of as "
            f"many as there are stages: microbatches={microbatches} is no multiple of {stages} "
            f"stages; {fits} would do."
        )
    return make(stages, microbatches, repeats)


_CELL = re.compile(r"([FB])(\d+)(?:\.(\d+))?")


def schedule_from_text(text: str | Iterable[str], name: str = "table") -> Schedule:
    """Reads a table: a line per stage, a word per tick.

    ``F2`` is the forward of microbatch 2, ``B2`` its backward, ``F2+B0`` both in one tick,
    ``F2.1`` through the stage's second chunk (repeat 1), ``.`` idle.

    Raises:
        ConfigError: A word is none of these, or the table is no pipeline (see `Schedule`).
    """
    lines = text.splitlines() if isinstance(text, str) else list(text)
    rows = []
    for stage, line in enumerate(line for line in lines if line.strip()):
        rows.append(tuple(_read_cell(word, stage, tick) for tick, word in enumerate(line.split())))
    return Schedule(tuple(rows), name)


def _read_cell(word: str, stage: int, tick: int) -> Cell:
    found: dict[str, Work] = {}
    for part in word.split("+") if word != "." else ():
        match = _CELL.fullmatch(part)
        if match is None or match[1] in found:
            raise ConfigError(
                f"schedule: stage {stage}, tick {tick}: {word!r} is no cell; write F2, B0, F2+B0, "
                "F2.1 for repeat 1, or . for idle."
            )
        found[match[1]] = Work(int(match[2]), int(match[3] or 0))
    return Cell(found.get("F"), found.get("B"))


def _cell_text(cell: Cell) -> str:
    def one(letter: str, work: Work) -> str:
        return f"{letter}{work.microbatch}" + (f".{work.repeat}" if work.repeat else "")

    both = (("F", cell.forward), ("B", cell.backward))
    return "+".join(one(letter, work) for letter, work in both if work) or "."


def _from_orders(
    name: str, stages: int, microbatches: int, repeats: int, first_backward: int
) -> Schedule:
    """Forwards from tick 0 at stage 0, backwards from ``first_backward`` at the last stage."""
    turn = stages * repeats

    def order(index: int) -> Work:
        within = index % turn
        return Work(index // turn * stages + within % stages, within // stages)

    total = microbatches * repeats
    orders = [order(index) for index in range(total)]
    rows: list[list[Cell]] = []
    for stage in range(stages):
        row = [Cell()] * (first_backward + total + stages - 1)
        for index, work in enumerate(orders):
            row[stage + index] = dataclasses.replace(row[stage + index], forward=work)
            back = Work(work.microbatch, repeats - 1 - work.repeat)
            tick = first_backward + stages - 1 - stage + index
            row[tick] = dataclasses.replace(row[tick], backward=back)
        rows.append(row)
    return Schedule(tuple(map(tuple, rows)), name)


def _check(schedule: Schedule) -> None:
    table = schedule.table
    if not table or not table[0]:
        raise ConfigError("schedule: the table is empty; it needs a row per stage.")
    lengths = [len(row) for row in table]
    if len(set(lengths)) > 1:
        raise ConfigError(f"schedule: rows of {lengths} ticks; give every stage as many.")
    done: dict[tuple[str, int, int], int] = {}
    for stage, tick, letter, work in schedule.work():
        if work.microbatch < 0 or work.repeat < 0:
            raise ConfigError(f"schedule: stage {stage}, tick {tick}: {work} is below 0.")
        key = (letter, work.microbatch, work.repeat * len(table) + stage)
        if key in done:
            raise ConfigError(
                f"schedule: stage {stage} does the {_WORDS[letter]} of microbatch "
                f"{work.microbatch}, repeat {work.repeat}, at ticks {done[key]} and {tick}; "
                "once is enough."
            )
        done[key] = tick
    if not done:
        raise ConfigError("schedule: every cell is idle.")
    for tick, column in enumerate(zip(*table, strict=True)):
        if column == (Cell(),) * len(table):
            raise ConfigError(f"schedule: tick {tick}: no stage has work; leave the tick out.")
    chunks = len(table) * schedule.repeats
    for microbatch in range(schedule.microbatches):
        _check_one(done, microbatch, chunks, len(table))


_WORDS = {"F": "forward", "B": "backward"}


def _check_one(
    done: dict[tuple[str, int, int], int], microbatch: int, chunks: int, stages: int
) -> None:
    """Checks that one microbatch goes through all chunks and back, in order."""
    path: Sequence[tuple[str, int]] = [("F", chunk) for chunk in range(chunks)]
    path = [*path, *(("B", chunk) for chunk in reversed(range(chunks)))]
    before: tuple[str, int, int] | None = None
    for letter, chunk in path:
        where = f"the {_WORDS[letter]} of microbatch {microbatch} on stage {chunk % stages}"
        where += f", repeat {chunk // stages}" if chunks > stages else ""
        tick = done.get((letter, microbatch, chunk))
        if tick is None:
            raise ConfigError(f"schedule: {where}, is missing.")
        if before is not None:
            # The last chunk's backward may share the tick of its forward: it needs no transfer.
            at_once = before[:2] == ("F", chunk) and letter == "B"
            if tick < before[2] or (tick == before[2] and not at_once):
                raise ConfigError(
                    f"schedule: {where}, is at tick {tick}, but needs the {_WORDS[before[0]]} on "
                    f"stage {before[1] % stages}, which is at tick {before[2]}."
                )
        before = (letter, chunk, tick)
