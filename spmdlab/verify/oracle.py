"""What one device computes: gradients without any layout, and the optimizer's answer to them."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmdlab.models.config import DecoderConfig
from spmdlab.models.loss import cross_entropy
from spmdlab.models.params import run
from spmdlab.strategies.product import Strategy
from spmdlab.train.optimizer import optimizer
from spmdlab.train.state import init_state, paths
from spmdlab.workload import Workload

Tree = Any
"""Nested dicts of arrays."""


def flat(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """Returns a tree's leaves by dotted path."""
    names = jax.tree.leaves(paths(tree, prefix))
    return dict(zip(names, jax.tree.leaves(tree), strict=True))


def random_batch(workload: Workload, num_rows: int, *, seed: int, step: int) -> dict[str, Any]:
    """Returns one step's batch of random tokens.

    Rows differ in how many tokens count, each at least one, so that a mean of means goes wrong.
    """
    rng = np.random.default_rng([seed, step])
    T = workload.batch.seq_len
    tokens = rng.integers(0, workload.model.vocab_size, (num_rows, T + 1)).astype(np.int32)
    lengths = rng.integers(1, T + 1, (num_rows, 1))
    weights = (np.arange(T)[None] < lengths).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


_ORACLES: dict[str, "Oracle"] = {}


def oracle_of(workload: Workload, strategy: Strategy, seed: int) -> "Oracle":
    """Returns an oracle; the same one, compiled already, for the same question."""
    cuts: tuple[int, ...] = ()
    if _depends_on_cuts(workload.model):
        cuts += (strategy.accumulate,) if strategy.accumulate > 1 else ()
        cuts += (strategy.pipeline.microbatches,) if strategy.pipeline else ()
    key = repr((workload, cuts, seed))
    if key not in _ORACLES:
        _ORACLES[key] = Oracle(workload, cuts, seed)
    return _ORACLES[key]


def _depends_on_cuts(model: DecoderConfig) -> bool:
    """Whether microbatches change the loss: each draws its own masks, and balances its experts."""
    moe = model.moe
    balances = moe is not None and moe.load_balance_weight and moe.load_balance_over == "batch"
    return bool(model.dropout or balances)


class Oracle:
    """One device's answers for a workload.

    Some losses depend on how the batch is cut into microbatches: each has a key of its own for
    dropout, and load-balance losses are no sums over rows.  Then, and only then, the oracle cuts
    it likewise, ``cuts`` times in a row: row ``r`` belongs to part ``r % cut``.  It adds the parts
    up by itself.
    """

    def __init__(self, workload: Workload, cuts: tuple[int, ...], seed: int) -> None:
        self._workload = workload
        self._cuts = cuts
        self._seed = seed
        self._loss_and_grads = jax.jit(self._compute)
        self._update = jax.jit(self._optimize)

    @functools.cache  # noqa: B019 (an oracle lives as long as its process)
    def start(self) -> Tree:
        """Returns a fresh state."""
        return jax.device_get(init_state(self._workload, jax.random.key(self._seed)))

    def loss_and_grads(self, state: Tree, batch: Mapping[str, Any]) -> tuple[float, dict]:
        """Returns the loss and path -> gradient of a state in host memory."""
        loss, grads = self._loss_and_grads(state["params"], state["step"], dict(batch))
        return float(loss), {path: np.asarray(grad) for path, grad in flat(grads).items()}

    def updated(self, state: Tree, grads: Mapping[str, np.ndarray]) -> Tree:
        """Returns the state that the optimizer makes of these gradients."""
        leaves = [jnp.asarray(grads[path]) for path in flat(state["params"])]
        tree = jax.tree.unflatten(jax.tree.structure(state["params"]), leaves)
        return jax.device_get(self._update(state, tree))

    def row_grads(self, state: Tree, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns path -> [rows, ...]: what each row of the batch adds to the gradient.

        Loss times tokens is linear in the weights: count a row twice, and the difference is it.
        """
        weights = np.asarray(batch["weights"])
        total = weights.sum()
        _, whole = self.loss_and_grads(state, batch)
        shares: dict[str, list[np.ndarray]] = {path: [] for path in whole}
        for row, own in enumerate(weights.sum(1)):
            twice = weights.copy()
            twice[row] *= 2
            _, grads = self.loss_and_grads(state, {**batch, "weights": twice})
            for path, grad in grads.items():
                more = grad.astype(np.float64) * (total + own) / total
                shares[path].append(more - whole[path])
        return {path: np.stack(each) for path, each in shares.items()}

    def _compute(self, params: Tree, step: jax.Array, batch: Any) -> tuple[jax.Array, Tree]:
        key = None
        if self._workload.model.dropout:
            key = jax.random.fold_in(jax.random.key(self._seed), step)
        return jax.value_and_grad(self._loss)(params, key, batch)

    def _loss(self, params: Tree, key: jax.Array | None, batch: Any) -> jax.Array:
        """Tokens count equally wherever they are, and so do parts' load balances."""
        model, losses, balances = self._workload.model, [], []
        for rows, own_key in _parts(batch, key, self._cuts):
            output = run(model, params, rows["tokens"], dropout_key=own_key)
            losses_BT = cross_entropy(output.logits_BTV, rows["targets"])
            losses.append(jnp.sum(losses_BT * rows["weights"]))
            if output.routing is not None:
                balances.append(model.moe.load_balance_weight * output.routing.load_balance)
        loss = sum(losses) / jnp.sum(batch["weights"])
        return loss + sum(balances) / len(balances) if balances else loss

    def _optimize(self, state: Tree, grads: Tree) -> Tree:
        transformation = optimizer(self._workload.optimizer, self._workload.model)
        updates, moments = transformation.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"step": state["step"] + 1, "params": params, "optimizer": moments}


def _parts(
    batch: Mapping[str, Any], key: jax.Array | None, cuts: tuple[int, ...]
) -> Iterator[tuple[dict[str, Any], jax.Array | None]]:
    """The rows and the key of each microbatch, cut and cut again."""
    if not cuts:
        yield dict(batch), key
        return
    for part in range(cuts[0]):
        rows = {name: array[part :: cuts[0]] for name, array in batch.items()}
        own_key = None if key is None else jax.random.split(key, cuts[0])[part]
        yield from _parts(rows, own_key, cuts[1:])
