"""The whole chain from text to a replayed step, for tests that damage the text."""

import time

from spmdlab.cost.ledger import price
from spmdlab.errors import HloError
from spmdlab.hardware.chips import chip
from spmdlab.hardware.topology import parse_topology, row_major_placement
from spmdlab.hlo.parse import parse
from spmdlab.timeline.replay import Timeline, replay

LONGEST_S = 20.0
"""No text of the size of the samples may take longer, on a machine however busy."""


def survives(text: str, target: str = "cpu:8") -> Timeline | HloError:
    """Parses, prices and replays; an `HloError` is the only error it may end in."""
    topology = parse_topology(target)
    axes = {"data": topology.num_devices // 8, "fsdp": 4, "tensor": 2}
    placement = row_major_placement(topology, axes)
    start = time.perf_counter()
    try:
        outcome: Timeline | HloError = replay(price(parse(text), chip(topology.chip), placement))
    except HloError as error:
        outcome = error
    if isinstance(outcome, HloError):
        assert "\n" not in str(outcome), "an error is one line"
        assert len(str(outcome)) < 400, "an error is one short line"
    seconds = time.perf_counter() - start
    assert seconds < LONGEST_S, f"took {seconds:.1f} s"
    return outcome
