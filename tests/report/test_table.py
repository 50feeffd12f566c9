import pytest

from spmdlab.report.console import print_tables, text_of
from spmdlab.report.table import comparison_notes, comparison_report


def test_text(golden, rows):
    golden("comparison_table.txt", text_of(*comparison_report(rows)))


def lines_of(rows, width=240):
    return text_of(*comparison_report(rows), width=width).splitlines()


def test_the_fastest_that_fits_is_best_once_per_target(rows):
    best = [line.split()[:2] for line in lines_of(rows) if " best " in line]
    assert best == [["fsdp[best]", "v5e:2x4"], ["data", "cpu:8"]]


def test_every_row_is_there_and_each_failure_has_its_line(rows):
    lines = lines_of(rows)
    for row in rows:
        assert sum(line.split()[:2] == [row["strategy"], row["target"]] for line in lines) == 1
    assert "tensor on v5e:2x4: dim 'heads' of size 6 does not divide 4 ways" in lines
    assert "big on v5e:2x4: needs 20.0 GiB of 15.8 GiB" in lines


def test_nothing_is_best_where_nothing_can_be_had(rows):
    assert not [line for line in lines_of(rows[2:4]) if " best " in line]
    assert not [note for note in comparison_notes(rows[2:4]) if note.startswith("step:")]


def test_notes_count_what_is_not_modelled_and_call_cpu_nominal(rows):
    notes = "\n".join(comparison_notes(rows))
    assert "unmodelled: 2 things are not in these numbers (most in data on v5e:2x4: 2)" in notes
    assert "nominal" in notes
    assert "nominal" not in "\n".join(comparison_notes(rows[:2]))
    assert "unmodelled" not in "\n".join(comparison_notes(rows[1:2]))


def test_a_file_gets_no_colour_no_padding_and_no_wrapped_rows(rows, capsys):
    rows[2]["error"] = "because " * 60
    print_tables(*comparison_report(rows))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert not [line for line in out.splitlines() if line != line.rstrip()]
    assert out.count("because") == 60
    assert sum("because" in line for line in out.splitlines()) == 1


@pytest.mark.parametrize("missing", ["step_s", "memory", "evidence", "mfu"])
def test_a_value_that_is_unknown_reads_as_a_dash(rows, missing):
    rows[0][missing] = None
    (line,) = [
        each for each in lines_of(rows) if each.startswith(("data  ", " data  ")) and "v5e" in each
    ]
    assert " - " in f"{line} "


@pytest.mark.parametrize("width", [80, 100, 120, 140])
def test_a_narrow_terminal_loses_whole_columns_and_says_which(rows, width):
    for row in rows:
        row["error"] = row["error"] and "short"
    lines = lines_of(rows, width)
    table = lines[: next(n for n, line in enumerate(lines) if line.startswith("big on"))]
    assert max(map(len, table)) <= width
    assert not [line for line in table if "…" in line]
    assert [line for line in table if "12.3 ms" in line and "4.00 / 15.8 GiB" in line]
    left_out = [line for line in table if line.startswith("too wide for this terminal: ")]
    assert bool(left_out) == (width < 130)
    if width == 80:
        words = "evidence, ideal .. no overlap, collective, compute"
        assert left_out == [f"too wide for this terminal: {words}"]
