"""Checkpoints of a state that no step has seen."""

import pathlib
import shutil

import jax
import numpy as np
import pytest

from spmdlab.compile import lay_out
from spmdlab.errors import RunError
from spmdlab.run import manifest
from spmdlab.run.checkpoint import Checkpoints
from spmdlab.strategies.product import as_strategy
from spmdlab.targets import parse_target
from spmdlab.train.state import abstract_state, init_state
from spmdlab.workload import Workload
from tests.run.small import experiment

LOSSES = {1: 3.0, 2: 1.0, 3: 2.0, 4: 4.0}
"""Of the valid split, by step."""


def laid_out(name: str):
    config = experiment()
    load = Workload(model=config.model, batch=config.batch, optimizer=config.optimizer)
    strategy = as_strategy(config.strategies[name])
    return load, lay_out(load, strategy, parse_target(f"cpu:{strategy.num_devices}"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Four saves of one state, of which the two newest and the best are kept."""
    load, layout = laid_out("fsdp")
    state = init_state(load, jax.random.key(0), layout.shardings(abstract_state(load)))
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    checkpoints = Checkpoints(folder, keep=2)
    for step, loss in LOSSES.items():
        checkpoints.save(step, state, {"step": step, "valid_loss": loss})
    checkpoints.close()
    assert checkpoints.last == 4
    return folder, jax.device_get(state)


@pytest.fixture
def copied(saved, tmp_path):
    return pathlib.Path(shutil.copytree(saved[0], tmp_path / "checkpoints"))


def newest_good(folder) -> tuple[int | None, list[str]]:
    notes: list[str] = []
    checkpoints = Checkpoints(folder, keep=2)
    try:
        return checkpoints.newest_good(notes.append), notes
    finally:
        checkpoints.close()


def test_the_newest_and_the_best_are_kept(saved):
    assert sorted(path.name for path in saved[0].iterdir()) == ["2", "3", "4"]


def test_a_bit_in_any_file_makes_the_one_before_count(saved, tmp_path):
    """Of each file in the newest: Orbax's arrays, indices and metadata, and ours."""
    names = [p.relative_to(saved[0] / "4") for p in (saved[0] / "4").rglob("*") if p.is_file()]
    kinds = {name.parts[-2] if name.name.isalnum() else name.name for name in names}
    assert {"d", "_METADATA", "manifest.ocdbt", "about.json", "manifest.json"} <= kinds
    for number, name in enumerate(names):
        folder = pathlib.Path(shutil.copytree(saved[0], tmp_path / str(number)))
        data = bytearray((folder / "4" / name).read_bytes())
        if not data:
            continue
        data[len(data) // 3] ^= 4
        (folder / "4" / name).write_bytes(data)
        found, (note,) = newest_good(folder)
        assert found == 3
        # Of the manifest, the flip may be in another file's hash.
        assert name.name in note or name.name == manifest.NAME
        assert (folder / "4.damaged" / name).read_bytes() == data  # Kept, to be looked at.


@pytest.mark.parametrize("left", ["nothing", "no manifest", "half"])
def test_a_save_that_did_not_finish_does_not_count(copied, left):
    """An empty folder, which Orbax takes for the latest; and two later moments of a save."""
    folder = copied / "5"
    folder.mkdir()
    if left == "no manifest":
        shutil.copytree(copied / "4", folder, dirs_exist_ok=True)
        (folder / manifest.NAME).unlink()
    if left == "half":
        (folder / "state.orbax-checkpoint-tmp").mkdir()
    found, notes = newest_good(copied)
    assert found == 4
    assert len(notes) == 1
    assert "did not finish" in notes[0]


def test_without_a_good_one_there_is_none(copied):
    for path in copied.iterdir():
        (path / "about.json").unlink()
    found, notes = newest_good(copied)
    assert found is None
    assert len(notes) == 3


@pytest.mark.parametrize("name", ["fsdp", "data", "tensor", "one"])
def test_it_is_restored_in_any_layout(saved, name):
    folder, state = saved
    load, layout = laid_out(name)
    checkpoints = Checkpoints(folder, keep=2)
    found = checkpoints.restore(4, load, layout)
    checkpoints.close()
    shardings = layout.shardings(abstract_state(load))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), state)
    for leaf, sharding in zip(jax.tree.leaves(found), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_a_failed_save_says_which_checkpoint_is_good(copied, monkeypatch):
    load, _ = laid_out("one")
    state = init_state(load, jax.random.key(0))
    checkpoints = Checkpoints(copied, keep=2)
    assert checkpoints.newest_good(lambda note: None) == 4

    def full(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest, "write", full)
    checkpoints.save(5, state, {})
    with pytest.raises(RunError, match=r"No space left.*the last good one is 4"):
        checkpoints.wait()
    checkpoints.close()
    assert newest_good(copied)[0] == 4
