"""One optimizer step.  Pure: mesh, rules and keys reach it as arguments.

Dims:  A microbatches   B batch   T sequence
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from spmdlab.errors import ConfigError
from spmdlab.lookup import pick
from spmdlab.models.loss import cross_entropy
from spmdlab.models.moe import Routing
from spmdlab.models.params import Params, param_axes, run
from spmdlab.models.remat import REMAT
from spmdlab.models.sequence import in_layout_order
from spmdlab.models.weights import Constrain, Layout, Shards, unconstrained
from spmdlab.pipeline.schedule import Schedule
from spmdlab.train.optimizer import optimizer
from spmdlab.train.pipeline import pipelined_loss_and_grads
from spmdlab.train.state import BATCH_AXES, State
from spmdlab.workload import Workload

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
Step = Callable[[State, Batch], tuple[State, Metrics]]


class Recipe(Protocol):
    """The part of a strategy that changes the program rather than the layout."""

    remat: str
    accumulate: int

    @property
    def pipeline(self) -> Schedule | None:
        """The schedule of its pipeline, if it has one."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossAndGrads:
    """What one batch says about the parameters."""

    loss: jax.Array
    """Mean over the tokens, by their weights, in nats; with experts, plus the load-balance loss
    times its weight."""

    grads: Params
    """Of the loss, in the parameters' dtype."""

    tokens: jax.Array
    """Sum of the weights."""

    routing: Routing | None
    """Mean over microbatches; None where there are no experts."""


def loss_and_grads(
    workload: Workload,
    strategy: Recipe,
    params: Params,
    batch: Batch,
    *,
    constrain: Constrain = unconstrained,
    constrain_gradient: Constrain | None = None,
    shards: Shards | None = None,
    dropout_key: jax.Array | None = None,
) -> LossAndGrads:
    """Returns the loss of a batch and its gradients, summed over microbatches.

    Args:
        workload: What is computed.
        strategy: Names the remat policy and the number of microbatches.
        params: Nested dict of arrays.
        batch: ``tokens``, ``targets``, ``weights``, each [B, T].
        constrain: Lays out an array by the logical axes of its dims.
        constrain_gradient: The same for gradients; None: like the weights.
        shards: Runs kernels on each device's own part; None: there is one device.
        dropout_key: None switches dropout off.

    Raises:
        ConfigError: The batch does not divide into microbatches, or there is no such
            remat policy.
    """
    constrain_gradient = constrain_gradient or constrain
    # Divided by the tokens of the whole batch, parts just add up: a mean of the parts'
    # means would weigh a microbatch with few tokens too much.
    layout = Layout(constrain, constrain_gradient, shards)
    with jax.named_scope("order"):
        batch = {name: in_layout_order(x, BATCH_AXES, layout) for name, x in batch.items()}
    with jax.named_scope("loss"):
        tokens = jnp.sum(batch["weights"])

    num = strategy.accumulate
    _check_cuts(batch["tokens"].shape[0], strategy, layout.ways(BATCH_AXES[0]))

    def share_of_loss(
        params: Params, part: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, Routing | None]:
        output = run(
            workload.model,
            params,
            part["tokens"],
            constrain=constrain,
            constrain_gradient=constrain_gradient,
            shards=shards,
            dropout_key=key,
            remat=strategy.remat,
            order="layout",
        )
        with jax.named_scope("loss"):
            losses_BT = cross_entropy(output.logits_BTV, part["targets"])
            loss = jnp.sum(losses_BT * part["weights"]) / tokens
            # Microbatches are equally long, and routers see every token of theirs.
            routing = jax.tree.map(lambda mean: (mean / num).astype(loss.dtype), output.routing)
            if routing is not None:
                loss += workload.model.moe.load_balance_weight * routing.load_balance
            return loss, routing

    def pipelined(part: Batch, key: jax.Array | None) -> Any:
        microbatches = strategy.pipeline.microbatches
        return pipelined_loss_and_grads(
            workload,
            strategy.pipeline,
            params,
            _microbatches(part, microbatches, constrain),
            tokens,
            layout=layout,
            stages=shards,
            accumulate=num,
            remat=strategy.remat,
            dropout_keys_M=None if key is None else jax.random.split(key, microbatches),
        )

    def part_of_it(part: Batch, key: jax.Array | None) -> Any:
        if strategy.pipeline:
            found, grads = pipelined(part, key)
        else:
            found, grads = jax.value_and_grad(share_of_loss, has_aux=True)(params, part, key)
        return found, _constrain_params(workload, grads, constrain_gradient)

    if num == 1:
        (loss, routing), grads = part_of_it(batch, dropout_key)
        return LossAndGrads(loss=loss, grads=grads, tokens=tokens, routing=routing)

    keys_A = None if dropout_key is None else jax.random.split(dropout_key, num)

    def add(total: Any, xs: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, part_of_it(*xs)), None

    zeros = _constrain_params(workload, jax.tree.map(jnp.zeros_like, params), constrain_gradient)
    with jax.named_scope("accumulate"):
        zero = jnp.zeros((), jnp.promote_types(tokens.dtype, workload.model.compute_dtype))
        routing = None
        if workload.model.moe:
            routing = Routing(load_balance=zero, dropped_fraction=zero)
        xs = (_microbatches(batch, num, constrain), keys_A)
        ((loss, routing), grads), _ = jax.lax.scan(add, ((zero, routing), zeros), xs)
        # Pinned, or the layout that the optimizer wants drifts into the loop.
        grads = _constrain_params(workload, grads, constrain_gradient)
    return LossAndGrads(loss=loss, grads=grads, tokens=tokens, routing=routing)


def make_step(
    workload: Workload,
    strategy: Recipe,
    constrain: Constrain = unconstrained,
    *,
    constrain_gradient: Constrain | None = None,
    constrain_optimizer: Constrain | None = None,
    shards: Shards | None = None,
    seed: int = 0,
) -> Step:
    """Returns one optimizer step, a pure function ``(state, batch) -> (state, metrics)``.

    Metrics are ``loss`` (nats per token), ``grad_norm`` (before clipping) and ``tokens``; of a
    mixture of experts also ``load_balance`` (whose weighted value is part of ``loss``) and
    ``dropped_fraction``, means over layers (see `spmdlab.models.moe.Routing`).

    Args:
        workload: What is computed.
        strategy: Names the remat policy and the number of microbatches.
        constrain: Lays out activations and weights by the logical axes of their dims.
        constrain_gradient: The same for gradients; None: like the weights.
        constrain_optimizer: The same for optimizer state, and so for the update; None: like
            the weights.  They differ under ZeRO-1 and ZeRO-2, where each device updates its
            share of weights that all hold.
        shards: Runs kernels on each device's own part; None: there is one device.
        seed: Of dropout; each step folds its number in.

    Raises:
        ConfigError: There is no such remat policy.
    """
    pick(REMAT, strategy.remat, "remat policy")
    constrain_optimizer = constrain_optimizer or constrain
    transformation = optimizer(workload.optimizer, workload.model)

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        key = None
        if workload.model.dropout:
            key = jax.random.fold_in(jax.random.key(seed), state["step"])
        found = loss_and_grads(
            workload,
            strategy,
            state["params"],
            batch,
            constrain=constrain,
            constrain_gradient=constrain_gradient,
            shards=shards,
            dropout_key=key,
        )
        with jax.named_scope("optimizer"):
            shares = _constrain_params(workload, state["params"], constrain_optimizer)
            grads = _constrain_params(workload, found.grads, constrain_optimizer)
            updates, moments = transformation.update(grads, state["optimizer"], shares)
            shares = optax.apply_updates(shares, updates)
            shares = _constrain_params(workload, shares, constrain_optimizer)
            params = _constrain_params(workload, shares, constrain)
            grad_norm = optax.tree.norm(grads)
        new_state = {"step": state["step"] + 1, "params": params, "optimizer": moments}
        metrics = {"loss": found.loss, "grad_norm": grad_norm, "tokens": found.tokens}
        if found.routing is not None:
            metrics |= dataclasses.asdict(found.routing)
        return new_state, metrics

    return step


def _constrain_params(workload: Workload, tree: Params, constrain: Constrain) -> Params:
    return jax.tree.map(constrain, tree, param_axes(workload.model))


def _check_cuts(num_rows: int, strategy: Recipe, ways: int) -> None:
    """Raises ConfigError unless each microbatch has equally many rows for each part of the mesh.

    What the batch itself must divide into, when nothing cuts it, the sharding plan says.
    """
    cuts = {"accumulate": strategy.accumulate}
    if strategy.pipeline:
        cuts["microbatches"] = strategy.pipeline.microbatches
    cuts = {option: num for option, num in cuts.items() if num > 1}
    unit = math.prod(cuts.values()) * ways
    if not cuts or num_rows % unit == 0:
        return
    below = num_rows - num_rows % unit
    over = f", each split {ways} ways" if ways > 1 else ""
    raise ConfigError(
        f"A batch of {num_rows} sequences does not divide into "
        f"{' x '.join(f'{option}={num}' for option, num in cuts.items())} microbatches{over}; "
        f"the nearest that do have {f'{below} and {below + unit}' if below else unit}."
    )


def _microbatches(batch: Batch, num: int, constrain: Constrain) -> Batch:
    """Returns the batch with a leading dim of microbatches, each spread over all devices.

    Row r goes to microbatch ``r % num``.  A reshape to [A, B / A] would give the first
    microbatch the rows of the first devices, and move data; this moves none.
    """

    def split(rows_BT: jax.Array) -> jax.Array:
        B, T = rows_BT.shape
        rows_BAT = constrain(
            rows_BT.reshape(B // num, num, T), (BATCH_AXES[0], None, BATCH_AXES[1])
        )
        return constrain(rows_BAT.swapaxes(0, 1), (None, *BATCH_AXES))

    return jax.tree.map(split, batch)
