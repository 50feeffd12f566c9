"""Which parameter a value belongs to: its weight on the way in, its gradient on the way out.

Two passes over the data flow, both through loops and fusions.  Forwards from the arguments:
a value made from one argument by conversions, copies, slices and collectives alone is still
that argument.  Backwards from the outputs that reuse an argument's buffer (donation): an
operand as large as the result of an elementwise instruction belongs to the same argument, so
the gradient of a weight is found from the update it flows into.  Products, reductions and
broadcasts end both, and what they make is an activation: it has no owner.
"""

import re
from collections.abc import Sequence

from spmdlab.hlo.megascale import sent_value, transfer
from spmdlab.hlo.program import Computation, Instruction, Program

Tree = frozenset | tuple  # owners of an array, or one tree for each part of a tuple
_NONE: frozenset[str] = frozenset()

_SAME = frozenset(
    "convert copy copy-done bitcast bitcast-convert reshape transpose slice dynamic-slice "
    "slice-done all-gather all-gather-done collective-permute collective-permute-done "
    "all-to-all optimization-barrier reduce-precision all-reduce all-reduce-start "
    "all-reduce-done reduce-scatter async-done async-update pad".split()
)
_STARTS = frozenset(
    "copy-start slice-start dynamic-slice-start all-gather-start collective-permute-start "
    "async-start".split()
)
_ELEMENTWISE = frozenset(
    "add subtract multiply divide maximum minimum select clamp negate abs sqrt rsqrt power "
    "exponential tanh and or xor compare".split()
)
_CALLS = frozenset({"fusion", "call"})


class Owners:
    """Owners of every value of a program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._forward: dict[tuple[str, str], Tree] = {}
        self._backward: dict[tuple[str, str], Tree] = {}
        # What single parts of a tuple are used for, until the tuple itself is reached.
        self._parts: dict[tuple[str, str], dict[int, Tree]] = {}
        entry = program.entry
        self.arguments: dict[int, str] = {
            int(parameter.literal): argument_path(parameter.op_name)
            for parameter in entry.parameters
            if parameter.op_name
        }
        """Entry parameter number -> dotted path of the argument."""
        inputs: list[Tree] = [
            frozenset({self.arguments[number]}) if number in self.arguments else _NONE
            for number in range(len(entry.parameters))
        ]
        self._run_forward(entry, inputs)
        self._run_backward(entry, self._outputs(entry))

    def of(self, scope: Computation, instruction: Instruction) -> tuple[str, ...]:
        """The arguments that ``instruction`` moves or whose gradient it makes, sorted."""
        found: frozenset[str] = _NONE
        for operand in scope.operands(instruction):
            found |= _flat(self._forward.get((scope.name, operand.name), _NONE))
        if not found:
            # What is sent away has no result here; it is known by what becomes of its operand.
            made = instruction.operands[0] if transfer(instruction) else instruction.name
            found = _flat(self._backward.get((scope.name, made), _NONE))
        return tuple(sorted(found))

    def _outputs(self, entry: Computation) -> Tree:
        shape = entry.root.shape
        count = len(shape.parts) if shape.is_tuple else 1
        names = [
            frozenset({self.arguments[self._program.aliases[i]]})
            if self._program.aliases.get(i) in self.arguments
            else _NONE
            for i in range(count)
        ]
        return tuple(names) if shape.is_tuple else names[0]

    # Forwards.

    def _run_forward(self, scope: Computation, inputs: list[Tree]) -> Tree:
        labels = self._forward
        for instruction in scope.instructions:
            labels[scope.name, instruction.name] = self._made(scope, instruction, inputs)
        return labels[scope.name, scope.root.name]

    def _made(self, scope: Computation, instruction: Instruction, inputs: list[Tree]) -> Tree:
        opcode = instruction.opcode
        operands = [self._forward[scope.name, name] for name in instruction.operands]
        if opcode == "parameter":
            number = int(instruction.literal)
            return inputs[number] if number < len(inputs) else _NONE
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            return _element(operands[0], instruction.integers("index"))
        if opcode in _CALLS and instruction.called:
            return self._run_forward(self._program.computations[instruction.called[0]], operands)
        if opcode == "while" and operands:
            body = self._body(instruction)
            return _union(operands[0], self._run_forward(body, [operands[0]])) if body else _NONE
        if opcode in _STARTS and operands:
            moved = _flat(operands[0])
            return (moved, moved)
        if sent := sent_value(scope, instruction):
            return (self._forward.get((scope.name, sent.name), _NONE), _NONE)
        if opcode in _SAME and operands:
            if instruction.shape.is_tuple and len(operands) == len(instruction.shape.parts):
                return tuple(operands)
            first = operands[0]
            return _flat(first) if isinstance(first, tuple) else first
        if _is_glue(instruction, scope.operands(instruction)):
            return operands[0] if len(set(operands)) == 1 else _NONE
        return _NONE

    def _body(self, loop: Instruction) -> Computation | None:
        name = loop.attributes.get("body", "").strip().lstrip("%")
        return self._program.computations.get(name)

    # Backwards.

    def _run_backward(self, scope: Computation, result: Tree) -> list[Tree]:
        """Marks a computation from its result; returns what its parameters belong to."""
        labels = self._backward
        self._mark(scope, scope.root, result)
        for instruction in reversed(scope.instructions):
            if parts := self._parts.pop((scope.name, instruction.name), None):
                used = tuple(parts.get(index, _NONE) for index in range(max(parts) + 1))
                self._mark(scope, instruction, used)
            label = labels.get((scope.name, instruction.name), _NONE)
            if _flat(label):
                self._spread(scope, instruction, label)
        return [labels.get((scope.name, p.name), _NONE) for p in scope.parameters]

    def _mark(self, scope: Computation, instruction: Instruction, label: Tree) -> None:
        key = scope.name, instruction.name
        self._backward[key] = _union(self._backward.get(key, _NONE), label)

    def _spread(self, scope: Computation, instruction: Instruction, label: Tree) -> None:
        opcode, operands = instruction.opcode, scope.operands(instruction)
        if opcode == "tuple" and isinstance(label, tuple):
            for operand, part in zip(operands, label, strict=False):
                self._mark(scope, operand, part)
        elif opcode == "get-tuple-element":
            parts = self._parts.setdefault((scope.name, operands[0].name), {})
            index = instruction.integers("index")[0]
            parts[index] = _union(parts.get(index, _NONE), label)
        elif opcode in _CALLS and instruction.called:
            inner = self._program.computations[instruction.called[0]]
            for operand, part in zip(operands, self._run_backward(inner, label), strict=False):
                self._mark(scope, operand, part)
        elif opcode == "while" and operands and (body := self._body(instruction)):
            state = label
            for _ in range(2):  # what the state belongs to at the end of one turn starts the next
                state = _union(state, (self._run_backward(body, state) or [_NONE])[0])
            self._mark(scope, operands[0], state)
        elif opcode in _SAME and operands:
            if isinstance(label, tuple) and len(label) <= len(operands):
                for operand, part in zip(operands, label, strict=False):
                    self._mark(scope, operand, part)
            else:
                self._mark(scope, operands[0], _flat(label))
        elif opcode in _STARTS and operands:
            self._mark(scope, operands[0], _flat(label))
        elif sent := sent_value(scope, instruction):
            self._mark(scope, sent, _flat(label))
        elif opcode == "dynamic-update-slice":
            for operand in operands[:2]:
                self._mark(scope, operand, label)
        elif opcode in ("concatenate", "custom-call") and _is_glue(instruction, operands):
            for operand in operands:
                self._mark(scope, operand, _flat(label))
        elif opcode in _ELEMENTWISE:
            for operand in operands:
                if operand.shape.num_elements == instruction.shape.num_elements > 1:
                    self._mark(scope, operand, label)


def argument_path(op_name: str) -> str:
    """A dotted path from the name JAX gives an argument.

    >>> argument_path("state['params']['attention']['value'].value[0]")
    'params.attention.value.0'
    >>> argument_path("w[1]"), argument_path("x")
    ('w.1', 'x')
    """
    # The attribute that holds a variable's array is no part of its path; a key may be.
    head, *keys = re.findall(r"\w+", re.sub(r"\.(?:raw_)?value\b", "", op_name)) or [op_name]
    return ".".join(keys if head == "state" and keys else [head, *keys])


def parameter_name(owners: tuple[str, ...]) -> str | None:
    """One name for a ledger row: the parameters among the owners, or all of them.

    Optimizer state follows its parameter through the update; where both are found the
    parameter is the owner.

    >>> parameter_name(("optimizer.mu.w", "params.w"))
    'params.w'
    """
    parameters = [owner for owner in owners if owner.startswith("params.")]
    return ", ".join(parameters or owners) or None


def _is_glue(instruction: Instruction, operands: Sequence[Instruction]) -> bool:
    """Whether slices are put together again: a concatenation, or TPU's ConcatBitcast."""
    if instruction.opcode not in ("concatenate", "custom-call") or not operands:
        return False
    parts = sum(operand.shape.num_elements for operand in operands)
    return parts == instruction.shape.num_elements


def _element(tree: Tree, index: tuple[int, ...]) -> Tree:
    if isinstance(tree, tuple):
        return tree[index[0]] if index and index[0] < len(tree) else _NONE
    return tree


def _flat(tree: Tree) -> frozenset[str]:
    if isinstance(tree, frozenset):
        return tree
    return frozenset().union(*map(_flat, tree))


def _union(left: Tree, right: Tree) -> Tree:
    if isinstance(left, tuple) or isinstance(right, tuple):
        a = left if isinstance(left, tuple) else ()
        b = right if isinstance(right, tuple) else ()
        size = max(len(a), len(b))
        pad_a, pad_b = a + (_NONE,) * (size - len(a)), b + (_NONE,) * (size - len(b))
        return tuple(_union(x, y) for x, y in zip(pad_a, pad_b, strict=True))
    return left | right
