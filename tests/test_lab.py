"""The verbs, with a made-up row function in real worker processes."""

import json
import textwrap

import pytest

from spmdlab import lab
from spmdlab.config import Experiment
from spmdlab.errors import CompileError, ConfigError, HloError, ShardingError
from spmdlab.lab import workers
from spmdlab.models.config import DecoderConfig
from spmdlab.report import progress
from spmdlab.strategies import Data, Fsdp, Tensor
from spmdlab.workload import BatchConfig

ROWS = """
    import os
    from spmdlab import errors
    from spmdlab.report.rows import failed_row

    PREPARED = []

    def prepare(targets):
        PREPARED.append(targets)

    def row(experiment, strategy, target, detail=False):
        mesh = str(experiment.strategies[strategy])
        if strategy == "tensor":
            raise errors.ShardingError("dim 'heads' of size 6 does not divide 4 ways")
        if strategy == "big":
            raise errors.DoesNotFit("needs more", needed_bytes=20.0, capacity_bytes=16.0)
        if strategy == "abort":
            os.abort()
        if strategy == "slightly":
            found = failed_row(strategy=strategy, target=target, error="", error_type="")
            found |= {"status": "does not fit", "error": "needs more", "error_type": "DoesNotFit"}
            ledger = {"totals": {}, "collectives": [], "unmodelled": []}
            return found | ({"ledger": ledger, "timeline_events": []} if detail else {})
        if strategy == "bug":
            raise KeyError("oh")
        found = failed_row(strategy=strategy, target=target, error="", error_type="")
        found |= {"status": "ok", "error": None, "mfu": float("nan"), "prepared": PREPARED}
        found["step_s"] = {"ideal": 1.0, "replay": 2.0, "no_overlap": 3.0}
        if detail:
            totals = {"flops": 1.0}
            found["ledger"] = {"totals": totals, "collectives": [], "unmodelled": []}
            event = {"name": "dot", "track": "compute", "start_s": 0.0, "duration_s": 1.0}
            found["timeline_events"] = [event]
        return found

    def analyze(text, target, mesh):
        if "cut" in text:
            raise errors.HloError("line 1: cut short")
        return {"text": text, "target": target, "mesh": mesh}
"""


class Watcher:
    """Remembers what it is told."""

    def __init__(self):
        self.seen = []

    def started(self, label):
        self.seen.append(("started", label))

    def finished(self, label, note, *, outcome):
        self.seen.append((outcome, label))


@pytest.fixture(autouse=True)
def rows(tmp_path, monkeypatch):
    (tmp_path / "rows_of_the_test.py").write_text(textwrap.dedent(ROWS))
    monkeypatch.syspath_prepend(tmp_path)
    for constant, name in {
        "COMPILE_ROW": "row",
        "ANALYZE_HLO": "analyze",
        "PREPARE": "prepare",
    }.items():
        monkeypatch.setattr(workers, constant, f"rows_of_the_test:{name}")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def experiment(*names: str, targets: tuple[str, ...] = ("cpu:8",)) -> Experiment:
    kinds = {"fsdp": Fsdp(8), "tensor": Tensor(8)}
    model = DecoderConfig(
        vocab_size=256,
        num_layers=2,
        embed_dim=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_dim=64,
    )
    return Experiment(
        model=model,
        batch=BatchConfig(global_batch=8, seq_len=16),
        strategies={name: kinds.get(name, Data(8)) for name in names},
        targets=targets,
    )


def compare(*names, targets=("cpu:8",), **options):
    options.setdefault("watcher", progress.Silent())
    return lab.compare(experiment(*names, targets=targets), **options)


def test_one_row_per_pair_in_the_order_asked_for():
    found = compare("data", "fsdp", targets=("v5e:2x4", "cpu:8"), jobs=2)
    assert [(row["strategy"], row["target"]) for row in found["rows"]] == [
        ("data", "v5e:2x4"),
        ("fsdp", "v5e:2x4"),
        ("data", "cpu:8"),
        ("fsdp", "cpu:8"),
    ]
    assert {"spmdlab", "jax", "libtpu", "config", "rows"} == set(found)
    assert found["config"]["strategies"] == {"data": "data=8", "fsdp": "fsdp=8"}


def test_each_worker_is_prepared_for_all_targets_at_once():
    found = compare("data", "fsdp", targets=("v5e:2x4", "cpu:8"))
    prepared = {repr(row["prepared"]) for row in found["rows"]}
    assert prepared == {"[('v5e:2x4', 'cpu:8')]"}


def test_what_fails_says_why_and_the_rest_goes_on(out):
    watcher = Watcher()
    found = compare("data", "tensor", "big", "abort", "bug", "fsdp", out=out, watcher=watcher)
    said = {row["strategy"]: (row["status"], row["error"]) for row in found["rows"]}
    assert said["data"] == said["fsdp"] == ("ok", None)
    assert said["tensor"] == ("error", "dim 'heads' of size 6 does not divide 4 ways")
    assert said["big"] == ("does not fit", "needs more")
    assert said["abort"][1].startswith("the compiling process died of SIGABRT")
    assert said["bug"] == ("error", "internal error: KeyError: 'oh'")
    rows = {row["strategy"]: row for row in found["rows"]}
    assert (rows["big"]["memory"]["peak"], rows["big"]["memory"]["capacity"]) == (20.0, 16.0)
    assert rows["tensor"]["mesh"] == {"tensor": 8}
    assert rows["tensor"]["chip"] == "cpu"
    assert sorted(kind for kind, _ in watcher.seen if kind != "started") == [
        "done",
        "done",
        "failed",
        "failed",
        "failed",
        "refused",
    ]
    written = json.loads((out / "comparison.json").read_text())
    assert [row["strategy"] for row in written["rows"]] == list(said)
    assert written["rows"][0]["mfu"] is None
    assert sorted(p.name for p in out.iterdir()) == ["comparison.json", "report.html"]


def test_when_every_row_is_the_users_mistake_it_is_raised_and_nothing_written(out):
    with pytest.raises(ShardingError, match=r"^tensor on cpu:8: dim 'heads'") as raised:
        compare("tensor", targets=("cpu:8", "v5e:2x4"), out=out)
    assert "\n" not in str(raised.value)
    assert not out.exists()


def test_rows_that_do_not_fit_are_an_answer_and_no_mistake(out):
    assert compare("big", out=out)["rows"][0]["status"] == "does not fit"
    assert (out / "comparison.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategies": ["dta"]}, "Did you mean 'data'"),
        ({"strategies": ["fspd=4"]}, "Did you mean 'fsdp'"),
        ({"strategies": []}, "strategies is empty"),
        ({"targets": ["v5e:3x3"]}, "v5e:3x3"),
        ({"jobs": 0}, "jobs must be at least 1"),
        ({"out": "/proc/none"}, "cannot write"),
        ({"out": ""}, "has no name"),
    ],
)
def test_a_mistake_is_found_before_any_work(options, message):
    watcher = Watcher()
    with pytest.raises(ConfigError, match=message):
        compare("data", watcher=watcher, **options)
    assert watcher.seen == []


def test_strategies_are_chosen_by_name_or_written_as_text():
    found = compare("data", "fsdp", strategies=["fsdp", "fsdp=4 tensor=2"], targets=("cpu:8",))
    assert [row["strategy"] for row in found["rows"]] == ["fsdp", "fsdp=4 tensor=2"]
    assert found["config"]["strategies"]["fsdp=4 tensor=2"] == "fsdp=4 tensor=2"


def test_explain_takes_the_first_pair_and_writes_ledger_and_timeline(out):
    found = experiment("fsdp", "data", targets=("v5e:2x4", "cpu:8"))
    row = lab.explain(found, out=out, watcher=progress.Silent())
    assert (row["strategy"], row["target"]) == ("fsdp", "v5e:2x4")
    assert json.loads((out / "ledger.json").read_text()) == row["ledger"]
    trace = json.loads((out / "timeline.perfetto.json").read_text())
    assert trace["traceEvents"][-1]["dur"] == 1e6


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("tensor", ShardingError, "tensor on cpu:8: dim 'heads'"),
        ("big", CompileError, "needs more"),
        ("abort", CompileError, "SIGABRT"),
        ("bug", RuntimeError, "KeyError: 'oh'"),
    ],
)
def test_explain_raises_what_its_worker_raised(name, kind, message, out):
    with pytest.raises(kind, match=message):
        lab.explain(experiment(name), out=out, watcher=progress.Silent())
    assert not out.exists()


def test_a_step_that_was_compiled_is_explained_even_if_it_does_not_fit(out):
    row = lab.explain(experiment("slightly"), out=out, watcher=progress.Silent())
    assert (row["status"], row["error"]) == ("does not fit", "needs more")
    assert (out / "ledger.json").exists()


@pytest.mark.parametrize("name", ["comparison.json", "report.html"])
def test_a_file_that_cannot_be_written_is_told_before_the_work(out, name):
    (out / name).mkdir(parents=True)
    watcher = Watcher()
    with pytest.raises(ConfigError, match=f"{name}': it is a folder"):
        compare("data", out=out, watcher=watcher)
    assert watcher.seen == []


def test_a_text_that_is_refused_is_named(tmp_path):
    (tmp_path / "step.txt").write_text("cut")
    with pytest.raises(HloError, match=r"^HLO file '.*step\.txt': line 1: cut short$"):
        lab.analyze(tmp_path / "step.txt", target="cpu:8")


def test_analyze_hands_the_text_on(tmp_path, out):
    (tmp_path / "step.txt").write_text("HloModule x\n")
    ledger = lab.analyze(tmp_path / "step.txt", target="cpu:8", mesh="data=8", out=out)
    assert ledger == {"text": "HloModule x\n", "target": "cpu:8", "mesh": "data=8"}
    assert json.loads((out / "ledger.json").read_text()) == ledger
    with pytest.raises(HloError, match="does not exist"):
        lab.analyze(tmp_path / "none.txt", target="cpu:8")
