"""What one device computes: gradients without any layout, and the optimizer's answer to them."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmdlab.train.optimizer import optimizer
from spmdlab.train.state import init_state, paths
from spmdlab.train.step import loss_and_grads
from spmdlab.workload import Workload

Tree = Any
"""Nested dicts of arrays."""


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """The plainest program: nothing recomputed, nothing cut."""

    remat: str = "none"
    accumulate: int = 1
    pipeline: None = None


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


def oracle_of(workload: Workload, accumulate: int, seed: int) -> "Oracle":
    """Returns an oracle; the same one, compiled already, for the same question."""
    parts = accumulate if workload.model.dropout else 1
    key = repr((workload, parts, seed))
    if key not in _ORACLES:
        _ORACLES[key] = Oracle(workload, parts, seed)
    return _ORACLES[key]


class Oracle:
    """One device's answers for a workload.

    With dropout the masks depend on how the batch is cut into microbatches, each of which has
    a key of its own; then, and only then, the oracle cuts it likewise: row ``r`` belongs to
    microbatch ``r % accumulate``.  It adds the parts up by itself.
    """

    def __init__(self, workload: Workload, parts: int, seed: int) -> None:
        self._workload = workload
        self._parts = parts
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
        if self._parts == 1:
            found = loss_and_grads(self._workload, _Recipe(), params, batch, dropout_key=key)
            return found.loss, found.grads
        keys = jax.random.split(key, self._parts)
        total = jnp.sum(batch["weights"])
        parts = []
        for part in range(self._parts):
            rows = {name: array[part :: self._parts] for name, array in batch.items()}
            found = loss_and_grads(self._workload, _Recipe(), params, rows, dropout_key=keys[part])
            share = found.tokens / total
            parts.append(jax.tree.map(lambda x, s=share: x * s, (found.loss, found.grads)))
        return functools.reduce(functools.partial(jax.tree.map, jnp.add), parts)

    def _optimize(self, state: Tree, grads: Tree) -> Tree:
        transformation = optimizer(self._workload.optimizer, self._workload.model)
        updates, moments = transformation.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"step": state["step"] + 1, "params": params, "optimizer": moments}
