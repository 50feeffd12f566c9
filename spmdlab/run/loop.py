"""The loop: step after step, the host one step ahead of the devices.

While a step runs, the host dispatches the next and then waits for the one before it, so that no
device waits for the host and each step's end is known.  Values are fetched where something is
done with them: at a logged step (while the next one runs), and before an evaluation, a checkpoint
or the end.  The guard sees every step's values, so no checkpoint holds a state it has not passed.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, Literal

import jax

from spmdlab.run import processes
from spmdlab.run.batches import Ahead, PlacedBatch
from spmdlab.run.guard import Guard
from spmdlab.run.metrics import Recorder, Timings
from spmdlab.run.stop import StopSignals
from spmdlab.train.state import State
from spmdlab.training import TrainingConfig

Status = Literal["finished", "reached_target", "interrupted", "diverged"]


@dataclasses.dataclass(kw_only=True)
class Standing:
    """How far a run is.  Every checkpoint holds it."""

    step: int = 0
    """Steps done; also the position in the data of the next step."""

    tokens: float = 0.0
    """Trained on, by their weights."""

    seconds: float = 0.0
    """Wall time from the first step on, with evaluations, saves and waiting, without compiling
    and without what was lost between a checkpoint and a death."""

    loss: float | None = None
    """Of the last step looked at."""

    valid: dict[str, float] | None = None
    """``step`` and ``valid_loss`` of the last evaluation."""

    best: dict[str, float] | None = None
    """The same of the one with the lowest loss."""

    lowest_loss: float = math.inf
    """Of all steps; see `spmdlab.run.guard`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """What turns a step's time into MFU."""

    evidence: Literal["emulated", "measured"]
    global_model_flops: float
    """Of one step."""
    global_peak_flops_per_s: float | None
    """None where the chip is unknown or emulated."""

    def mfu(self, step_s: float | None) -> float | None:
        """Returns model FLOPs over what the devices could do in this time."""
        if step_s is None or self.global_peak_flops_per_s is None:
            return None
        return self.global_model_flops / (step_s * self.global_peak_flops_per_s)


class Diverged(Exception):
    """Ends the loop; its message says with which step, and why."""


class Loop:
    """One session of a run: from where it stands to its end, or until it is asked to stop."""

    def __init__(
        self,
        config: TrainingConfig,
        standing: Standing,
        *,
        step: Callable[[State, dict[str, jax.Array]], tuple[State, dict[str, jax.Array]]],
        evaluate: Callable[[Any], float],
        batches: Ahead[PlacedBatch],
        save: Callable[[Standing, State], None],
        recorder: Recorder,
        stop: StopSignals,
        rate: Rate,
    ) -> None:
        """Args: as their types say, and.

        step: Compiled; donates the state.
        evaluate: Parameters -> loss on the valid split.
        save: Begins to save a state.
        """
        self.standing = standing
        self._config = config
        self._step = step
        self._evaluate = evaluate
        self._batches = batches
        self._save = save
        self._recorder = recorder
        self._stop = stop
        self._rate = rate
        self._guard = Guard(best=standing.lowest_loss)
        self._pending: list[tuple[int, dict[str, jax.Array]]] = []
        self._timings = Timings()
        self._logged_step, self._logged_tokens = standing.step, standing.tokens
        self._saved_step = standing.step
        self._last_end: float | None = None
        self._clock = time.perf_counter()

    def run(self, state: State) -> Status:
        """Trains, and returns when the last save has begun.

        Raises:
            Diverged: The run is to be given up.
            RunError: A checkpoint cannot be written.
        """
        self._clock = time.perf_counter()
        try:
            return self._run(state)
        finally:
            self._pass_time()

    def _run(self, state: State) -> Status:
        at, config = self.standing, self._config
        while at.step < config.steps and not self._reached_target():
            if self._asked_to_stop():
                self._look_at_all()
                self._save_now(state)
                return "interrupted"
            state = self._one_step(state)
            last = at.step == config.steps
            evaluates = last or at.step % config.evaluate_every == 0
            saves = last or at.step % config.checkpoint_every == 0
            if evaluates or saves:
                self._look_at_all()
            if evaluates:
                self._evaluate_now(state)
            if saves or self._reached_target():
                self._save_now(state)
            if evaluates or saves:
                self._last_end = None
        return "reached_target" if self._reached_target() else "finished"

    def _one_step(self, state: State) -> State:
        began = time.perf_counter()
        batch = next(self._batches)
        self._timings.input_wait_s.append(time.perf_counter() - began)
        self._recorder.order(batch.position, batch.ids)
        state, metrics = self._step(state, batch.arrays)
        self.standing.step += 1
        self._pending.append((self.standing.step, metrics))
        if len(self._pending) > 1:
            self._await(self._pending[-2][1])
            if self._is_logged(self.standing.step - 1):
                self._look_at(len(self._pending) - 1)
        return state

    def _await(self, metrics: dict[str, jax.Array]) -> None:
        jax.block_until_ready(metrics)
        now = time.perf_counter()
        if self._last_end is not None:
            self._timings.step_s.append(now - self._last_end)
        self._last_end = now

    def _look_at_all(self) -> None:
        if self._pending:
            self._await(self._pending[-1][1])
            self._look_at(len(self._pending))

    def _look_at(self, count: int) -> None:
        """Fetches the values of the oldest steps that nobody has looked at, and logs."""
        done, self._pending = self._pending[:count], self._pending[count:]
        values = jax.device_get([metrics for _, metrics in done])
        for (step, _), value in zip(done, values, strict=True):
            found = {name: float(each) for name, each in value.items()}
            self.standing.tokens += found.pop("tokens")
            self.standing.loss = found["loss"]
            problem = self._guard.problem(found["loss"], found["grad_norm"])
            self.standing.lowest_loss = self._guard.best
            if problem or self._is_logged(step):
                self._log(step, found)
            if problem:
                raise Diverged(f"step {step}: {problem}")

    def _is_logged(self, step: int) -> bool:
        return step % self._config.log_every == 0 or step == self._config.steps

    def _log(self, step: int, values: dict[str, float]) -> None:
        at = self.standing
        steps, tokens = step - self._logged_step, at.tokens - self._logged_tokens
        self._logged_step, self._logged_tokens = step, at.tokens
        record = {"step": step, **values, "tokens": at.tokens}
        record |= self._timings.summary(tokens / steps)
        if (mfu := self._rate.mfu(record["step_s"])) is not None:
            record["mfu"] = mfu
        self._timings = Timings()
        self._recorder.step(record | {"evidence": self._rate.evidence})

    def _evaluate_now(self, state: State) -> None:
        at = self.standing
        loss = self._evaluate(state["params"])
        self._pass_time()
        found = {"step": at.step, "valid_loss": loss}
        spent = {"tokens": at.tokens, "seconds": at.seconds, "evidence": self._rate.evidence}
        self._recorder.step(found | spent, "valid")
        if not math.isfinite(loss):
            raise Diverged(f"step {at.step}: valid_loss is {loss}")
        at.valid = found
        if at.best is None or loss < at.best["valid_loss"]:
            at.best = found

    def _save_now(self, state: State) -> None:
        if self.standing.step != self._saved_step:
            self._pass_time()
            self._save(self.standing, state)
            self._saved_step = self.standing.step

    def _reached_target(self) -> bool:
        target, valid = self._config.target, self.standing.valid
        return target is not None and valid is not None and valid["valid_loss"] <= target

    def _asked_to_stop(self) -> bool:
        # Processes agree on it, which costs an exchange, so they do it now and then.
        if jax.process_count() > 1 and self.standing.step % self._config.log_every:
            return False
        return processes.of_any(self._stop.number or 0) != 0

    def _pass_time(self) -> None:
        now = time.perf_counter()
        self.standing.seconds += now - self._clock
        self._clock = now
