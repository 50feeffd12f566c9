"""How compile time, memory and our own share grow with chips and with scanned layers.

  python benchmarks/growth.py

Each point is a process of its own.  Ratios of the largest to the smallest point must stay within
1.2: 4096 chips against 8, and 80 layers against 8.  Parsing, pricing and replaying must take less
than 5% of the compile time.  The first compile of a process pays libtpu's start-up, so every point
compiles twice and the second counts.  Times are processor seconds, which what else the machine
does distorts least.
"""

import json
import pathlib
import subprocess
import sys

SHARE = "analysis / compile, largest"
ROOT = pathlib.Path(__file__).resolve().parents[1]

POINT = """
import json, resource, sys, time
target, layers = sys.argv[1], int(sys.argv[2])
from spmdlab.targets import parse_target, prepare_environment
prepare_environment([target])
from spmdlab.compile import compile_step
from spmdlab.cost.ledger import price
from spmdlab.hlo.parse import parse
from spmdlab.models.config import DecoderConfig
from spmdlab.strategies.fsdp import Fsdp
from spmdlab.strategies.data import Data
from spmdlab.timeline.replay import replay
from spmdlab.workload import BatchConfig, Workload
aim = parse_target(target)
n = aim.topology.num_devices
# The same work per device everywhere: 8 ways of fsdp, the rest are replicas.
strategy = (Data(n // 8) * Fsdp(8)).with_options(remat="full")
for turn in range(2):
    began = time.process_time()
    model = DecoderConfig(
        vocab_size=32000, num_layers=layers, embed_dim=2048, num_heads=16, num_kv_heads=16,
        head_dim=128, mlp_dim=5632, layers="scanned", norm_eps=1e-5 * (turn + 1))
    work = Workload(model=model, batch=BatchConfig(per_device_batch=1, seq_len=1024))
    step = compile_step(work, strategy, aim)
    compile_cpu_s = time.process_time() - began
start = time.process_time()
replay(price(parse(step.hlo_text), aim.chip, step.placement))
ours = time.process_time() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"target": target, "layers": layers, "compile_cpu_s": compile_cpu_s,
                  "analysis_cpu_s": ours, "peak_bytes": peak, "hlo_bytes": len(step.hlo_text)}))
"""


def point(target: str, layers: int) -> dict[str, float]:
    """Compiles one step in a process of its own."""
    command = [sys.executable, "-c", POINT, target, str(layers)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-4000:])
    found = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def main() -> None:
    few, many = point("v5p:2x2x2", 8), point("v5p:16x16x16", 8)
    shallow, deep = few, point("v5p:2x2x2", 80)
    points = (few, many, deep)
    result = {
        "chips 8 -> 4096": _ratios(few, many),
        "layers 8 -> 80": _ratios(shallow, deep),
        SHARE: max(p["analysis_cpu_s"] / p["compile_cpu_s"] for p in points),
        "points": points,
    }
    print(json.dumps(result, indent=2))
    worst = [*result["chips 8 -> 4096"].values(), *result["layers 8 -> 80"].values()]
    sys.exit(max(worst) > 1.2 or result[SHARE] > 0.05)


def _ratios(small: dict[str, float], large: dict[str, float]) -> dict[str, float]:
    return {key: large[key] / small[key] for key in ("compile_cpu_s", "peak_bytes")}


if __name__ == "__main__":
    main()
