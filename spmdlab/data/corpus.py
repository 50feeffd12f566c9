"""A corpus that every machine has: the sources of Python's standard library, as bytes.

Which bytes these are depends on the Python version, on nothing else.
"""

import dataclasses
import functools
import hashlib
import pathlib
import sysconfig
from typing import Literal

import numpy as np

VOCAB_SIZE = 256
"""A token is a byte."""

Split = Literal["train", "valid"]

# Not part of the library, or not there on every machine: some distributions package the
# tests and the graphical parts apart, and the build's configuration names the machine.
_LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "tkinter",
    "ensurepip",
    "__pycache__",
}
_VALID_PERCENT = 10


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One file of the corpus."""

    name: str
    """Path inside the library, with ``/``."""

    text: bytes

    @property
    def digest(self) -> str:
        """Hash of the content."""
        return hashlib.sha256(self.text).hexdigest()

    @property
    def split(self) -> Split:
        """Where this file belongs.

        It follows from the content alone, so that a file never moves when others come and
        go, and two copies of one text are never on both sides.
        """
        return "valid" if int(self.digest[:8], 16) % 100 < _VALID_PERCENT else "train"


def sources(root: pathlib.Path | None = None) -> list[Source]:
    """Returns the files under ``root`` (the standard library if None), sorted by name."""
    root = root or pathlib.Path(sysconfig.get_path("stdlib"))
    found = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        folders = relative.parts[:-1]
        if _LEFT_OUT.isdisjoint(folders) and not (
            path.name.startswith("_sysconfigdata") or any(f.startswith("config-") for f in folders)
        ):
            found.append(Source(name=relative.as_posix(), text=path.read_bytes()))
    return sorted(found, key=lambda source: source.name)


@functools.cache
def tokens(split: Split) -> np.ndarray:
    """Returns a split's files one after the other, as uint8; a zero byte ends each."""
    parts = [source.text + b"\0" for source in sources() if source.split == split]
    joined = np.frombuffer(b"".join(parts), dtype=np.uint8)
    return joined
