"""Our `compare` of one row against MaxText's own `train_compile` of the same step.

  pip install 'maxtext[tpu]==0.2.5'     # in an environment of its own, Python 3.12
  python benchmarks/against_maxtext.py --maxtext-python=/path/to/that/bin/python

Both compile one training step of Llama-2-7B (32 layers, 4096, 11008, 32 heads, vocabulary 32000),
2048 tokens, 4 sequences per device, full rematerialisation, fsdp=256, for v5e:16x16.  The two
commands take turns on the same machine, so that what else it does falls on both.  What counts is
the ratio, which must not exceed 1, and our memory, which must stay under 4 GiB.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONFIG = "configs/llama2_7b_v5e.py"
MAXTEXT = (
    "compile_topology=v5e-256 compile_topology_num_slices=1 model_name=llama2-7b "
    "per_device_batch_size=4 max_target_length=2048 remat_policy=full run_name=benchmark"
).split()
FIND_MAXTEXT = """
import importlib.util
print(importlib.util.find_spec("maxtext").submodule_search_locations[0])
"""
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One command."""

    wall_s: float
    cpu_s: float
    peak_bytes: float
    """Resident memory of its largest process."""


def run(command: list[str]) -> Run:
    """Runs a command to its end and raises if it fails."""
    start = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, **ENVIRONMENT}
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{log.read().decode()[-4000:]}")
    return Run(
        wall_s=time.monotonic() - start,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_bytes=usage.ru_maxrss * 1024.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--maxtext-python", required=True, help="a Python that has MaxText")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    theirs_python = arguments.maxtext_python
    package = subprocess.check_output([theirs_python, "-c", FIND_MAXTEXT], text=True).strip()
    ours: list[Run] = []
    theirs: list[Run] = []
    with tempfile.TemporaryDirectory() as out:
        compare = [sys.executable, "-m", "launch.compare", f"--config={CONFIG}", f"--out={out}"]
        module = "maxtext.trainers.pre_train.train_compile"
        train_compile = [theirs_python, "-m", module, f"{package}/configs/base.yml", *MAXTEXT]
        for _ in range(arguments.rounds):
            ours.append(run(compare))
            theirs.append(run([*train_compile, f"base_output_directory={out}"]))
        row = json.loads(pathlib.Path(out, "comparison.json").read_text())["rows"][0]
    result = {
        "wall_ratio": statistics.median(r.wall_s for r in ours)
        / statistics.median(r.wall_s for r in theirs),
        "cpu_ratio": statistics.median(r.cpu_s for r in ours)
        / statistics.median(r.cpu_s for r in theirs),
        "our_peak_gib": max(r.peak_bytes for r in ours) / 2**30,
        "our_step_flops": row["flops"],
        "ours": [dataclasses.asdict(r) for r in ours],
        "maxtext": [dataclasses.asdict(r) for r in theirs],
    }
    print(json.dumps(result, indent=2))
    sys.exit(result["wall_ratio"] > 1 or result["our_peak_gib"] > 4)


if __name__ == "__main__":
    main()
