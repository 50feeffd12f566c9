"""Memory of one device during a step, by what holds it."""

import dataclasses
from collections.abc import Mapping

from spmdlab.hlo.program import Program

ROLES = ("params", "optimizer", "batch")


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Bytes per device."""

    params: float
    optimizer: float | None
    """Optimizer state and the step counter; None where arguments cannot be told apart."""
    batch: float | None
    padding: float | None
    """What the compiler's layouts add to the arguments."""
    temp: float | None
    """Temporaries: activations, gradients, gathered weights; None where no compiler said."""
    output: float
    alias: float
    """Outputs that reuse an argument's buffer (donation), counted once in ``peak``."""
    peak: float | None
    capacity: float

    def to_json(self) -> dict[str, float | None]:
        """Returns the fields by name."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledMemory:
    """The totals of XLA's ``memory_analysis()``, per device."""

    argument_bytes: float
    output_bytes: float
    alias_bytes: float
    temp_bytes: float
    peak_bytes: float

    @property
    def peak(self) -> float:
        """The larger of what XLA calls the peak and the sum of the parts.

        Each is wrong somewhere: XLA's peak ignores a loop's working set on CPU, and its
        temporaries read 0 for some TPU programs.
        """
        parts = self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes
        return max(self.peak_bytes, parts)


def compiled_memory(
    stats: CompiledMemory, argument_bytes: Mapping[str, float], capacity: float
) -> Memory:
    """Memory of a compiled step.

    Args:
        stats: What the compiler says.
        argument_bytes: Role (`ROLES`) -> bytes of its arrays on one device, unpadded.
        capacity: Bytes a program may use.
    """
    known = sum(argument_bytes.values())
    peak = stats.peak
    settled = stats.argument_bytes + stats.output_bytes - stats.alias_bytes
    return Memory(
        params=argument_bytes.get("params", 0.0),
        optimizer=argument_bytes.get("optimizer", 0.0),
        batch=argument_bytes.get("batch", 0.0),
        padding=stats.argument_bytes - known,
        temp=max(stats.temp_bytes, peak - settled),
        output=stats.output_bytes,
        alias=stats.alias_bytes,
        peak=peak,
        capacity=capacity,
    )


def text_memory(program: Program, capacity: float) -> Memory:
    """What HLO text alone says: arguments and outputs.  All arguments count as ``params``."""
    sizes = [parameter.shape.num_bytes for parameter in program.entry.parameters]
    aliased = sum(sizes[p] for p in program.aliases.values() if p < len(sizes))
    return Memory(
        params=float(sum(sizes)),
        optimizer=None,
        batch=None,
        padding=None,
        temp=None,
        output=float(program.entry.root.shape.num_bytes),
        alias=float(aliased),
        peak=None,
        capacity=capacity,
    )
