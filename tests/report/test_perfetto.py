import json

from spmdlab.report.perfetto import perfetto_trace


def test_spans_keep_their_times_and_tracks():
    events = [
        {"name": "dot", "track": "compute", "start_s": 0.0, "duration_s": 2e-3, "args": {"n": 1}},
        {"name": "all-gather", "track": "ICI", "start_s": 1e-3, "duration_s": 5e-4, "args": None},
        {"name": "dot", "track": "compute", "start_s": 2e-3, "duration_s": 1e-3},
    ]
    trace = json.loads(json.dumps(perfetto_trace(events, process="fsdp")))
    names = {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(names[e["tid"]], e["name"], e["ts"], e["dur"]) for e in spans] == [
        ("compute", "dot", 0.0, 2000.0),
        ("ICI", "all-gather", 1000.0, 500.0),
        ("compute", "dot", 2000.0, 1000.0),
    ]
    assert spans[0]["args"] == {"n": 1}


def tracks_of(trace):
    return {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }


def test_what_runs_at_the_same_time_has_rows_of_its_own():
    """Neither nested nor in turn is a form that the format does not know."""
    times = [(0.0, 5e-5), (1e-5, 1e-5), (2e-5, 6e-5), (5e-5, 1e-5)]
    events = [
        {"name": str(n), "track": "collective", "start_s": start, "duration_s": duration}
        for n, (start, duration) in enumerate(times)
    ]
    trace = perfetto_trace(events)
    names = tracks_of(trace)
    spans = [(names[e["tid"]], e["name"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    assert spans == [
        ("collective", "0"),
        ("collective 2", "1"),
        ("collective 2", "2"),
        ("collective", "3"),
    ]


def test_tracks_keep_their_order_whatever_starts_first():
    events = [
        {"name": "x", "track": track, "start_s": n * 1e-6, "duration_s": 1e-6}
        for n, track in enumerate(["copy", "pcie", "exposed", "compute", "collective"])
    ]
    names = tracks_of(perfetto_trace(events))
    assert [names[tid] for tid in sorted(names)] == [
        "compute",
        "collective",
        "exposed",
        "copy",
        "pcie",
    ]


def test_no_events_is_a_trace_too():
    assert [e["ph"] for e in perfetto_trace([])["traceEvents"]] == ["M"]
