"""What a run tells of itself: JSON lines, TensorBoard where it is installed, and its caller."""

import dataclasses
import importlib
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from spmdlab.run.directory import METRICS, ORDER, Journal

Tell = Callable[[dict[str, Any]], None]
"""Is given each line of the metrics as it is written, and ``{"note": TEXT}``."""

TENSORBOARD = "tensorboard"


@dataclasses.dataclass(kw_only=True)
class Timings:
    """Seconds of the steps since the last logged one."""

    step_s: list[float] = dataclasses.field(default_factory=list)
    """From the end of the step before to the end of this one; none for the first step after a
    pause (evaluation, checkpoint)."""

    input_wait_s: list[float] = dataclasses.field(default_factory=list)
    """How long each step waited for its batch."""

    def summary(self, tokens_per_step: float) -> dict[str, float | None]:
        """Returns percentiles of the step's time, its tokens per second, and the mean wait.

        >>> timings = Timings(step_s=[1.0, 2.0, 3.0], input_wait_s=[0.5, 0.0, 0.1])
        >>> timings.summary(100.0)["step_s"], timings.summary(100.0)["tokens_per_s"]
        (2.0, 50.0)
        """
        found: dict[str, float | None] = {
            "step_s": None,
            "step_s_p90": None,
            "step_s_p99": None,
            "tokens_per_s": None,
            "input_wait_s": float(np.mean(self.input_wait_s)) if self.input_wait_s else None,
        }
        if self.step_s:
            p50, p90, p99 = np.percentile(self.step_s, (50, 90, 99))
            found |= {"step_s": float(p50), "step_s_p90": float(p90), "step_s_p99": float(p99)}
            found["tokens_per_s"] = tokens_per_step / float(np.mean(self.step_s))
        return found


class Recorder:
    """Writes a run's metrics and the order of its examples, in the first process only."""

    def __init__(self, folder: pathlib.Path, *, writes: bool, tell: Tell) -> None:
        self._tell = tell
        self._writes = writes
        self._folder = folder
        self._metrics, self._order = Journal(folder / METRICS), Journal(folder / ORDER)
        self._board: Any = None

    def begin(self, first_step: int) -> None:
        """Goes on after this many steps; what was written of later ones is dropped."""
        if not self._writes:
            return
        self._metrics.trim(lambda record: record["step"] <= first_step)
        self._order.trim(lambda record: record["step"] < first_step)
        try:
            board = importlib.import_module("tensorboardX")
        except ImportError:
            self.note("no TensorBoard files: pip install 'spmdlab[tensorboard]' to have them")
        else:
            logdir = str(self._folder / TENSORBOARD)
            self._board = board.SummaryWriter(logdir, purge_step=first_step + 1)

    def order(self, position: int, ids: list[str]) -> None:
        """Notes the examples at one position of the data."""
        if self._writes:
            self._order.append({"step": position, "ids": ids})

    def step(self, record: Mapping[str, Any], kind: Literal["train", "valid"] = "train") -> None:
        """Notes what is known of one step."""
        if not self._writes:
            return
        self._metrics.append(record)
        self._tell(dict(record))
        if self._board is not None:
            for name, value in record.items():
                if name != "step" and isinstance(value, int | float):
                    self._board.add_scalar(f"{kind}/{name}", value, record["step"])

    def note(self, text: str) -> None:
        """Tells the caller something in one line."""
        if self._writes:
            self._tell({"note": text})

    def close(self) -> None:
        """Ends all files."""
        self._metrics.close()
        self._order.close()
        if self._board is not None:
            self._board.close()
