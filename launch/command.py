"""What all launch scripts share: flags, and exit codes instead of tracebacks.

Exit code 0: done; 1: the check that the verb makes failed; 2: the user's input is wrong, and one
line on stderr says what and what would work.  An error of ours keeps its traceback.
"""

import ast
import contextlib
import dataclasses
import io
import os
import signal
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

from absl import flags
from ml_collections import config_flags

from spmdlab.config import Experiment, load_experiment
from spmdlab.errors import ConfigError, SpmdlabError
from spmdlab.lookup import pick


@dataclasses.dataclass
class _NoExperiment:
    """Stands where no --config was given."""


def run(main: Callable[[], int | None], *, define: Callable[[], None]) -> typing.NoReturn:
    """Defines and parses the flags, calls ``main``, exits.

    Args:
        main: Does the work; returns the exit code, None for 0.
        define: Defines the script's flags.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # Where the terminal has no "µ", a "?".
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP, and so do we.
            signal.signal(number, _leave)
    try:
        sys.exit(_run(main, define))
    except (SpmdlabError, flags.Error) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of stdout left; what is buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _leave(number: int, frame: types.FrameType | None) -> typing.NoReturn:
    """Ends this process by way of its ``finally`` clauses, which end the workers."""
    sys.exit(128 + number)


def _run(main: Callable[[], int | None], define: Callable[[], None]) -> int:
    if {"--help", "-h", "--helpshort"} & set(sys.argv[1:]):
        # The only definition that can fail is one with overrides, which help does not need.
        sys.argv = [sys.argv[0]]
        define()
        print(f"{(sys.modules['__main__'].__doc__ or '').strip()}\n\nflags:")
        for flag in sorted(_ours(), key=lambda flag: flag.name):
            print(f"  --{flag.name}: {flag.help}")
        return 0
    define()
    try:
        rest = flags.FLAGS(sys.argv)[1:]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        # What config_flags raises for overrides that `_check_overrides` does not know to refuse.
        raise ConfigError(f"{type(error).__name__}: {error}") from error
    if rest:
        raise ConfigError(f"unexpected argument {rest[0]!r}; flags are written --name=value")
    return main() or 0


def _ours() -> list[flags.Flag]:
    modules = flags.FLAGS.flags_by_module_dict()
    return [
        flag
        for name, members in modules.items()
        if name in (__name__, sys.argv[0], "__main__")
        for flag in members
    ]


def define_config() -> None:
    """Defines ``--config=FILE.py[:VARIANT]`` and, as given, ``--config.x.y=value``."""
    if not any(arg.lstrip("-").split("=")[0] == "config" for arg in sys.argv[1:]) and _overrides():
        raise ConfigError("--config=FILE.py is missing")
    _register_parsers(Experiment, seen=set())
    config_flags.DEFINE_config_dataclass(
        "config",
        _NoExperiment(),
        "FILE.py or FILE.py:VARIANT, whose get_config returns an Experiment; "
        "--config.batch.seq_len=128 and the like override its fields",
        parse_fn=_parse_experiment,
    )


def experiment() -> Experiment:
    """Returns the experiment that --config names, with its overrides.

    Raises:
        ConfigError: There is no --config.
    """
    value = flags.FLAGS.config
    if isinstance(value, _NoExperiment):
        raise ConfigError("--config=FILE.py is missing")
    return value


def texts(name: str) -> list[str] | None:
    """Returns the parts of a comma separated flag, None where it is not given.

    Raises:
        ConfigError: A part is empty.
    """
    value: str | None = flags.FLAGS[name].value
    if value is None:
        return None
    parts = [part.strip() for part in value.split(",")]
    if not all(parts):
        raise ConfigError(f"--{name}={value!r} has an empty part")
    return parts


class _OrNone(flags.ArgumentParser):
    """Reads what ``kind`` reads, or ``none``; `Experiment.check` knows where None may stand."""

    def __init__(self, kind: type[int] | type[float]) -> None:
        self._kind = kind

    def parse(self, argument: Any) -> Any:
        if not isinstance(argument, str):
            return argument
        return None if argument.lower() == "none" else self._kind(argument)


class _DictParser(flags.ArgumentParser):
    """Reads a dict as Python writes it."""

    def parse(self, argument: Any) -> dict[Any, Any]:
        if not isinstance(argument, str):
            return argument
        try:
            value = ast.literal_eval(argument)
        except (SyntaxError, ValueError):
            value = None
        if not isinstance(value, dict):
            raise ValueError("write a dict, as in \"{'v5e': {'hbm_bytes': 16e9}}\"")
        return value


def _parse_experiment(text: str) -> Experiment:
    with contextlib.redirect_stdout(sys.stderr):  # stdout is the table's.
        found = load_experiment(text)
    _check_overrides(found)
    return found


def _overrides() -> list[str]:
    """Returns the ``x.y`` of each ``--config.x.y`` on the command line."""
    names = [arg.split("=")[0].lstrip("-") for arg in sys.argv[1:] if arg.startswith("-")]
    prefixes = ("config.", "noconfig.")
    return [name.partition(".")[2] for name in names if name.startswith(prefixes)]


def _check_overrides(config: Experiment) -> None:
    """Raises ConfigError where a --config.x.y names no field, listing those that exist."""
    for path in _overrides():
        if path == "strategies":
            raise ConfigError(
                "--config.strategies cannot be written as text; choose with "
                "--strategy='fsdp=8,fsdp=4 tensor=2'"
            )
        holder: Any = config
        so_far = "config"
        for name in path.split("."):
            if dataclasses.is_dataclass(holder):
                known = {
                    field.name: getattr(holder, field.name) for field in dataclasses.fields(holder)
                }
            elif isinstance(holder, dict):
                known = {str(key): value for key, value in holder.items()}
            else:
                raise ConfigError(f"--config.{path}: {so_far} has no fields")
            if not known:
                raise ConfigError(f"--config.{path}: {so_far} is empty; set it as a whole")
            holder = pick(known, name, f"field of {so_far}")
            so_far += f".{name}"


def _register_parsers(kind: type, seen: set[type]) -> None:
    """Teaches config_flags the field types that it does not know: Literal, dict, int | None."""
    for number in (int, float):
        config_flags.register_flag_parser_for_type(number, _OrNone(number))
    seen.add(kind)
    for field in dataclasses.fields(kind):
        members = [field.type]
        if typing.get_origin(field.type) in (typing.Union, types.UnionType):
            members = list(typing.get_args(field.type))
        for member in members:
            if typing.get_origin(member) is typing.Literal:
                choices = [str(choice) for choice in typing.get_args(member)]
                config_flags.register_flag_parser_for_type(member, flags.EnumParser(choices))
            elif typing.get_origin(member) is dict:
                config_flags.register_flag_parser_for_type(member, _DictParser())
            elif dataclasses.is_dataclass(member) and member not in seen:
                _register_parsers(typing.cast(type, member), seen)
