"""Processes that hang, die or find something become rows; nothing else is lost."""

import pathlib
import sys

import pytest

from spmdlab import lab
from spmdlab.errors import ConfigError
from spmdlab.report.progress import Silent
from spmdlab.strategies import Data
from spmdlab.verify import supervise

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import faulty


def rows(monkeypatch, function, **options):
    monkeypatch.setattr(supervise, "VERIFY_STRATEGY", f"faulty:{function}")
    return lab.verify(faulty.experiment(), jobs=1, steps=1, watcher=Silent(), **options)["rows"]


def test_a_hang_names_the_collective(monkeypatch):
    [row] = rows(monkeypatch, "hanging", timeout_s=100)
    assert (row["status"], row["error_type"]) == ("error", "TimedOut")
    assert row["error"].startswith("no end after 20 s while running step 1 of 1; ")
    assert "devices wait for others in all-reduce" in row["error"]
    assert "over data" in row["error"]
    assert "mine/psum" in row["error"]


def test_what_never_comes_back_at_all_is_ended_too(monkeypatch):
    [row] = rows(monkeypatch, "sleeping", timeout_s=1)
    assert row["error_type"] == "TimedOut"
    assert "no answer after 1 s; the process was killed; no collective has" in row["error"]


def test_a_death_is_a_row(monkeypatch):
    [row] = rows(monkeypatch, "aborting")
    assert (row["status"], row["error_type"]) == ("error", "WorkerDied")
    assert "SIGABRT" in row["error"]


def test_a_mismatch_is_written_down(monkeypatch, tmp_path):
    [row] = rows(monkeypatch, "mismatching", out=tmp_path)
    assert row["status"] == "mismatch"
    assert row["findings"][0]["cause"] == "reduced twice"
    assert [path.name for path in tmp_path.iterdir()] == ["verification.json"]
    assert '"cause": "reduced twice"' in (tmp_path / "verification.json").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "bfloat16"}, "Unknown dtype 'bfloat16'"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"timeout_s": 0}, "timeout must be at least 1"),
        ({"jobs": 0}, "jobs must be at least 1"),
    ],
)
def test_refuses_what_makes_no_sense(options, words):
    with pytest.raises(ConfigError, match=words):
        lab.verify(faulty.experiment(), watcher=Silent(), **options)


def test_float64_is_exact_to_far_below_float32():
    """In a process of its own, for the switch is JAX's and not the step's."""
    strategy = Data(4).with_options(accumulate=2)
    found = lab.verify(
        faulty.experiment(strategy), dtype="float64", steps=2, jobs=1, watcher=Silent()
    )
    [row] = found["rows"]
    assert row["status"] == "ok"
    assert row["tolerance"] < 1e-12
    assert max(row["steps"][2]["gradient_errors"].values()) < 1e-12
