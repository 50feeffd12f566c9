"""Every bit of every file of a checkpoint counts."""

import pytest

from spmdlab.run import manifest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "state/d").mkdir(parents=True)
    (tmp_path / "about.json").write_text('{"step": 3}\n')
    (tmp_path / "state/_METADATA").write_text("{}")
    (tmp_path / "state/d/empty").write_bytes(b"")
    (tmp_path / "state/d/0a1b").write_bytes(bytes(range(64)))
    manifest.write(tmp_path)
    return tmp_path


def test_a_folder_counts_once_its_manifest_is_there(folder):
    assert manifest.is_complete(folder)
    assert manifest.damage(folder) is None
    (folder / manifest.NAME).unlink()
    assert not manifest.is_complete(folder)
    assert "did not finish" in manifest.damage(folder)


def test_any_flipped_bit_is_found_and_named(folder):
    """One bit of each byte of all files, of the manifest too."""
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        data = path.read_bytes()
        for place in range(len(data)):
            changed = bytearray(data)
            changed[place] ^= 1 << place % 8
            path.write_bytes(changed)
            reason = manifest.damage(folder)
            assert reason is not None, (path, place)
            if path.name != manifest.NAME:
                assert path.relative_to(folder).as_posix() in reason
        path.write_bytes(data)
    assert manifest.damage(folder) is None


@pytest.mark.parametrize("name", ["about.json", "state/d/0a1b", "state/d/empty"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert manifest.damage(folder) == f"{name} is missing"


@pytest.mark.parametrize("length", [0, 1, 40])
def test_a_manifest_cut_short_is_found(folder, length):
    path = folder / manifest.NAME
    path.write_bytes(path.read_bytes()[:length])
    assert manifest.damage(folder) == "manifest.json is not what was written"


def test_a_file_that_came_later_does_not_matter(folder):
    (folder / "note.txt").write_text("looked at it")
    assert manifest.damage(folder) is None
