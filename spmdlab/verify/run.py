"""Verifies one strategy, in a process with as many emulated devices as it needs.

What runs is the step that `spmdlab.compile` compiles, compiled the same way; no variant of it
that returns gradients.  The gradient is read back from Adam's first moment, which the step moves
by ``(1 - b1)`` times the clipped gradient, and clipping is undone by the norm that the step
reports.  So what is compared is the gradient that was applied.

The strategy runs free, each step from the state it made itself.  The oracle takes every step
from the strategy's own state before it, bit for bit: gradients then need no allowance for how
earlier differences grow (Adam turns a tiny gradient of another sign into a whole step the
other way), and if no step leaves the path, neither do k of them.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from spmdlab.compile import RELAYS, Layout, jitted_step, lay_out
from spmdlab.config import Experiment
from spmdlab.lookup import pick
from spmdlab.strategies.product import Strategy, as_strategy
from spmdlab.targets import parse_target
from spmdlab.train.state import abstract_batch, abstract_state, init_state
from spmdlab.verify import hang
from spmdlab.verify.compare import Difference, Evidence, Expected, Found, Setting
from spmdlab.verify.diagnose import Verdict, judge_start, judge_step
from spmdlab.verify.oracle import Tree, flat, oracle_of, random_batch
from spmdlab.verify.tolerance import UNIT_ROUNDOFF, blind_spot, num_roundings, tolerance
from spmdlab.workload import Workload

MakeStep = Callable[[Workload, Strategy, Layout, int], Any]
"""Makes the jitted step, as `spmdlab.compile.jitted_step` does."""

_OTHER_COMPILERS = ("xla_tpu_", "xla_gpu_")
"""Options that the CPU's compiler refuses, and that do not change what is computed."""


def verify_strategy(
    experiment: Experiment,
    name: str,
    *,
    dtype: str = "float32",
    steps: int = 3,
    scratch: str | None = None,
    step_timeout_s: float | None = None,
    make: MakeStep = jitted_step,
) -> dict[str, Any]:
    """Compares steps of one strategy with one device's.

    Args:
        experiment: Checked already.
        name: A key of its strategies.
        dtype: Of weights and of all computation, whatever the experiment says.
        steps: How many, one after the other.  It ends early where one does not match.
        scratch: Folder to leave word in, see `spmdlab.verify.hang`.
        step_timeout_s: The process ends where a step takes longer; needs ``scratch``.
        make: Makes the step to be verified.

    Returns:
        A row of ``verification.json``.

    Raises:
        SpmdlabError: The strategy cannot be laid out or compiled.
    """
    start_s = time.monotonic()
    strategy = as_strategy(pick(experiment.strategies, name, "strategy"))
    model = dataclasses.replace(experiment.model, param_dtype=dtype, compute_dtype=dtype)
    workload = Workload(model=model, batch=experiment.batch, optimizer=experiment.optimizer)
    bench = _Bench(workload, strategy, experiment.seed, dtype, make, scratch)
    verdicts = bench.run(steps, step_timeout_s)
    findings = [
        {"step": step, **dataclasses.asdict(finding)}
        for step, verdict in enumerate(verdicts)
        for finding in verdict.findings
    ]
    return {
        "strategy": name,
        "target": f"cpu:{strategy.num_devices}",
        "mesh": dict(strategy.mesh_axes),
        "status": "mismatch" if findings else "ok",
        "error": None,
        "error_type": None,
        "dtype": dtype,
        "tolerance": bench.setting.tolerance,
        "num_roundings": num_roundings(workload, strategy.num_devices),
        "steps": [_summary(step, verdict) for step, verdict in enumerate(verdicts)],
        "findings": findings,
        "notes": bench.notes(verdicts),
        "seconds": time.monotonic() - start_s,
    }


class _Bench:
    """A strategy's compiled step next to an oracle."""

    def __init__(
        self,
        workload: Workload,
        strategy: Strategy,
        seed: int,
        dtype: str,
        make: MakeStep,
        scratch: str | None = None,
    ) -> None:
        self._workload = workload
        self._strategy = strategy
        self._seed = seed
        self._dtype = dtype
        self._make = make
        self._scratch = pathlib.Path(scratch) if scratch else None
        self._num_devices = strategy.num_devices
        self._target = parse_target(f"cpu:{self._num_devices}")
        self._layout = lay_out(workload, strategy, self._target)
        self._oracle = oracle_of(workload, strategy, seed)
        self.setting = Setting(
            mesh_axes=strategy.mesh_axes,
            tolerance=tolerance(num_roundings(workload, self._num_devices), dtype),
            unit_roundoff=UNIT_ROUNDOFF[dtype],
            accumulate=strategy.accumulate,
        )

    def run(self, steps: int, step_timeout_s: float | None = None) -> list[Verdict]:
        """Returns the verdict on the initial state and on each step, up to the first mismatch."""
        self._note("creating the initial state")
        shardings = self._layout.shardings(abstract_state(self._workload))
        state = init_state(self._workload, jax.random.key(self._seed), shardings)
        before = jax.device_get(state)
        start = judge_start(flat(before), flat(self._oracle.start()), self.setting)
        verdicts = [start]
        program = None
        while len(verdicts) <= steps and not verdicts[-1].findings:
            number = len(verdicts)
            batch = self._batch(number)
            placed = self._placed(batch)
            program = program or self._compile(state, placed)
            self._note(f"running step {number} of {steps}", program)
            with hang.limit(self._scratch, step_timeout_s):
                state, metrics = program(state, placed)
                jax.block_until_ready((state, metrics))
            self._note(f"comparing step {number}")
            verdict, before = self._judge(before, state, metrics, batch)
            verdicts.append(verdict)
        return verdicts

    def notes(self, verdicts: list[Verdict]) -> list[str]:
        """What must be known with the result, a line each."""
        found = []
        parts = max(self._num_devices, self._strategy.accumulate)
        if blind := blind_spot(self.setting.tolerance, parts):
            found.append(blind)
        gradients = [each for v in verdicts for each in v.differences.get("gradient", ())]
        if zeros := sorted({each.path for each in gradients if not each.proves}):
            found.append(f"gradients that are 0 on one device prove nothing: {', '.join(zeros)}")
        dropped = [option for option, _ in self._strategy.compiler_options if not _ours(option)]
        if dropped:
            found.append(f"the CPU's compiler does not know {', '.join(dropped)}")
        return found

    def _batch(self, step: int) -> dict[str, Any]:
        rows = self._workload.global_batch(self._num_devices)
        return random_batch(self._workload, rows, seed=self._seed, step=step)

    def _placed(self, batch: Mapping[str, Any]) -> Any:
        abstract = abstract_batch(self._workload, self._num_devices)
        return jax.device_put(dict(batch), self._layout.shardings(abstract, "batch"))

    def _compile(self, state: Tree, batch: Any) -> Any:
        self._note("compiling")
        step = self._make(self._workload, self._strategy, self._layout, self._seed)
        options = {name: value for name, value in self._strategy.compiler_options if _ours(name)}
        return step.lower(state, batch).compile(compiler_options=options or None)

    def _judge(
        self, before: Tree, state: Tree, metrics: Any, batch: Mapping[str, Any]
    ) -> tuple[Verdict, Tree]:
        after = jax.device_get(state)
        copies = {path: found for path, leaf in flat(state).items() if (found := _copies(leaf))}
        norm = float(metrics["grad_norm"])
        norms = _copies(metrics["grad_norm"])
        grads = self._gradients(before, after, norm)
        moments = f"optimizer.adam.{_MOMENT}."
        for path in grads:
            if moved := copies.get(moments + path):
                old = flat(before)[moments + path]
                own = norms if len(norms) == len(moved) else [norm] * len(moved)
                pairs = zip(moved, own, strict=True)
                copies[path] = [self._gradient(old, new, float(each)) for new, each in pairs]
        loss, expected_grads = self._oracle.loss_and_grads(before, batch)
        found = Found(
            loss=float(metrics["loss"]),
            grads=grads,
            grad_norm=norm,
            state=flat(after),
            copies=copies,
        )
        expected = Expected(
            loss=loss,
            grads=expected_grads,
            before=flat(before),
            state=flat(self._oracle.updated(before, grads)),
        )
        setting = dataclasses.replace(self.setting, tokens_per_row=batch["weights"].sum(1))
        evidence = Evidence(
            row_grads=_once(lambda: self._oracle.row_grads(before, batch)),
            agrees_without_dropout=(
                _once(self._agrees_without_dropout) if self._workload.model.dropout else None
            ),
        )
        return judge_step(found, expected, setting, evidence), after

    def _gradients(self, before: Tree, after: Tree, norm: float) -> dict[str, np.ndarray]:
        old, new = (flat(getattr(s["optimizer"]["adam"], _MOMENT)) for s in (before, after))
        return {path: self._gradient(old[path], new[path], norm) for path in new}

    def _gradient(self, old: np.ndarray, new: np.ndarray, norm: float) -> np.ndarray:
        """From Adam's first moment before and after, and the gradients' norm before clipping."""
        optimizer = self._workload.optimizer
        clipped = (np.asarray(new, np.float64) - optimizer.b1 * old) / (1 - optimizer.b1)
        return (clipped * max(1.0, norm / optimizer.clip_norm)).astype(new.dtype)

    def _agrees_without_dropout(self) -> bool:
        model = dataclasses.replace(self._workload.model, dropout=0.0)
        workload = dataclasses.replace(self._workload, model=model)
        bench = _Bench(workload, self._strategy, self._seed, self._dtype, self._make)
        return not bench.run(1)[-1].findings

    def _note(self, doing: str, program: Any = None) -> None:
        if self._scratch is None:
            return
        axes, found = self._strategy.mesh_axes, []
        if program is not None:
            found = hang.collectives_of(program.as_text(), axes, RELAYS)
        hang.note(self._scratch, doing, found)


_MOMENT = "mu"


def _copies(array: jax.Array) -> list[np.ndarray]:
    """Returns the whole copies that devices hold of an array; none if all are the same bits."""
    held: dict[Any, list[np.ndarray]] = {}
    for shard in array.addressable_shards:
        where = tuple((part.start, part.stop) for part in shard.index)
        held.setdefault(where, []).append(np.asarray(shard.data))
    if all(each.tobytes() == parts[0].tobytes() for parts in held.values() for each in parts):
        return []
    copies = []
    for number in range(min(map(len, held.values()))):
        copy = np.empty(array.shape, array.dtype)
        for where, parts in held.items():
            copy[tuple(slice(*ends) for ends in where)] = parts[number]
        copies.append(copy)
    return copies


def _summary(step: int, verdict: Verdict) -> dict[str, Any]:
    """Returns, for each kind of thing compared, the worst of its kind."""
    worst = {}
    for what, differences in verdict.differences.items():
        if differences:
            far = max(differences, key=_badness)
            worst[what] = {
                "path": far.path,
                "error": far.error,
                "tolerance": far.tolerance,
                "count": len(differences),
            }
    gradients = {each.path: each.error for each in verdict.differences.get("gradient", ())}
    return {"step": step, "worst": worst, "gradient_errors": gradients}


def _badness(each: Difference) -> float:
    return float("inf") if np.isnan(each.error) else each.error / max(each.tolerance, 1e-300)


def _ours(option: str) -> bool:
    return not option.startswith(_OTHER_COMPILERS)


def _once(function: Callable[[], Any]) -> Callable[[], Any]:
    answers: list[Any] = []

    def answer() -> Any:
        if not answers:
            answers.append(function())
        return answers[0]

    return answer
