"""What the training loop costs over a hand-written loop of the same step.

  python benchmarks/training_loop.py

One compiled step, one machine, eight emulated devices; stretches of both loops take turns.  Ours
also writes metrics and the order of the examples, times every step and looks at its values.
"""

import argparse
import pathlib
import statistics
import sys
import tempfile
import time

from spmdlab.targets import parse_target, prepare_environment

STEPS, LOG_EVERY = 30, 10
"""Of one stretch."""


def main() -> None:
    """Prints seconds of both and the ratio of their medians; exits with 1 above 1.02."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stretches", type=int, default=15, help="of each loop")
    stretches = parser.parse_args().stretches
    prepare_environment(["cpu:8"])

    import jax

    from spmdlab.compile import compile_lowered, jitted_step, lay_out, placed
    from spmdlab.data.config import DataConfig
    from spmdlab.data.dataset import open_dataset
    from spmdlab.data.loader import loader
    from spmdlab.models.config import DecoderConfig
    from spmdlab.run.batches import Ahead, placed_batches, rows_held
    from spmdlab.run.loop import Loop, Rate, Standing
    from spmdlab.run.metrics import Recorder
    from spmdlab.run.stop import StopSignals
    from spmdlab.strategies import strategy_from_text
    from spmdlab.train.state import abstract_batch, abstract_state, init_state
    from spmdlab.training import TrainingConfig
    from spmdlab.workload import BatchConfig, Workload

    model = DecoderConfig(
        vocab_size=256, num_layers=2, embed_dim=64, num_heads=8, num_kv_heads=8, head_dim=8,
        mlp_dim=192,
    )  # fmt: skip
    work = Workload(model=model, batch=BatchConfig(global_batch=16, seq_len=64))
    strategy = strategy_from_text("fsdp=8")
    layout = lay_out(work, strategy, parse_target("cpu:8"))
    abstract, batch = abstract_state(work), abstract_batch(work, 8)
    lowered = jitted_step(work, strategy, layout).lower(
        placed(abstract, layout), placed(batch, layout, "batch")
    )
    step = compile_lowered(lowered, strategy)
    shardings = layout.shardings(batch, "batch")
    held = rows_held(shardings, (16, 64))
    dataset = open_dataset(DataConfig(), seq_len=64, split="train")
    config = TrainingConfig(
        steps=STEPS, log_every=LOG_EVERY, evaluate_every=STEPS, checkpoint_every=STEPS
    )

    def fresh() -> object:
        state = init_state(work, jax.random.key(0), layout.shardings(abstract))
        return jax.block_until_ready(state)

    def by_hand() -> float:
        state, loaded = fresh(), loader(dataset, global_batch=16, seed=0)
        began = time.perf_counter()
        for number in range(1, STEPS + 1):
            state, metrics = step(state, jax.device_put(next(loaded).rows, shardings))
            if number % LOG_EVERY == 0:
                print(number, float(metrics["loss"]), float(metrics["grad_norm"]), file=log)
        jax.block_until_ready(state)
        return time.perf_counter() - began

    def ours(folder: str) -> float:
        state, loaded = fresh(), loader(dataset, global_batch=16, seed=0)
        recorder = Recorder(pathlib.Path(folder), writes=True, tell=lambda said: None)
        began = time.perf_counter()
        ahead = Ahead(placed_batches(loaded, held, shardings, 16))
        ends = []
        loop = Loop(
            config,
            Standing(),
            step=step,
            evaluate=lambda params: 1.0,
            batches=ahead,
            save=lambda standing, state: ends.append(jax.block_until_ready(state)),
            recorder=recorder,
            stop=StopSignals(),
            rate=Rate(evidence="emulated", global_model_flops=1.0, global_peak_flops_per_s=None),
        )
        loop.run(state)
        took = time.perf_counter() - began
        ahead.close()
        recorder.close()
        return took

    found: dict[str, list[float]] = {"by hand": [], "ours": []}
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/by_hand.txt", "w") as log:
        for number in range(stretches + 1):
            pair = {"by hand": by_hand(), "ours": ours(folder)}
            if number:  # The first pair warms up.
                for name, seconds in pair.items():
                    found[name].append(seconds)
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    for name, seconds in found.items():
        print(f"{name:<8} median {medians[name] / STEPS * 1e3:.2f} ms a step, "
              f"{min(seconds) / STEPS * 1e3:.2f} to {max(seconds) / STEPS * 1e3:.2f}")  # fmt: skip
    ratio = medians["ours"] / medians["by hand"]
    print(f"ratio of medians: {ratio:.3f}")
    sys.exit(0 if ratio <= 1.02 else 1)


if __name__ == "__main__":
    main()
