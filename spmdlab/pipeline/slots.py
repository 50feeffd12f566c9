"""A schedule as the compiled program follows it: per stage and tick, what goes into which slot.

Each stage has a ring of slots for its chunks' inputs, as many as the fullest stage ever needs, and
one for cotangents that wait.
"""

import dataclasses
from collections.abc import Iterable

from spmdlab.pipeline.schedule import Schedule
from spmdlab.pipeline.simulate import Held, cotangents_held, inputs_held, ticks_of

NONE = -1

FIELDS = (
    "receive",  # slot for the activation that came from the stage before, or NONE
    "inject",  # slot for the embedded microbatch (chunk 0), or NONE
    "forward_slot",  # slot that the forward reads; NONE: idle
    "forward_microbatch",
    "forward_repeat",
    "receive_cotangent",  # slot for the cotangent that came from the next stage, or NONE
    "backward_slot",  # slot that the backward reads its input from; NONE: idle
    "backward_microbatch",
    "backward_repeat",
    "cotangent_slot",  # slot with its output's cotangent; NONE: the last chunk, the head's
    "is_first",  # 1 if its input's cotangent belongs to the embedding
)
"""Of one stage in one tick."""

SHARED_FIELDS = (
    "embed",  # microbatch that enters the first stage, or NONE
    "head",  # microbatch that leaves the last stage, or NONE
    "unembed",  # microbatch whose cotangent reaches the embedding, or NONE
)
"""Of one tick, the same for all stages."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """Tables of whole numbers."""

    inputs: int
    """Slots for inputs on every stage."""
    cotangents: int
    own: dict[str, list[list[int]]]
    """`FIELDS` -> per tick, per stage."""
    shared: dict[str, list[int]]
    """`SHARED_FIELDS` -> per tick."""


def assign_slots(schedule: Schedule) -> Slots:
    """Returns the tables of a schedule."""
    stages, last = schedule.stages, schedule.stages * schedule.repeats - 1
    inputs, num_inputs = _assign(inputs_held(schedule))
    cotangents, num_cotangents = _assign(cotangents_held(schedule))
    own = {
        name: [[0 if name == "is_first" else NONE] * stages for _ in range(schedule.ticks)]
        for name in FIELDS
    }
    for name in ("forward_microbatch", "forward_repeat", "backward_microbatch", "backward_repeat"):
        own[name] = [[0] * stages for _ in range(schedule.ticks)]
    shared = {name: [NONE] * schedule.ticks for name in SHARED_FIELDS}
    for held, slot in inputs.items():
        own["receive" if held.chunk else "inject"][held.start][held.stage] = slot
    for held, slot in cotangents.items():
        own["receive_cotangent"][held.start][held.stage] = slot
    input_slot = {(held.microbatch, held.chunk): slot for held, slot in inputs.items()}
    cotangent_slot = {(held.microbatch, held.chunk): slot for held, slot in cotangents.items()}
    for (letter, microbatch, chunk), tick in ticks_of(schedule).items():
        word = "forward" if letter == "F" else "backward"
        stage = chunk % stages
        own[f"{word}_slot"][tick][stage] = input_slot[microbatch, chunk]
        own[f"{word}_microbatch"][tick][stage] = microbatch
        own[f"{word}_repeat"][tick][stage] = chunk // stages
        if letter == "F" and chunk == 0:
            shared["embed"][tick] = microbatch
        if letter == "B":
            own["cotangent_slot"][tick][stage] = cotangent_slot.get((microbatch, chunk), NONE)
            own["is_first"][tick][stage] = int(chunk == 0)
            if chunk == 0:
                shared["unembed"][tick] = microbatch
            if chunk == last:
                shared["head"][tick] = microbatch
    return Slots(inputs=num_inputs, cotangents=max(1, num_cotangents), own=own, shared=shared)


def _assign(held: Iterable[Held]) -> tuple[dict[Held, int], int]:
    """Gives each thing held the lowest slot of its stage that is free: as few as can be."""
    free_from: dict[int, list[int]] = {}
    found = {}
    for each in sorted(held, key=lambda each: each.start):
        slots = free_from.setdefault(each.stage, [])
        slot = next((i for i, tick in enumerate(slots) if tick <= each.start), len(slots))
        if slot == len(slots):
            slots.append(0)
        slots[slot] = each.stop + 1
        found[each] = slot
    return found, max(map(len, free_from.values()), default=0)


def homeward_permutes(stages: int, repeats: int) -> list[list[tuple[int, int, int, int]]]:
    """How chunks get from their order in the model to the stages that run them.

    At rest the layers are split in order: stage ``s`` holds chunks ``s * repeats`` to
    ``(s + 1) * repeats - 1``, but runs chunks ``s``, ``s + stages``, ...  Returned are
    ``repeats`` rounds; in each, every stage sends one chunk and receives one: ``(source,
    target, slot at the source, slot at the target)``, ordered by source.
    """
    edges: list[dict[int, list[tuple[int, int, int, int]]]] = [{} for _ in range(stages)]
    for chunk in range(stages * repeats):
        source, target = chunk // repeats, chunk % stages
        edge = (source, target, chunk % repeats, chunk // stages)
        edges[source].setdefault(target, []).append(edge)
    # As many chunks leave each stage as reach it, so perfect matchings use them all up (König).
    return [_matching(edges) for _ in range(repeats)]


def _matching(
    edges: list[dict[int, list[tuple[int, int, int, int]]]],
) -> list[tuple[int, int, int, int]]:
    source_of: dict[int, int] = {}

    def augment(source: int, seen: set[int]) -> bool:
        for target, left in edges[source].items():
            if not left or target in seen:
                continue
            seen.add(target)
            if target not in source_of or augment(source_of[target], seen):
                source_of[target] = source
                return True
        return False

    for source in range(len(edges)):
        assert augment(source, set())
    pairs = sorted((source, target) for target, source in source_of.items())
    return [edges[source][target].pop() for source, target in pairs]
