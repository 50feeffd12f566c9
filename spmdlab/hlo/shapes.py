"""HLO shapes as text: dtype, dims, layout, memory space; arrays and tuples.

>>> parse_shape("bf16[2,256]{1,0:T(8,128)(2,1)S(1)}").num_bytes
1024
>>> parse_shape("(s32[], /*index=1*/f32[4]{0})").num_bytes
20
"""

import dataclasses
import functools
import math
import re

from spmdlab.errors import HloError

# Bits per element.  Source: XLA's xla_data.proto PrimitiveType.
DTYPE_BITS: dict[str, int] = {
    "pred": 8,
    **{f"{sign}{bits}": bits for sign in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
    "bf16": 16,
    "f16": 16,
    "f32": 32,
    "f64": 64,
    "c64": 64,
    "c128": 128,
    "f4e2m1fn": 4,
    "f8e8m0fnu": 8,
    **dict.fromkeys("f8e3m4 f8e4m3 f8e4m3b11fnuz f8e4m3fn f8e4m3fnuz f8e5m2 f8e5m2fnuz".split(), 8),
    "token": 0,
    "opaque": 0,
}

# Memory spaces of TPU layouts, S(n): 1 is VMEM, 5 is host memory; 0 (not printed) is HBM.
HBM, VMEM, HOST = 0, 1, 5

_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\](\{[^}]*\})?")
_SPACE = re.compile(r"S\((\d{1,4})\)")
_SPACES = re.compile(r"\s*")
_COMMENT = re.compile(r"/\*[^*]*\*/")
_DIM = re.compile(r"[0-9]{1,15}")
_MAX_DEPTH = 16
_MAX_RANK = 64
MAX_ELEMENTS = 2**60
"""XLA itself counts elements in 63 bits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One array, or a tuple of shapes."""

    dtype: str
    """Element type; ``"tuple"`` for a tuple."""
    dims: tuple[int, ...] = ()
    memory_space: int = HBM
    parts: tuple["Shape", ...] = ()
    """Elements of a tuple."""
    minor_to_major: tuple[int, ...] = ()

    @property
    def is_tuple(self) -> bool:
        """Whether this is a tuple of shapes."""
        return self.dtype == "tuple"

    @property
    def num_elements(self) -> int:
        """Elements of the array, or of all arrays of a tuple."""
        if self.is_tuple:
            return sum(part.num_elements for part in self.parts)
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes without tiling padding, a tuple's parts added."""
        if self.is_tuple:
            return sum(part.num_bytes for part in self.parts)
        return -(-self.num_elements * DTYPE_BITS[self.dtype] // 8)

    @property
    def arrays(self) -> tuple["Shape", ...]:
        """The arrays of this shape in order, tuples flattened."""
        if not self.is_tuple:
            return (self,)
        return tuple(array for part in self.parts for array in part.arrays)

    def bytes_in(self, memory_space: int) -> int:
        """Bytes of the arrays that live in ``memory_space``."""
        return sum(array.num_bytes for array in self.arrays if array.memory_space == memory_space)

    def __str__(self) -> str:
        if self.is_tuple:
            return f"({', '.join(map(str, self.parts))})"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@functools.lru_cache(maxsize=65536)
def parse_shape(text: str) -> Shape:
    """Parses a shape as HLO text prints it.

    Raises:
        HloError: The text is not a shape, names an unknown element type, or is larger than
            any memory.
    """
    text = _COMMENT.sub("", text).strip()
    shape, end = _parse(text, 0, 0)
    if text[end : end + 80].strip():
        raise HloError(f"unexpected text after a shape: {text[end : end + 80]!r}")
    return shape


def _parse(text: str, start: int, depth: int) -> tuple[Shape, int]:
    """The shape at ``start``, and where it ends."""
    if depth > _MAX_DEPTH:
        raise HloError(f"shape nested deeper than {_MAX_DEPTH} tuples")
    if not text.startswith("(", start):
        return _array(text, start)
    parts: list[Shape] = []
    position = _skip(text, start + 1)
    while not text.startswith(")", position):
        part, position = _parse(text, position, depth + 1)
        parts.append(part)
        position = _skip(text, position)
        if text.startswith(",", position):
            position = _skip(text, position + 1)
        elif not text.startswith(")", position):
            raise HloError(f"tuple shape is not closed: {text[start : start + 80]!r}")
    return Shape("tuple", parts=tuple(parts)), position + 1


def _skip(text: str, position: int) -> int:
    found = _SPACES.match(text, position)
    return found.end() if found else position


def _array(text: str, start: int) -> tuple[Shape, int]:
    shown = text[start : start + 80]
    found = _ARRAY.match(text, start)
    if not found:
        raise HloError(f"not a shape: {shown!r}")
    dtype, dims, layout = found.groups(default="")
    if dtype not in DTYPE_BITS:
        raise HloError(f"unknown element type {dtype[:40]!r} in shape {shown!r}")
    sizes: list[int] = []
    for dim in filter(None, (d.strip() for d in dims.split(","))):
        size = dim.removeprefix("<=")  # a bounded dynamic dim: its bound is what is allocated
        if not _DIM.fullmatch(size):
            raise HloError(f"dim {dim[:40]!r} of shape {shown!r} is not a number")
        sizes.append(int(size))
    if len(sizes) > _MAX_RANK or math.prod(sizes) > MAX_ELEMENTS:
        raise HloError(f"shape {shown!r} has over {MAX_ELEMENTS:.2g} elements or {_MAX_RANK} dims")
    space = _SPACE.search(layout)
    order = layout[1:-1].split(":")[0]
    minor = tuple(int(d) for d in order.split(",") if _DIM.fullmatch(d.strip()))
    return Shape(dtype, tuple(sizes), int(space[1]) if space else HBM, (), minor), found.end()
