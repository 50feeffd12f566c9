"""Timelines in the form that https://ui.perfetto.dev opens (Chrome's trace event format)."""

from collections.abc import Mapping, Sequence
from typing import Any

TRACKS = ("compute", "collective", "exposed", "copy")
"""From top to bottom; others follow."""

_ROUNDING_US = 2e-6


def perfetto_trace(
    events: Sequence[Mapping[str, Any]], *, process: str = "one device"
) -> dict[str, Any]:
    """Returns a trace with one row per track, and more where events of a track overlap.

    The format knows only events that follow one another or lie within one another; what runs at
    the same time, as on ICI and DCN, needs rows of its own to be seen.

    Args:
        events: Each ``{name, track, start_s, duration_s, args}``; times in seconds from the
            start of the step.
        process: The name above the tracks.

    Source: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

    >>> event = {"name": "dot", "track": "compute", "start_s": 1e-6, "duration_s": 2e-6}
    >>> perfetto_trace([event])["traceEvents"][-1]["dur"]
    2.0
    """
    spans, lanes = [], {}
    for event in sorted(events, key=lambda event: event["start_s"]):
        start_us = round(event["start_s"] * 1e6, 6)
        duration_us = round(event["duration_s"] * 1e6, 6)
        ends = lanes.setdefault(event["track"], [])
        free = (n for n, end_us in enumerate(ends) if end_us <= start_us + _ROUNDING_US)
        lane = next(free, len(ends))
        ends[lane : lane + 1] = [start_us + duration_us]
        spans.append(((event["track"], lane), start_us, duration_us, event))
    order = {name: n for n, name in enumerate(TRACKS)}
    tracks = sorted(lanes, key=lambda track: order.get(track, len(order)))
    rows = [(track, lane) for track in tracks for lane in range(len(lanes[track]))]
    tids = {row: tid for tid, row in enumerate(rows, 1)}
    names = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": process}}]
    for (track, lane), tid in tids.items():
        about = {"ph": "M", "pid": 1, "tid": tid}
        name = f"{track} {lane + 1}" if lane else track
        names.append({**about, "name": "thread_name", "args": {"name": name}})
        names.append({**about, "name": "thread_sort_index", "args": {"sort_index": tid}})
    shown = [
        {
            "ph": "X",
            "pid": 1,
            "tid": tids[row],
            "name": event["name"],
            "ts": start_us,
            "dur": duration_us,
            "args": dict(event.get("args") or {}),
        }
        for row, start_us, duration_us, event in spans
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *shown]}
