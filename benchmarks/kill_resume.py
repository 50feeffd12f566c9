"""Kills a training run at random moments, resumes it, and compares it with one left alone.

  python benchmarks/kill_resume.py

Each session is sent SIGKILL some time after its first step, at the latest when a few more
checkpoints would be there; saves are frequent, so many kills fall into one.  The run must then
end with the same parameters to the bit, the same losses and the same order of examples.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

STEPS, CHECKPOINT_EVERY, SECONDS = 2000, 5, 1.0
HERE = pathlib.Path(__file__).resolve()
sys.path[0] = str(HERE.parents[1])

CHILD = "--child"


def child(out: str) -> None:
    """Trains, or goes on."""
    from spmdlab.run.processes import prepare

    prepare(["cpu:8"])
    import jax

    for name, value in {"cache_dir": f"{out}-compiled"}.items():
        jax.config.update(f"jax_compilation_{name}", value)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    from spmdlab.config import Experiment
    from spmdlab.models.config import DecoderConfig
    from spmdlab.run.trainer import train
    from spmdlab.strategies import Fsdp
    from spmdlab.training import TrainingConfig
    from spmdlab.workload import BatchConfig

    experiment = Experiment(
        model=DecoderConfig(
            vocab_size=256, num_layers=1, embed_dim=32, num_heads=4, num_kv_heads=4, head_dim=8,
            mlp_dim=64, dropout=0.1,
        ),
        batch=BatchConfig(global_batch=8, seq_len=16),
        strategies={"fsdp": Fsdp(8)},
        training=TrainingConfig(
            steps=STEPS, log_every=1, evaluate_every=STEPS, checkpoint_every=CHECKPOINT_EVERY
        ),
    )  # fmt: skip
    resume = (pathlib.Path(out) / "run.json").exists()
    train(
        experiment, "fsdp", "cpu:8", out, resume=resume, tell=lambda said: print(said, flush=True)
    )


def session(out: pathlib.Path, kill_after_s: float | None) -> list[str]:
    """Runs one process; kills it so long after its first step.  Returns what it noted."""
    command = [sys.executable, str(HERE), CHILD, str(out)]
    notes = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        for line in running.stdout:
            if "note" in line:
                notes.append(line.strip())
            elif "loss" in line and kill_after_s is not None:
                time.sleep(kill_after_s)
                running.kill()
                break
        running.communicate()
    if kill_after_s is None and running.returncode:
        sys.exit(f"a session ended with {running.returncode}")
    return notes


def last_arrays(out: pathlib.Path) -> dict[str, bytes]:
    """The last checkpoint's arrays, by path."""
    import orbax.checkpoint as ocp

    folder = (out / "checkpoints" / str(STEPS) / "state").absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(folder)
    return {path: array.tobytes() for path, array in found.items()}


def losses(out: pathlib.Path) -> list[tuple[int, float]]:
    """Step and loss of each line of the metrics."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(each["step"], each["loss"]) for each in records if "loss" in each]


def main() -> None:
    """Prints what the kills hit; exits with 1 where the two runs differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    flags = parser.parse_args()
    moments = random.Random(flags.seed)
    with tempfile.TemporaryDirectory() as folder:
        alone, killed = pathlib.Path(folder) / "alone", pathlib.Path(folder) / "killed"
        session(alone, None)
        unfinished = 0
        for number in range(1, flags.kills + 1):
            session(killed, moments.uniform(0, SECONDS))
            saved = [each for each in (killed / "checkpoints").iterdir() if each.name.isdecimal()]
            half = [each.name for each in saved if not (each / "manifest.json").exists()]
            unfinished += bool(half)
            where = losses(killed)[-1][0]
            print(
                f"kill {number}: at step {where}, unfinished: {', '.join(half) or '-'}", flush=True
            )
        session(killed, None)

        from spmdlab.run.processes import prepare

        prepare(["cpu:8"])
        same = {
            "parameters and optimizer state": last_arrays(alone) == last_arrays(killed),
            "losses": losses(alone) == losses(killed),
            "order of examples": (alone / "order.jsonl").read_bytes()
            == (killed / "order.jsonl").read_bytes(),
        }
    print(f"{flags.kills} kills, {unfinished} with a save unfinished")
    for what, holds in same.items():
        print(f"{what}: {'the same to the bit' if holds else 'DIFFERENT'}")
    sys.exit(0 if all(same.values()) else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        child(sys.argv[2])
    else:
        main()
