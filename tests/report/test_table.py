import pytest

from spmdlab.report.console import print_tables, text_of
from spmdlab.report.table import comparison_notes, comparison_report, row_report


def test_text(golden, rows):
    golden("comparison_table.txt", text_of(*comparison_report(rows)))


def lines_of(rows, width=240):
    return text_of(*comparison_report(rows), width=width).splitlines()


def test_the_fastest_that_fits_is_best_once_per_target(rows):
    best = [line.split()[:2] for line in lines_of(rows) if " best " in line]
    assert best == [["fsdp[best]", "v5e:2x4"]]


def test_a_strategy_compared_with_none_is_not_the_best(rows):
    (line,) = [line for line in lines_of(rows) if line.split()[:2] == ["data", "cpu:8"]]
    assert line.split()[2] == "ok"


def test_a_step_that_was_compiled_and_does_not_fit_keeps_its_numbers_and_is_not_the_best(rows):
    rows[1] |= {"status": "does not fit", "error": "needs 4.00 GiB of 1.00 GiB"}
    lines = lines_of(rows)
    assert [line.split()[0] for line in lines if " best " in line] == ["data"]
    assert [line for line in lines if "fsdp[best]" in line and "12.3 ms" in line]
    assert "fsdp[best] on v5e:2x4: needs 4.00 GiB of 1.00 GiB" in lines


def test_strategies_that_fail_for_one_reason_share_a_line(rows):
    rows[3]["error"] = rows[2]["error"]
    notes = [line for line in lines_of(rows) if "does not divide" in line]
    assert notes == ["tensor, big on v5e:2x4: dim 'heads' of size 6 does not divide 4 ways"]


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
    """The nominal device has its own note, so is not among the two that are counted."""
    notes = "\n".join(comparison_notes(rows))
    assert "unmodelled: 2 notes on what is assumed or left out (most for data on v5e:2x4: 2)" in (
        notes
    )
    assert notes.count("nominal") == 1
    assert "nominal" not in "\n".join(comparison_notes(rows[:2]))
    only_nominal = "\n".join(comparison_notes(rows[4:]))
    assert "nominal" in only_nominal
    assert "unmodelled" not in only_nominal
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


@pytest.mark.parametrize("width", [40, 50, 60])
def test_a_very_narrow_terminal_cuts_no_number_short(rows, width):
    lines = lines_of(rows, width)
    assert [line for line in lines if "fsdp[best]" in line and "12.3 ms" in line]
    assert not [line for line in lines[:9] if "…" in line]
    assert "evidence, ideal .. no overlap, collective, compute, MFU" in " ".join(lines)


def test_a_long_strategy_goes_on_in_the_next_line(rows):
    rows[0]["strategy"] = "data=2 fsdp=2 tensor=2 remat=full accumulate=4"
    text = "\n".join(lines_of(rows, 80))
    assert "data=2 fsdp=2" in text
    assert "4.00 / 15.8 GiB" in text


def test_one_row_is_shown_without_what_its_ledger_says(rows):
    text = text_of(*row_report(rows[0]))
    assert "data      v5e:2x4  ok" in text
    assert "step: replay" in text
    assert "unmodelled" not in text


@pytest.mark.parametrize("width", [80, 100, 120, 140])
def test_a_narrow_terminal_loses_whole_columns_and_says_which(rows, width):
    for row in rows:
        row["error"] = row["error"] and "short"
    lines = lines_of(rows, width)
    table = lines[: next(n for n, line in enumerate(lines) if line.startswith("tensor, big on"))]
    assert max(map(len, table)) <= width
    assert not [line for line in table if "…" in line]
    assert [line for line in table if "12.3 ms" in line and "4.00 / 15.8 GiB" in line]
    left_out = [line for line in table if line.startswith("too wide for this terminal: ")]
    assert bool(left_out) == (width < 130)
    if width == 80:
        words = "evidence, ideal .. no overlap, collective, compute"
        assert left_out == [f"too wide for this terminal: {words}"]
