"""Trains one strategy of a config, and keeps what happened in the run's directory.

  python -m launch.train --config=configs/quickstart.py:train --strategy=fsdp_tensor --out=out/run
  python -m launch.train ... --resume     goes on from the newest good checkpoint

Stops early where --config.training.target is reached.  SIGTERM and Ctrl-C save first.  Exits with
1 where the run diverged or its process died, and 128 and the signal where it was interrupted.
"""

import pathlib
import sys

if __package__ in (None, ""):  # Run as `python launch/train.py`.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from absl import flags

from launch import command
from spmdlab import lab
from spmdlab.errors import ConfigError, RunError
from spmdlab.report.console import print_tables
from spmdlab.report.training import training_report


def define() -> None:
    command.define_config()
    flags.DEFINE_string("out", None, "folder for the run: metrics, order, checkpoints, result.json")
    flags.DEFINE_string("strategy", None, "a name or a form like 'fsdp=4 tensor=2'; else the first")
    flags.DEFINE_string("target", None, "cpu:8 or local; else the config's first")
    flags.DEFINE_bool("resume", False, "go on with the run that is in --out")


def main() -> int:
    if flags.FLAGS.out is None:
        raise ConfigError("--out=FOLDER is missing: a run is its directory")
    try:
        result = lab.train(
            command.experiment(),
            strategy=flags.FLAGS.strategy,
            target=flags.FLAGS.target,
            out=flags.FLAGS.out,
            resume=flags.FLAGS.resume,
        )
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_tables(*training_report(result))
    if result["status"] == "interrupted":
        return 128 + result["signal"]
    return 1 if result["status"] == "diverged" else 0


if __name__ == "__main__":
    command.run(main, define=define)
