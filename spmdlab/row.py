"""One row of a comparison: a step compiled, priced and replayed.  Runs in a worker process."""

import re
from collections.abc import Mapping
from typing import Any

from spmdlab.config import LOCAL, Experiment
from spmdlab.cost.ledger import Ledger, Row, price
from spmdlab.cost.memory import Memory, compiled_memory, text_memory
from spmdlab.errors import TargetError
from spmdlab.hardware.chips import Chip, chip
from spmdlab.hardware.topology import axes_from_text, parse_topology, row_major_placement
from spmdlab.hlo.parse import parse
from spmdlab.lookup import pick
from spmdlab.report.rows import NOMINAL
from spmdlab.strategies.product import as_strategy
from spmdlab.timeline.replay import Timeline, replay
from spmdlab.units import text_of_bytes
from spmdlab.workload import Workload

_NAMED_MESH = re.compile(r"mesh\[((?:'[^']+'=\d+,?)+)\]")
_NAMED_AXIS = re.compile(r"'([^']+)'=(\d+)")
_TPU_LAYOUT = re.compile(r"\{[\d,]*:T\(\d")
_ONE_AXIS = "devices"


def compile_row(
    experiment: Experiment, strategy_name: str, target_text: str, *, detail: bool = False
) -> dict[str, Any]:
    """Compiles one strategy of an experiment for one target.

    Args:
        experiment: Checked already.
        strategy_name: A key of its strategies.
        target_text: A target.
        detail: Adds ``ledger`` (what ``ledger.json`` holds) and ``timeline_events``.

    Returns:
        A row of ``comparison.json``.  A step that was compiled and needs more memory than the
        device has is a row with all its numbers and the status "does not fit".

    Raises:
        SpmdlabError: The step cannot be laid out or compiled, or the compiler refuses its size.
    """
    from spmdlab.compile import RELAYS, compile_step
    from spmdlab.targets import parse_target

    strategy = as_strategy(pick(experiment.strategies, strategy_name, "strategy"))
    target = parse_target(target_text, experiment.chips)
    workload = Workload(
        model=experiment.model, batch=experiment.batch, optimizer=experiment.optimizer
    )
    compiled = compile_step(workload, strategy, target, seed=experiment.seed)
    program = parse(compiled.hlo_text)
    ledger = price(program, target.chip, compiled.placement, relays=RELAYS)
    timeline = replay(ledger)
    memory = compiled_memory(compiled.memory, compiled.argument_bytes, target.chip.hbm_bytes)
    num_devices = strategy.num_devices
    model_flops = workload.global_model_flops(num_devices) / num_devices
    step_s = timeline.step_s.replay
    peak = step_s * target.chip.bf16_flops_per_s
    tokens = workload.global_batch(num_devices) * workload.batch.seq_len
    chips = num_devices / target.topology.devices_per_chip
    notes = list(ledger.unmodelled)
    if target.chip.name == "cpu":
        notes.insert(0, f"{target.text}: {NOMINAL}")
    too_large = _too_large(memory)
    row = {
        "strategy": strategy_name,
        "target": target.text,
        "chip": target.chip.name,
        "mesh": strategy.mesh_axes,
        "status": "does not fit" if too_large else "ok",
        "error": too_large,
        "error_type": "DoesNotFit" if too_large else None,
        "evidence": _evidence(target.chip),
        "compile_s": compiled.compile_s,
        "flops": ledger.flops().total,
        "matmul_flops": ledger.flops().matmul,
        "model_flops": model_flops,
        "hbm_bytes": ledger.hbm_bytes(),
        "wire_bytes": ledger.wire_bytes(),
        "compute_s": timeline.compute_s,
        "collective_s": timeline.collective_s,
        "exposed_collective_s": timeline.exposed_collective_s,
        "step_s": _step_json(timeline),
        "mfu": model_flops / peak if peak else None,
        "hfu": ledger.flops().matmul / peak if peak else None,
        "tokens_per_s_per_chip": tokens / step_s / chips if step_s else None,
        "memory": memory.to_json(),
        "collectives": collectives_json(ledger, timeline),
        "unmodelled": notes,
    }
    if detail:
        row["ledger"] = {
            "target": target.text,
            "mesh": strategy.mesh_axes,
            **ledger_json(ledger, timeline, memory, target.chip, notes),
        }
        row["timeline_events"] = events_json(ledger, timeline)
    return row


def analyze_hlo(text: str, target_text: str, mesh_text: str | None) -> dict[str, Any]:
    """Prices HLO text of any program as if it ran on a target.

    Args:
        text: An HLO module.
        target_text: What it was compiled for.
        mesh_text: Mesh axes and sizes, outermost first, like ``"data=16 fsdp=16"``; None to
            take the mesh the text names, or one axis ``devices``.

    Returns:
        What ``ledger.json`` holds.

    Raises:
        HloError: The text is no HLO, or does not fit the mesh.
        TargetError: The target is unknown or has another number of devices.
        ConfigError: The mesh does not parse.
        ShardingError: The mesh does not match the target.
    """
    if target_text == LOCAL:
        raise TargetError("analyze needs the target by name, as in cpu:8 or v5e:2x4, not 'local'")
    topology = parse_topology(target_text)
    axes = None if mesh_text is None else axes_from_text(mesh_text)
    program = parse(text)
    devices = max(program.num_partitions, program.num_replicas)
    if devices not in (1, topology.num_devices, topology.num_devices // topology.num_slices):
        raise TargetError(
            f"the program is for {devices} devices, target {target_text!r} has "
            f"{topology.num_devices}; name the target it was compiled for"
        )
    guessed = axes is None
    if axes is None:
        axes = _named_mesh(text, topology.num_devices)
    one = chip(topology.chip)
    ledger = price(program, one, row_major_placement(topology, axes))
    timeline = replay(ledger)
    notes = list(ledger.unmodelled)
    notes.append(
        "memory: a text does not tell weights from other arguments, so all count as params; "
        "it has neither temporaries nor peak"
    )
    if guessed and axes == {_ONE_AXIS: topology.num_devices} and devices > 1:
        notes.append(f"no mesh was given and the text names none: all is filed under {_ONE_AXIS!r}")
    if other := _other_compiler(text, topology.kind):
        notes.append(other)
    if devices > 1 and topology.kind == "tpu":
        notes.append("mesh positions are taken to lie on the torus in row-major order")
    if one.name == "cpu":
        notes.append(f"{target_text}: {NOMINAL}")
    memory = text_memory(program, one.hbm_bytes)
    return {
        "target": target_text,
        "mesh": axes,
        **ledger_json(ledger, timeline, memory, one, notes),
    }


def ledger_json(
    ledger: Ledger, timeline: Timeline, memory: Memory, priced_on: Chip, notes: list[str]
) -> dict[str, Any]:
    """What ``ledger.json`` holds besides target and mesh, per device and step."""
    flops = ledger.flops()
    return {
        "chip": priced_on.name,
        "evidence": _evidence(priced_on),
        "totals": {
            "flops": flops.total,
            "matmul_flops": flops.matmul,
            "hbm_bytes": ledger.hbm_bytes(),
            "wire_bytes": ledger.wire_bytes(),
            "compute_s": timeline.compute_s,
            "copy_s": timeline.copy_s,
            "collective_s": timeline.collective_s,
            "exposed_collective_s": timeline.exposed_collective_s,
            "exposed_copy_s": timeline.exposed_copy_s,
            "step_s": _step_json(timeline),
        },
        "collectives": collectives_json(ledger, timeline),
        "instructions": [
            _instruction_json(row, exposed)
            for row, exposed in zip(ledger.rows, timeline.exposed_s, strict=True)
        ],
        "memory": memory.to_json(),
        "unmodelled": notes,
    }


def collectives_json(ledger: Ledger, timeline: Timeline) -> list[dict[str, Any]]:
    """The collectives, in schedule order; bytes and seconds sum over the executions."""
    found = []
    for row, exposed in zip(ledger.rows, timeline.exposed_s, strict=True):
        if row.wire is None:
            continue
        found.append(
            {
                "name": row.name,
                "kind": row.kind,
                "mesh_axes": list(row.wire.mesh_axes),
                "whole_axes": row.wire.whole_axes,
                "link": row.wire.link,
                "dtype": row.wire.dtype,
                "payload_bytes": row.wire.payload_bytes * row.count,
                "wire_bytes": row.wire.wire_bytes * row.count,
                "count": _count(row),
                "seconds": row.seconds * row.count,
                "exposed_seconds": exposed,
                "parameter": row.parameter,
                "op_name": row.op_name or None,
                "source": row.source or None,
                "phase": row.phase,
                "algorithm": row.wire.algorithm or None,
            }
        )
    return found


def events_json(ledger: Ledger, timeline: Timeline) -> list[dict[str, Any]]:
    """The bars of the timeline, for `spmdlab.report.perfetto`."""
    return [
        {
            "name": event.name,
            "track": event.track,
            "start_s": event.start_s,
            "duration_s": event.duration_s,
            "args": _event_args(ledger.rows[event.row]),
        }
        for event in timeline.events
    ]


def _event_args(row: Row) -> Mapping[str, Any]:
    args: dict[str, Any] = {"kind": row.kind, "count": _count(row), "phase": row.phase}
    args |= {"op_name": row.op_name, "source": row.source}
    if row.parameter:
        args["parameter"] = row.parameter
    if row.wire is not None:
        args |= {"mesh_axes": row.wire.axis_key, "wire_bytes": row.wire.wire_bytes}
    return args


def _instruction_json(row: Row, exposed: float) -> dict[str, Any]:
    return {
        "name": row.name,
        "computation": row.computation,
        "opcode": row.opcode,
        "kind": row.kind,
        "count": _count(row),
        "flops": row.flops.total * row.count,
        "hbm_bytes": row.hbm_bytes * row.count,
        "seconds": row.seconds * row.count,
        "exposed_seconds": exposed,
        "op_name": row.op_name or None,
        "source": row.source or None,
        "parameter": row.parameter,
        "phase": row.phase,
    }


def _count(row: Row) -> int | None:
    """Executions per step; None inside a loop whose trip count is unknown."""
    return int(row.count) if row.counted else None


def _step_json(timeline: Timeline) -> dict[str, float]:
    step = timeline.step_s
    return {"ideal": step.ideal, "replay": step.replay, "no_overlap": step.no_overlap}


def _evidence(priced_on: Chip) -> str:
    """Of the seconds; FLOPs, bytes and memory are read from the compiled program."""
    return "emulated" if priced_on.name == "cpu" else "replayed"


def _named_mesh(text: str, num_devices: int) -> dict[str, int]:
    """The mesh a program names in its replica groups, the one with the most axes."""
    best: dict[str, int] = {}
    for mesh in set(_NAMED_MESH.findall(text)):
        axes = {name: int(size[:9]) for name, size in _NAMED_AXIS.findall(mesh)}
        total = 1
        for size in axes.values():
            total *= size
        own = not any(re.fullmatch(r"axis_\d+", name) for name in axes)
        if own and total == num_devices and len(axes) > len(best):
            best = axes
    return best or {_ONE_AXIS: num_devices}


def _too_large(memory: Memory) -> str | None:
    """Says by how much a step exceeds its device, and what holds the memory."""
    if memory.peak is None or memory.peak <= memory.capacity:
        return None
    parts = {"params": memory.params, "optimizer": memory.optimizer, "batch": memory.batch}
    parts["temporaries"] = memory.temp or 0.0
    held = ", ".join(
        f"{name} {text_of_bytes(size)}" for name, size in sorted(parts.items(), key=lambda p: -p[1])
    )
    over = text_of_bytes(memory.peak - memory.capacity)
    return (
        f"needs {text_of_bytes(memory.peak)} per device, {over} more than the "
        f"{text_of_bytes(memory.capacity)} it has: {held}"
    )


def _other_compiler(text: str, kind: str) -> str | None:
    """Says where a program was compiled for another kind of device than it is priced on."""
    tiled = _TPU_LAYOUT.search(text) is not None
    if tiled and kind != "tpu":
        return f"the program was compiled for a TPU and is priced on a {kind.upper()}"
    if not tiled and kind == "tpu":
        return "the text has no TPU layouts: the TPU's own compiler would write another program"
    return None
