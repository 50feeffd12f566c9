"""One tick of one stage of a pipeline: at most one chunk forwards, then one backwards.

All here runs inside a region that is manual over mesh axis ``stage`` alone.

Dims:  B batch   T sequence   D model   V vocabulary   L layers   S stages   F fields of a table
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from spmdlab.models import parts
from spmdlab.models.loss import cross_entropy
from spmdlab.models.moe import Routing
from spmdlab.models.params import Params
from spmdlab.models.weights import RESIDUAL, Layout
from spmdlab.pipeline.schedule import Phase, Schedule
from spmdlab.pipeline.slots import FIELDS, NONE
from spmdlab.workload import Workload

STAGE = "stage"
Carry = dict[str, Any]
"""Arrays with a leading dim of stages."""


class Stages(Protocol):
    """Runs functions on each position of one mesh axis."""

    def manually(
        self, axis: str, function: Callable[..., Any], specs_in: Any, specs_out: Any
    ) -> Callable[..., Any]:
        """See `spmdlab.mesh.MeshShards.manually`."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipe:
    """What every tick needs and none changes."""

    workload: Workload
    schedule: Schedule
    layout: Layout
    remat: str
    tokens: jax.Array
    """Of the whole batch, by their weights."""
    accumulate: int
    """Parts of the whole batch that take turns, of which this pipeline runs one."""

    has_dropout: bool

    @property
    def loss_dtype(self) -> Any:
        return jnp.promote_types(self.tokens.dtype, self.workload.model.compute_dtype)

    @property
    def chunks(self) -> int:
        return self.schedule.stages * self.schedule.repeats

    @property
    def layers_per_chunk(self) -> int:
        return self.workload.model.num_layers // self.chunks


def on_stage(
    pipe: Pipe, phase: Phase, carry_S: Carry, own_SF: jax.Array, given: dict[str, Any]
) -> Carry:
    """One tick of one stage; leading dims of stages are 1 here."""
    carry = {name: value if name == "layers" else _first(value) for name, value in carry_S.items()}
    own = dict(zip(FIELDS, own_SF[0], strict=True))
    given = {
        name: value if name in ("layers", "targets", "weights") else _varying(value)
        for name, value in given.items()
    }
    new = dict(carry)
    if phase.forward:
        new["inputs"] = _put(new["inputs"], own["receive"], carry["sent_forward"])
        new["inputs"] = _put(new["inputs"], own["inject"], given["embedded"])
    if phase.backward:
        new["cotangents"] = _put(
            new["cotangents"], own["receive_cotangent"], carry["sent_backward"]
        )
    if phase.forward:
        new["sent_forward"] = _shift(_forward(pipe, new, own, given), pipe, 1)
    if phase.backward:
        dx = _backward(pipe, phase, new, own, given)
        new["sent_backward"] = _shift(dx, pipe, -1)
    return {
        name: value if name == "layers" else jax.tree.map(lambda x: x[None], value)
        for name, value in new.items()
    }


def _forward(
    pipe: Pipe, carry: Carry, own: dict[str, jax.Array], given: dict[str, Any]
) -> jax.Array:
    x_BTD = get_slot(carry["inputs"], own["forward_slot"])
    layers = _chunk(pipe, given["layers"], own["forward_repeat"])
    keys = _keys(pipe, given, own["forward_microbatch"], own["forward_repeat"])
    with jax.named_scope("forward"):
        return _run(pipe, layers, x_BTD, keys)[0]


def _backward(
    pipe: Pipe,
    phase: Phase,
    carry: Carry,
    own: dict[str, jax.Array],
    given: dict[str, Any],
) -> jax.Array:
    """Returns the cotangent of the chunk's input; adds to the gradients and the loss in carry."""
    repeat, active = own["backward_repeat"], own["backward_slot"] != NONE
    x_BTD = get_slot(carry["inputs"], own["backward_slot"])
    layers = _chunk(pipe, given["layers"], repeat)
    keys = _keys(pipe, given, own["backward_microbatch"], repeat)
    with jax.named_scope("backward"):
        (y_BTD, balance), pull, routing = jax.vjp(
            functools.partial(_run_for_loss, pipe, keys), layers, x_BTD, has_aux=True
        )
    carry["routing"] = jax.tree.map(
        lambda total, share: total + jnp.where(active, share, 0), carry["routing"], routing
    )
    dy_BTD = get_slot(carry["cotangents"], own["cotangent_slot"])
    if phase.head:
        is_last = active & (own["cotangent_slot"] == NONE)
        dy_BTD = jnp.where(is_last, _head(pipe, carry, is_last, y_BTD, given), dy_BTD)
    with jax.named_scope("backward"):
        dlayers, dx_BTD = pull((dy_BTD, jax.tree.map(jnp.ones_like, balance)))
        dx_BTD = pipe.layout.constrain(dx_BTD, RESIDUAL)
        carry["layers"] = jax.tree.map(
            functools.partial(_add_chunk, pipe, repeat, active), carry["layers"], dlayers
        )
    first_BTD = jnp.where(own["is_first"] == 1, dx_BTD, 0)
    dtable = parts.table_gradient(pipe.workload.model, first_BTD, given["looked_up"], pipe.layout)
    carry["table"] = carry["table"] + dtable
    return dx_BTD


def _head(
    pipe: Pipe, carry: Carry, is_last: jax.Array, y_BTD: jax.Array, given: dict[str, Any]
) -> jax.Array:
    """Returns the cotangent of the last chunk's output, on every stage; adds to the carry."""
    model, layout = pipe.workload.model, pipe.layout
    there = given["shared"]["head"] != NONE

    def share_of_loss(head: Params, part_BTD: jax.Array) -> jax.Array:
        logits_BTV = parts.logits(model, head, part_BTD, layout)
        with jax.named_scope("loss"):
            losses_BT = cross_entropy(logits_BTV, given["targets"])
            return jnp.sum(losses_BT * given["weights"]) / pipe.tokens

    with jax.named_scope("head_tokens"):
        part_BTD = _locally(
            layout,
            functools.partial(
                jax.lax.psum_scatter, axis_name=STAGE, scatter_dimension=1, tiled=True
            ),
            jnp.where(is_last, y_BTD, 0),
        )
    loss, (dhead, dpart_BTD) = jax.value_and_grad(share_of_loss, argnums=(0, 1))(
        given["head"], part_BTD
    )
    carry["loss"] = carry["loss"] + jnp.where(there, loss, 0)
    carry["head"] = jax.tree.map(
        lambda total, grad: total + jnp.where(there, grad, 0), carry["head"], dhead
    )
    with jax.named_scope("head_tokens"):
        gather = functools.partial(jax.lax.all_gather, axis_name=STAGE, axis=1, tiled=True)
        return layout.constrain(_locally(layout, gather, dpart_BTD), RESIDUAL)


def _locally(
    layout: Layout, collective: Callable[[jax.Array], jax.Array], x_BTD: jax.Array
) -> jax.Array:
    """Runs a collective over stages on each device's own part of the batch.

    Left automatic, the partitioner gathers the other axes first.  Sequences are whole here: the
    collective splits them, and the residual stream's may be split over another axis.
    """
    axes = ("act_batch", None, "act_embed")
    return layout.locally(collective, (axes,), axes)(x_BTD)


def _run(
    pipe: Pipe, layers: Params, x_BTD: jax.Array, keys_L: jax.Array | None
) -> tuple[jax.Array, Routing | None]:
    return parts.run_layers(pipe.workload.model, layers, x_BTD, keys_L, pipe.remat, pipe.layout)


def _run_for_loss(
    pipe: Pipe, keys_L: jax.Array | None, layers: Params, x_BTD: jax.Array
) -> tuple[tuple[jax.Array, jax.Array | None], Routing | None]:
    """Returns the chunk's output, what its load balance adds to the loss, and its routing.

    The routing is its share of the mean over all layers and microbatches of the step: chunks
    have equally many layers, and microbatches equally many tokens.
    """
    y_BTD, routing = _run(pipe, layers, x_BTD, keys_L)
    if routing is None:
        return (y_BTD, None), None
    shares = pipe.chunks * pipe.schedule.microbatches * pipe.accumulate
    routing = jax.tree.map(lambda mean: (mean / shares).astype(pipe.loss_dtype), routing)
    balance = pipe.workload.model.moe.load_balance_weight * routing.load_balance
    return (y_BTD, balance), routing


def _chunk(pipe: Pipe, layers: Params, repeat: jax.Array) -> Params:
    """One of the stage's chunks of layers."""
    if pipe.schedule.repeats == 1:
        return layers
    n = pipe.layers_per_chunk
    return jax.tree.map(lambda param: jax.lax.dynamic_slice_in_dim(param, repeat * n, n), layers)


def _add_chunk(
    pipe: Pipe, repeat: jax.Array, active: jax.Array, total: jax.Array, grad: jax.Array
) -> jax.Array:
    # Selected, not multiplied: what an idle stage computes may be no number.
    grad = jnp.where(active, grad, 0)
    if pipe.schedule.repeats == 1:
        return total + grad
    n = pipe.layers_per_chunk
    at = jax.lax.dynamic_slice_in_dim(total, repeat * n, n)
    return jax.lax.dynamic_update_slice_in_dim(total, at + grad, repeat * n, 0)


def _keys(
    pipe: Pipe, given: dict[str, Any], microbatch: jax.Array, repeat: jax.Array
) -> jax.Array | None:
    """A dropout key per layer of the chunk: those that the microbatch has without a pipeline."""
    if not pipe.has_dropout:
        return None
    data = jax.lax.dynamic_index_in_dim(given["keys"], microbatch, keepdims=False)
    keys_L = jax.random.split(jax.random.wrap_key_data(data), pipe.workload.model.num_layers)
    chunk = repeat * pipe.schedule.stages + jax.lax.axis_index(STAGE)
    n = pipe.layers_per_chunk
    return jax.lax.dynamic_slice_in_dim(keys_L, chunk * n, n)


def get_slot(slots: jax.Array, slot: jax.Array) -> jax.Array:
    """Returns what is in a slot; NONE gives what is in the first."""
    return jax.lax.dynamic_index_in_dim(slots, jnp.maximum(slot, 0), keepdims=False)


def _put(slots: jax.Array, slot: jax.Array, value: jax.Array) -> jax.Array:
    """Writes into a slot; NONE writes back what is in the first."""
    value = jnp.where(slot == NONE, get_slot(slots, slot), value)
    return jax.lax.dynamic_update_index_in_dim(slots, value, jnp.maximum(slot, 0), 0)


def _shift(x: jax.Array, pipe: Pipe, by: int) -> jax.Array:
    n = pipe.schedule.stages
    with jax.named_scope("to_the_next" if by == 1 else "to_the_one_before"):
        return jax.lax.ppermute(x, STAGE, [(i, (i + by) % n) for i in range(n)])


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _varying(tree: Any) -> Any:
    """Marks what is the same on all stages as each stage's own: nothing sums it behind our back."""
    return jax.tree.map(lambda x: jax.lax.pcast(x, (STAGE,), to="varying"), tree)
