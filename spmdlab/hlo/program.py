"""A parsed HLO module: computations, instructions, and where each came from."""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from spmdlab.errors import HloError
from spmdlab.hlo.shapes import Shape

_CALLED = ("calls", "to_apply", "body", "condition", "branch_computations", "true_computation",
           "false_computation", "called_computations", "select", "scatter")  # fmt: skip
_NAME = re.compile(r"%?([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"stack_frame_id=(\d{1,9})\b")
_FILE = re.compile(r'source_file="((?:[^"\\]|\\.)*)"(?:\s+source_line=(\d+))?')
# Not the user's: JAX and what is built on it, Python's own library, and code without a file.
_FRAMEWORK = re.compile(
    r"-packages/(jax|jaxlib|flax|optax|orbax|chex|absl|equinox|haiku|qwix|ml_collections)/"
    r"|/lib/python3\.\d+/(?!(site|dist)-packages/)|^<"
)
_INT = re.compile(r"-?\d+")
_MAX_DIGITS = 18


@dataclasses.dataclass(eq=False)
class Instruction:
    """One HLO instruction, as printed."""

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    """Names of the operand instructions, all in the same computation."""
    literal: str
    """What stands between the parentheses when it names no instruction (constant, parameter)."""
    attributes: Mapping[str, str]
    is_root: bool
    line_number: int

    @functools.cached_property
    def op_name(self) -> str:
        """The JAX name stack, e.g. ``jit(step)/jvp(layers)/mlp/dot_general``; "" if unknown."""
        found = _OP_NAME.search(self.attributes.get("metadata", ""))
        return found[1].replace('\\"', '"') if found else ""

    @property
    def stack_frame_id(self) -> int:
        """Key into `Program.frames`; 0 if unknown."""
        found = _FRAME.search(self.attributes.get("metadata", ""))
        return int(found[1]) if found else 0

    @property
    def inline_source(self) -> str:
        """``file:line`` of the older metadata form that carries no stack frames, or ""."""
        found = _FILE.search(self.attributes.get("metadata", ""))
        return f"{found[1]}:{found[2]}" if found and found[2] else (found[1] if found else "")

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations this instruction refers to, in order of appearance."""
        return tuple(
            name
            for key in _CALLED
            if key in self.attributes
            for name in _NAME.findall(self.attributes[key])
        )

    @functools.cached_property
    def backend_config(self) -> Mapping[str, Any]:
        """The JSON backend config; empty when there is none or it is not JSON."""
        text = self.attributes.get("backend_config", "")
        if not text.startswith("{"):
            return {}
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def integers(self, attribute: str) -> tuple[int, ...]:
        """The integers of an attribute such as ``dimensions={0,1}``; empty if absent.

        Raises:
            HloError: One of them does not fit 64 bits.
        """
        found = _INT.findall(self.attributes.get(attribute, ""))
        if any(len(number) > _MAX_DIGITS for number in found):
            where = f"line {self.line_number}: {attribute} of {self.name[:80]!r}"
            raise HloError(f"{where} is out of range")
        return tuple(map(int, found))

    @property
    def custom_call_target(self) -> str:
        """The quoted target of a custom call, or ""."""
        return self.attributes.get("custom_call_target", "").strip('"')

    @property
    def channel_id(self) -> int | None:
        """The channel that joins the parts of one logical collective."""
        ids = self.integers("channel_id")
        return ids[0] if ids else None


@dataclasses.dataclass(eq=False)
class Computation:
    """A list of instructions in schedule order, operands before users."""

    name: str
    instructions: Sequence[Instruction]
    is_entry: bool

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Instruction name -> instruction."""
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        for instruction in self.instructions:
            if instruction.is_root:
                return instruction
        return self.instructions[-1]

    @functools.cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """Parameters in the order of their numbers."""
        found = [i for i in self.instructions if i.opcode == "parameter"]
        return tuple(sorted(found, key=lambda i: int(i.literal)))

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Instruction name -> instructions that read it."""
        table: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                table.setdefault(operand, []).append(instruction)
        return {name: tuple(users) for name, users in table.items()}

    def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """The operand instructions of ``instruction``."""
        return tuple(self.by_name[name] for name in instruction.operands)


@dataclasses.dataclass(frozen=True)
class Frame:
    """One Python frame of the stack tables that head an HLO text."""

    file: str
    line: int
    function: str
    parent: int


@dataclasses.dataclass(eq=False)
class Program:
    """An HLO module."""

    name: str
    computations: Mapping[str, Computation]
    entry: Computation
    frames: Mapping[int, Frame]
    num_partitions: int
    num_replicas: int
    is_scheduled: bool
    aliases: Mapping[int, int]
    """Output number -> number of the entry parameter whose buffer it reuses (donation)."""

    def stack(self, frame_id: int) -> list[Frame]:
        """The frames from the innermost outwards."""
        frames: list[Frame] = []
        seen: set[int] = set()
        while frame_id in self.frames and frame_id not in seen:
            seen.add(frame_id)
            frames.append(self.frames[frame_id])
            frame_id = self.frames[frame_id].parent
        return frames

    def source(self, instruction: Instruction, relays: Sequence[str] = ()) -> str:
        """``file:line`` of the innermost frame that is the user's own, "" if unknown.

        Frames inside JAX, its companions and Python itself, and in files that only relay a call,
        are passed over as long as an outer one is there: people ask for the line of the model.

        Args:
            instruction: Any instruction of the program.
            relays: Ends of paths of files whose frames are passed over.
        """
        frames = self.stack(instruction.stack_frame_id)
        if not frames:
            return instruction.inline_source
        outside = [f for f in frames if not _FRAMEWORK.search(f.file)]
        own = [f for f in outside if not f.file.endswith(tuple(relays))]
        frame = (own or outside or frames)[0]
        return f"{frame.file}:{frame.line}"

    @property
    def num_instructions(self) -> int:
        """Instructions over all computations."""
        return sum(len(c.instructions) for c in self.computations.values())
