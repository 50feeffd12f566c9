"""The simulator against closed forms."""

import pytest
from hypothesis import given, settings, strategies as st

from spmdlab.pipeline.schedule import circular, gpipe, one_forward_one_backward
from spmdlab.pipeline.simulate import simulate
from tests.pipeline.tables import alternating

STAGES, MICROBATCHES = st.integers(1, 6), st.integers(1, 12)


@given(STAGES, MICROBATCHES, st.floats(0.5, 4))
def test_gpipe_holds_every_microbatch(p, m, cost):
    found = simulate(gpipe(p, m), cost)
    assert found.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
    assert found.live == (m,) * p
    assert found.ticks == found.permutes == 2 * (m + p - 1)
    assert found.forward_transfers == found.backward_transfers == m * (p - 1)


@given(STAGES, MICROBATCHES, st.floats(0.5, 4))
def test_1f1b_holds_as_many_as_there_are_ticks_between_forward_and_backward(p, m, cost):
    """The same bubble; on stage s no more than 2 (p - s) - 1, never more than 2 p - 1."""
    found = simulate(one_forward_one_backward(p, m), cost)
    assert found.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
    assert found.live == tuple(min(m, 2 * (p - s) - 1) for s in range(p))
    assert found.ticks == m + 2 * (p - 1)
    assert found.forward_ticks == found.backward_ticks == m + p - 1


@given(st.integers(2, 5), st.integers(1, 4), st.integers(2, 3))
@settings(deadline=None)
def test_repeats_divide_the_bubble(p, groups, r):
    m = groups * p
    for make in (circular, one_forward_one_backward):
        found = simulate(make(p, m, r))
        assert found.bubble_fraction == pytest.approx((p - 1) / (r * m + p - 1))
        assert found.forward_transfers == m * (p * r - 1)
        assert found.permutes == 2 * (r * m + p - 1)
    assert simulate(circular(p, m, r)).live == (m * r,) * p


@given(st.integers(2, 5), st.integers(2, 3))
@settings(deadline=None)
def test_interleaved_1f1b_does_not_grow_with_microbatches(p, r):
    live = [simulate(one_forward_one_backward(p, n * p, r)).live for n in (4, 5, 8)]
    assert live[0] == live[1] == live[2]
    assert max(live[0]) <= 2 * p * r


@given(STAGES, MICROBATCHES)
def test_the_textbooks_1f1b_holds_a_microbatch_per_stage_ahead(p, m):
    """One forward or backward a tick: p - s on stage s, in 2 (m + p - 1) ticks.

    Between the first stage and the last one more may have come in that waits for its turn.

    With a forward as dear as a backward the textbook's bubble is (p - 1) / (m + p - 1).  In one
    SPMD program each tick between costs both, so that about half of all time is bubble.
    """
    found = simulate(alternating(p, m), 1.0)
    for s, live in enumerate(found.live):
        assert min(m, p - s) <= live <= min(m, p - s + (0 < s < p - 1))
    assert max(found.live) <= p
    assert found.ticks == 2 * (m + p - 1)
    if p > 1 and m > p:
        assert found.bubble_fraction > (p - 1) / (m + p - 1)
