"""Analyzes any optimised HLO text: its collectives by mesh axis, its FLOPs, bytes and time.

  python -m launch.analyze --hlo=dump.txt --target=v5e:16x16 --mesh="data=16 fsdp=16"

Writes ledger.json into --out.  The text is what `compiled.as_text()` returns or
`--xla_dump_hlo_as_text` writes, plain or compressed with gzip, of any JAX or XLA program.
"""

import pathlib
import sys

if __package__ in (None, ""):  # Run as `python launch/analyze.py`.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from absl import flags

from launch import command
from spmdlab import lab
from spmdlab.errors import ConfigError
from spmdlab.report.collectives import ledger_report
from spmdlab.report.console import print_tables


def define() -> None:
    flags.DEFINE_string("hlo", None, "file with HLO text, plain or gzip")
    flags.DEFINE_string("target", None, "what it was compiled for, as in v5e:16x16 or cpu:8")
    flags.DEFINE_string("mesh", None, "axes and sizes, outermost first: 'data=16 fsdp=16'")
    flags.DEFINE_string("out", None, "folder for ledger.json")


def main() -> None:
    for name in ("hlo", "target"):
        if not flags.FLAGS[name].value:
            raise ConfigError(f"--{name} is missing")
    ledger = lab.analyze(
        flags.FLAGS.hlo,
        target=flags.FLAGS.target,
        mesh=flags.FLAGS.mesh,
        out=flags.FLAGS.out,
    )
    print_tables(*ledger_report(ledger))


if __name__ == "__main__":
    command.run(main, define=define)
