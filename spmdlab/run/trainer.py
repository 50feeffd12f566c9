"""Trains a workload under a strategy, from the config to the files of the run's directory."""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import jax

from spmdlab import __version__, pool
from spmdlab.compile import Layout, compile_lowered, jitted_step, lay_out, placed
from spmdlab.config import Experiment
from spmdlab.data.dataset import Dataset, open_dataset
from spmdlab.data.loader import loader
from spmdlab.errors import TargetError
from spmdlab.lookup import pick
from spmdlab.report import files
from spmdlab.run import directory, manifest, processes
from spmdlab.run.batches import Ahead, PlacedBatch, placed_batches, rows_held
from spmdlab.run.checkpoint import Checkpoints
from spmdlab.run.evaluation import evaluation_batches, jitted_evaluation, valid_loss
from spmdlab.run.loop import Diverged, Loop, Rate, Standing, Status
from spmdlab.run.metrics import Recorder, Tell
from spmdlab.run.stop import StopSignals
from spmdlab.strategies.product import Strategy, as_strategy
from spmdlab.targets import Target, parse_target
from spmdlab.train.state import State, abstract_batch, abstract_state, init_state
from spmdlab.workload import Workload


def train(
    experiment: Experiment,
    strategy: str,
    target: str,
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    tell: Tell = pool.tell,
) -> dict[str, Any]:
    """Trains until the steps are done, the target is reached, or a signal asks to stop.

    Called in every process of a job, with the same arguments; the first one writes.

    Args:
        experiment: Checked already.
        strategy: A key of its strategies.
        target: ``cpu:8`` or ``local``; its devices must be here.
        out: The run's directory, see `spmdlab.run.directory`.
        resume: Whether to go on with the run that is there, from its newest good checkpoint.
        tell: Is given what happens, as it happens.

    Returns:
        What ``result.json`` holds, and ``signal``, the one that interrupted it, if any.

    Raises:
        ConfigError: There is a run already, or none to resume, or it is of another workload.
        SpmdlabError: The strategy cannot be laid out or compiled for the target.
        RunError: A checkpoint cannot be written or restored.
    """
    with StopSignals() as stop:
        folder = pathlib.Path(out)
        before = directory.read_run(folder) if resume else None
        if before is None:
            directory.check_new(folder)
        bench = _Bench(experiment, strategy, target)
        if before is not None:
            directory.check_same(before["fixed"], bench.fixed)
        bench.compile(tell)
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            if processes.is_first():
                stack.enter_context(directory.locked(folder))
                if before is None:
                    directory.check_new(folder)  # Somebody else may have been faster.
            checkpoints = Checkpoints(
                folder.absolute() / directory.CHECKPOINTS,
                keep=experiment.training.keep_checkpoints,
            )
            stack.callback(checkpoints.close)
            recorder = Recorder(folder, writes=processes.is_first(), tell=tell)
            stack.callback(recorder.close)
            return _Session(bench, folder, before, checkpoints, recorder, stop).run()


class _Bench:
    """A workload laid out on its devices, and its data."""

    def __init__(self, experiment: Experiment, strategy: str, target: str) -> None:
        self.experiment = experiment
        self.name = strategy
        self.strategy: Strategy = as_strategy(pick(experiment.strategies, strategy, "strategy"))
        self.target: Target = parse_target(target, experiment.chips)
        if self.target.platform not in ("cpu", "local"):
            raise TargetError(
                f"Target {target!r} is a description; training needs devices that are here: "
                f"'cpu:{self.strategy.num_devices}', or 'local'."
            )
        self.workload = Workload(
            model=experiment.model, batch=experiment.batch, optimizer=experiment.optimizer
        )
        self.layout: Layout = lay_out(self.workload, self.strategy, self.target)
        self.global_batch = self.workload.global_batch(self.strategy.num_devices)
        self.batch = abstract_batch(self.workload, self.strategy.num_devices)
        self.shardings = self.layout.shardings(self.batch, "batch")
        self.held = rows_held(self.shardings, self.batch["tokens"].shape)
        self.train_data, self.valid_data = (self._open(split) for split in ("train", "valid"))

    def _open(self, split: Any) -> Dataset:
        seq_len, vocab_size = self.workload.batch.seq_len, self.workload.model.vocab_size
        return open_dataset(
            self.experiment.data, seq_len=seq_len, split=split, vocab_size=vocab_size
        )

    @property
    def data_seed(self) -> int:
        """Of the order of the examples."""
        return self.experiment.data_seed

    @property
    def fixed(self) -> dict[str, Any]:
        """What must be the same when the run resumes."""
        return {
            **directory.fixed(self.experiment.to_json()),
            "global_batch": self.global_batch,
            "dataset": {
                "train": self.train_data.lineage[-1].output,
                "valid": self.valid_data.lineage[-1].output,
            },
            "rng": {
                "implementation": jax.config.jax_default_prng_impl,
                "partitionable": jax.config.jax_threefry_partitionable,
            },
        }

    @property
    def rate(self) -> Rate:
        """What turns a step's time into MFU."""
        peak = None
        if not self.target.emulated:
            with contextlib.suppress(TargetError):  # A chip without figures has no MFU.
                chip = self.target.chip
                if chip.name != "cpu":
                    peak = chip.bf16_flops_per_s * self.strategy.num_devices
        return Rate(
            evidence="emulated" if self.target.emulated else "measured",
            global_model_flops=self.workload.global_model_flops(self.strategy.num_devices),
            global_peak_flops_per_s=peak,
        )

    @property
    def num_chips(self) -> int:
        """Chips that the devices are part of."""
        per_chip = 1
        with contextlib.suppress(TargetError):
            per_chip = self.target.chip.devices_per_chip
        return -(-self.strategy.num_devices // per_chip)

    def compile(self, tell: Tell) -> None:
        """Compiles the step and the evaluation."""
        tell({"note": f"compiling {self.name} for {self.target.text}"})
        state = placed(abstract_state(self.workload), self.layout)
        batch = placed(self.batch, self.layout, "batch")
        seed = self.experiment.seed
        step = jitted_step(self.workload, self.strategy, self.layout, seed)
        evaluation = jitted_evaluation(self.workload, self.strategy, self.layout)
        self.step = compile_lowered(step.lower(state, batch), self.strategy)
        lowered = evaluation.lower(state["params"], batch)
        self.evaluation = compile_lowered(lowered, self.strategy)

    def initial_state(self) -> State:
        """The state before the first step."""
        shardings = self.layout.shardings(abstract_state(self.workload))
        return init_state(self.workload, jax.random.key(self.experiment.seed), shardings)

    def evaluation_batches(self) -> list[PlacedBatch]:
        """The batches of every evaluation."""
        return evaluation_batches(
            self.valid_data,
            num_batches=self.experiment.training.evaluate_batches,
            global_batch=self.global_batch,
            seed=self.data_seed,
            held=self.held,
            shardings=self.shardings,
        )

    @contextlib.contextmanager
    def batches(self, first_step: int) -> Iterator[Ahead[PlacedBatch]]:
        """The run's batches from a position of the data on, one made ahead."""
        loaded = loader(
            self.train_data,
            global_batch=self.global_batch,
            seed=self.data_seed,
            first_step=first_step,
            rows=self.held,
        )
        ahead = Ahead(placed_batches(loaded, self.held, self.shardings, self.global_batch))
        try:
            yield ahead
        finally:
            ahead.close()


class _Session:
    """One stretch of a run in its directory, from its start or from a checkpoint."""

    def __init__(
        self,
        bench: _Bench,
        folder: pathlib.Path,
        before: dict[str, Any] | None,
        checkpoints: Checkpoints,
        recorder: Recorder,
        stop: StopSignals,
    ) -> None:
        self._bench = bench
        self._folder = folder
        self._before = before
        self._checkpoints = checkpoints
        self._recorder = recorder
        self._stop = stop

    def run(self) -> dict[str, Any]:
        """Trains, and returns what ``result.json`` holds."""
        bench = self._bench
        state, standing = self._start()
        self._write_run(standing.step)
        processes.together("the run's directory is ready")
        self._recorder.begin(standing.step)
        evaluation_batches = bench.evaluation_batches()
        error = None
        with bench.batches(standing.step) as batches:
            loop = Loop(
                bench.experiment.training,
                standing,
                step=bench.step,
                evaluate=lambda params: valid_loss(bench.evaluation, params, evaluation_batches),
                batches=batches,
                save=self._save,
                recorder=self._recorder,
                stop=self._stop,
                rate=bench.rate,
            )
            status: Status
            try:
                status = loop.run(state)
            except Diverged as diverged:
                status, error = "diverged", str(diverged)
        self._checkpoints.wait()
        result = self._result(status, error, standing)
        if processes.is_first():
            lineage = [*self._lineage(), self._own_record(standing)]
            texts = {
                directory.LINEAGE: files.json_text(lineage),
                directory.RESULT: files.json_text(result),
            }
            files.write_files(self._folder, texts)
        return result | {"signal": self._stop.number if status == "interrupted" else None}

    def _start(self) -> tuple[State, Standing]:
        bench = self._bench
        step = None
        if self._before is not None:
            step = self._checkpoints.newest_good(self._recorder.note)
            found = "no good checkpoint: it begins again" if step is None else f"from step {step}"
            self._recorder.note(f"resuming {self._folder} {found}")
        if step is None:
            return bench.initial_state(), Standing()
        state = self._checkpoints.restore(step, bench.workload, bench.layout)
        return state, Standing(**self._checkpoints.about(step)["standing"])

    def _save(self, standing: Standing, state: State) -> None:
        valid = standing.valid
        about = {
            "step": standing.step,
            "data_position": standing.step,
            "valid_loss": valid["valid_loss"] if valid and valid["step"] == standing.step else None,
            "standing": dataclasses.asdict(standing),
            "fixed": self._bench.fixed,
            "lineage": self._lineage(),
            "strategy": str(self._bench.strategy),
            "target": self._bench.target.text,
        }
        self._checkpoints.save(standing.step, state, about)

    def _lineage(self) -> list[dict[str, Any]]:
        datasets = (self._bench.train_data, self._bench.valid_data)
        records = [record.to_json() for data in datasets for record in data.lineage]
        # What the splits have in common stands in both.
        return [each for n, each in enumerate(records) if each not in records[:n]]

    def _own_record(self, standing: Standing) -> dict[str, Any]:
        """What training adds to the lineage: its output is the last checkpoint, by its manifest."""
        output = None
        if (name := self._checkpoints.name(self._checkpoints.last)) is not None:
            text = (self._folder / name / manifest.NAME).read_bytes()
            output = hashlib.sha256(text).hexdigest()
        return {
            "stage": "train",
            "version": __version__,
            "inputs": list(self._bench.fixed["dataset"].values()),
            "output": output,
            "counts": {"steps": standing.step, "tokens": standing.tokens},
        }

    def _write_run(self, first_step: int) -> None:
        """Writes ``run.json``, with this session at the end of it."""
        if not processes.is_first():
            return
        bench = self._bench
        session = {
            "first_step": first_step,
            "strategy": bench.name,
            "strategy_text": str(bench.strategy),
            "target": bench.target.text,
            "mesh": dict(bench.strategy.mesh_axes),
            "num_devices": bench.strategy.num_devices,
            "num_processes": jax.process_count(),
            "versions": {
                "python": platform.python_version(),
                **{name: metadata.version(name) for name in ("jax", "flax", "optax")},
                "orbax-checkpoint": metadata.version("orbax-checkpoint"),
            },
        }
        run = {
            "spmdlab": __version__,
            "config": bench.experiment.to_json(),
            "fixed": bench.fixed,
            "sessions": [*(self._before or {}).get("sessions", []), session],
        }
        (self._folder / directory.RESULT).unlink(missing_ok=True)
        texts = {
            directory.RUN: files.json_text(run),
            directory.LINEAGE: files.json_text(self._lineage()),
        }
        files.write_files(self._folder, texts)

    def _result(self, status: Status, error: str | None, standing: Standing) -> dict[str, Any]:
        spent = {
            "steps": standing.step,
            "seconds": standing.seconds,
            "tokens": standing.tokens,
            "chip_seconds": standing.seconds * self._bench.num_chips,
            "num_chips": self._bench.num_chips,
            "evidence": self._bench.rate.evidence,
        }
        target = self._bench.experiment.training.target
        return {
            "status": status,
            "error": error,
            "strategy": self._bench.name,
            "target": self._bench.target.text,
            **spent,
            "loss": standing.loss,
            "final": standing.valid,
            "best": standing.best,
            "time_to_accuracy": (
                {"valid_loss": target, **spent} if status == "reached_target" else None
            ),
            "last_checkpoint": self._checkpoints.name(self._checkpoints.last),
        }
