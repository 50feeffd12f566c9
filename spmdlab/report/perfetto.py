"""Timelines in the form that https://ui.perfetto.dev opens (Chrome's trace event format)."""

from collections.abc import Mapping, Sequence
from typing import Any


def perfetto_trace(
    events: Sequence[Mapping[str, Any]], *, process: str = "one device"
) -> dict[str, Any]:
    """Returns a trace with one row per track, in the order in which tracks first appear.

    Args:
        events: Each ``{name, track, start_s, duration_s, args}``; times in seconds from the
            start of the step.
        process: The name above the tracks.

    Source: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

    >>> event = {"name": "dot", "track": "compute", "start_s": 1e-6, "duration_s": 2e-6}
    >>> perfetto_trace([event])["traceEvents"][-1]["dur"]
    2.0
    """
    tracks = {track: n for n, track in enumerate(dict.fromkeys(e["track"] for e in events), 1)}
    names = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": process}}]
    for track, tid in tracks.items():
        about = {"ph": "M", "pid": 1, "tid": tid}
        names.append({**about, "name": "thread_name", "args": {"name": track}})
        names.append({**about, "name": "thread_sort_index", "args": {"sort_index": tid}})
    spans = [
        {
            "ph": "X",
            "pid": 1,
            "tid": tracks[event["track"]],
            "name": event["name"],
            "ts": round(event["start_s"] * 1e6, 6),  # Microseconds.
            "dur": round(event["duration_s"] * 1e6, 6),
            "args": dict(event.get("args") or {}),
        }
        for event in events
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *spans]}
