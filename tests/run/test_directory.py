import json
import os
import signal
import subprocess
import sys

import pytest

from spmdlab.errors import ConfigError
from spmdlab.run import directory
from spmdlab.run.directory import Journal
from spmdlab.run.stop import StopSignals


def test_a_journal_is_cut_back_to_what_is_wanted_and_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path)
    for step in (1, 2, 3):
        journal.append({"step": step, "loss": float("nan") if step == 2 else 0.5})
    journal.close()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # Killed while it wrote.
    again = Journal(path)
    again.trim(lambda record: record["step"] <= 2)
    again.append({"step": 3})
    again.close()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert found == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}, {"step": 3}]


def test_only_what_decides_the_result_must_stay():
    config = {"model": {"layers": 2}, "seed": 0, "strategies": {}, "targets": [], "chips": {}}
    assert directory.fixed(config | {"training": {}}) == {"model": {"layers": 2}, "seed": 0}


def test_each_difference_is_named_with_both_values():
    before = {"model": {"layers": 2, "dim": 8}, "seed": 0}
    with pytest.raises(ConfigError) as error:
        directory.check_same(before, {"model": {"layers": 3, "dim": 8}, "seed": 0, "new": 1})
    assert "model.layers was 2 and is 3; new was null and is 1" in str(error.value)
    directory.check_same(before, dict(before))


def test_a_second_process_stays_out(tmp_path):
    code = (
        "import pathlib, sys; from spmdlab.run import directory\n"
        "with directory.locked(pathlib.Path(sys.argv[1])): pass"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with directory.locked(tmp_path):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert "another process is training" in done.stderr
    assert subprocess.run(command, timeout=60).returncode == 0


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "order.jsonl"])
def test_a_folder_that_has_a_run_is_not_new(tmp_path, name):
    (tmp_path / "notes.txt").write_text("mine")
    assert directory.check_new(tmp_path) == tmp_path
    (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match=name):
        directory.check_new(tmp_path)


def test_a_signal_is_noted_and_an_ignored_one_stays_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.number is None
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.number == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) != stop._note
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_second_interrupt_is_one():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.number == signal.SIGINT
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
