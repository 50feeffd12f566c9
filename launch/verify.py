"""Verifies that every strategy of a config computes what one device computes.

  python -m launch.verify --config=configs/parallelisms.py --out=out/verify

Loss, each parameter's gradient and the update, step by step, on emulated devices.  Writes
verification.json into --out; exits with 1 where a strategy computes something else.
"""

import pathlib
import sys

if __package__ in (None, ""):  # Run as `python launch/verify.py`.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from absl import flags

from launch import command
from spmdlab import lab
from spmdlab.report.console import print_tables
from spmdlab.report.verification import verification_report


def define() -> None:
    command.define_config()
    flags.DEFINE_string("out", None, "folder for verification.json")
    flags.DEFINE_string("strategy", None, "only these: names or forms like 'fsdp=4 tensor=2', a,b")
    flags.DEFINE_integer("steps", 3, "optimizer steps; each is compared")
    flags.DEFINE_string("dtype", "float32", "of all computation: float32 or float64")
    flags.DEFINE_integer("jobs", None, "strategies at a time")
    flags.DEFINE_float("timeout", 300.0, "seconds a strategy may take before it counts as hanging")


def main() -> int:
    verification = lab.verify(
        command.experiment(),
        strategies=command.texts("strategy"),
        steps=flags.FLAGS.steps,
        dtype=flags.FLAGS.dtype,
        jobs=flags.FLAGS.jobs,
        timeout_s=flags.FLAGS.timeout,
        out=flags.FLAGS.out,
    )
    print_tables(*verification_report(verification["rows"]))
    return 0 if all(row["status"] == "ok" for row in verification["rows"]) else 1


if __name__ == "__main__":
    command.run(main, define=define)
