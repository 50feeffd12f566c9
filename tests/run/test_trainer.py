"""Whole runs: stopped, killed, damaged, resumed elsewhere, diverged."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from spmdlab.data.config import DataConfig
from spmdlab.data.dataset import open_dataset
from spmdlab.data.loader import loader
from spmdlab.errors import ConfigError, TargetError
from spmdlab.run import trainer
from spmdlab.run.trainer import train
from spmdlab.verify.tolerance import num_roundings, tolerance
from spmdlab.workload import Workload
from tests.run.small import STEPS, arrays, experiment, lines

REPO = pathlib.Path(__file__).parents[2]


def silent(said) -> None: ...


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    result = train(experiment(), "fsdp", "cpu:8", folder, tell=silent)
    assert result["status"] == "finished"
    return folder


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """The same run, sent SIGTERM after its sixth step."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"

    def stop(said):
        if said.get("step") == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    result = train(experiment(), "fsdp", "cpu:8", folder, tell=stop)
    assert (result["status"], result["signal"]) == ("interrupted", signal.SIGTERM)
    assert result["last_checkpoint"] == f"checkpoints/{result['steps']}"
    assert 6 <= result["steps"] < STEPS
    return folder


@pytest.fixture
def copied(interrupted, tmp_path):
    return pathlib.Path(shutil.copytree(interrupted, tmp_path / "run"))


def allowed_after(steps: int) -> float:
    """What verify allows in one step, for each of them."""
    config = experiment()
    load = Workload(model=config.model, batch=config.batch, optimizer=config.optimizer)
    return steps * tolerance(num_roundings(load, 8), "float32")


def assert_same_run(folder, whole):
    """To the bit, and line by line: nothing lost, nothing twice."""
    mine, theirs = (arrays(each, STEPS, experiment()) for each in (folder, whole))
    assert mine.keys() == theirs.keys()
    for path, array in mine.items():
        np.testing.assert_array_equal(array, theirs[path], err_msg=path)
    assert (folder / "order.jsonl").read_bytes() == (whole / "order.jsonl").read_bytes()
    kept = ("step", "loss", "grad_norm", "tokens", "valid_loss")
    for mine, theirs in zip(*(lines(f / "metrics.jsonl") for f in (folder, whole)), strict=True):
        assert {k: mine.get(k) for k in kept} == {k: theirs.get(k) for k in kept}


def test_a_run_that_is_stopped_and_resumed_is_the_run_that_is_not(copied, whole):
    result = train(experiment(), "fsdp", "cpu:8", copied, resume=True, tell=silent)
    assert result["status"] == "finished"
    assert_same_run(copied, whole)


def test_the_order_names_every_position_once(whole):
    order = lines(whole / "order.jsonl")
    assert [line["step"] for line in order] == list(range(STEPS))
    data = open_dataset(DataConfig(), seq_len=16, split="train")
    for line in order:  # Asked for one by one, as nobody who trains does.
        batch = next(loader(data, global_batch=8, seed=0, first_step=line["step"]))
        assert line["ids"] == batch.ids


def test_a_run_goes_on_under_another_strategy_and_on_fewer_devices(copied, whole):
    """fsdp, then fsdp and tensor, then one device: within what verify allows, step by step."""
    train(experiment(steps=9), "tensor", "cpu:8", copied, resume=True, tell=silent)
    result = train(experiment(), "one", "cpu:1", copied, resume=True, tell=silent)
    assert result["steps"] == STEPS
    allowed = allowed_after(STEPS)
    mine, theirs = (arrays(each, STEPS, experiment()) for each in (copied, whole))
    for path, array in theirs.items():
        far = np.abs(mine[path] - array).max()
        assert far <= allowed * max(np.abs(array).max(), 1e-6), path
    assert (copied / "order.jsonl").read_bytes() == (whole / "order.jsonl").read_bytes()


def test_strategies_have_one_loss_for_twenty_steps(tmp_path, whole):
    folders = {"fsdp": whole}
    for name in ("data", "tensor"):
        folders[name] = tmp_path / name
        train(
            experiment(evaluate_every=STEPS, checkpoint_every=STEPS),
            name,
            "cpu:8",
            folders[name],
            tell=silent,
        )
    found = {name: lines(folder / "metrics.jsonl") for name, folder in folders.items()}
    losses = {name: [x["loss"] for x in each if "loss" in x] for name, each in found.items()}
    assert len(losses["data"]) == STEPS == 20
    assert losses["data"][-1] < losses["data"][0] - 0.1
    for name in ("fsdp", "tensor"):
        np.testing.assert_allclose(losses[name], losses["data"], rtol=allowed_after(STEPS))


def test_a_changed_bit_is_named_and_the_checkpoint_before_it_used(copied, whole):
    newest = max((copied / "checkpoints").iterdir(), key=lambda path: int(path.name))
    victim = max((newest / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    said = []
    train(experiment(), "fsdp", "cpu:8", copied, resume=True, tell=said.append)
    notes = [each["note"] for each in said if "note" in each]
    damaged = next(note for note in notes if "damaged" in note)
    assert victim.relative_to(newest).as_posix() in damaged
    assert any("from step 4" in note for note in notes)
    assert (copied / "checkpoints" / f"{newest.name}.damaged").is_dir()
    assert_same_run(copied, whole)


KILLED = """
    import os, signal, sys
    sys.path[:0] = [{repo!r}]
    import jax
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    from tests.run.small import experiment
    from spmdlab.run import manifest, trainer

    hashed = manifest._sha256

    def dies(path):
        if "/checkpoints/8/" in str(path) and path.parent.name == "d":
            os.kill(os.getpid(), signal.SIGKILL)
        return hashed(path)

    manifest._sha256 = dies
    trainer.train(experiment(), "fsdp", "cpu:8", {out!r})
"""


def test_a_process_killed_while_it_saves(tmp_path, whole):
    out = tmp_path / "run"
    code = textwrap.dedent(KILLED).format(repo=str(REPO), out=str(out))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (out / "checkpoints/8/state").is_dir()
    assert not (out / "result.json").exists()
    said = []
    train(experiment(), "fsdp", "cpu:8", out, resume=True, tell=said.append)
    assert any("did not finish" in each.get("note", "") for each in said)
    assert_same_run(out, whole)


def test_a_finished_run_has_nothing_left_to_do_until_it_is_given_more_steps(whole, tmp_path):
    folder = pathlib.Path(shutil.copytree(whole, tmp_path / "run"))
    result = train(experiment(), "fsdp", "cpu:8", folder, resume=True, tell=silent)
    assert (result["status"], result["last_checkpoint"]) == ("finished", f"checkpoints/{STEPS}")
    assert_same_run(folder, whole)
    more = experiment(steps=STEPS + 1, evaluate_every=100, checkpoint_every=100)
    result = train(more, "fsdp", "cpu:8", folder, resume=True, tell=silent)
    assert (result["steps"], result["final"]["step"]) == (STEPS + 1, STEPS + 1)


def test_a_loss_that_is_no_number_ends_the_run_and_names_the_checkpoint(tmp_path, monkeypatch):
    """Found though no step is logged, and before a checkpoint could hold it."""

    def spoiled(*arguments, **options):
        for batch in loader(*arguments, **options):
            batch.rows["weights"][:] *= np.nan if batch.step == 1 else 1
            yield batch

    monkeypatch.setattr(trainer, "loader", spoiled)
    config = experiment(log_every=100, checkpoint_every=1)
    result = train(config, "fsdp", "cpu:8", tmp_path / "run", tell=silent)
    assert result["status"] == "diverged"
    assert result["error"] == "step 2: loss is nan"
    assert result["last_checkpoint"] == "checkpoints/1"
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["1"]


def test_a_run_ends_where_its_target_is_reached(whole, tmp_path):
    """The target is what the whole run's first evaluation, after six steps, found."""
    first = next(x for x in lines(whole / "metrics.jsonl") if "valid_loss" in x)
    config = experiment(target=first["valid_loss"])
    result = train(config, "fsdp", "cpu:8", tmp_path / "run", tell=silent)
    assert result["status"] == "reached_target"
    reached = result["time_to_accuracy"]
    assert (reached["steps"], reached["tokens"]) == (6, 6 * 8 * 16)
    assert reached["evidence"] == "emulated"
    assert reached["chip_seconds"] == 8 * reached["seconds"] > 0
    assert result["last_checkpoint"] == "checkpoints/6"


def test_metrics_have_what_they_promise(whole):
    records = lines(whole / "metrics.jsonl")
    steps = [each for each in records if "loss" in each]
    assert [each["step"] for each in steps] == list(range(1, STEPS + 1))
    names = "step loss grad_norm tokens tokens_per_s step_s step_s_p90 step_s_p99 input_wait_s"
    for each in steps:
        assert set(each) == {*names.split(), "evidence"}  # No MFU: these devices are emulated.
        assert each["evidence"] == "emulated"
        assert each["tokens"] == each["step"] * 8 * 16
    evaluations = [each for each in records if "valid_loss" in each]
    assert [each["step"] for each in evaluations] == [6, 12, 18, 20]


@pytest.mark.parametrize(
    ("changes", "resume", "words"),
    [
        ({}, False, ["has a run in it", "--resume"]),
        ({"seq_len": 8}, True, ["batch.seq_len was 16 and is 8"]),
        ({"optimizer": {"b1": 0.5}}, True, ["optimizer.b1 was 0.9 and is 0.5"]),
    ],
)
def test_a_run_refuses_what_does_not_belong_to_it(whole, changes, resume, words):
    before = sorted(whole.rglob("*"))
    with pytest.raises(ConfigError) as refused:
        train(experiment(**changes), "fsdp", "cpu:8", whole, resume=resume, tell=silent)
    for word in words:
        assert word in str(refused.value)
    assert sorted(whole.rglob("*")) == before


def test_there_must_be_a_run_to_resume_and_devices_to_train_on(tmp_path):
    with pytest.raises(ConfigError, match="no run in"):
        train(experiment(), "fsdp", "cpu:8", tmp_path / "none", resume=True, tell=silent)
    with pytest.raises(TargetError, match="'cpu:8', or 'local'"):
        train(experiment(), "fsdp", "v5e:2x4", tmp_path / "none", tell=silent)
    assert not (tmp_path / "none").exists()
