import io

from rich.console import Console
from rich.progress import Progress

from spmdlab.report import progress


def lines(*jobs: tuple[str, str]) -> str:
    console = Console(file=io.StringIO(), width=40)
    watcher = progress.Lines(console, len(jobs))
    for label, outcome in jobs:
        watcher.finished(label, "a note [that] is long enough to be wrapped", outcome=outcome)
    return console.file.getvalue()


def test_a_line_per_job():
    text = lines(("a", "done"), ("b", "failed"))
    assert [line.split()[0] for line in text.splitlines()] == ["[1/2]", "[2/2]"]
    assert "a note [that] is long enough" in text


def test_refusals_alone_leave_stderr_to_the_one_line_that_sums_them_up():
    assert lines(("a", "refused"), ("b", "refused")) == ""


def test_refusals_are_told_once_anything_else_happened():
    text = lines(("a", "refused"), ("b", "done"), ("c", "refused"))
    assert [line.split()[0] for line in text.splitlines()] == ["[1/3]", "[2/3]", "[3/3]"]


def test_live_display_forgets_what_has_finished():
    console = Console(file=io.StringIO(), force_terminal=True, width=100, highlight=False)
    shown = Progress(console=console)
    watcher = progress.Live(shown, 2, "compiling")
    watcher.started("fsdp on v5e:2x4")
    assert [task.description for task in shown.tasks] == ["compiling", "  fsdp on v5e:2x4"]
    watcher.finished("fsdp on v5e:2x4", "step 1 ms", outcome="done")
    assert [(task.description, task.completed) for task in shown.tasks] == [("compiling", 1)]
    assert "fsdp on v5e:2x4: step 1 ms" in console.file.getvalue()
