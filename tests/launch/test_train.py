"""`launch.train` in real processes, whose worker trains nothing: signals, deaths, exit codes."""

import contextlib
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest

REPO = pathlib.Path(__file__).parents[2]

CONFIG = """
    from spmdlab.config import Experiment
    from spmdlab.models.config import DecoderConfig
    from spmdlab.strategies import Data
    from spmdlab.workload import BatchConfig

    def get_config():
        return Experiment(
            model=DecoderConfig(vocab_size=256, num_layers=1, embed_dim=32, num_heads=4,
                                num_kv_heads=2, head_dim=8, mlp_dim=64),
            batch=BatchConfig(global_batch=8, seq_len=16),
            strategies={"data": Data(8)},
        )
"""

# Stands for training: says what it was given, then does what the strategy's text asks for.
DRIVER = """
    import json, os, pathlib, runpy, signal, sys, time
    from spmdlab import errors, pool
    from spmdlab.lab import workers
    from spmdlab.run.stop import StopSignals

    def prepare(targets):
        pass

    def train(experiment, strategy, target, out, *, resume):
        with StopSignals() as stop:
            staged = pathlib.Path(__file__).with_name("staged")
            staged.write_text(str(os.getpid()))
            staged.rename(staged.with_name("worker"))
            pool.tell({"note": f"{strategy} {target} {resume}"})
            if strategy == "data=1":
                os.abort()
            if strategy == "data=2":
                raise errors.ConfigError("there is no run")
            while strategy in ("data=3", "data=4") and not stop.number:
                time.sleep(0.01)
            if strategy == "data=4":
                pathlib.Path(__file__).with_name("saving").touch()
                time.sleep(60)  # A save that does not end.
        status = {"data": "finished", "data=3": "interrupted"}.get(strategy, "diverged")
        spent = {"steps": 3, "tokens": 384.0, "seconds": 2.0, "chip_seconds": 16.0}
        return {"status": status, "signal": stop.number, "strategy": strategy, "target": target,
                "error": "step 3: loss is nan" if status == "diverged" else None,
                **spent, "loss": 2.0, "final": None, "best": None, "evidence": "emulated",
                "time_to_accuracy": {"valid_loss": 2.5, "evidence": "emulated", **spent},
                "last_checkpoint": "checkpoints/2"}

    if __name__ == "__main__":
        workers.TRAIN, workers.PREPARE_TO_TRAIN = "driver:train", "driver:prepare"
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
"""

HEED_SIGNALS = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)  # whoever runs the tests may ignore some (nohup, &)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.py").write_text(textwrap.dedent(CONFIG))
    (tmp_path / "driver.py").write_text(textwrap.dedent(DRIVER))
    return tmp_path


@contextlib.contextmanager
def start(folder, *flags) -> Iterator[subprocess.Popen[str]]:
    train = [sys.executable, "-P", f"{folder}/driver.py", f"{REPO}/launch/train.py"]
    with subprocess.Popen(
        [sys.executable, "-c", HEED_SIGNALS, *train, f"--config={folder}/config.py", *flags],
        cwd=REPO,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{REPO}:{folder}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def run(folder, *flags) -> tuple[int, str, str]:
    with start(folder, f"--out={folder}/out", *flags) as running:
        printed, said = running.communicate(timeout=60)
    return running.returncode, printed, said


def test_a_run_that_ends_prints_its_result(folder):
    code, printed, said = run(folder, "--resume", "--target=cpu:8")
    assert code == 0, said
    assert said == "data cpu:8 True\n"
    assert "the last good checkpoint is checkpoints/2" in printed
    assert "valid loss 2.5 reached after 3 steps, 384 tokens, 2.00 s, 16 chip-seconds" in printed


def test_a_run_that_diverges_exits_1(folder):
    code, printed, _ = run(folder, "--strategy=data=5")
    assert code == 1
    assert "step 3: loss is nan; the last good checkpoint is checkpoints/2" in printed


def test_a_death_is_one_line_and_exit_1(folder):
    code, printed, said = run(folder, "--strategy=data=1")
    assert (code, printed) == (1, "")
    last = said.splitlines()[-1]
    assert last.startswith("error: data=1 on cpu:8: the training process died of SIGABRT")
    assert "/out'" in last


def test_a_mistake_is_one_line_and_exit_2(folder):
    code, printed, said = run(folder, "--strategy=data=2")
    assert (code, printed) == (2, "")
    assert said.splitlines()[-1] == "error: data=2 on cpu:8: there is no run"
    with start(folder) as running:
        _, said = running.communicate(timeout=60)
    assert (running.returncode, len(said.splitlines())) == (2, 1)
    assert "--out=FOLDER is missing" in said


def wait_for(path: pathlib.Path) -> None:
    until = time.monotonic() + 60
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert path.exists()


def when_it_trains(folder) -> int:
    wait_for(folder / "worker")
    return int((folder / "worker").read_text())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_training_which_saves(folder, number):
    with start(folder, f"--out={folder}/out", "--strategy=data=3") as running:
        when_it_trains(folder)
        running.send_signal(number)
        printed, said = running.communicate(timeout=20)
    assert running.returncode == 128 + number, said
    assert "interrupted" in printed


def test_a_second_signal_ends_it_at_once(folder):
    with start(folder, f"--out={folder}/out", "--strategy=data=4") as running:
        worker = when_it_trains(folder)
        running.send_signal(signal.SIGTERM)
        wait_for(folder / "saving")
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=20)
    assert running.returncode == 128 + signal.SIGTERM
    assert not pathlib.Path(f"/proc/{worker}").exists()


def test_what_a_killed_launcher_leaves_behind_ends(folder):
    with start(folder, f"--out={folder}/out", "--strategy=data=3") as running:
        worker = when_it_trains(folder)
        running.kill()
        running.communicate(timeout=20)
    until = time.monotonic() + 20
    while pathlib.Path(f"/proc/{worker}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not pathlib.Path(f"/proc/{worker}").exists()
