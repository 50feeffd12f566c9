"""Which part of a training step an instruction belongs to, from the names JAX gives it.

JAX marks what it differentiates: ``jvp(...)`` around the forward pass, ``transpose(jvp(...))``
around the backward pass, recomputation under remat included.  What stands outside both in a
program that has a backward pass updates the state.  A pipeline differentiates by hand, forward
and backward in one tick: that is a phase of its own.
"""

from spmdlab.hlo.program import Instruction, Program

FORWARD, BACKWARD, UPDATE, UNKNOWN = "forward", "backward", "update", "unknown"
TICK, TICK_SCOPE = "pipeline tick", "pipeline_tick"


class Phases:
    """Assigns phases in one program."""

    def __init__(self, program: Program) -> None:
        self._trains = any(
            "transpose(" in instruction.op_name
            for computation in program.computations.values()
            for instruction in computation.instructions
        )

    def of(self, instruction: Instruction) -> str:
        """One of the phases above; unknown where the instruction carries no name."""
        name = instruction.op_name
        if not name:
            return UNKNOWN
        if TICK_SCOPE in name:
            return TICK
        if "transpose(" in name:
            return BACKWARD
        if "jvp(" in name or not self._trains:
            return FORWARD
        return UPDATE
