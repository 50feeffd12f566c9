"""The rows of ``comparison.json``: one per strategy and target, plain dicts of JSON's types.

FLOPs, bytes and seconds are per device and per step.  What cannot be known is None.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

Row = dict[str, Any]

Status = Literal["ok", "does not fit", "error"]
"""What became of a row; ``error`` says why it is not ``ok``."""

NOMINAL = "seconds come from a nominal device: they rank strategies, no more"
"""How ``unmodelled`` says that a row is ``emulated``."""

_UNKNOWN = (
    "evidence compile_s flops matmul_flops model_flops hbm_bytes compute_s collective_s "
    "exposed_collective_s mfu hfu tokens_per_s_per_chip"
).split()
_MEMORY = "params optimizer batch padding temp output alias peak capacity".split()


def failed_row(
    *,
    strategy: str,
    target: str,
    error: str,
    error_type: str,
    chip: str | None = None,
    mesh: Mapping[str, int] | None = None,
    status: Status = "error",
    needed_bytes: float | None = None,
    capacity_bytes: float | None = None,
    log_tail: Sequence[str] = (),
) -> Row:
    """Returns a row with every key a row has, whose numbers are unknown.

    Args:
        strategy: Its name in the experiment.
        target: Its text.
        error: Why, in one line.
        error_type: The name of the exception's class, or "WorkerDied".
        chip: The target's chip.
        mesh: Mesh axis -> size.
        status: "does not fit" where the compiler says so, else "error".
        needed_bytes: Per device, where the compiler says so.
        capacity_bytes: Per device, where the compiler says so.
        log_tail: The last lines that the compiler wrote to its log.
    """
    memory: dict[str, float | None] = dict.fromkeys(_MEMORY)
    memory |= {"peak": needed_bytes, "capacity": capacity_bytes}
    return {
        "strategy": strategy,
        "target": target,
        "chip": chip,
        "mesh": dict(mesh) if mesh is not None else None,
        "status": status,
        "error": " ".join(error.split()),
        "error_type": error_type,
        **dict.fromkeys(_UNKNOWN),
        "wire_bytes": {},
        "step_s": {"ideal": None, "replay": None, "no_overlap": None},
        "memory": memory,
        "collectives": [],
        "unmodelled": [],
        "log_tail": list(log_tail),
    }


def step_s(row: Row) -> float | None:
    """Returns the replayed step time of a row that has one."""
    return (row.get("step_s") or {}).get("replay") if row["status"] == "ok" else None


def by_target(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns target -> its rows, the fastest first, those without a time last."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["target"], []).append(row)
    for group in groups.values():
        group.sort(key=lambda row: (step_s(row) is None, step_s(row) or 0.0))
    return groups


def best_rows(rows: Sequence[Row]) -> dict[str, str]:
    """Returns target -> the strategy with the least replayed step time that fits there.

    A strategy that was compared with no other is not called the best.
    """
    return {
        target: group[0]["strategy"]
        for target, group in by_target(rows).items()
        if step_s(group[0]) is not None and len(group) > 1
    }
