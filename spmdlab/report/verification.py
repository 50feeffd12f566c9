"""The table of `verify`: one line per strategy, and under it what is wrong and why."""

import collections
from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from spmdlab.report.console import Column, FittingTable
from spmdlab.units import UNKNOWN, text_of_seconds

Row = dict[str, Any]

_STYLES = {"ok": "green", "mismatch": "bold red", "error": "red"}
_MOST_FINDINGS = 5
"""Findings of one cause that are named one by one."""

_COLUMNS = (
    Column(name="strategy"),
    Column(name="mesh", rank=2),
    Column(name="result"),
    Column(name="steps", justify="right", rank=3),
    Column(name="loss", justify="right", rank=1),
    Column(name="gradient\nworst", justify="right"),
    Column(name="\nof", rank=1),
    Column(name="update\nworst", justify="right"),
    Column(name="tolerance", justify="right"),
    Column(name="time", justify="right", rank=4),
)


def verification_table(rows: Sequence[Row]) -> FittingTable:
    """Returns the table; differences are shares of each array's largest element."""
    table = FittingTable(_COLUMNS)
    for row in rows:
        table.add_row(_cells(row), style=_STYLES.get(row["status"], ""))
    return table


def _cells(row: Row) -> list[str]:
    mesh = " ".join(f"{axis}={size}" for axis, size in row["mesh"].items())
    compared = [step for step in row["steps"] if step["step"]]
    gradient, update = _worst(compared, "gradient"), _worst(compared, "update")
    return [
        row["strategy"],
        mesh,
        row["status"],
        str(len(compared)) if compared else UNKNOWN,
        _share(_worst(compared, "loss")),
        _share(gradient),
        gradient["path"] if gradient else UNKNOWN,
        _share(update),
        f"{row['tolerance']:.1e}" if "tolerance" in row else UNKNOWN,
        text_of_seconds(row.get("seconds")),
    ]


def _worst(steps: Sequence[dict[str, Any]], what: str) -> dict[str, Any] | None:
    found = [step["worst"][what] for step in steps if what in step["worst"]]
    return max(found, key=lambda each: each["error"], default=None)


def _share(worst: dict[str, Any] | None) -> str:
    return f"{worst['error']:.1e}" if worst else UNKNOWN


def verification_notes(rows: Sequence[Row]) -> list[str]:
    """Returns what is wrong, most telling first, and what must be read with the table."""
    notes = []
    for row in rows:
        if row["status"] == "error":
            notes.append(f"{row['strategy']}: {row['error']}")
        by_cause = collections.defaultdict(list)
        for finding in row["findings"]:
            by_cause[finding["cause"]].append(finding)
        for cause, findings in by_cause.items():
            where = f"{row['strategy']}, step {findings[0]['step']}"
            notes += [f"{where}: {cause.upper()}: {f['text']}" for f in findings[:_MOST_FINDINGS]]
            if (more := len(findings) - _MOST_FINDINGS) > 0:
                notes.append(f"{where}: {cause.upper()}: and {more} more, see verification.json")
        notes += [f"{row['strategy']}: {note}" for note in row.get("notes") or ()]
    if any(row["steps"] for row in rows):
        notes.append(
            "loss, gradient, update: largest difference from one device, as a share of the "
            "array's largest element, over all steps; tolerance: unit roundoff times the longest "
            "chain of roundings (of an update, one rounding of the parameter more)"
        )
    return notes


def verification_report(rows: Sequence[Row]) -> tuple[RenderableType, ...]:
    """Returns the table and its notes, ready to print."""
    return verification_table(rows), *(escape(note) for note in verification_notes(rows))
