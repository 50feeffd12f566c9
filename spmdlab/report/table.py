"""The table of `compare`: one line per strategy and target, the best per target marked."""

import collections
from collections.abc import Sequence

from rich.console import RenderableType
from rich.markup import escape

from spmdlab.report.console import Column, FittingTable
from spmdlab.report.rows import Row, best_rows, by_target
from spmdlab.units import UNKNOWN, text_of_bytes, text_of_pair, text_of_seconds, text_of_share

_STYLES = {"best": "bold green", "ok": "", "does not fit": "yellow", "error": "red"}


_COLUMNS = (
    Column(name="strategy"),
    Column(name="target"),
    Column(name="status"),
    Column(name="step", justify="right"),
    Column(name="ideal ..\nno overlap", justify="right", rank=3),
    Column(name="compute", justify="right", rank=1),
    Column(name="collective", justify="right", rank=2),
    Column(name="exposed", justify="right"),
    Column(name="memory\npeak / capacity", justify="right"),
    Column(name="MFU", justify="right"),
    Column(name="evidence", rank=4),
)


def comparison_table(rows: Sequence[Row]) -> FittingTable:
    """Returns the table; within a target the fastest strategy comes first."""
    table = FittingTable(_COLUMNS)
    best = best_rows(rows)
    for group in by_target(rows).values():
        for row in group:
            is_best = best.get(row["target"]) == row["strategy"]
            status = "best" if is_best else row["status"]
            table.add_row(_cells(row, status), style=_STYLES.get(status, ""))
        table.end_section()
    return table


def _cells(row: Row, status: str) -> list[str]:
    step = row.get("step_s") or {}
    memory = row.get("memory") or {}
    bounds = [text_of_seconds(step.get(key)) for key in ("ideal", "no_overlap")]
    sizes = [text_of_bytes(memory.get(key)) for key in ("peak", "capacity")]
    return [
        row["strategy"],
        row["target"],
        status,
        text_of_seconds(step.get("replay")),
        text_of_pair(bounds, " .. "),
        text_of_seconds(row.get("compute_s")),
        text_of_seconds(row.get("collective_s")),
        text_of_seconds(row.get("exposed_collective_s")),
        text_of_pair(sizes, " / "),
        text_of_share(row.get("mfu")),
        row.get("evidence") or UNKNOWN,
    ]


def comparison_notes(rows: Sequence[Row]) -> list[str]:
    """Returns what must be read with the table, a line each."""
    notes = [
        f"{row['strategy']} on {row['target']}: {row['error']}"
        for group in by_target(rows).values()
        for row in group
        if row["status"] != "ok"
    ]
    if any(row["status"] == "ok" for row in rows):
        notes.append(
            "step: replay of the compiled schedule; times and bytes are per device and step; "
            "exposed: collective time during which nothing is computed"
        )
    missing = collections.Counter(
        {f"{row['strategy']} on {row['target']}": len(row.get("unmodelled") or []) for row in rows}
    )
    if total := missing.total():
        most, count = missing.most_common(1)[0]
        plural = "thing is" if total == 1 else "things are"
        notes.append(
            f"unmodelled: {total} {plural} not in these numbers (most in {most}: {count}); "
            "comparison.json lists them"
        )
    if any(row["target"].startswith("cpu:") for row in rows):
        notes.append(
            "cpu:N is priced as a nominal device: good for ranking strategies, "
            "not for how long a step takes"
        )
    return notes


def comparison_report(rows: Sequence[Row]) -> tuple[RenderableType, ...]:
    """Returns the table and its notes, ready to print."""
    return comparison_table(rows), *(escape(note) for note in comparison_notes(rows))
