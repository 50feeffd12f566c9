"""Where tables are printed: in full in a file, and on a terminal as far as it is wide."""

import dataclasses
import io
import sys
from collections.abc import Iterator, Sequence
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.table import Table

WIDTH_IN_A_FILE = 400
"""Columns given to a table whose reader is no terminal; unused ones are not printed."""

_NARROWEST_FOLDED = 18
"""Columns below which a folded column is not worth printing."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column; its header may have two lines."""

    name: str
    justify: Literal["left", "right"] = "left"
    folds: bool = False
    """Whether long cells go on in the next line; all others are printed whole or not at all."""
    rank: int = 0
    """On a narrow terminal the column of the highest rank goes first; 0 always stays."""


class FittingTable:
    """A table that leaves out whole columns rather than cutting numbers short."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns
        self._rows: list[tuple[list[str], str]] = []
        self._ends: set[int] = set()

    def add_row(self, cells: Sequence[str], *, style: str = "") -> None:
        """Adds a row of plain text, one cell per column."""
        self._rows.append((list(cells), style))

    def end_section(self) -> None:
        """Leaves a blank line after the last row."""
        self._ends.add(len(self._rows) - 1)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        shown = list(range(len(self._columns)))
        left_out = []
        while self._width(shown) > options.max_width:
            lowest = max(shown, key=lambda n: self._columns[n].rank)
            if self._columns[lowest].rank == 0:
                break
            shown.remove(lowest)
            left_out.append(" ".join(self._columns[lowest].name.split()))
        yield self._table(shown)
        if left_out:
            yield f"[dim]too wide for this terminal: {', '.join(left_out)}[/dim]"

    def _width(self, shown: Sequence[int]) -> int:
        total = 2 * len(shown)  # Edges, and two blanks between columns.
        for n in shown:
            column = self._columns[n]
            cells = [*column.name.split("\n"), *(cells[n] for cells, _ in self._rows)]
            widest = max(map(cell_len, cells))
            total += min(widest, _NARROWEST_FOLDED) if column.folds else widest
        return total

    def _table(self, shown: Sequence[int]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for n in shown:
            column = self._columns[n]
            table.add_column(
                column.name, justify=column.justify, no_wrap=not column.folds, overflow="fold"
            )
        for index, (cells, style) in enumerate(self._rows):
            ends = index in self._ends and index + 1 < len(self._rows)
            table.add_row(*(escape(cells[n]) for n in shown), style=style, end_section=ends)
        return table


def print_tables(*tables: RenderableType) -> None:
    """Prints to stdout, in colour where that is a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        sys.stdout.write(text_of(*tables))
        return
    for table in tables:
        console.print(table)


def text_of(*tables: RenderableType, width: int = WIDTH_IN_A_FILE) -> str:
    """Returns what `print_tables` prints to a file; tables are ``width`` columns wide at most."""
    console = Console(file=io.StringIO(), highlight=False, width=width, color_system=None)
    for table in tables:
        console.print(table, soft_wrap=isinstance(table, str))
    lines = console.file.getvalue().splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)
