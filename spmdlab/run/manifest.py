"""What a checkpoint's files must be, byte for byte.

Readers of arrays notice few changes in the bytes they read, and file systems differ in when a
folder counts as complete.  So a folder counts once its manifest is there, which is written last
and renamed into place; and what is read from it counts once every file has the manifest's hash.
"""

import hashlib
import json
import os
import pathlib
from typing import Any

NAME = "manifest.json"


def write(folder: pathlib.Path) -> None:
    """Hashes every file below ``folder`` and makes it count."""
    hashes = {name: _sha256(folder / name) for name in _files(folder)}
    staged = folder / f".{NAME}"
    with staged.open("w", encoding="utf-8") as file:
        file.write(_text({"sha256": hashes}))
        file.flush()
        os.fsync(file.fileno())
    os.replace(staged, folder / NAME)


def is_complete(folder: pathlib.Path) -> bool:
    """Whether the folder was written to its end.  Says nothing of what happened to it since."""
    return (folder / NAME).is_file()


def damage(folder: pathlib.Path) -> str | None:
    """Returns in a few words why the folder cannot be trusted; None if it can.

    Reads every file.  Files that are not in the manifest do not matter.
    """
    try:
        text = (folder / NAME).read_text(encoding="utf-8")
    except FileNotFoundError:
        return f"it has no {NAME}: the save did not finish"
    except (OSError, UnicodeDecodeError) as error:
        return f"{NAME} cannot be read: {error}"
    try:
        found = json.loads(text)
        hashes = dict(found["sha256"])
    except (ValueError, TypeError, KeyError):
        return f"{NAME} is not what was written"
    if text != _text(found):
        return f"{NAME} is not what was written"
    for name, expected in hashes.items():
        try:
            if _sha256(folder / name) != expected:
                return f"{name} has changed since it was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def _files(folder: pathlib.Path) -> list[str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _text(value: Any) -> str:
    """One way to write it, so that each byte of the file says something."""
    return json.dumps(value, indent=1, sort_keys=True) + "\n"
