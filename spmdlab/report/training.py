"""What a training run says: line by line on stderr while it runs, and in short at its end."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from spmdlab.report.console import Column, FittingTable
from spmdlab.units import UNKNOWN, text_of_seconds

Watcher = Callable[[dict[str, Any]], None]
"""Is given each line of ``metrics.jsonl`` as it is written, and ``{"note": TEXT}``."""


@contextlib.contextmanager
def on_stderr(steps: int) -> Iterator[Watcher]:
    """Shows a bar on a terminal, and else a line for each thing that is told."""
    console = Console(stderr=True, highlight=False)

    def print_line(said: dict[str, Any]) -> None:
        console.print(line(said, steps), markup=False, soft_wrap=True)

    if not console.is_terminal:
        yield print_line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[note]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("training", total=steps, note="")

        def show(said: dict[str, Any]) -> None:
            if "loss" in said:
                progress.update(task, completed=said["step"], note=line(said, steps))
            else:
                print_line(said)

        yield show


def line(said: dict[str, Any], steps: int) -> str:
    """Returns one line for what a run tells.

    >>> line({"step": 20, "valid_loss": 2.5, "tokens": 8.0, "seconds": 3.0}, 100)
    'step 20/100  valid loss 2.5000'
    """
    if "note" in said:
        return said["note"]
    at = f"step {said['step']}/{steps}"
    if "valid_loss" in said:
        return f"{at}  valid loss {said['valid_loss']:.4f}"
    parts = [at, f"loss {said['loss']:.4f}", f"grad norm {said['grad_norm']:.3g}"]
    if said["step_s"] is not None:
        times = "/".join(text_of_seconds(said[f"step_s{end}"]) for end in ("", "_p90", "_p99"))
        parts += [f"{said['tokens_per_s']:,.0f} tokens/s", f"step p50/p90/p99 {times}"]
    parts.append(f"input wait {text_of_seconds(said['input_wait_s'])}")
    if "mfu" in said:
        parts.append(f"MFU {said['mfu']:.1%}")
    return f"{'  '.join(parts)}  ({said['evidence']})"


_COLUMNS = (
    Column(name="strategy"),
    Column(name="target"),
    Column(name="status"),
    Column(name="steps", justify="right"),
    Column(name="loss", justify="right", rank=2),
    Column(name="valid loss", justify="right"),
    Column(name="best", justify="right", rank=1),
    Column(name="tokens", justify="right", rank=3),
    Column(name="time", justify="right"),
    Column(name="chip-seconds", justify="right", rank=4),
    Column(name="evidence"),
)
_STYLES = {"finished": "green", "reached_target": "green", "diverged": "bold red"}


def training_report(result: dict[str, Any]) -> tuple[RenderableType, ...]:
    """Returns a table of one row, and a line for what must be known with it."""
    checkpoint = result["last_checkpoint"]
    saved = f"the last good checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint"
    if "steps" not in result:
        return (f"interrupted before the first step; {saved}",)
    table = FittingTable(_COLUMNS)
    cells = [
        result["strategy"],
        result["target"],
        result["status"].replace("_", " "),
        str(result["steps"]),
        _loss(result["loss"]),
        *(_loss((result[name] or {}).get("valid_loss")) for name in ("final", "best")),
        f"{result['tokens']:,.0f}",
        text_of_seconds(result["seconds"]),
        f"{result['chip_seconds']:,.0f}",
        result["evidence"],
    ]
    table.add_row(cells, style=_STYLES.get(result["status"], ""))
    notes = [f"{result['error']}; {saved}" if result["error"] else saved]
    if (reached := result["time_to_accuracy"]) is not None:
        notes.append(
            f"valid loss {reached['valid_loss']:g} reached after {reached['steps']} steps, "
            f"{reached['tokens']:,.0f} tokens, {text_of_seconds(reached['seconds'])}, "
            f"{reached['chip_seconds']:,.0f} chip-seconds ({reached['evidence']})"
        )
    if result["evidence"] == "emulated":
        notes.append("emulated: devices share this machine's cores; times say nothing of a chip's")
    return table, *notes


def _loss(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4f}"
