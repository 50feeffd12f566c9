"""Seconds of an instruction that computes, on one device.

A roofline: the slowest of the matrix unit, the vector unit, HBM and VMEM.  For matrix products
on TPU the compiler's own estimate (``estimated_cycles``) is better where it can be trusted:
within a factor of two above the roofline.  Outside that it is bounded to the range.  Everything
else is priced by its traffic: there the compiler's figure is an upper bound, up to nine times
too high.
"""

import dataclasses
from collections.abc import Iterator

from spmdlab.cost.flops import FlopCounter, Flops
from spmdlab.cost.kernels import FREE_TARGETS, KernelCost, kernel_cost, kernel_name
from spmdlab.cost.traffic import Traffic, traffic
from spmdlab.hardware.chips import Chip
from spmdlab.hlo.program import Computation, Instruction, Program

# Source: scaling-book, tpus: a vector unit of 8 x 128 lanes with 4 ALUs each per core.
VECTOR_FLOPS_PER_CYCLE = 8 * 128 * 4
# Source: scaling-book, tpus: VMEM's bandwidth is about 22 times HBM's.
VMEM_PER_HBM_BANDWIDTH = 22.0
# Vector operations per transcendental: one polynomial of about this many terms.
TRANSCENDENTAL_FLOPS = 8.0
# Above this the compiler has no estimate (seen for large softmaxes).
_NO_ESTIMATE = 2**62
TRUSTED_RATIO = 2.0
"""How far above the roofline the compiler's estimate of a matrix product is believed."""


@dataclasses.dataclass(frozen=True, slots=True)
class ComputeCost:
    """One execution on one device."""

    flops: Flops
    traffic: Traffic
    seconds: float


class Compute:
    """Prices the computing instructions of one program on one chip."""

    def __init__(self, program: Program, chip: Chip) -> None:
        self._program = program
        self._chip = chip
        self._counter = FlopCounter(program)
        self.unknown: dict[str, int] = {}
        """What was met without a rule -> how often."""

    def price(self, scope: Computation, instruction: Instruction) -> ComputeCost:
        """FLOPs, traffic and seconds of one execution."""
        moved = traffic(self._program, scope, instruction)
        if instruction.opcode == "custom-call":
            return self._custom_call(scope, instruction, moved)
        flops = self._counter.instruction(scope, instruction)
        matmul_s = self._matmul(scope, instruction) if flops.matmul else 0.0
        return ComputeCost(flops, moved, self._seconds(instruction, flops, moved, matmul_s))

    def _custom_call(
        self, scope: Computation, instruction: Instruction, moved: Traffic
    ) -> ComputeCost:
        target = instruction.custom_call_target
        if target in FREE_TARGETS:
            return ComputeCost(Flops(), Traffic(), 0.0)
        operands = [operand.shape for operand in scope.operands(instruction)]
        known: KernelCost | None = kernel_cost(instruction, operands)
        if known is None:
            self._note(f"custom call {target!r}: FLOPs unknown, priced by its memory traffic")
            return ComputeCost(Flops(), moved, self._memory_s(moved))
        if known.note:
            self._note(f"kernel {kernel_name(instruction)!r}: {known.note}")
        peak = self._chip.bf16_flops_per_s * known.efficiency * self._chip.matmul_efficiency
        seconds = max(known.flops.matmul / peak, self._memory_s(moved))
        return ComputeCost(known.flops, moved, seconds)

    def _seconds(
        self, instruction: Instruction, flops: Flops, moved: Traffic, matmul_s: float
    ) -> float:
        chip = self._chip
        vector = flops.vector - flops.shared + TRANSCENDENTAL_FLOPS * flops.transcendental
        memory_s = self._memory_s(moved)
        if chip.ici_links < 2:  # not a TPU: no VMEM, no cycles; vector work at the f32 rate
            return max(matmul_s, memory_s, vector / chip.f32_flops_per_s)
        roofline_s = max(matmul_s, memory_s)
        if flops.matmul:
            cycles = estimated_cycles(instruction)
            if cycles is None:
                return roofline_s
            return min(max(cycles / chip.clock_hz, roofline_s), TRUSTED_RATIO * roofline_s)
        return max(roofline_s, vector / (chip.clock_hz * VECTOR_FLOPS_PER_CYCLE))

    def _memory_s(self, moved: Traffic) -> float:
        rate = self._chip.hbm_bytes_per_s * self._chip.hbm_efficiency
        return max(moved.hbm / rate, moved.vmem / (rate * VMEM_PER_HBM_BANDWIDTH))

    def _matmul(self, scope: Computation, instruction: Instruction) -> float:
        """Seconds of the matrix products inside, each at the rate of its element type."""
        total = 0.0
        for home, product in self._products(scope, instruction):
            operands = home.operands(product)
            narrowest = min(
                (o.shape for o in operands[:2]), key=lambda s: s.num_bytes / max(1, s.num_elements)
            )
            rate = self._rate(narrowest.dtype, product.attributes.get("operand_precision", ""))
            total += self._counter.instruction(home, product).matmul / rate
        return total

    def _rate(self, dtype: str, precision: str) -> float:
        chip = self._chip
        if dtype.startswith("f8") and chip.fp8_flops_per_s:
            peak = chip.fp8_flops_per_s
        elif dtype in ("s8", "u8", "s4", "u4") and chip.int8_flops_per_s:
            peak = chip.int8_flops_per_s
        elif dtype in ("f32", "f64"):
            # A TPU multiplies float32 in one bfloat16 pass unless a higher precision is asked for.
            one_pass = chip.ici_links >= 2 and "high" not in precision
            peak = chip.bf16_flops_per_s if one_pass else chip.f32_flops_per_s
            if "high" in precision and "highest" not in precision:
                peak = chip.bf16_flops_per_s / 3  # Precision.HIGH: three bfloat16 passes
        else:
            peak = chip.bf16_flops_per_s
        return peak * chip.matmul_efficiency

    def _products(
        self, scope: Computation, instruction: Instruction
    ) -> Iterator[tuple[Computation, Instruction]]:
        if instruction.opcode in ("dot", "convolution"):
            yield scope, instruction
        for name in instruction.called if instruction.opcode in ("fusion", "call") else ():
            inner = self._program.computations[name]
            for child in inner.instructions:
                if child.opcode in ("dot", "convolution", "fusion", "call"):
                    yield from self._products(inner, child)

    def _note(self, text: str) -> None:
        self.unknown[text] = self.unknown.get(text, 0) + 1

    def notes(self) -> list[str]:
        """What could not be priced, one line each."""
        opcodes = {
            f"{name}: no FLOP rule, priced by its memory traffic": count
            for name, count in self._counter.unknown.items()
            if name.removeprefix("custom-call ") not in FREE_TARGETS
        }
        return [f"{text} ({count}x)" for text, count in sorted((self.unknown | opcodes).items())]


def estimated_cycles(instruction: Instruction) -> float | None:
    """The compiler's estimate for one execution, in device clock cycles; None if it has none."""
    config = instruction.backend_config.get("window_config")
    text = str(config.get("estimated_cycles", "")) if isinstance(config, dict) else ""
    cycles = int(text) if text.isdecimal() and len(text) < 30 else 0
    return float(cycles) if 0 < cycles < _NO_ESTIMATE else None
