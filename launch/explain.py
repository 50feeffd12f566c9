"""Explains one strategy on one target: each collective, what causes it, what it costs.

  python -m launch.explain --config=configs/quickstart.py --strategy=fsdp --target=v5e:2x4

Writes ledger.json and timeline.perfetto.json (for https://ui.perfetto.dev) into --out.
"""

import pathlib
import sys

if __package__ in (None, ""):  # Run as `python launch/explain.py`.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from absl import flags

from launch import command
from spmdlab import lab
from spmdlab.report.collectives import ledger_report
from spmdlab.report.console import print_tables
from spmdlab.report.table import row_report


def define() -> None:
    command.define_config()
    flags.DEFINE_string("out", None, "folder for ledger.json and timeline.perfetto.json")
    flags.DEFINE_string("strategy", None, "a name or a form like 'fsdp=4 tensor=2'; else the first")
    flags.DEFINE_string("target", None, "as in cpu:8 or v5e:2x4; else the config's first")


def main() -> None:
    row = lab.explain(
        command.experiment(),
        strategy=flags.FLAGS.strategy,
        target=flags.FLAGS.target,
        out=flags.FLAGS.out,
    )
    print_tables(*row_report(row), "", *ledger_report(row["ledger"]))


if __name__ == "__main__":
    command.run(main, define=define)
