"""Bytes an instruction moves through each memory of a device.

An operand counts once at its full size, unless only part of it is read (a dynamic-slice, slice
or gather, also inside a fusion) or it is updated in place (dynamic-update-slice, scatter): then
only that part counts.  Operands and results in VMEM, memory space S(1) of TPU layouts, cost no
HBM traffic.  Tiling padding is not counted.
"""

import dataclasses

from spmdlab.hlo.program import Computation, Instruction, Program
from spmdlab.hlo.shapes import HBM, HOST, VMEM, Shape

_NOTHING = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id while "
    "conditional call optimization-barrier domain add-dependency get-dimension-size".split()
)
_READS_PART = frozenset({"dynamic-slice", "slice", "gather"})


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes read plus bytes written, by memory."""

    hbm: float = 0.0
    vmem: float = 0.0
    host: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.hbm + other.hbm, self.vmem + other.vmem, self.host + other.host)


def traffic(program: Program, scope: Computation, instruction: Instruction) -> Traffic:
    """Traffic of one execution of ``instruction``."""
    opcode = instruction.opcode
    if opcode in _NOTHING or opcode.endswith(("-done", "-update")):
        return Traffic()
    operands = [operand.shape for operand in scope.operands(instruction)]
    if opcode == "fusion" and instruction.called:
        return _fusion(program, program.computations[instruction.called[0]], instruction, operands)
    if opcode in ("slice-start", "dynamic-slice-start", "copy-start"):
        moved = instruction.shape.parts[1 if opcode != "copy-start" else 0]
        source = _like(operands[0], moved.num_bytes)
        return source + _whole(moved)
    if opcode == "dynamic-update-slice-start":
        return _whole(operands[1]) + _like(operands[0], operands[1].num_bytes)
    if opcode.endswith("-start"):
        return Traffic()
    if opcode in _READS_PART and operands:
        return _like(operands[0], instruction.shape.num_bytes) + _whole(instruction.shape)
    if opcode in ("dynamic-update-slice", "scatter") and len(operands) > 1:
        update = operands[1] if opcode == "dynamic-update-slice" else operands[-1]
        return _whole(update) + _like(operands[0], update.num_bytes)
    total = _whole(instruction.shape)
    for shape in operands:
        total += _whole(shape)
    return total


def _whole(shape: Shape) -> Traffic:
    return Traffic(shape.bytes_in(HBM), shape.bytes_in(VMEM), shape.bytes_in(HOST))


def _like(shape: Shape, num_bytes: float) -> Traffic:
    """``num_bytes`` in the memory that ``shape`` lives in."""
    space = shape.arrays[0].memory_space if shape.arrays else HBM
    return Traffic(
        hbm=num_bytes if space == HBM else 0.0,
        vmem=num_bytes if space == VMEM else 0.0,
        host=num_bytes if space == HOST else 0.0,
    )


def _fusion(
    program: Program, inner: Computation, instruction: Instruction, operands: list[Shape]
) -> Traffic:
    total = Traffic()
    for number, shape in enumerate(operands):
        if number < len(inner.parameters):
            total += _like(shape, _read(program, inner, inner.parameters[number], 0))
    roots = [inner.root]
    shapes = [instruction.shape]
    if inner.root.opcode == "tuple" and instruction.shape.is_tuple:
        roots, shapes = list(inner.operands(inner.root)), list(instruction.shape.parts)
    for root, shape in zip(roots, shapes, strict=False):
        total += _like(shape, _written(program, inner, root, shape))
    return total


def _read(program: Program, scope: Computation, value: Instruction, depth: int) -> float:
    """Bytes of ``value`` that its users in a fused computation read."""
    full = float(value.shape.num_bytes)
    part = 0.0
    for user in scope.users.get(value.name, ()):
        first = user.operands and user.operands[0] == value.name
        if user.opcode in _READS_PART and first:
            part += user.shape.num_bytes
        elif user.opcode == "dynamic-update-slice" and first and user.operands[1] != value.name:
            continue  # updated in place: what is not overwritten stays where it is
        elif user.opcode == "bitcast" and depth < 8:
            part += _read(program, scope, user, depth + 1)
        elif user.opcode == "fusion" and user.called and depth < 8:
            inner = program.computations[user.called[0]]
            for number, name in enumerate(user.operands):
                if name == value.name and number < len(inner.parameters):
                    part += _read(program, inner, inner.parameters[number], depth + 1)
        elif user.opcode == "tuple" and value.opcode == "parameter":
            continue  # passed through, not read
        else:
            return full
        if part >= full:
            return full
    return part


def _written(program: Program, scope: Computation, root: Instruction, shape: Shape) -> float:
    """Bytes written for one result of a fusion."""
    for _ in range(16):
        if root.opcode == "bitcast" and root.operands:
            root = scope.by_name[root.operands[0]]
        elif root.opcode == "fusion" and root.called and not root.shape.is_tuple:
            scope = program.computations[root.called[0]]
            root = scope.root
        else:
            break
    if root.opcode == "parameter":
        return 0.0
    if root.opcode == "dynamic-update-slice":
        return float(scope.by_name[root.operands[1]].shape.num_bytes)
    return float(shape.num_bytes)
