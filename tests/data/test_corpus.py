import hashlib

import numpy as np

from spmdlab.data import corpus


def test_no_text_is_on_both_sides_and_both_are_large():
    """Also where two files have the same text; one side has about a tenth of the files."""
    texts = {"train": set(), "valid": set()}
    for source in corpus.sources():
        texts[source.split].add(source.text)
    assert not texts["train"] & texts["valid"]
    share = len(texts["valid"]) / len(texts["train"] | texts["valid"])
    assert 0.05 < share < 0.15
    assert len(corpus.tokens("train")) > 2_000_000


def test_is_the_files_in_the_order_of_their_names(tmp_path):
    for name, text in {"b.py": "b", "a/c.py": "c", "a.txt": "no", "test/x.py": "no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = corpus.sources(tmp_path)
    assert [(source.name, source.text) for source in found] == [("a/c.py", b"c"), ("b.py", b"b")]


def test_the_split_follows_from_the_text_alone():
    source = corpus.Source(name="x.py", text=b"print(1)\n")
    percent = int(hashlib.sha256(b"print(1)\n").hexdigest()[:8], 16) % 100
    assert source.split == ("valid" if percent < 10 else "train")
    assert corpus.Source(name="y.py", text=b"print(1)\n").split == source.split


def test_reads_the_same_twice():
    first = corpus.tokens("valid").copy()
    corpus.tokens.cache_clear()
    np.testing.assert_array_equal(first, corpus.tokens("valid"))
