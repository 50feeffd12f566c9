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


def test_no_events_is_a_trace_too():
    assert [e["ph"] for e in perfetto_trace([])["traceEvents"]] == ["M"]
