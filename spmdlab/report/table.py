"""The table of `compare`: one line per strategy and target, the best per target marked."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.markup import escape

from spmdlab.report.console import Column, FittingTable
from spmdlab.report.rows import NOMINAL, Row, best_rows, by_target
from spmdlab.units import UNKNOWN, text_of_bytes, text_of_pair, text_of_seconds, text_of_share

_STYLES = {"best": "bold green", "ok": "", "does not fit": "yellow", "error": "red"}


_COLUMNS = (
    Column(name="strategy", folds=True),
    Column(name="target"),
    Column(name="status", rank=1),
    Column(name="step", justify="right"),
    Column(name="ideal ..\nno overlap", justify="right", rank=7),
    Column(name="compute", justify="right", rank=5),
    Column(name="collective", justify="right", rank=6),
    Column(name="exposed", justify="right", rank=3),
    Column(name="memory\npeak / capacity", justify="right", rank=2),
    Column(name="MFU", justify="right", rank=4),
    Column(name="evidence", rank=8),
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


def failure_notes(rows: Sequence[Row]) -> list[str]:
    """Returns why rows have no numbers, strategies of one reason in one line."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for group in by_target(rows).values():
        for row in group:
            if row["status"] != "ok":
                reasons.setdefault((row["target"], row["error"]), []).append(row["strategy"])
    return [
        f"{', '.join(strategies)} on {target}: {error}"
        for (target, error), strategies in reasons.items()
    ]


def reading_notes(rows: Sequence[Row]) -> list[str]:
    """Returns what must be known to read the numbers, a line each."""
    notes = []
    if any((row.get("step_s") or {}).get("replay") is not None for row in rows):
        notes.append(
            "step: replay of the compiled schedule; times and bytes are per device and step; "
            "exposed: collective time during which nothing is computed"
        )
    if any(row.get("evidence") == "emulated" for row in rows):
        notes.append(
            "emulated: priced as a nominal device, good for ranking strategies, "
            "not for how long a step takes"
        )
    return notes


def comparison_notes(rows: Sequence[Row]) -> list[str]:
    """Returns what must be read with the numbers of all rows, a line each."""
    notes = reading_notes(rows)
    missing = {f"{row['strategy']} on {row['target']}": _num_unmodelled(row) for row in rows}
    if total := sum(missing.values()):
        most = max(missing, key=lambda label: missing[label])
        plural = "note" if total == 1 else "notes"
        notes.append(
            f"unmodelled: {total} {plural} on what is assumed or left out (most for {most}: "
            f"{missing[most]}); comparison.json has them"
        )
    return notes


def _num_unmodelled(row: Row) -> int:
    """Counts what is not modelled, without the nominal device, which has its own note."""
    return sum(not each.endswith(NOMINAL) for each in row.get("unmodelled") or [])


def comparison_report(rows: Sequence[Row]) -> tuple[RenderableType, ...]:
    """Returns the table and its notes, ready to print."""
    notes = [*failure_notes(rows), *comparison_notes(rows)]
    return comparison_table(rows), *map(escape, notes)


def row_report(row: Row) -> tuple[RenderableType, ...]:
    """Returns the table of one row; what is unmodelled in it stands with its ledger."""
    notes = [*failure_notes([row]), *reading_notes([row])]
    return comparison_table([row]), *map(escape, notes)
