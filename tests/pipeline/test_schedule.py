"""Schedules: the tables, and what is refused."""

import pytest
from hypothesis import given, settings, strategies as st

from spmdlab.errors import ConfigError
from spmdlab.pipeline.schedule import (
    Cell,
    Schedule,
    make_schedule,
    one_forward_one_backward,
    schedule_from_text,
)
from tests.pipeline.tables import anything_legal


def test_interleaved_1f1b_of_two_stages_by_hand():
    """Each microbatch goes round twice; the first backward is in its last forward's tick."""
    assert str(one_forward_one_backward(2, 2, 2)).splitlines() == [
        "F0        F1        F0.1      F1.1      B0.1      B1.1      B0        B1",
        ".         F0        F1        F0.1+B0.1 F1.1+B1.1 B0        B1        .",
    ]


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**20))
@settings(max_examples=60, deadline=None)
def test_text_round_trips(stages, microbatches, repeats, seed):
    schedule = anything_legal(stages, microbatches, repeats, seed)
    assert schedule_from_text(str(schedule), schedule.name) == schedule
    assert (schedule.stages, schedule.repeats) == (stages, repeats)
    assert schedule.microbatches == microbatches


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**20))
@settings(max_examples=60, deadline=None)
def test_phases_cover_all_ticks_and_all_work(stages, microbatches, repeats, seed):
    schedule = anything_legal(stages, microbatches, repeats, seed)
    phases = schedule.phases()
    assert [t for p in phases for t in range(p.start, p.stop)] == list(range(schedule.ticks))
    for _, tick, letter, _ in schedule.work():
        phase = next(p for p in phases if p.start <= tick < p.stop)
        assert phase.forward if letter == "F" else phase.backward


def test_1f1b_is_warm_up_steady_and_drain():
    phases = one_forward_one_backward(4, 8).phases()
    assert [(p.ticks, p.forward, p.backward, p.head) for p in phases] == [
        (3, True, False, False),
        (8, True, True, True),
        (3, False, True, False),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0 B0 F0", "stage 0 does the forward of microbatch 0, repeat 0, at ticks 0 and 2"),
        ("F0 F1 B0", "the backward of microbatch 1 on stage 0, is missing"),
        (
            "F0 B0\n. F0+B0",
            "backward of microbatch 0 on stage 0, is at tick 1, but needs the "
            "backward on stage 1, which is at tick 1",
        ),
        (
            "F0 . B0\nF0 B0 .",
            "forward of microbatch 0 on stage 1, is at tick 0, but needs the "
            "forward on stage 0, which is at tick 0",
        ),
        ("B0 F0", "backward of microbatch 0 on stage 0, is at tick 0, but needs the forward"),
        ("F0 B0 F0.1 B0.1", "forward of microbatch 0|backward of microbatch 0"),
        ("F0 B0\n.", r"rows of \[2, 1\] ticks"),
        ("F0 . B0", "tick 1: no stage has work; leave the tick out"),
        ("F0 X B0", "stage 0, tick 1: 'X' is no cell; write F2"),
        ("F0+F1 B0", "'F0\\+F1' is no cell"),
        (".", "every cell is idle"),
        ("", "the table is empty"),
        ("F1 B1", "the forward of microbatch 0 on stage 0, is missing"),
    ],
)
def test_refuses_a_table_that_is_no_pipeline(text, message):
    with pytest.raises(ConfigError, match=message):
        schedule_from_text(text)


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("1f1d", (2, 2), "Unknown pipeline schedule '1f1d'.  Did you mean '1f1b'"),
        ("gpipe", (2, 0), "microbatches=0 must be a whole number"),
        ("gpipe", (2, 2, 2), "schedule=gpipe goes through the stages once, repeats=2"),
        ("circular", (4, 6, 2), "microbatches=6 is no multiple of 4 stages; 4 or 8 would do"),
        ("1f1b", (4, 3, 2), "microbatches=3 is no multiple of 4 stages; 4 would do"),
    ],
)
def test_refuses_numbers_that_do_not_go_together(name, numbers, message):
    with pytest.raises(ConfigError, match=message):
        make_schedule(name, *numbers)


def test_negative_work_is_refused():
    from spmdlab.pipeline.schedule import Work

    with pytest.raises(ConfigError, match="below 0"):
        Schedule(((Cell(forward=Work(-1)),),))
