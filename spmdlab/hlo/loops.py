"""How often each ``while`` body runs.

CPU and GPU text records ``known_trip_count``; TPU text never does.  There the count follows
from three facts read off the program: the variable's initial value in the operand tuple, its
step in the body, and the limit that the condition compares it with.  Constants reach the
comparison through copies, tuples, fusions and outer loops, so values are resolved through all
of these.  A loop whose end depends on data stays unknown: `trip_count` returns None and the
caller reports it; 1 is never assumed silently.
"""

import dataclasses
import re
from collections.abc import Mapping

from spmdlab.hlo.program import Computation, Instruction, Program

# Instructions whose value is that of their first operand.
_SAME = frozenset(
    "copy bitcast bitcast-convert convert copy-done reshape broadcast optimization-barrier".split()
)
_CALLS = frozenset({"fusion", "call"})
_COUNT = re.compile(r"[0-9]{1,18}")
_MAX_DEPTH = 200
_MIRROR = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


@dataclasses.dataclass(frozen=True, slots=True)
class _Value:
    """``variable + offset``: an integer that is known up to one element of a loop's state."""

    offset: int
    variable: tuple[int, ...] | None = None
    """Path into the loop's state tuple; None for a constant."""


class Loops:
    """Trip counts of a program's loops, resolved on demand."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._callers: dict[str, list[tuple[Computation, Instruction]]] = {}
        for computation in program.computations.values():
            for instruction in computation.instructions:
                for called in instruction.called:
                    self._callers.setdefault(called, []).append((computation, instruction))
        self._cache: dict[str, int | None] = {}
        self._values: dict[tuple[str, str, tuple[int, ...], str], _Value | None] = {}

    def trip_count(self, computation: Computation, loop: Instruction) -> int | None:
        """Executions of the body of ``loop`` (an instruction of ``computation``), if known."""
        key = f"{computation.name}/{loop.name}"
        if key not in self._cache:
            recorded = loop.backend_config.get("known_trip_count")
            count = str(recorded.get("n", "")) if isinstance(recorded, Mapping) else ""
            if _COUNT.fullmatch(count):
                self._cache[key] = int(count)
            else:
                self._cache[key] = self._derive(computation, loop)
        return self._cache[key]

    def _derive(self, computation: Computation, loop: Instruction) -> int | None:
        condition = self._called(loop, "condition")
        body = self._called(loop, "body")
        if condition is None or body is None or not loop.operands:
            return None
        compared = self._comparison(condition)
        if compared is None:
            return None
        scope, compare = compared
        left, right = (
            self._resolve(scope, operand, (), condition, 0) for operand in scope.operands(compare)
        )
        direction = compare.attributes.get("direction", "")
        if left is None or right is None or direction not in _MIRROR:
            return None

        def limit(value: _Value) -> int | None:
            """The value if it does not change from iteration to iteration."""
            if value.variable is None:
                return value.offset
            step = self._resolve(body, body.root, value.variable, body, 0)
            if step != _Value(0, value.variable):
                return None
            start = self._initial(computation, loop, value.variable)
            return None if start is None else start + value.offset

        bound = limit(right)
        if bound is None:
            left, right, direction = right, left, _MIRROR[direction]
            bound = limit(right)
        if bound is None or left.variable is None:
            return None
        step = self._resolve(body, body.root, left.variable, body, 0)
        start = self._initial(computation, loop, left.variable)
        if step is None or step.variable != left.variable or start is None:
            return None
        return _count(start + left.offset, bound, step.offset, direction)

    def _called(self, loop: Instruction, attribute: str) -> Computation | None:
        name = loop.attributes.get(attribute, "").strip().lstrip("%")
        return self._program.computations.get(name)

    def _comparison(self, condition: Computation) -> tuple[Computation, Instruction] | None:
        """The comparison that decides the loop, looked for through fusions."""
        scope, found = condition, condition.root
        for _ in range(_MAX_DEPTH):
            if found.opcode == "compare" and len(found.operands) == 2:
                return scope, found
            if found.opcode in _CALLS and found.called:
                scope = self._program.computations[found.called[0]]
                found = scope.root
            elif found.opcode in _SAME and found.operands:
                found = scope.by_name[found.operands[0]]
            else:
                return None
        return None

    def _initial(
        self, computation: Computation, loop: Instruction, path: tuple[int, ...]
    ) -> int | None:
        value = self._resolve(computation, computation.by_name[loop.operands[0]], path, None, 0)
        return value.offset if value is not None and value.variable is None else None

    def _resolve(
        self,
        scope: Computation,
        instruction: Instruction,
        path: tuple[int, ...],
        state: Computation | None,
        depth: int,
    ) -> _Value | None:
        """The integer at ``path`` of ``instruction``, relative to the parameter of ``state``."""
        key = (scope.name, instruction.name, path, state.name if state else "")
        if key not in self._values:
            self._values[key] = None  # what depends on itself is not known
            if depth <= _MAX_DEPTH:
                self._values[key] = self._follow(scope, instruction, path, state, depth)
        return self._values[key]

    def _follow(
        self,
        scope: Computation,
        instruction: Instruction,
        path: tuple[int, ...],
        state: Computation | None,
        depth: int,
    ) -> _Value | None:
        opcode, operands = instruction.opcode, scope.operands(instruction)
        if opcode == "constant":
            text = instruction.literal.strip()
            return _Value(int(text)) if _COUNT.fullmatch(text.removeprefix("-")) else None
        if opcode == "parameter":
            return self._parameter(scope, instruction, path, state, depth)
        if opcode == "get-tuple-element":
            index = instruction.integers("index")
            return self._resolve(scope, operands[0], index + path, state, depth + 1)
        if opcode == "tuple" and path and path[0] < len(operands):
            return self._resolve(scope, operands[path[0]], path[1:], state, depth + 1)
        if opcode in _SAME and operands:
            return self._resolve(scope, operands[0], path, state, depth + 1)
        if opcode == "copy-start" and operands:
            return self._resolve(scope, operands[0], path[1:], state, depth + 1)
        if opcode in ("add", "subtract") and len(operands) == 2 and not path:
            left = self._resolve(scope, operands[0], (), state, depth + 1)
            right = self._resolve(scope, operands[1], (), state, depth + 1)
            return _combine(opcode, left, right)
        if opcode in _CALLS and instruction.called:
            inner = self._program.computations[instruction.called[0]]
            return self._resolve(inner, inner.root, path, state, depth + 1)
        if opcode == "while" and operands:
            body = self._called(instruction, "body")
            if body and self._resolve(body, body.root, path, body, depth + 1) == _Value(0, path):
                return self._resolve(scope, operands[0], path, state, depth + 1)
        return None

    def _parameter(
        self,
        scope: Computation,
        parameter: Instruction,
        path: tuple[int, ...],
        state: Computation | None,
        depth: int,
    ) -> _Value | None:
        if scope is state:
            return _Value(0, path)
        values: set[_Value | None] = set()
        for caller, call in self._callers.get(scope.name, [])[:64]:
            if call.opcode == "while":
                body = self._called(call, "body")
                same = body and self._resolve(body, body.root, path, body, depth + 1)
                if same != _Value(0, path):
                    return None
                operand = call.operands[0]
            elif call.opcode in _CALLS and int(parameter.literal) < len(call.operands):
                operand = call.operands[int(parameter.literal)]
            else:
                return None
            values.add(self._resolve(caller, caller.by_name[operand], path, state, depth + 1))
        return values.pop() if len(values) == 1 else None


def _combine(opcode: str, left: _Value | None, right: _Value | None) -> _Value | None:
    if left is None or right is None:
        return None
    if opcode == "subtract":
        if right.variable is not None:
            return None
        return _Value(left.offset - right.offset, left.variable)
    if left.variable is not None and right.variable is not None:
        return None
    variable = left.variable if left.variable is not None else right.variable
    return _Value(left.offset + right.offset, variable)


def _count(start: int, bound: int, step: int, direction: str) -> int | None:
    """Iterations of ``for (i = start; i <direction> bound; i += step)``.

    >>> _count(0, 12, 1, "LT"), _count(0, 12, 5, "LE"), _count(7, -1, -1, "GT")
    (12, 3, 8)
    >>> _count(0, 12, 0, "LT") is None
    True
    """
    if direction == "NE":
        if start == bound:
            return 0
        whole = step != 0 and (bound - start) % step == 0 and (bound - start) // step >= 0
        return (bound - start) // step if whole else None
    distance = bound - start if direction[0] == "L" else start - bound
    advance = step if direction[0] == "L" else -step
    if direction[1] == "E":
        distance += 1
    if distance <= 0:
        return 0
    return -(-distance // advance) if advance > 0 else None
