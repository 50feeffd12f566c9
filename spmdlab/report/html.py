"""One self-contained page: the table of `compare`, a bar per row, its collectives."""

from collections.abc import Sequence
from importlib import resources
from typing import Any

import jinja2

from spmdlab.report.collectives import short_source
from spmdlab.report.rows import Row, best_rows, by_target, step_s
from spmdlab.report.table import comparison_notes
from spmdlab.units import (
    text_of_bytes,
    text_of_count,
    text_of_pair,
    text_of_seconds,
    text_of_share,
)

LONGEST = 25
"""Collectives shown per row; comparison.json has them all."""


def comparison_page(comparison: dict[str, Any]) -> str:
    """Returns the HTML of what `comparison.json` holds; it needs no other file and no network."""
    rows: Sequence[Row] = comparison["rows"]
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "bytes": text_of_bytes,
        "count": text_of_count,
        "pair": text_of_pair,
        "seconds": text_of_seconds,
        "share": text_of_share,
        "short_source": short_source,
    }
    source = resources.files("spmdlab.report").joinpath("comparison.html.jinja").read_text("utf-8")
    best = best_rows(rows)
    groups = [
        {
            "target": target,
            "rows": [_view(row, group, best.get(target) == row["strategy"]) for row in group],
        }
        for target, group in by_target(rows).items()
    ]
    return environment.from_string(source).render(
        comparison=comparison, groups=groups, notes=comparison_notes(rows)
    )


def _view(row: Row, group: Sequence[Row], is_best: bool) -> dict[str, Any]:
    """Returns a row with what the page shows beside it; widths are percent of the longest step."""
    longest_s = max((step_s(each) or 0.0 for each in group), default=0.0)
    step = step_s(row)
    bars: dict[str, float] = {}
    if step and longest_s:
        exposed_s = min(row.get("exposed_collective_s") or 0.0, step)
        bars = {
            "compute": 100 * (step - exposed_s) / longest_s,
            "exposed": 100 * exposed_s / longest_s,
        }
    ranked = sorted(row.get("collectives") or [], key=lambda each: -(each.get("seconds") or 0.0))
    return {
        "row": row,
        "status": "best" if is_best else row["status"],
        "step": row.get("step_s") or {},
        "memory": row.get("memory") or {},
        "bars": bars,
        "collectives": ranked[:LONGEST],
        "num_collectives": len(ranked),
    }
