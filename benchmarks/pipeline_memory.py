"""How the memory of a pipeline grows with its microbatches, beside what the simulator says.

  python benchmarks/pipeline_memory.py

Four stages, two replicas, eight emulated devices, one microbatch's size fixed: the batch grows with
their number.  1F1B's temporaries must stay within 5% from 8 to 64; GPipe's grow.
"""

import argparse
import sys

from spmdlab.targets import parse_target, prepare_environment

STAGES, ROWS, LENGTH = 4, 4, 64
MICROBATCHES = (8, 16, 32, 64)


def temporaries(text: str, microbatches: int, target: str) -> float:
    """Bytes of a compiled step's temporaries on each device."""
    from spmdlab.compile import compile_step
    from spmdlab.models.config import DecoderConfig
    from spmdlab.strategies import strategy_from_text
    from spmdlab.workload import BatchConfig, Workload

    model = DecoderConfig(
        vocab_size=64, num_layers=8, embed_dim=64, num_heads=2, num_kv_heads=2, head_dim=8,
        mlp_dim=128,
    )  # fmt: skip
    batch = BatchConfig(global_batch=ROWS * microbatches, seq_len=LENGTH)
    workload = Workload(model=model, batch=batch)
    return compile_step(workload, strategy_from_text(text), parse_target(target)).memory.temp_bytes


def main() -> None:
    """Prints the table; exits with 1 if 1F1B grows, or GPipe does not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="cpu:8", help="eight devices, like v5e:2x4")
    target = parser.parse_args().target
    prepare_environment([target])
    from spmdlab.pipeline.simulate import simulate
    from spmdlab.strategies import strategy_from_text

    print(f"{'schedule':<9}{'microbatches':>13}{'bubble':>8}{'inputs held':>13}{'temp MiB':>10}")
    temp = {}
    for schedule in ("gpipe", "circular", "1f1b"):
        for microbatches in MICROBATCHES:
            text = f"stage={STAGES} data=2 schedule={schedule} microbatches={microbatches}"
            paper = simulate(strategy_from_text(text).pipeline)
            temp[schedule, microbatches] = temporaries(text, microbatches, target)
            print(
                f"{schedule:<9}{microbatches:>13}{paper.bubble_fraction:>8.1%}"
                f"{max(paper.live):>13}{temp[schedule, microbatches] / 2**20:>10.2f}",
                flush=True,
            )
    growth = {s: temp[s, MICROBATCHES[-1]] / temp[s, MICROBATCHES[0]] for s in ("gpipe", "1f1b")}
    print("growth: " + ", ".join(f"{name} {ratio:.3f}" for name, ratio in growth.items()))
    sys.exit(0 if growth["1f1b"] <= 1.05 < growth["gpipe"] else 1)


if __name__ == "__main__":
    main()
