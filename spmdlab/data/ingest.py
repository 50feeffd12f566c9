"""First stages: a source becomes documents, and documents become clean."""

import dataclasses
import functools
import pathlib
import sysconfig
from collections.abc import Callable, Sequence

import numpy as np

from spmdlab.data.config import STDLIB
from spmdlab.data.lineage import Lineage, content_hash, json_hash
from spmdlab.errors import ConfigError

BYTE_VOCAB = 256
"""Token ids of text: a token is a byte."""

# Not part of the standard library, or not there on every machine: some distributions package
# the tests and the graphical parts apart, and the build's configuration names the machine.
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

# A source that is one file has no groups of its own.  It is cut in stretches, long enough that
# what two of them share at their border is little, and many enough to be divided.
_SECTIONS = 100
_SHORTEST_SECTION = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Document:
    """A source file, a stretch of one, or whatever else must not be torn between splits."""

    name: str
    content: np.ndarray
    """Token ids [length]: uint8 where they are bytes, else int32."""

    @functools.cached_property
    def digest(self) -> str:
        """Hash of the content."""
        return content_hash(self.content)


def ingest(source: str) -> tuple[list[Document], Lineage]:
    """Reads a source as `DataConfig.source` describes it, in the order of the files' names.

    Of a folder, hidden files and files with a zero byte (which are no text) are left out; the
    lineage counts the latter.  A single file is cut in up to 100 stretches of equal length.

    Raises:
        ConfigError: The source does not exist, cannot be read, holds nothing, or is a ``.npy``
            file of anything but a row of whole numbers from 0 on.
    """
    skipped = 0
    path = pathlib.Path(source)
    if source == STDLIB:
        documents = standard_library()
        rule = "stdlib: .py files as bytes 1"
    elif path.is_dir():
        texts = [(name, _read(path / name)) for name in _visible(path)]
        documents = [_text(name, text) for name, text in texts if b"\0" not in text]
        skipped = len(texts) - len(documents)
        rule = "folder: files as bytes 1"
    elif not path.exists():
        raise ConfigError(f"data.source={source!r} does not exist")
    elif path.suffix == ".npy":
        documents = _sections(path.name, _token_ids(path))
        rule = f"tokens: {_SECTIONS} stretches 1"
    else:
        text = _read(path)
        if b"\0" in text:
            raise ConfigError(f"data.source={source!r} is no text: it has zero bytes")
        documents = _sections(path.name, np.frombuffer(text, np.uint8))
        rule = f"text: {_SECTIONS} stretches 1"
    documents = [document for document in documents if document.content.size]
    if not documents:
        files = "file" if skipped == 1 else "files"
        why = f" ({skipped} {files} of no text)" if skipped else ""
        raise ConfigError(f"data.source={source!r} is empty{why}")
    lineage = _record("ingest", rule, (), documents, skipped_binary=skipped)
    return documents, lineage


def standard_library(root: pathlib.Path | None = None) -> list[Document]:
    """Returns the sources of Python's standard library.

    Which these are depends on the Python version, on nothing else.

    Args:
        root: Another folder to read by the same rules.
    """
    root = root or pathlib.Path(sysconfig.get_path("stdlib"))
    found = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        folders = relative.parts[:-1]
        if _LEFT_OUT.isdisjoint(folders) and not (
            path.name.startswith("_sysconfigdata") or any(f.startswith("config-") for f in folders)
        ):
            found.append(relative.as_posix())
    return [_text(name, _read(root / name)) for name in sorted(found)]


def _visible(root: pathlib.Path) -> list[str]:
    files = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return sorted(
        path.as_posix() for path in files if not any(part.startswith(".") for part in path.parts)
    )


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"data.source: cannot read {str(path)!r}: {error.strerror or error}"
        ) from error


def _text(name: str, text: bytes) -> Document:
    return Document(name, np.frombuffer(text, np.uint8))


def _token_ids(path: pathlib.Path) -> np.ndarray:
    what = f"data.source={str(path)!r}"
    try:
        ids = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{what} cannot be read as a .npy file: {reason}") from error
    if not np.issubdtype(ids.dtype, np.integer):
        raise ConfigError(f"{what} holds {ids.dtype}; token ids are whole numbers, such as int32")
    if ids.ndim != 1:
        raise ConfigError(f"{what} has shape {ids.shape}; token ids stand in one row, [length]")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < 2**31:
        wrong = ids[(ids < 0) | (ids >= 2**31)][0]
        raise ConfigError(f"{what} holds {wrong}; token ids go from 0 to 2**31 - 1")
    return ids.astype(np.int32)


def _sections(name: str, content: np.ndarray) -> list[Document]:
    length = max(_SHORTEST_SECTION, -(-len(content) // _SECTIONS))
    return [
        Document(f"{name}[{start}:{start + length}]", content[start : start + length])
        for start in range(0, len(content), length)
    ]


def _newlines(content: np.ndarray) -> np.ndarray:
    if content.dtype != np.uint8 or not (content == ord("\r")).any():
        return content
    return np.frombuffer(content.tobytes().replace(b"\r\n", b"\n"), np.uint8)


def _byte_order_mark(content: np.ndarray) -> np.ndarray:
    if content.dtype != np.uint8 or content[:3].tobytes() != b"\xef\xbb\xbf":
        return content
    return content[3:]


Rule = Callable[[np.ndarray], np.ndarray]

CLEANING: tuple[tuple[str, Rule], ...] = (
    ("newlines 1", _newlines),
    ("byte order mark 1", _byte_order_mark),
)
"""Rules that rewrite a document's tokens, in this order; raise a rule's number with its effect."""


def clean(
    documents: Sequence[Document],
    before: Lineage,
    rules: Sequence[tuple[str, Rule]] = CLEANING,
) -> tuple[list[Document], Lineage]:
    """Returns the documents after all rules, without empty ones and exact copies.

    Of copies the first by name is kept.

    Args:
        documents: What `ingest` returned.
        before: The lineage of the documents.
        rules: Name and number -> what becomes of a document's tokens.
    """
    kept: dict[str, Document] = {}
    num_empty = num_copies = 0
    for document in documents:
        content = functools.reduce(lambda so_far, rule: rule[1](so_far), rules, document.content)
        cleaned = Document(document.name, content)
        if not content.size:
            num_empty += 1
        elif kept.setdefault(cleaned.digest, cleaned) is not cleaned:
            num_copies += 1
    version = ", ".join([*(name for name, _ in rules), "no empty 1", "no copies 1"])
    found = list(kept.values())
    return found, _record(
        "clean",
        version,
        (before.output,),
        found,
        dropped_empty=num_empty,
        dropped_copies=num_copies,
    )


def _record(
    stage: str, version: str, inputs: tuple[str, ...], documents: Sequence[Document], **counts: int
) -> Lineage:
    sizes = {"documents": len(documents), "tokens": sum(len(each.content) for each in documents)}
    return Lineage(
        stage=stage,
        version=version,
        inputs=inputs,
        output=json_hash([(document.name, document.digest) for document in documents]),
        counts=sizes | counts,
    )
