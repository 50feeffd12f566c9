"""What must hold of a program before anything is read off it.

Everything after the parser relies on these facts: parameters are numbered without gaps, tuples
have the parts they claim, computations get the arguments they take, opcodes have the operands
their rules look at, and no loop or call multiplies the program beyond what can be walked.
Text that breaks one of them was not printed by XLA, or was damaged on the way.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from spmdlab.errors import HloError
from spmdlab.hlo.program import Computation, Instruction, Program
from spmdlab.hlo.shapes import Shape

MAX_DEPTH = 48
"""Calls and loops inside each other; real programs stay under twenty."""
MAX_EXPANDED = 1_000_000
"""Instructions of a program whose calls are all written out.  An unrolled 80-layer decoder's
training step has about 100,000."""

# Opcodes whose rules look at operands: how many they look at.  Elementwise ones look at none.
_OPERANDS: Mapping[str, int] = {
    "get-tuple-element": 1,
    "sort": 1,
    "send": 1,
    "recv": 1,
    "copy-start": 1,
    "slice-start": 1,
    "dynamic-slice-start": 1,
    "slice": 1,
    "dynamic-slice": 1,
    "gather": 2,
    "compare": 2,
    "dot": 2,
    "convolution": 2,
    "reduce": 2,
    "reduce-window": 2,
    "dynamic-update-slice": 2,
    "dynamic-update-slice-start": 2,
    "scatter": 3,
    "select-and-scatter": 3,
}
# Their results and operands are arrays, or tuples that hold one.
_ON_ARRAYS = frozenset(_OPERANDS) - {"get-tuple-element"} | {"map"}
_DMA_PAIRS = frozenset({"copy-start", "slice-start", "dynamic-slice-start"})
_DOT_DIMS = {
    "lhs_contracting_dims": 0,
    "lhs_batch_dims": 0,
    "rhs_contracting_dims": 1,
    "rhs_batch_dims": 1,
}


def validate(program: Program) -> None:
    """Checks a parsed program.

    Raises:
        HloError: It breaks one of the facts above; the message starts with the line number.
    """
    if max(program.num_partitions, program.num_replicas) < 1:
        raise HloError("the HLO header names neither partitions nor replicas")
    for computation in program.computations.values():
        _parameters(computation)
        for instruction in computation.instructions:
            problem = _problem(program, computation, instruction)
            if problem:
                raise HloError(
                    f"line {instruction.line_number}: {instruction.opcode} "
                    f"{instruction.name[:80]!r} {problem}"
                )
    _calls(program.computations)


def _parameters(computation: Computation) -> None:
    found = sorted(int(i.literal) for i in computation.instructions if i.opcode == "parameter")
    if found != list(range(len(found))):
        raise HloError(
            f"line {computation.instructions[0].line_number}: the parameters of "
            f"{computation.name[:80]!r} are not numbered 0 to {len(found) - 1}"
        )
    roots = [i for i in computation.instructions if i.is_root]
    if len(roots) > 1:
        raise HloError(f"line {roots[1].line_number}: {computation.name[:80]!r} has two ROOTs")


def _problem(program: Program, scope: Computation, instruction: Instruction) -> str | None:
    """What is wrong with an instruction, if anything."""
    opcode, shape = instruction.opcode, instruction.shape
    operands = [operand.shape for operand in scope.operands(instruction)]
    needed = _OPERANDS.get(opcode, 1 if opcode.endswith(("-done", "-update")) else 0)
    if len(operands) < needed:
        return f"has {len(operands)} operands, needs {needed}"
    if (opcode in _ON_ARRAYS or opcode.endswith("-start")) and not all(
        map(_holds_array, (shape, *operands))
    ):
        return "works on an empty tuple"
    if opcode == "tuple":
        if not shape.is_tuple or not _same_parts(shape.parts, operands):
            return f"has parts of other shapes than its operands: {str(shape)[:80]}"
    elif opcode == "get-tuple-element":
        index = instruction.integers("index")
        parts = operands[0].parts
        if len(index) != 1 or not 0 <= index[0] < len(parts):
            return f"takes part {index} of {len(parts)}"
        if not same_structure(shape, parts[index[0]]):
            return f"says {str(shape)[:40]}, but the part is {str(parts[index[0]])[:40]}"
    elif opcode in _DMA_PAIRS and len(shape.parts) < 2:
        return f"has shape {str(shape)[:80]}, expected a tuple of source and destination"
    elif opcode == "dot":
        return _dot_problem(instruction, operands)
    return _call_problem(program, instruction, operands)


def _dot_problem(instruction: Instruction, operands: list[Shape]) -> str | None:
    for attribute, operand in _DOT_DIMS.items():
        rank = len(operands[operand].dims)
        for dim in instruction.integers(attribute):
            if not 0 <= dim < rank:
                return f"has {attribute} {dim} outside of {str(operands[operand])[:60]}"
    return None


def _call_problem(program: Program, instruction: Instruction, operands: list[Shape]) -> str | None:
    """Whether the computations called fit the operands and the result."""
    opcode = instruction.opcode
    if opcode in ("fusion", "call"):
        if not instruction.called:
            return "calls nothing"
        inner = program.computations[instruction.called[0]]
        if not _same_parts([p.shape for p in inner.parameters], operands):
            return f"does not pass what {inner.name[:80]!r} takes"
        if not same_structure(inner.root.shape, instruction.shape):
            return f"is not of the shape that {inner.name[:80]!r} returns"
    elif opcode == "while":
        names = [instruction.attributes.get(key, "").strip().lstrip("%") for key in _LOOP]
        if len(operands) != 1 or not all(name in program.computations for name in names):
            return "lacks its state, its condition or its body"
        condition, body = (program.computations[name] for name in names)
        states = [instruction.shape, body.root.shape]
        states += [p.shape for p in (*condition.parameters, *body.parameters)]
        if len(states) != 4 or not all(same_structure(operands[0], s) for s in states):
            return "has a condition or body that does not take and return its state"
    elif opcode == "conditional":
        branches = [program.computations[name] for name in instruction.called]
        if len(operands) != 1 + len(branches) or any(len(b.parameters) != 1 for b in branches):
            return "does not pass one operand to each branch"
    return None


_LOOP = ("condition", "body")


def _holds_array(shape: Shape) -> bool:
    return not shape.is_tuple or any(map(_holds_array, shape.parts))


def _same_parts(left: tuple[Shape, ...] | list[Shape], right: list[Shape]) -> bool:
    return len(left) == len(right) and all(map(same_structure, left, right))


def same_structure(left: Shape, right: Shape) -> bool:
    """Whether two shapes are equal but for layouts and memory spaces."""
    if left is right:
        return True
    if left.dtype != right.dtype or left.dims != right.dims:
        return False
    return _same_parts(left.parts, list(right.parts))


def _calls(computations: Mapping[str, Computation]) -> None:
    """Every computation called exists, none calls itself, and all calls can be written out."""
    depth: dict[str, int] = {}
    expanded: dict[str, int] = {}
    for name in _callees_first(computations):
        instructions = computations[name].instructions
        depth[name] = 1 + max((depth[c] for i in instructions for c in i.called), default=0)
        expanded[name] = sum(
            1 + _visits(i) * sum(expanded[called] for called in i.called) for i in instructions
        )
        if depth[name] > MAX_DEPTH:
            raise HloError(f"calls from {name[:80]!r} are nested deeper than {MAX_DEPTH}")
        if expanded[name] > MAX_EXPANDED:
            raise HloError(
                f"{name[:80]!r} with its calls written out has over {MAX_EXPANDED} lines"
            )


def _visits(instruction: Instruction) -> int:
    """How often the walks of this package enter what an instruction calls."""
    if instruction.opcode == "while":
        return 2  # the replay's first iteration, and the one that stands for the rest
    if instruction.opcode == "fusion":  # an operand given twice is followed twice
        return max(Counter(instruction.operands).values(), default=1)
    return 1


def _callees_first(computations: Mapping[str, Computation]) -> Iterator[str]:
    """Names ordered so that whatever a computation calls comes before it."""
    under_way, finished = set[str](), set[str]()
    for start in computations:
        stack: list[tuple[str, Iterator[str]]] = []

        def enter(name: str, stack: list[tuple[str, Iterator[str]]] = stack) -> None:
            under_way.add(name)
            called = (c for i in computations[name].instructions for c in i.called)
            stack.append((name, called))

        if start not in finished:
            enter(start)
        while stack:
            name, called = stack[-1]
            inner = next(called, None)
            if inner is None:
                stack.pop()
                finished.add(name)
                yield name
            elif inner not in finished:
                if inner in under_way:
                    raise HloError(f"computation {inner[:80]!r} calls itself")
                enter(inner)
