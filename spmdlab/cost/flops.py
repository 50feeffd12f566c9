"""FLOPs of HLO instructions, by the convention of XLA's own cost analysis.

Counted: two per multiply-add of a dot or convolution, one per output element of an elementwise
instruction, one application of the reducer per element it removes, one addition per element of
an all-reduce or reduce-scatter.  Transcendental functions are counted apart.  Data movement is
zero.  Loops are not multiplied here: that is the ledger's task.

Source: xla/service/hlo_cost_analysis.cc; agreement is tested program by program.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

from spmdlab.errors import HloError
from spmdlab.hlo.program import Computation, Instruction, Program
from spmdlab.hlo.shapes import MAX_ELEMENTS, Shape

_ELEMENTWISE = frozenset(
    "add subtract multiply divide remainder maximum minimum and or xor not negate abs sign "
    "compare select clamp convert bitcast-convert round-nearest-afz round-nearest-even floor "
    "ceil is-finite popcnt count-leading-zeros shift-left shift-right-arithmetic "
    "shift-right-logical reduce-precision real imag complex stochastic-convert".split()
)
_TRANSCENDENTAL = frozenset(
    "exponential exponential-minus-one log log-plus-one logistic power sqrt rsqrt cbrt tanh tan "
    "sine cosine atan2 erf asin acos atan sinh cosh asinh acosh atanh".split()
)
# No arithmetic, or none that XLA counts.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast reshape broadcast iota "
    "copy transpose slice dynamic-slice dynamic-update-slice concatenate pad reverse gather "
    "after-all partition-id replica-id rng rng-bit-generator rng-get-and-update-state "
    "optimization-barrier domain add-dependency get-dimension-size set-dimension-size infeed "
    "outfeed all-gather all-to-all ragged-all-to-all collective-permute collective-broadcast "
    "send recv send-done recv-done copy-start copy-done slice-start slice-done while "
    "conditional".split()
)
_CALLS = frozenset({"fusion", "call"})
_DIM_LABELS = re.compile(r"([0-9a-z]+)_([0-9a-z]+)->([0-9a-z]+)")
_MAX_WINDOW = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Flops:
    """Arithmetic of one execution on one device."""

    matmul: float = 0.0
    """In dots and convolutions: what the matrix unit does."""
    vector: float = 0.0
    """Everything else that XLA counts as FLOPs."""
    transcendental: float = 0.0
    """Elements through exp, log, tanh and their kin: not FLOPs in XLA's count."""
    shared: float = 0.0
    """The part of ``vector`` that XLA counts anew for each of overlapping windows, though their
    sums are shared: it is in XLA's total and takes no time (TPU softmaxes become such windows)."""

    @property
    def total(self) -> float:
        """What XLA reports as ``flops``."""
        return self.matmul + self.vector

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            self.matmul + other.matmul,
            self.vector + other.vector,
            self.transcendental + other.transcendental,
            self.shared + other.shared,
        )

    def __mul__(self, times: float) -> "Flops":
        return Flops(
            self.matmul * times,
            self.vector * times,
            self.transcendental * times,
            self.shared * times,
        )


class FlopCounter:
    """Counts FLOPs in one program, each computation once."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._computations: dict[str, Flops] = {}
        self._carried: frozenset[int | None] = frozenset()
        self.unknown: dict[str, int] = {}
        """Opcodes (or custom call targets) met without a rule, and how often."""

    def computation(self, name: str) -> Flops:
        """One execution of a computation."""
        if name not in self._computations:
            scope = self._program.computations[name]
            total = Flops()
            for instruction in scope.instructions:
                total += self.instruction(scope, instruction)
            self._computations[name] = total
        return self._computations[name]

    def instruction(self, scope: Computation, instruction: Instruction) -> Flops:
        """One execution of an instruction, fusions and calls included, loops not entered."""
        opcode = instruction.opcode
        if opcode in _FREE:
            return Flops()
        if opcode in _ELEMENTWISE:
            return Flops(vector=instruction.shape.num_elements)
        if opcode in _TRANSCENDENTAL:
            return Flops(transcendental=instruction.shape.num_elements)
        if opcode in _CALLS:
            return sum((self.computation(name) for name in instruction.called), Flops())
        shapes = [operand.shape for operand in scope.operands(instruction)]
        if opcode == "dot":
            return Flops(matmul=dot_flops(instruction, shapes))
        if opcode == "convolution":
            return Flops(matmul=convolution_flops(instruction, shapes))
        if opcode in ("all-reduce", "reduce-scatter", "all-reduce-start", "reduce-scatter-start"):
            return Flops(vector=instruction.shape.num_elements)
        if opcode in ("reduce", "reduce-window", "scatter", "select-and-scatter", "map", "sort"):
            return self._applied(instruction, shapes)
        if opcode.endswith(("-start", "-done", "-update")):
            return Flops()
        self._note(instruction)
        return Flops()

    def _applied(self, instruction: Instruction, shapes: Sequence[Shape]) -> Flops:
        """Instructions that apply a small computation to many elements."""
        opcode, out = instruction.opcode, instruction.shape.arrays[0].num_elements
        if opcode == "sort":
            elements = shapes[0].num_elements
            return Flops(vector=elements * max(0, math.ceil(math.log2(max(1, elements)))))
        bodies = [self.computation(name) for name in instruction.called]
        if opcode == "select-and-scatter":
            select, add = bodies if len(bodies) == 2 else (Flops(), Flops())
            source = shapes[1].num_elements
            return select * (source * (_window_elements(instruction) - 1)) + add * source
        body = sum(bodies, Flops())
        if opcode == "map":
            return body * out
        if opcode == "reduce":
            return body * (shapes[0].num_elements - out)
        if opcode == "scatter":
            return body * shapes[-1].arrays[0].num_elements
        broadcast = _broadcast_span(instruction)  # reduce-window
        if broadcast:  # XLA's own count of these, though each sum takes span - 1 additions
            return body * (out // broadcast + broadcast - 1)
        counted = body * ((_window_elements(instruction) - 1) * out)
        # Once forwards and once backwards over the elements gives every window.
        needed = 2 * body.vector * max(out, shapes[0].num_elements)
        return counted + Flops(shared=max(0.0, counted.vector - needed))

    def _note(self, instruction: Instruction) -> None:
        name = instruction.opcode
        if name == "custom-call":
            name = f"custom-call {instruction.custom_call_target}"
        self.unknown[name] = self.unknown.get(name, 0) + 1


def dot_flops(instruction: Instruction, shapes: Sequence[Shape]) -> float:
    """Two per multiply-add: output elements times the contracted extent."""
    dims = shapes[0].dims
    contracted = instruction.integers("lhs_contracting_dims")
    if any(dim >= len(dims) for dim in contracted):
        raise HloError(
            f"line {instruction.line_number}: contracting dim outside {str(shapes[0])[:80]}"
        )
    return 2.0 * instruction.shape.num_elements * math.prod(dims[dim] for dim in contracted)


def convolution_flops(instruction: Instruction, shapes: Sequence[Shape]) -> float:
    """Two per multiply-add at window positions that fall on input, not on padding or holes."""
    labels = _DIM_LABELS.fullmatch(instruction.attributes.get("dim_labels", ""))
    if not labels or len(shapes) < 2:
        raise HloError(f"line {instruction.line_number}: convolution without dim_labels")
    left, right, out = labels.groups()
    if not all(len(set(side)) == len(side) for side in (left, right, out)):
        raise HloError(f"line {instruction.line_number}: dim_labels name a dim twice")
    if not {"b", "f"} <= set(left) or not {"i", "o"} <= set(right):
        raise HloError(f"line {instruction.line_number}: dim_labels lack b, f, i or o")
    lhs, rhs, result = shapes[0].dims, shapes[1].dims, instruction.shape.dims
    if (len(left), len(right), len(out)) != (len(lhs), len(rhs), len(result)):
        raise HloError(f"line {instruction.line_number}: dim_labels do not match the shapes")
    positions = 1
    spatial = sorted(label for label in left if label.isdigit())
    for dim, label in enumerate(spatial):
        if label not in right or label not in out:
            raise HloError(f"line {instruction.line_number}: dim_labels lack {label!r}")
        positions *= _valid_positions(
            lhs[left.index(label)],
            rhs[right.index(label)],
            result[out.index(label)],
            stride=max(1, _pick(_pairs(instruction, "stride"), dim, 1)),
            low=_pick(_pads(instruction), dim, 0),
            base=max(1, _pick(_pairs(instruction, "lhs_dilate"), dim, 1)),
            window=max(1, _pick(_pairs(instruction, "rhs_dilate"), dim, 1)),
        )
    feature_groups = (instruction.integers("feature_group_count") or (1,))[0]
    batch_groups = (instruction.integers("batch_group_count") or (1,))[0]
    features = lhs[left.index("f")] // max(1, feature_groups)
    batch = lhs[left.index("b")] // max(1, batch_groups)
    return 2.0 * features * rhs[right.index("o")] * batch * positions


def _valid_positions(
    size: int, kernel: int, out: int, *, stride: int, low: int, base: int, window: int
) -> int:
    """Pairs (output, kernel position) that read an input element.

    >>> _valid_positions(4, 3, 4, stride=1, low=1, base=1, window=1)  # "same": 2 + 3 + 3 + 2
    10
    """
    total = 0
    limit = (size - 1) * base  # the last input element, in dilated coordinates
    if kernel > _MAX_WINDOW:
        raise HloError(f"a convolution window of {kernel} positions is over {_MAX_WINDOW}")
    # Of the outputs o, those with o * stride + offset divisible by base lie `period` apart.
    shared = math.gcd(stride, base)
    period = base // shared
    inverse = pow(stride // shared, -1, period) if period > 1 else 0
    for k in range(kernel):
        offset = k * window - low
        if offset % shared:
            continue
        residue = -offset // shared * inverse % period
        first = max(0, -(offset // stride))  # smallest o with o * stride + offset >= 0
        last = min(out - 1, (limit - offset) // stride)
        first += (residue - first) % period
        total += max(0, (last - first) // period + 1)
    return total


def _window(instruction: Instruction, key: str) -> str:
    found = re.search(rf"\b{key}=([\d_x\-]+)", instruction.attributes.get("window", ""))
    return found[1] if found else ""


def _pairs(instruction: Instruction, key: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d{1,12}", _window(instruction, key))]


def _pads(instruction: Instruction) -> list[int]:
    return [low for low, _ in _pad_pairs(instruction)]


def _pad_pairs(instruction: Instruction) -> list[tuple[int, int]]:
    pairs = re.findall(r"(-?\d{1,12})_(-?\d{1,12})(?!\d)", _window(instruction, "pad"))
    return [(int(low), int(high)) for low, high in pairs]


def _window_elements(instruction: Instruction) -> int:
    elements = math.prod(_pairs(instruction, "size"))
    if elements > MAX_ELEMENTS:
        raise HloError(
            f"line {instruction.line_number}: a window of over {MAX_ELEMENTS:.2g} elements"
        )
    return elements


def _broadcast_span(instruction: Instruction) -> int:
    """The dim's size if every window spans the whole of one dim: a reduction, broadcast back."""
    if instruction.shape.is_tuple:
        return 0
    spans = [(d, size) for d, size in enumerate(_pairs(instruction, "size")) if size != 1]
    padded = [(d, pair) for d, pair in enumerate(_pad_pairs(instruction)) if any(pair)]
    if len(spans) != 1 or len(padded) != 1 or spans[0][0] != padded[0][0]:
        return 0
    (dim, size), (_, (low, high)) = spans[0], padded[0]
    dims = instruction.shape.dims
    whole = low == high and size == 2 * low + 1 and dim < len(dims) and low == dims[dim] - 1
    return dims[dim] if whole else 0


def _pick(values: Sequence[int], index: int, default: int) -> int:
    return values[index] if index < len(values) else default
