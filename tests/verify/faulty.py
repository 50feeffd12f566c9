"""Data parallelism by hand, over eight devices, with a fault to choose."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

from spmdlab.config import Experiment
from spmdlab.models.config import DecoderConfig
from spmdlab.strategies import Data
from spmdlab.train.optimizer import optimizer
from spmdlab.train.state import abstract_state
from spmdlab.train.step import loss_and_grads
from spmdlab.workload import BatchConfig

DEVICES = 8
ROWS, T = 16, 8


class Plain:
    """A recipe of `loss_and_grads`: nothing recomputed, nothing cut."""

    remat = "none"
    accumulate = 1
    pipeline = None


def experiment(strategy=None, dropout=0.0) -> Experiment:
    return Experiment(
        model=DecoderConfig(
            vocab_size=32,
            num_layers=1,
            embed_dim=16,
            num_heads=8,
            num_kv_heads=8,
            head_dim=2,
            mlp_dim=32,
            dropout=dropout,
        ),
        batch=BatchConfig(global_batch=ROWS, seq_len=T),
        strategies={"it": strategy or Data(DEVICES)},
    )


def by_hand(fault: str) -> Callable:
    """Returns what stands in for `jitted_step`: right, but for the fault."""

    def make(workload, strategy, layout, seed):
        transformation = optimizer(workload.optimizer, workload.model)

        def step(state, batch):
            device = jax.lax.axis_index("data")
            key = None
            if workload.model.dropout:
                key = jax.random.fold_in(jax.random.key(seed), state["step"])
                key = jax.random.fold_in(key, device) if fault == "rng" else key
            tokens = jax.lax.psum(jnp.sum(batch["weights"]), "data")
            count = float(ROWS * T) if fault == "count" else tokens
            parts = range(strategy.accumulate - (fault == "microbatch"))
            loss, grads = 0.0, jax.tree.map(jnp.zeros_like, state["params"])
            for part in parts:
                rows = {name: a[part :: strategy.accumulate] for name, a in batch.items()}
                got = loss_and_grads(workload, Plain(), state["params"], rows, dropout_key=key)
                share = 1 / DEVICES if fault == "means" else got.tokens / count
                loss += got.loss * share
                grads = jax.tree.map(lambda t, g, s=share: t + g * s, grads, got.grads)
            loss = jax.lax.psum(loss, "data")
            grads = jax.tree.map(reduced, grads)
            updates, moments = transformation.update(grads, state["optimizer"], state["params"])
            if fault == "update":
                updates = jax.tree.map(lambda u: 2 * u, updates)
            new = {
                "step": state["step"] + 1,
                "params": optax.apply_updates(state["params"], updates),
                "optimizer": moments,
            }
            return new, {"loss": loss, "grad_norm": optax.tree.norm(grads), "tokens": tokens}

        def reduced(grad):
            match fault:
                case "dropped":
                    return grad
                case "first only":
                    mine = jnp.where(jax.lax.axis_index("data") == 0, grad, 0)
                    return jax.lax.psum(mine, "data")
                case "twice":
                    return jax.lax.psum(jax.lax.psum(grad, "data"), "data")
                case "doubled":
                    return 2 * jax.lax.psum(grad, "data")
                case "averaged":
                    return jax.lax.pmean(grad, "data")
                case "order" if grad.shape[-1] % DEVICES == 0:
                    dim = grad.ndim - 1
                    part = jax.lax.psum_scatter(grad, "data", scatter_dimension=dim, tiled=True)
                    around = [(i, (i + 1) % DEVICES) for i in range(DEVICES)]
                    part = jax.lax.ppermute(part, "data", around)
                    return jax.lax.all_gather(part, "data", axis=dim, tiled=True)
            return jax.lax.psum(grad, "data")

        mapped = jax.shard_map(
            step,
            mesh=layout.mesh,
            in_specs=(P(), P("data")),
            out_specs=(P(), P()),
            check_vma=False,
        )
        state = layout.shardings(abstract_state(workload))
        whole = NamedSharding(layout.mesh, P())
        return jax.jit(mapped, donate_argnums=0, out_shardings=(state, whole))

    return make


def hanging(experiment, name, **options):
    """Verifies a step in which one device never comes to the all-reduce of its gradients."""
    import time

    import numpy as np

    from spmdlab.verify.run import verify_strategy

    def wait(device):
        if device == 3:
            time.sleep(1000)
        return np.float32(0)

    def make(workload, strategy, layout, seed):
        inner = by_hand("none")(workload, strategy, layout, seed)

        def late(x):
            with jax.named_scope("mine"):
                device = jax.lax.axis_index("data")
                zero = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), device)
                return jax.lax.psum(x + zero, "data")

        def step(state, batch):
            outer = jax.shard_map(
                late, mesh=layout.mesh, in_specs=P(), out_specs=P(), check_vma=False
            )
            new, metrics = inner(state, batch)
            return new, {**metrics, "loss": outer(metrics["loss"])}

        return jax.jit(step)

    return verify_strategy(experiment, name, make=make, **options)


def aborting(experiment, name, **options):
    """Stands in for `verify_strategy`."""
    import os

    os.abort()


def mismatching(experiment, name, **options):
    """Verifies a step whose gradients are reduced twice."""
    from spmdlab.verify.run import verify_strategy

    return verify_strategy(experiment, name, make=by_hand("twice"), **options)


def sleeping(experiment, name, **options):
    """Stands in for `verify_strategy`."""
    import time

    time.sleep(1000)
