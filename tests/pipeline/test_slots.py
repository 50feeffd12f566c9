"""The tables a program follows: whoever follows them blindly gets every value to its place."""

import pytest
from hypothesis import given, settings, strategies as st

from spmdlab.pipeline.schedule import Schedule, circular, gpipe, one_forward_one_backward
from spmdlab.pipeline.simulate import simulate
from spmdlab.pipeline.slots import FIELDS, NONE, assign_slots, homeward_permutes
from tests.pipeline.tables import alternating, anything_legal


def follow(schedule: Schedule) -> None:
    """Runs the tables with names for arrays, as `spmdlab.train.pipeline` does with arrays."""
    slots, p, last = assign_slots(schedule), schedule.stages, schedule.stages * schedule.repeats - 1
    inputs = [[None] * slots.inputs for _ in range(p)]
    cotangents = [[None] * slots.cotangents for _ in range(p)]
    sent, returned = [None] * p, [None] * p
    seen = set()
    for phase in schedule.phases():
        for tick in range(phase.start, phase.stop):
            shared = {name: rows[tick] for name, rows in slots.shared.items()}
            owns = [{name: slots.own[name][tick][s] for name in FIELDS} for s in range(p)]
            outputs, backs = [None] * p, [None] * p
            for s, own in enumerate(owns):
                if phase.forward and own["receive"] != NONE:
                    inputs[s][own["receive"]] = sent[s]
                if phase.forward and own["inject"] != NONE:
                    inputs[s][own["inject"]] = ("in", shared["embed"], 0)
                if phase.backward and own["receive_cotangent"] != NONE:
                    cotangents[s][own["receive_cotangent"]] = returned[s]
                if own["forward_slot"] != NONE:
                    assert phase.forward
                    i, q = own["forward_microbatch"], own["forward_repeat"] * p + s
                    assert inputs[s][own["forward_slot"]] == ("in", i, q)
                    outputs[s] = ("in", i, q + 1)
                    seen.add(("F", i, q))
                if own["backward_slot"] != NONE:
                    assert phase.backward
                    i, q = own["backward_microbatch"], own["backward_repeat"] * p + s
                    assert inputs[s][own["backward_slot"]] == ("in", i, q)
                    if q == last:
                        assert phase.head
                        assert (own["cotangent_slot"], shared["head"]) == (NONE, i)
                    else:
                        assert cotangents[s][own["cotangent_slot"]] == ("out", i, q)
                    assert (own["is_first"] == 1) == (q == 0)
                    assert q or shared["unembed"] == i
                    backs[s] = ("out", i, q - 1)
                    seen.add(("B", i, q))
            if phase.forward:
                sent = [outputs[(s - 1) % p] for s in range(p)]
            if phase.backward:
                returned = [backs[(s + 1) % p] for s in range(p)]
    assert len(seen) == 2 * schedule.microbatches * (last + 1)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.integers(0, 2**20))
@settings(max_examples=150, deadline=None)
def test_any_legal_table_can_be_followed(stages, microbatches, repeats, seed):
    schedule = anything_legal(stages, microbatches, repeats, seed)
    follow(schedule)
    slots, found = assign_slots(schedule), simulate(schedule)
    assert slots.inputs == max(found.live)
    assert slots.cotangents == max(1, *found.live_cotangents)


@pytest.mark.parametrize(
    "schedule",
    [
        gpipe(4, 6),
        circular(4, 8, 3),
        one_forward_one_backward(4, 9),
        one_forward_one_backward(3, 6, 2),
        alternating(4, 6),
        gpipe(1, 3),
    ],
    ids=lambda schedule: f"{schedule.name}-{schedule.stages}",
)
def test_named_schedules_can_be_followed(schedule):
    follow(schedule)


@given(st.integers(1, 6), st.integers(1, 5))
def test_each_round_moves_one_chunk_from_and_to_every_stage(stages, repeats):
    rounds = homeward_permutes(stages, repeats)
    assert len(rounds) == repeats
    moved = set()
    for edges in rounds:
        assert [edge[0] for edge in edges] == list(range(stages))
        assert sorted(edge[1] for edge in edges) == list(range(stages))
        for source, target, at, to in edges:
            chunk = source * repeats + at
            assert (target, to) == (chunk % stages, chunk // stages)
            moved.add(chunk)
    assert len(moved) == stages * repeats
