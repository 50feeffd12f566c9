import numpy as np
import pytest

from spmdlab.data.ingest import CLEANING, clean, ingest, standard_library
from spmdlab.data.lineage import broken_links, first_difference, lineage_from_json
from spmdlab.errors import ConfigError


def write(root, texts):
    for name, text in texts.items():
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        (root / name).write_bytes(text)


def found(documents):
    return [(document.name, document.content.tobytes()) for document in documents]


def test_the_standard_library_is_its_files_in_the_order_of_their_names(tmp_path):
    write(tmp_path, {"b.py": b"b", "a/c.py": b"c", "a.txt": b"no", "test/x.py": b"no"})
    assert found(standard_library(tmp_path)) == [("a/c.py", b"c"), ("b.py", b"b")]


def test_a_folder_is_its_text_files_and_what_is_left_out_is_counted(tmp_path):
    write(tmp_path, {"b.txt": b"b", "a/c": b"c", ".git/x": b"no", "p.png": b"\x89\0", "e": b""})
    documents, lineage = ingest(str(tmp_path))
    assert found(documents) == [("a/c", b"c"), ("b.txt", b"b")]
    assert lineage.counts == {"documents": 2, "tokens": 2, "skipped_binary": 1}


@pytest.mark.parametrize(("length", "stretch"), [(63, 64), (6400, 64), (6401, 65)])
def test_one_file_is_stretches_that_together_are_the_file(tmp_path, length, stretch):
    ids = np.arange(length, dtype=np.uint16)
    np.save(tmp_path / "ids.npy", ids)
    documents, _ = ingest(str(tmp_path / "ids.npy"))
    np.testing.assert_array_equal(np.concatenate([each.content for each in documents]), ids)
    assert {len(each.content) for each in documents[:-1]} <= {stretch}
    assert len(documents) <= 100


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("x", None, "does not exist", id="missing"),
        pytest.param("x", b"", "is empty", id="empty"),
        pytest.param("x", b"a\0", "zero bytes", id="binary"),
        pytest.param("x.npy", b"abc", "cannot be read", id="no-npy"),
        pytest.param("x.npy", np.array([{}], object), "cannot be read", id="pickle"),
        pytest.param("x.npy", np.array([1.5]), "holds float64", id="float"),
        pytest.param("x.npy", np.ones((2, 2), int), r"shape \(2, 2\)", id="rank"),
        pytest.param("x.npy", np.array([3, -1]), "holds -1", id="negative"),
        pytest.param("x.npy", np.array([], int), "is empty", id="no-tokens"),
    ],
)
def test_refuses(tmp_path, name, content, message):
    if isinstance(content, bytes):
        write(tmp_path, {name: content})
    elif content is not None:
        np.save(tmp_path / name, content)
    with pytest.raises(ConfigError, match=message) as refusal:
        ingest(str(tmp_path / name))
    assert "\n" not in str(refusal.value)


def test_cleaning_drops_marks_copies_and_what_is_left_empty(tmp_path):
    write(
        tmp_path,
        {"a": b"\xef\xbb\xbfx\r\ny\r", "b": b"x\ny\r", "c": b"\xef\xbb\xbf", "d": b"z"},
    )
    documents, lineage = clean(*ingest(str(tmp_path)))
    assert found(documents) == [("a", b"x\ny\r"), ("d", b"z")]
    assert (lineage.counts["dropped_copies"], lineage.counts["dropped_empty"]) == (1, 1)


def test_cleaning_leaves_token_ids_alone():
    """13 and 10 are a carriage return and a newline only where a token is a byte."""
    ids = np.array([0xEF, 0xBB, 0xBF, 13, 10], np.int32)
    for _, rule in CLEANING:
        np.testing.assert_array_equal(rule(ids), ids)


def chain(root, rules=CLEANING):
    documents, ingested = ingest(str(root))
    return ingested, clean(documents, ingested, rules)[1]


def test_lineage_blames_the_first_stage_that_changed(tmp_path):
    write(tmp_path, {"a": b"some text\n", "b": b"other text\n"})
    before = chain(tmp_path)
    assert lineage_from_json([record.to_json() for record in before]) == before
    assert first_difference(before, chain(tmp_path)) is None
    assert broken_links(before) == []
    assert broken_links(before[1:]) != []
    renamed = (*CLEANING, ("upper case 1", lambda content: content - 32))
    assert "clean: its rule was" in first_difference(before, chain(tmp_path, renamed))
    sly = ((CLEANING[0][0], lambda content: content[1:]), *CLEANING[1:])
    said = first_difference(before, chain(tmp_path, sly))
    assert said.startswith("clean: same input and same rule, another output")
    assert "tokens 21 -> 19" in said
    write(tmp_path, {"b": b"new text\n"})
    assert first_difference(before, chain(tmp_path)).startswith("ingest: the source changed")


@pytest.mark.parametrize("value", [{"a": 1}, [{"stage": "x"}], 3, [3]])
def test_refuses_what_is_no_lineage(value):
    with pytest.raises(ConfigError, match="no lineage"):
        lineage_from_json(value)
