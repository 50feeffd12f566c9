"""Everything an experiment is told.  Each part is declared beside the code that uses it."""

import dataclasses
import importlib.machinery
import inspect
import pathlib
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

import cloudpickle

from spmdlab.data.config import DataConfig
from spmdlab.errors import ConfigError, SpmdlabError
from spmdlab.hardware.chips import chip
from spmdlab.hardware.topology import parse_topology
from spmdlab.models.config import DecoderConfig
from spmdlab.strategies.base import Parallelism
from spmdlab.strategies.product import Strategy, as_strategy
from spmdlab.training import TrainingConfig
from spmdlab.workload import BatchConfig, OptimizerConfig, Workload

LOCAL = "local"
"""The target that means the devices of this process."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Experiment:
    """One workload, the strategies to compare, and the targets to compare them on."""

    model: DecoderConfig
    """What is trained."""

    batch: BatchConfig
    """Sizes of one optimizer step's data."""

    strategies: dict[str, Strategy | Parallelism]
    """Name -> how the arrays are laid out.  Strategies are compared in this order."""

    targets: tuple[str, ...] = ("cpu:8",)
    """Where: ``cpu:8``, ``local``, ``v5e:2x4``, ``2*v5e:16x16``."""

    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """How gradients become updates."""

    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """What is trained on, and how it is divided."""

    chips: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    """Chip -> field of `spmdlab.hardware.chips.Chip` -> the value to use instead of ours."""

    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    """How long `train` runs, and how often it evaluates, logs and saves."""

    seed: int = 0
    """Of the initial values, dropout and the order of the batches."""

    @property
    def data_seed(self) -> int:
        """Of the order of the batches: ``data.seed``, or ``seed`` where that is None."""
        return self.seed if self.data.seed is None else self.data.seed

    def problems(self) -> list[str]:
        """Everything wrong with these values, one sentence each."""
        if found := _mistyped(self, ""):
            return found
        workload = Workload(model=self.model, batch=self.batch, optimizer=self.optimizer)
        found = workload.problems()
        found += self.data.problems()
        if not self.strategies:
            found.append("strategies is empty; name at least one, as in {'fsdp': Fsdp(8)}")
        if not self.targets:
            found.append("targets is empty; name at least one, as in ('cpu:8',)")
        for name, parts in self.strategies.items():
            found += _complaints(f"strategies[{name!r}]: ", as_strategy, parts)
        for target in self.targets:
            if target != LOCAL:
                found += _complaints("", parse_topology, target)
        for name, overrides in self.chips.items():
            found += _complaints("", chip, name, overrides)
        found += self.training.problems()
        if not 0 <= self.seed < 2**32:
            found.append(f"seed must be a whole number from 0 to 2**32 - 1, got {self.seed}")
        return found

    def check(self) -> None:
        """Raises one ConfigError that lists all that is wrong.  Called once, by `lab`.

        Raises:
            ConfigError: `problems` found something; the message is one line.
        """
        if found := self.problems():
            raise ConfigError("; ".join(" ".join(each.split()) for each in found))

    def to_json(self) -> dict[str, Any]:
        """Returns every value, with strategies in their text form."""
        return {
            "model": _plain(self.model),
            "batch": _plain(self.batch),
            "optimizer": _plain(self.optimizer),
            "data": _plain(self.data),
            "strategies": {name: str(as_strategy(it)) for name, it in self.strategies.items()},
            "targets": list(self.targets),
            "chips": _plain(self.chips),
            "training": _plain(self.training),
            "seed": self.seed,
        }


def load_experiment(text: str) -> Experiment:
    """Returns what ``get_config`` of a Python file returns.

    Args:
        text: ``FILE.py`` or ``FILE.py:VARIANT``; ``VARIANT`` is passed to ``get_config``.

    Raises:
        ConfigError: There is no such file, it cannot be run, or what it returns is no
            `Experiment`.  The message is one line and names the file's line where it can.
    """
    path, colon, variant = text.partition(":")
    if not pathlib.Path(path).is_file():
        reason = "is no file" if pathlib.Path(path).exists() else "does not exist"
        raise ConfigError(f"config file {path!r} {reason}")
    module = types.ModuleType("spmdlab_config_file")
    module.__file__ = path
    # Dataclasses in the file look their module up here; worker processes have no such module,
    # so what the file defines travels to them by value.
    sys.modules[module.__name__] = module
    cloudpickle.register_pickle_by_value(module)
    try:
        loader = importlib.machinery.SourceFileLoader(module.__name__, path)
        exec(loader.source_to_code(loader.get_data(path), path), module.__dict__)
    except (Exception, SystemExit) as error:
        raise ConfigError(_where(error, path)) from error
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise ConfigError(f"config file {path!r} defines no function get_config()")
    arguments = (variant,) if colon else ()
    try:
        inspect.signature(get_config).bind(*arguments)
    except TypeError:
        wants = f"get_config{inspect.signature(get_config)}"
        have = f"the variant {variant!r}" if colon else "no variant; write FILE.py:VARIANT"
        raise ConfigError(f"config file {path!r} has {wants}, but was given {have}") from None
    try:
        experiment = get_config(*arguments)
    except (Exception, SystemExit) as error:
        raise ConfigError(_where(error, path)) from error
    if not isinstance(experiment, Experiment):
        kind = type(experiment).__name__
        raise ConfigError(f"get_config() in {path!r} must return an Experiment, returned {kind}")
    return experiment


def _where(error: BaseException, path: str) -> str:
    """Returns one line: the config file's own line that led to ``error``, and what it was."""
    line = None
    if isinstance(error, SyntaxError) and error.filename == path:
        line, said = error.lineno, error.msg
    else:
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == path:
                line = trace.tb_lineno
            trace = trace.tb_next
        said = str(error)
    kind = "" if isinstance(error, SpmdlabError) else f"{type(error).__name__}: "
    at = f"{path}:{line}" if line else path
    return f"config file {at}: {kind}{' '.join(said.split())}"


def _complaints(prefix: str, check: Any, *arguments: Any) -> list[str]:
    try:
        check(*arguments)
    except SpmdlabError as error:
        return [f"{prefix}{error}"]
    return []


def _mistyped(config: Any, prefix: str) -> list[str]:
    """Returns a sentence for each field whose value is of another type than declared."""
    found = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not _is_of(value, field.type):
            kind = getattr(field.type, "__name__", None)
            wanted = kind if isinstance(field.type, type) and kind else str(field.type)
            found.append(f"{prefix}{field.name} must be {wanted}, got {value!r}")
        elif dataclasses.is_dataclass(value):
            found += _mistyped(value, f"{prefix}{field.name}.")
    return found


def _is_of(value: Any, kind: Any) -> bool:
    """Whether ``value`` is of an annotated type; what no config uses is taken on trust."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_is_of(value, each) for each in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_of(each, arguments[0]) for each in value)
    if origin is dict:
        key, inner = arguments
        return isinstance(value, dict) and all(
            _is_of(name, key) and _is_of(each, inner) for name, each in value.items()
        )
    if isinstance(value, bool) and kind in (int, float):
        return False
    if kind is float:
        return isinstance(value, int | float)
    # A Protocol's check says less than `as_strategy`, which comes later.
    if not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    return isinstance(value, kind)


def _plain(value: Any) -> Any:
    """Returns ``value`` in the types JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
