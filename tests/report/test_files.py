import json
import os

import pytest

from spmdlab.errors import ConfigError
from spmdlab.report import files


def everything(folder) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_makes_the_folder_and_leaves_only_the_files(tmp_path):
    files.write_files(tmp_path / "a" / "b", {"x.json": "1", "y.html": "é"})
    assert everything(tmp_path) == {"a/b/x.json": "1", "a/b/y.html": "é"}
    assert sorted(p.name for p in (tmp_path / "a/b").iterdir()) == ["x.json", "y.html"]


def test_replaces_what_was_there_and_touches_nothing_else(tmp_path):
    (tmp_path / "x.json").write_text("old")
    (tmp_path / "mine.txt").write_text("keep")
    files.write_files(tmp_path, {"x.json": "new"})
    assert everything(tmp_path) == {"x.json": "new", "mine.txt": "keep"}


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_all_files_or_none(tmp_path, monkeypatch, failing):
    """The rename of any of three files fails: old ones keep their text, new ones do not appear."""
    before = {"b.txt": "old b", "c.txt": "old c"}
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    real, calls = os.replace, []

    def replace(source, target):
        if not str(source).endswith(".before"):
            calls.append(target)
            if len(calls) == failing + 1:
                raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(ConfigError, match="No space left on device"):
        files.write_files(tmp_path, {"a.txt": "new a", "b.txt": "new b", "c.txt": "new c"})
    assert everything(tmp_path) == before


def test_a_file_where_the_folder_should_be_is_refused(tmp_path):
    (tmp_path / "out").write_text("mine")
    for path in (tmp_path / "out", tmp_path / "out" / "deeper"):
        with pytest.raises(ConfigError, match="is not a folder"):
            files.check_folder(path)


def test_a_folder_that_cannot_be_made_is_refused_before_the_work():
    with pytest.raises(ConfigError, match="cannot write to '/proc/none'"):
        files.check_folder("/proc/none")


def test_a_folder_where_a_file_should_be_is_refused_before_the_work(tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(ConfigError, match=r"report\.html': it is a folder"):
        files.check_folder(tmp_path, ["comparison.json", "report.html"])


def test_a_folder_without_a_name_is_not_this_one():
    with pytest.raises(ConfigError, match="has no name"):
        files.check_folder("")


def test_checking_leaves_nothing_behind(tmp_path):
    files.check_folder(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_json_has_null_for_what_is_no_number():
    text = files.json_text({"a": [float("nan"), float("inf"), 1.5], "b": {"c": -float("inf")}})
    assert json.loads(text) == {"a": [None, None, 1.5], "b": {"c": None}}
