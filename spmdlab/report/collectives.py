"""The tables of `explain` and `analyze`: totals, and each collective with what causes it."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from spmdlab.report.console import Column, FittingTable
from spmdlab.units import (
    UNKNOWN,
    text_of_bytes,
    text_of_count,
    text_of_flops,
    text_of_seconds,
)

LONGEST = 40
"""Collectives printed; ledger.json has them all."""


_COLUMNS = (
    Column(name="collective"),
    Column(name="mesh axes"),
    Column(name="link", rank=5),
    Column(name="dtype", rank=6),
    Column(name="count", justify="right", rank=2),
    Column(name="payload", justify="right", rank=3),
    Column(name="wire", justify="right", rank=4),
    Column(name="time", justify="right"),
    Column(name="exposed", justify="right"),
    Column(name="parameter", folds=True),
    Column(name="source", folds=True, rank=1),
    Column(name="phase", rank=7),
)


def collectives_table(collectives: Sequence[Mapping[str, Any]]) -> FittingTable:
    """Returns the collectives that take longest, the longest first.

    Bytes and times are per device and step, so sums over the ``count`` executions.
    """
    table = FittingTable(_COLUMNS)
    ranked = sorted(collectives, key=lambda each: -(each.get("seconds") or 0.0))
    for each in ranked[:LONGEST]:
        table.add_row(_cells(each))
    return table


def _cells(each: Mapping[str, Any]) -> list[str]:
    return [
        each["kind"],
        "+".join(each.get("mesh_axes") or [UNKNOWN]),
        each.get("link") or UNKNOWN,
        each.get("dtype") or UNKNOWN,
        text_of_count(each.get("count")),
        text_of_bytes(each.get("payload_bytes")),
        text_of_bytes(each.get("wire_bytes")),
        text_of_seconds(each.get("seconds")),
        text_of_seconds(each.get("exposed_seconds")),
        _first_two(each.get("parameter")),
        short_source(each.get("source")),
        each.get("phase") or UNKNOWN,
    ]


def _first_two(parameters: str | None) -> str:
    """Returns a list of parameters cut to what a table has room for; ledger.json has it whole."""
    names = (parameters or UNKNOWN).split(", ")
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def short_source(source: str | None) -> str:
    """Returns the end of ``file:line``, which is what people look for; ledger.json has it whole.

    >>> short_source("/home/me/lib/python3.11/site-packages/maxtext/layers/linears.py:81")
    'maxtext/layers/linears.py:81'
    """
    return "/".join((source or UNKNOWN).split("/")[-3:])


def totals_table(ledger: Mapping[str, Any]) -> Table:
    """Returns the sums over one step of one device, and what they are sums for."""
    totals = ledger["totals"]
    mesh = ledger.get("mesh") or {}
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    step = totals.get("step_s") or {}
    wire = totals.get("wire_bytes") or {}
    sums = {
        "target": ledger.get("target"),
        "mesh": " ".join(f"{axis}={size}" for axis, size in mesh.items()),
        "compute FLOPs": text_of_flops(totals.get("flops")),
        "memory traffic": text_of_bytes(totals.get("hbm_bytes")),
        "on the wire": ", ".join(f"{axis} {text_of_bytes(n)}" for axis, n in wire.items()),
        "compute time": text_of_seconds(totals.get("compute_s")),
        "collective time": text_of_seconds(totals.get("collective_s")),
        "of it exposed": text_of_seconds(totals.get("exposed_collective_s")),
        "step, ideal overlap": text_of_seconds(step.get("ideal")),
        "step, replayed": text_of_seconds(step.get("replay")),
        "step, no overlap": text_of_seconds(step.get("no_overlap")),
    }
    for name, value in sums.items():
        table.add_row(name, escape(value or UNKNOWN))
    return table


def ledger_report(ledger: Mapping[str, Any]) -> tuple[RenderableType, ...]:
    """Returns the totals, the collectives and the notes of a ledger, ready to print."""
    collectives = ledger["collectives"]
    notes = []
    if not collectives:
        notes.append("no collectives: nothing is exchanged between devices")
    if len(collectives) > LONGEST:
        notes.append(f"the {LONGEST} longest of {len(collectives)}; ledger.json has them all")
    if unmodelled := ledger.get("unmodelled"):
        plural = "note" if len(unmodelled) == 1 else "notes"
        notes.append(f"unmodelled: {len(unmodelled)} {plural} on what is assumed or left out:")
        notes += [f"  {each}" for each in unmodelled[:10]]
        if len(unmodelled) > 10:
            notes.append(f"  and {len(unmodelled) - 10} more, listed in ledger.json")
    tables = [collectives_table(collectives)] if collectives else []
    return totals_table(ledger), *tables, *map(escape, notes)
