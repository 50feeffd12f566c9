"""A comparison made up by hand, with a row of every kind."""

from typing import Any

import pytest

from spmdlab.report.rows import NOMINAL, Row, failed_row

GIB = 2**30


def good_row(strategy: str, target: str, replay_s: float, **changes: Any) -> Row:
    row = failed_row(strategy=strategy, target=target, error="", error_type="", chip="v5e")
    return row | {
        "mesh": {"fsdp": 8},
        "status": "ok",
        "error": None,
        "evidence": "replayed",
        "compile_s": 4.0,
        "compute_s": 0.75 * replay_s,
        "collective_s": 0.5 * replay_s,
        "exposed_collective_s": 0.25 * replay_s,
        "step_s": {"ideal": 0.75 * replay_s, "replay": replay_s, "no_overlap": 1.25 * replay_s},
        "mfu": 0.4,
        "hfu": 0.5,
        "tokens_per_s_per_chip": 12345.6,
        "memory": {
            "params": GIB,
            "optimizer": 2 * GIB,
            "batch": 1024,
            "temp": GIB,
            "output": 0,
            "peak": 4 * GIB,
            "capacity": 15.75 * GIB,
        },
        "collectives": [collective()],
        **changes,
    }


def collective(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "all-gather",
        "mesh_axes": ["fsdp"],
        "link": "ICI",
        "dtype": "bf16",
        "payload_bytes": 64 * 2**20,
        "wire_bytes": 56 * 2**20,
        "count": 2,
        "seconds": 1.2e-3,
        "exposed_seconds": 3e-4,
        "parameter": "params.layers.mlp.gate",
        "op_name": "jit(step)/mlp/dot",
        "source": "spmdlab/models/mlp.py:24",
        "phase": "forward",
        **changes,
    }


@pytest.fixture
def rows() -> list[Row]:
    return [
        good_row("data", "v5e:2x4", 20e-3, unmodelled=["custom-call x", "while y"]),
        good_row("fsdp[best]", "v5e:2x4", 12.3e-3),
        failed_row(
            strategy="tensor",
            target="v5e:2x4",
            error="dim 'heads' of size 6 does not divide 4 ways",
            error_type="ShardingError",
            chip="v5e",
            mesh={"tensor": 4},
        ),
        failed_row(
            strategy="big",
            target="v5e:2x4",
            error="needs 20.0 GiB of 15.8 GiB",
            error_type="DoesNotFit",
            status="does not fit",
            needed_bytes=20 * GIB,
            capacity_bytes=15.75 * GIB,
            log_tail=["E0101 <b>oom</b>"],
        ),
        good_row(
            "data",
            "cpu:8",
            1.0,
            mfu=None,
            collectives=[],
            evidence="emulated",
            unmodelled=[f"cpu:8: {NOMINAL}"],
        ),
    ]
