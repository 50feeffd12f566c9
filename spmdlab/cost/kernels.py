"""FLOPs of Pallas kernels: custom calls that XLA's own cost analysis sees as empty.

A kernel's author may give a cost estimate; it is taken as it stands.  Attention kernels without
one (splash attention, the backward passes of flash attention) are priced from their shapes.  Any
other kernel is unknown: it gets the time of its memory traffic and is listed as unmodelled.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

from spmdlab.cost.flops import Flops
from spmdlab.hlo.program import Instruction
from spmdlab.hlo.shapes import Shape

PALLAS_TARGETS = frozenset({"tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu"})

# Custom calls that compute nothing: they allocate, alias, mark or synchronise.
FREE_TARGETS = frozenset(
    "AllocateBuffer ConcatBitcast AsyncCollectiveStart AsyncCollectiveDone Sharding "
    "SPMDFullToShardShape SPMDShardToFullShape AssumeGatherIndicesInBound MoveToHost "
    "annotate_device_placement MoveToDevice PinToDevice PinToVmem BitcastConvert LayoutConstraint "
    "xla.sdy.FuncResultSharding".split()
)

ATTENTION_EFFICIENCY = 0.5
"""Fraction of the matrix peak that attention kernels reach: flash attention forward on v5e, by
libtpu's static profile of the emitted bundles (2048 x 2048, width 128, causal), 38%; replays of
published runs with 50% fit within 10%."""

# Matrix products of one (query block, key block) pair, each 2 * width FLOPs per score.
_ATTENTION_PRODUCTS = (
    (re.compile(r"dkv|dk_dv|bwd_dkv"), 4),
    (re.compile(r"dq"), 3),
    (re.compile(r"bwd|backward"), 5),
    (re.compile(r"fwd|forward|attention|mha"), 2),
)
_ATTENTION = re.compile(r"splash|flash|attention|mha")


@dataclasses.dataclass(frozen=True, slots=True)
class KernelCost:
    """What is known of one kernel."""

    flops: Flops
    efficiency: float
    """Fraction of the matrix peak it is taken to reach."""
    note: str
    """Where the figures come from; "" if from the kernel's own cost estimate."""


def kernel_cost(instruction: Instruction, operands: Sequence[Shape]) -> KernelCost | None:
    """Cost of one execution of a Pallas kernel; None if nothing is known of it.

    Attention from shapes: scores of all heads, batch * heads * queries * keys, times twice the
    width for each matrix product (two forward; three for dq, four for dk and dv), halved for a
    causal mask, which is what decoders use; the mask itself is not in the text.
    """
    config = instruction.backend_config.get("custom_call_config", {})
    estimate = config.get("cost_estimate", {}) if isinstance(config, dict) else {}
    name = kernel_name(instruction).lower()
    efficiency = ATTENTION_EFFICIENCY if _ATTENTION.search(name) else 1.0
    if isinstance(estimate, dict) and estimate.get("flops"):
        flops = Flops(
            matmul=_number(estimate.get("flops")),
            transcendental=_number(estimate.get("transcendentals")),
        )
        return KernelCost(flops, efficiency, "")
    if not _ATTENTION.search(name):
        return None
    wide = [s for s in operands if len(s.dims) >= 3 and s.dtype in ("bf16", "f16", "f32")]
    if len(wide) < 2 or len(wide[0].dims) != len(wide[1].dims):
        return None
    queries, keys = wide[0].dims, wide[1].dims
    products = next((n for pattern, n in _ATTENTION_PRODUCTS if pattern.search(name)), 2)
    leading = 1
    for size in queries[:-2]:
        leading *= size
    scores = leading * queries[-2] * keys[-2]
    return KernelCost(
        Flops(matmul=products * 2.0 * scores * queries[-1] / 2),
        efficiency,
        "priced from its shapes, causal mask assumed",
    )


def kernel_name(instruction: Instruction) -> str:
    """What the kernel is called: its instruction is named after it, and so is its last scope.

    The scopes further out say where it is used, not what it is.
    """
    scopes = [part for part in instruction.op_name.split("/") if part != "pallas_call"]
    own = instruction.name.split(".")[0]
    return own if not scopes or own == scopes[-1] else f"{own} {scopes[-1]}"


def _number(value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return max(0.0, number) if math.isfinite(number) else 0.0
