"""Compares every strategy of a config on every target: time, memory, MFU, and which is best.

  python -m launch.compare --config=configs/quickstart.py --out=out/compare

Writes comparison.json and report.html into --out.  Needs no accelerator.
"""

import pathlib
import sys

if __package__ in (None, ""):  # Run as `python launch/compare.py`.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from absl import flags

from launch import command
from spmdlab import lab
from spmdlab.report.console import print_tables
from spmdlab.report.table import comparison_report


def define() -> None:
    command.define_config()
    flags.DEFINE_string("out", None, "folder for comparison.json and report.html")
    flags.DEFINE_string("strategy", None, "only these: names or forms like 'fsdp=4 tensor=2', a,b")
    flags.DEFINE_string("target", None, "instead of the config's targets: cpu:8,v5e:2x4")
    flags.DEFINE_integer("jobs", None, "compilations at a time")


def main() -> int:
    comparison = lab.compare(
        command.experiment(),
        strategies=command.texts("strategy"),
        targets=command.texts("target"),
        jobs=flags.FLAGS.jobs,
        out=flags.FLAGS.out,
    )
    print_tables(*comparison_report(comparison["rows"]))
    answered = any(row["status"] in ("ok", "does not fit") for row in comparison["rows"])
    return 0 if answered else 1


if __name__ == "__main__":
    command.run(main, define=define)
