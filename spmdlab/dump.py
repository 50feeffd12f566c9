"""Reads an HLO text dump from disk, which may be anything at all."""

import gzip
import os
import pathlib
import zlib

from spmdlab.errors import HloError
from spmdlab.units import text_of_bytes

LARGEST_BYTES = 2**30
"""Of text.  A 70B decoder with scanned layers is some MB; a dump past this is a mistake."""

_GZIP = b"\x1f\x8b"


def read_hlo_text(file: str | os.PathLike[str]) -> str:
    """Returns the text of a dump, plain or compressed with gzip.

    Raises:
        HloError: There is no such file, or it is empty, binary, or larger than any dump.
    """
    path = pathlib.Path(file)
    try:
        if not path.is_file():
            reason = "is a folder" if path.is_dir() else "does not exist or is no regular file"
            raise HloError(f"HLO file {str(path)!r} {reason}")
        with path.open("rb") as raw:
            packed = raw.read(2) == _GZIP
        with gzip.open(path) if packed else path.open("rb") as stream:
            data = stream.read(LARGEST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        said = getattr(error, "strerror", None) or error
        raise HloError(f"HLO file {str(path)!r} cannot be read: {said}") from error
    if len(data) > LARGEST_BYTES:
        largest = text_of_bytes(LARGEST_BYTES)
        raise HloError(f"HLO file {str(path)!r} holds more than {largest} of text")
    if not data.strip():
        raise HloError(f"HLO file {str(path)!r} is empty")
    if b"\0" in data:
        raise HloError(
            f"HLO file {str(path)!r} is binary; a text dump is what compiled.as_text() returns "
            "or --xla_dump_hlo_as_text writes"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise HloError(f"HLO file {str(path)!r} is no text: {error}") from error
