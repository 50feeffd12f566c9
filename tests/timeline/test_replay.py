"""Replays of schedules made by hand, with answers worked out by hand."""

import dataclasses

import pytest
from hypothesis import given, settings, strategies as st

from spmdlab.cost.flops import Flops
from spmdlab.cost.ledger import Action, Ledger, Row, Wire
from spmdlab.timeline.replay import Timeline, replay

WIRE = Wire(
    mesh_axes=("data",),
    whole_axes=True,
    axis_key="data",
    link="ici",
    dtype="bf16",
    payload_bytes=1.0,
    wire_bytes=1.0,
    algorithm="",
)


class Schedule:
    """Builds rows and actions together."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def row(self, seconds: float, opcode: str, wire: Wire | None) -> int:
        self.rows.append(
            Row(
                name=f"r{len(self.rows)}",
                computation="main",
                opcode=opcode,
                kind=opcode,
                count=1.0,
                counted=True,
                flops=Flops(),
                hbm_bytes=0.0,
                seconds=seconds,
                op_name="",
                source="",
                parameter=None,
                phase="forward",
                wire=wire,
            )
        )
        return len(self.rows) - 1

    def compute(self, seconds: float) -> Action:
        return Action("run", self.row(seconds, "fusion", None))

    def blocking(self, seconds: float, *links: str) -> Action:
        return Action("run", self.row(seconds, "all-reduce", WIRE), links)

    def start(self, seconds: float, *links: str) -> Action:
        return Action("start", self.row(seconds, "all-gather-start", WIRE), links)

    def copy(self, seconds: float) -> Action:
        return Action("start", self.row(seconds, "copy-start", None), ("dma",))

    def loop(self, trips: int, body: list[Action]) -> Action:
        self.multiply(trips, body)
        return Action("loop", trips=float(trips), body=body)

    def multiply(self, trips: int, body: list[Action]) -> None:
        for action in body:
            if action.kind == "loop":
                self.multiply(trips, action.body)
            elif action.kind != "done":
                row = self.rows[action.row]
                self.rows[action.row] = dataclasses.replace(row, count=row.count * trips)

    def run(self, *actions: Action) -> Timeline:
        return replay(Ledger(tuple(self.rows), list(actions), ()))


def done(start: Action) -> Action:
    return Action("done", start.row)


def test_hidden_behind_longer_compute():
    s = Schedule()
    gather, work = s.start(2, "ici0+"), s.compute(5)
    line = s.run(gather, work, done(gather))
    assert line.step_s.replay == line.step_s.ideal == 5
    assert line.step_s.no_overlap == 7
    assert line.exposed_collective_s == 0
    assert line.exposed_s == (0, 5)


def test_what_compute_does_not_cover_is_exposed():
    s = Schedule()
    gather, work, more = s.start(7, "ici0+"), s.compute(5), s.compute(3)
    line = s.run(gather, work, done(gather), more)
    assert line.step_s.replay == 7 + 3
    assert line.exposed_collective_s == 7 - 5
    assert line.exposed_s == (2, 5, 3)
    assert line.step_s.ideal == 5 + 3


def test_synchronous_is_wholly_exposed():
    s = Schedule()
    line = s.run(s.compute(1), s.blocking(4, "ici0+"), s.compute(2))
    assert line.step_s.replay == line.step_s.no_overlap == 7
    assert line.exposed_collective_s == 4
    assert line.step_s.ideal == 4


def test_two_on_one_link_queue():
    s = Schedule()
    first, second, work = s.start(3, "ici0+"), s.start(4, "ici0+"), s.compute(1)
    line = s.run(first, second, work, done(first), done(second))
    assert line.step_s.replay == 3 + 4
    assert line.exposed_s == (2, 4, 1)
    assert line.step_s.ideal == 7


def test_two_on_different_dims_overlap():
    s = Schedule()
    first, second, work = s.start(3, "ici0+"), s.start(4, "ici1+"), s.compute(1)
    line = s.run(first, second, work, done(first), done(second))
    assert line.step_s.replay == 4
    assert line.exposed_s == (2, 1, 1)
    assert line.step_s.ideal == 4


def test_a_blocking_one_waits_for_its_link():
    s = Schedule()
    first, second = s.start(5, "ici0+"), s.blocking(2, "ici0+")
    line = s.run(first, s.compute(1), second, done(first))
    assert line.step_s.replay == 5 + 2
    # It stands in the way of compute from second 1 to second 7.
    assert line.exposed_s == (0, 6, 1)


def test_copies_are_exposed_apart_from_collectives():
    s = Schedule()
    copy, work = s.copy(4), s.compute(1)
    line = s.run(copy, work, done(copy))
    assert line.exposed_copy_s == 3
    assert line.exposed_collective_s == 0
    assert (line.compute_s, line.copy_s, line.collective_s) == (1, 4, 0)


def test_what_nobody_waits_for_still_has_to_end():
    s = Schedule()
    line = s.run(s.start(9, "dcn"), s.compute(1))
    assert line.step_s.replay == 9


def test_a_loop_hides_each_iteration_behind_its_own_compute():
    s = Schedule()
    gather, work = s.start(3, "ici0+"), s.compute(2)
    line = s.run(s.loop(10, [gather, work, done(gather)]))
    assert line.step_s.replay == 30
    assert line.exposed_s == (10, 20)
    assert (line.compute_s, line.collective_s) == (20, 30)
    assert line.step_s.ideal == 30
    assert line.step_s.no_overlap == 50


def test_a_link_that_falls_behind_in_a_loop_takes_its_own_time():
    """Nobody in the loop waits: ten messages of three seconds behind one second of compute."""
    s = Schedule()
    line = s.run(s.loop(10, [s.start(3, "ici0+"), s.compute(1)]), s.blocking(1, "ici0+"))
    assert line.step_s.replay == 30 + 1


def test_a_loop_does_not_move_what_is_under_way_on_other_links():
    s = Schedule()
    outer = s.start(100, "ici0+")
    work = s.loop(10, [s.compute(1)])
    inner = s.blocking(1, "ici0+")
    line = s.run(outer, work, inner, done(outer))
    assert line.step_s.replay == 100 + 1


def test_a_loop_of_no_trips_takes_no_time():
    s = Schedule()
    assert s.run(s.loop(0, [s.compute(5)]), s.compute(1)).step_s.replay == 1


def test_events_show_the_first_iteration():
    s = Schedule()
    gather, work = s.start(3, "ici0+"), s.compute(2)
    events = s.run(s.compute(1), s.loop(10, [gather, work, done(gather)])).events
    shown = [(e.track, e.start_s, e.duration_s) for e in events]
    assert shown == [
        ("compute", 0, 1),
        ("collective", 1, 3),
        ("compute", 1, 2),
        ("exposed", 3, 1),
    ]


LINKS = ("ici0+", "ici0-", "ici1+", "ici1-", "dcn")
# Sixteenths of a second: sums of them are exact, so equal is equal.
DURATION = st.integers(0, 64).map(lambda n: n / 16)


@st.composite
def bodies(draw, schedule, depth=0):
    """Random actions; all that is started is waited for before the end."""
    actions, open_ = [], []
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["compute", "start", "copy", "blocking", "done", "loop"]))
        links = draw(st.sets(st.sampled_from(LINKS), min_size=1, max_size=2))
        if kind == "compute":
            actions.append(schedule.compute(draw(DURATION)))
        elif kind == "blocking":
            actions.append(schedule.blocking(draw(DURATION), *sorted(links)))
        elif kind == "loop" and depth < 2:
            body = draw(bodies(schedule, depth + 1))
            actions.append(schedule.loop(draw(st.integers(0, 5)), body))
        elif kind == "done" and open_:
            actions.append(done(open_.pop(draw(st.integers(0, len(open_) - 1)))))
        elif kind in ("start", "copy"):
            new = schedule.copy if kind == "copy" else schedule.start
            open_.append(new(draw(DURATION), *(sorted(links) if kind == "start" else ())))
            actions.append(open_[-1])
    return actions + [done(start) for start in draw(st.permutations(open_))]


def unrolled(actions: list[Action]) -> list[Action]:
    flat: list[Action] = []
    for action in actions:
        if action.kind == "loop":
            flat += unrolled(action.body) * int(action.trips)
        else:
            flat.append(action)
    return flat


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_schedule_lies_between_the_bounds_and_adds_up(data):
    s = Schedule()
    actions = data.draw(bodies(s))
    line = s.run(*actions)
    step = line.step_s
    assert 0 <= step.ideal <= step.replay <= step.no_overlap
    assert sum(line.exposed_s) == pytest.approx(step.replay)
    assert step.no_overlap == pytest.approx(line.compute_s + line.collective_s + line.copy_s)
    # While compute waits for a collective, some collective is under way.
    assert line.exposed_collective_s <= line.collective_s + 1e-9
    for row, exposed in zip(s.rows, line.exposed_s, strict=True):
        assert exposed >= 0
        assert row.wire is not None or row.opcode == "copy-start" or exposed == pytest.approx(
            row.seconds * row.count
        )  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_loop_is_its_body_written_out(data):
    s = Schedule()
    actions = data.draw(bodies(s))
    rolled, flat = s.run(*actions), s.run(*unrolled(actions))
    assert rolled.step_s.replay == pytest.approx(flat.step_s.replay)
    assert rolled.exposed_s == pytest.approx(flat.exposed_s)
