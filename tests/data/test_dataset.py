import hashlib
import pathlib

import numpy as np
import pytest

from spmdlab.data.config import DataConfig
from spmdlab.data.dataset import open_dataset, prepared
from spmdlab.data.split import SPLITS
from spmdlab.errors import ConfigError


@pytest.fixture
def config(tmp_path):
    """Thirty files of 50 bytes; a zero byte ends each, so 51 tokens."""
    rng = np.random.default_rng(0)
    for i in range(30):
        (tmp_path / f"{i:02}.txt").write_bytes(rng.integers(1, 128, 50, dtype=np.uint8).tobytes())
    return DataConfig(source=str(tmp_path), valid_percent=30, test_percent=30)


def test_the_splits_are_the_files_each_once(config):
    datasets = [open_dataset(config, seq_len=10, split=name) for name in SPLITS]
    pieces = [piece for each in datasets for piece in each.tokens.tobytes().split(b"\0")[:-1]]
    files = [path.read_bytes() for path in pathlib.Path(config.source).iterdir()]
    assert sorted(pieces) == sorted(files)


def test_targets_are_the_tokens_one_later_and_windows_do_not_overlap(config):
    dataset = open_dataset(config, seq_len=10)
    examples = [dataset.example(i) for i in range(dataset.num_examples)]
    for name, shift in (("tokens", 0), ("targets", 1)):
        joined = np.concatenate([each[name] for each in examples])
        np.testing.assert_array_equal(joined, dataset.tokens[shift : len(joined) + shift])
    assert len(dataset.tokens) - 1 - 10 * len(examples) in range(10)
    assert {name: (each.shape, str(each.dtype)) for name, each in examples[0].items()} == {
        "tokens": ((10,), "int32"),
        "targets": ((10,), "int32"),
        "weights": ((10,), "float32"),
    }
    with pytest.raises(IndexError):
        dataset.example(dataset.num_examples)


def test_a_window_belongs_to_the_document_it_begins_in(config):
    """Of windows of 17 in documents of 51, three begin in the first."""
    dataset = open_dataset(config, seq_len=17)
    assert [dataset.group(i) for i in range(4)] == [dataset.groups[n] for n in (0, 0, 0, 1)]


def test_an_example_is_named_after_its_tokens(config):
    dataset = open_dataset(config, seq_len=10)
    window = dataset.tokens[20:31].astype("<i4").tobytes()
    assert dataset.example_id(2) == hashlib.sha256(window).hexdigest()[:16]


def test_the_hash_of_the_examples_depends_on_split_and_length(config):
    options = [{"seq_len": 10}, {"seq_len": 11}, {"seq_len": 10, "split": "valid"}]
    assert len({open_dataset(config, **each).lineage[-1].output for each in options}) == 3
    stages = [each.stage for each in open_dataset(config, seq_len=10).lineage]
    assert stages == ["ingest", "clean", "split", "examples"]


def test_refuses_a_sequence_longer_than_the_split(config):
    num_tokens = len(open_dataset(config, seq_len=1, split="valid").tokens)
    assert open_dataset(config, seq_len=num_tokens - 1, split="valid").num_examples == 1
    with pytest.raises(ConfigError, match=f"the valid split .* so at most {num_tokens - 1} work"):
        open_dataset(config, seq_len=num_tokens, split="valid")


def test_refuses_a_split_without_documents(config):
    config.test_percent = 0
    with pytest.raises(ConfigError, match=r"no test split: its 30 groups .* data.test_percent=0;"):
        open_dataset(config, seq_len=10, split="test")


def test_refuses_a_vocabulary_that_is_too_small(config, tmp_path):
    with pytest.raises(ConfigError, match="vocab_size=255 has no token 255"):
        open_dataset(config, seq_len=10, vocab_size=255)
    np.save(tmp_path / "ids.npy", np.arange(700))
    ids = DataConfig(source=str(tmp_path / "ids.npy"), valid_percent=0, test_percent=0)
    assert open_dataset(ids, seq_len=699, vocab_size=700).example(0)["targets"].max() == 699
    with pytest.raises(ConfigError, match="vocab_size=699 has no token 699"):
        open_dataset(ids, seq_len=10, vocab_size=699)


def test_the_standard_library_splits_about_as_asked():
    """A tenth of some 500 groups of files is 50, give or take 7."""
    placed, lineage = prepared("stdlib", 10, 10, 0.8)
    names = {each.group: each.split for each in placed}
    assert len(names) == lineage[-1].counts["groups"] > 300
    for name in ("valid", "test"):
        assert 0.05 < list(names.values()).count(name) / len(names) < 0.17
