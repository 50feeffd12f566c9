"""A pipeline in one SPMD program: any schedule, tick by tick, its gradients worked out by hand.

Each tick is manual over mesh axis ``stage`` and nothing else, so that every other axis goes on
as without a pipeline.  A stage keeps only its chunks' inputs, in slots that the schedule assigns
ahead of time; a backward computes its chunk's forward again.

Where the model begins and ends: every stage looks the microbatch up, in step, and all but the
first drop it; so with the lookup's gradient.  That takes no longer than on one stage, and nothing
is sent.  The head and the loss would take longer: there each stage takes an equal part of the
tokens, after a reduce-scatter over ``stage``.  Their gradients add up on each stage, and are
summed over the stages once a step.

Dims:  M microbatches   B batch   T sequence   D model   S stages   K slots   R repeats
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from spmdlab.cost.phase import TICK_SCOPE
from spmdlab.errors import ConfigError
from spmdlab.models import parts
from spmdlab.models.loss import cross_entropy
from spmdlab.models.params import Params, param_axes
from spmdlab.models.weights import RESIDUAL, Layout
from spmdlab.pipeline.schedule import Phase, Schedule
from spmdlab.pipeline.slots import NONE, assign_slots, homeward_permutes
from spmdlab.workload import Workload

STAGE = "stage"

_SPLIT, _WHOLE = PartitionSpec(STAGE), PartitionSpec()
_SPLIT_TOKENS = PartitionSpec(None, STAGE)

Manually = Callable[[str, Callable[..., Any], Any, Any], Callable[..., Any]]
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
class _Pipeline:
    """What every tick needs and none changes."""

    workload: Workload
    schedule: Schedule
    layout: Layout
    remat: str
    tokens: jax.Array
    """Of the whole batch, by their weights."""
    has_dropout: bool

    @property
    def layers_per_chunk(self) -> int:
        return self.workload.model.num_layers // (self.schedule.stages * self.schedule.repeats)


def pipelined_loss_and_grads(
    workload: Workload,
    schedule: Schedule,
    params: Params,
    batch_M: dict[str, jax.Array],
    tokens: jax.Array,
    *,
    layout: Layout,
    stages: Stages,
    remat: str,
    dropout_keys_M: jax.Array | None,
) -> tuple[jax.Array, Params]:
    """Returns the loss of a batch and its gradients, shaped and laid out like the parameters.

    Args:
        workload: What is computed.
        schedule: Who does what, when.
        params: As without a pipeline; the layers are split in order over ``stage``.
        batch_M: ``tokens``, ``targets``, ``weights``, each [M, B, T].
        tokens: What the loss is divided by.
        layout: How arrays are laid out.
        stages: Runs functions on each stage.
        remat: What of a chunk's forward its backward keeps, between computing it again and
            using it.
        dropout_keys_M: A key for each microbatch; None switches dropout off.

    Raises:
        ConfigError: Layers or tokens do not divide into stages.
    """
    check_divides(workload, schedule)
    pipe = _Pipeline(
        workload=workload,
        schedule=schedule,
        layout=layout,
        remat=remat,
        tokens=tokens,
        has_dropout=dropout_keys_M is not None,
    )
    layers, home = params["layers"], None
    if schedule.repeats > 1:
        away, home = _movers(schedule, stages)
        layers = away(layers)
    names = parts.head_names(workload.model)
    fixed = {"layers": layers, "head": {name: params[name] for name in names}}
    if dropout_keys_M is not None:
        fixed["keys"] = jax.random.key_data(dropout_keys_M)
    slots = assign_slots(schedule)
    own = np.stack([np.array(slots.own[name], np.int32) for name in _OWN], axis=-1)
    shared = np.stack([np.array(slots.shared[name], np.int32) for name in _SHARED], axis=-1)
    carry = _start(pipe, params, batch_M["tokens"].shape[1:], slots.inputs, slots.cotangents)
    for phase in schedule.phases():
        tick = functools.partial(_tick, pipe, phase, stages, params, fixed, batch_M)
        rows = (own[phase.start : phase.stop], shared[phase.start : phase.stop])
        with jax.named_scope(TICK_SCOPE):
            carry, _ = jax.lax.scan(tick, carry, jax.tree.map(jnp.asarray, rows))
    grads = {name: _over_stages(grad) for name, grad in carry["head"].items()}
    table = _over_stages(carry["table"])
    table = table + grads["embed"]["table"] if "embed" in grads else table
    grads["embed"] = {"table": table}
    grads["layers"] = carry["layers"] if home is None else home(carry["layers"])
    return jnp.sum(carry["loss"]), {name: grads[name] for name in params}


def check_divides(workload: Workload, schedule: Schedule) -> None:
    """Raises ConfigError unless layers and tokens divide evenly."""
    model, stages, repeats = workload.model, schedule.stages, schedule.repeats
    if model.layers != "scanned":
        raise ConfigError(
            f"model.layers={model.layers!r}: a pipeline needs the layers stacked, layers='scanned'."
        )
    chunks = stages * repeats
    if model.num_layers % chunks:
        below = model.num_layers - model.num_layers % chunks
        fits = f"{below} or {below + chunks}" if below else str(chunks)
        times = f" with repeats={repeats}" if repeats > 1 else ""
        raise ConfigError(
            f"model.num_layers={model.num_layers} layers do not divide over {stages} stages"
            f"{times}; {fits} layers would."
        )
    if workload.batch.seq_len % stages:
        raise ConfigError(
            f"batch.seq_len={workload.batch.seq_len} must divide by the {stages} stages: each "
            "takes an equal part of a sequence through the head."
        )


_OWN = (
    "receive inject forward_slot forward_microbatch forward_repeat receive_cotangent "
    "backward_slot backward_microbatch backward_repeat cotangent_slot is_first"
).split()
_SHARED = "embed head unembed".split()


def _over_stages(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), tree)


def _start(
    pipe: _Pipeline, params: Params, shape_BT: tuple[int, ...], inputs: int, cotangents: int
) -> Carry:
    """Everything at zero, laid out as it stays."""
    model, layout, stages = pipe.workload.model, pipe.layout, pipe.schedule.stages
    gradient = layout.constrain_gradient or layout.constrain
    axes = param_axes(model)

    def stream(*slots: int) -> jax.Array:
        shape = (stages, *slots, *shape_BT, model.embed_dim)
        names = ("layers", *(None for _ in slots), *RESIDUAL)
        return layout.constrain(jnp.zeros(shape, model.compute_dtype), names)

    def on_each_stage(name: str) -> Params:
        return jax.tree.map(
            lambda param, names: gradient(
                jnp.zeros((stages, *param.shape), param.dtype), ("layers", *names)
            ),
            params[name],
            axes[name],
        )

    return {
        "inputs": stream(inputs),
        "cotangents": stream(cotangents),
        "sent_forward": stream(),
        "sent_backward": stream(),
        "layers": jax.tree.map(
            lambda param, names: gradient(jnp.zeros_like(param), names),
            params["layers"],
            axes["layers"],
        ),
        "head": {name: on_each_stage(name) for name in parts.head_names(model)},
        "table": on_each_stage("embed")["table"],
        "loss": layout.constrain(jnp.zeros((stages,), pipe.tokens.dtype), ("layers",)),
    }


def _tick(
    pipe: _Pipeline,
    phase: Phase,
    stages: Stages,
    params: Params,
    fixed: dict[str, Any],
    batch_M: dict[str, jax.Array],
    carry: Carry,
    rows: tuple[jax.Array, jax.Array],
) -> tuple[Carry, None]:
    """One tick of all stages."""
    own_SF, shared_F = rows
    shared = dict(zip(_SHARED, shared_F, strict=True))

    def microbatch(name: str, which: str) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(
            batch_M[name], jnp.maximum(shared[which], 0), keepdims=False
        )

    given: dict[str, Any] = {"shared": shared, **fixed}
    specs = {**dict.fromkeys(given, _WHOLE), "layers": _SPLIT}
    if phase.forward:
        given["embedded"] = parts.embed(
            pipe.workload.model, params, microbatch("tokens", "embed"), pipe.layout
        )
        specs["embedded"] = _WHOLE
    if phase.backward:
        given["looked_up"] = microbatch("tokens", "unembed")
        specs["looked_up"] = _WHOLE
    if phase.head:
        given["targets"] = microbatch("targets", "head")
        given["weights"] = microbatch("weights", "head")
        specs |= {"targets": _SPLIT_TOKENS, "weights": _SPLIT_TOKENS}
    run = stages.manually(
        STAGE,
        functools.partial(_on_stage, pipe, phase),
        (_SPLIT, _SPLIT, specs),
        _SPLIT,
    )
    return run(carry, own_SF, given), None


def _on_stage(
    pipe: _Pipeline, phase: Phase, carry_S: Carry, own_SF: jax.Array, given: dict[str, Any]
) -> Carry:
    """One tick of one stage; leading dims of stages are 1 here."""
    carry = {name: value if name == "layers" else _first(value) for name, value in carry_S.items()}
    own = dict(zip(_OWN, own_SF[0], strict=True))
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
    pipe: _Pipeline, carry: Carry, own: dict[str, jax.Array], given: dict[str, Any]
) -> jax.Array:
    x_BTD = _get(carry["inputs"], own["forward_slot"])
    layers = _chunk(pipe, given["layers"], own["forward_repeat"])
    keys = _keys(pipe, given, own["forward_microbatch"], own["forward_repeat"])
    with jax.named_scope("forward"):
        return _run(pipe, layers, x_BTD, keys)


def _backward(
    pipe: _Pipeline,
    phase: Phase,
    carry: Carry,
    own: dict[str, jax.Array],
    given: dict[str, Any],
) -> jax.Array:
    """Returns the cotangent of the chunk's input; adds to the gradients and the loss in carry."""
    repeat, active = own["backward_repeat"], own["backward_slot"] != NONE
    x_BTD = _get(carry["inputs"], own["backward_slot"])
    layers = _chunk(pipe, given["layers"], repeat)
    keys = _keys(pipe, given, own["backward_microbatch"], repeat)
    with jax.named_scope("backward"):
        y_BTD, pull = jax.vjp(lambda layers, x_BTD: _run(pipe, layers, x_BTD, keys), layers, x_BTD)
    dy_BTD = _get(carry["cotangents"], own["cotangent_slot"])
    if phase.head:
        is_last = active & (own["cotangent_slot"] == NONE)
        dy_BTD = jnp.where(is_last, _head(pipe, carry, is_last, y_BTD, given), dy_BTD)
    with jax.named_scope("backward"):
        dlayers, dx_BTD = pull(dy_BTD)
        dx_BTD = pipe.layout.constrain(dx_BTD, RESIDUAL)
        carry["layers"] = jax.tree.map(
            functools.partial(_add_chunk, pipe, repeat, active), carry["layers"], dlayers
        )
    first_BTD = jnp.where(own["is_first"] == 1, dx_BTD, 0)
    dtable = parts.table_gradient(pipe.workload.model, first_BTD, given["looked_up"], pipe.layout)
    carry["table"] = carry["table"] + dtable
    return dx_BTD


def _head(
    pipe: _Pipeline, carry: Carry, is_last: jax.Array, y_BTD: jax.Array, given: dict[str, Any]
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
    found = layout.locally(collective, (axes,), axes)(x_BTD)
    # What comes out does not say that it differs between stages; taken to be the same on all, its
    # cotangent would be summed over them.
    if STAGE in jax.typeof(found).manual_axis_type.varying:
        return found
    return _varying(found)


def _run(pipe: _Pipeline, layers: Params, x_BTD: jax.Array, keys_L: jax.Array | None) -> jax.Array:
    return parts.run_layers(pipe.workload.model, layers, x_BTD, keys_L, pipe.remat, pipe.layout)


def _chunk(pipe: _Pipeline, layers: Params, repeat: jax.Array) -> Params:
    """One of the stage's chunks of layers."""
    if pipe.schedule.repeats == 1:
        return layers
    n = pipe.layers_per_chunk
    return jax.tree.map(lambda param: jax.lax.dynamic_slice_in_dim(param, repeat * n, n), layers)


def _add_chunk(
    pipe: _Pipeline, repeat: jax.Array, active: jax.Array, total: jax.Array, grad: jax.Array
) -> jax.Array:
    # Selected, not multiplied: what an idle stage computes may be no number.
    grad = jnp.where(active, grad, 0)
    if pipe.schedule.repeats == 1:
        return total + grad
    n = pipe.layers_per_chunk
    at = jax.lax.dynamic_slice_in_dim(total, repeat * n, n)
    return jax.lax.dynamic_update_slice_in_dim(total, at + grad, repeat * n, 0)


def _keys(
    pipe: _Pipeline, given: dict[str, Any], microbatch: jax.Array, repeat: jax.Array
) -> jax.Array | None:
    """A dropout key per layer of the chunk: those that the microbatch has without a pipeline."""
    if not pipe.has_dropout:
        return None
    data = jax.lax.dynamic_index_in_dim(given["keys"], microbatch, keepdims=False)
    keys_L = jax.random.split(jax.random.wrap_key_data(data), pipe.workload.model.num_layers)
    chunk = repeat * pipe.schedule.stages + jax.lax.axis_index(STAGE)
    n = pipe.layers_per_chunk
    return jax.lax.dynamic_slice_in_dim(keys_L, chunk * n, n)


def _get(slots: jax.Array, slot: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(slots, jnp.maximum(slot, 0), keepdims=False)


def _put(slots: jax.Array, slot: jax.Array, value: jax.Array) -> jax.Array:
    """Writes into a slot; NONE writes back what is in the first."""
    value = jnp.where(slot == NONE, _get(slots, slot), value)
    return jax.lax.dynamic_update_index_in_dim(slots, value, jnp.maximum(slot, 0), 0)


def _shift(x: jax.Array, pipe: _Pipeline, by: int) -> jax.Array:
    n = pipe.schedule.stages
    with jax.named_scope("to_the_next" if by == 1 else "to_the_one_before"):
        return jax.lax.ppermute(x, STAGE, [(i, (i + by) % n) for i in range(n)])


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _varying(tree: Any) -> Any:
    """Marks what is the same on all stages as each stage's own: nothing sums it behind our back."""
    return jax.tree.map(lambda x: jax.lax.pcast(x, (STAGE,), to="varying"), tree)


def _movers(
    schedule: Schedule, stages: Stages
) -> tuple[Callable[[Params], Params], Callable[[Params], Params]]:
    """Functions that move the layers to where they run, and their gradients back."""
    rounds = homeward_permutes(schedule.stages, schedule.repeats)

    def move(tree: Params, *, back: bool) -> Params:
        me = jax.lax.axis_index(STAGE)

        def one(param: jax.Array) -> jax.Array:
            chunks = param.reshape(schedule.repeats, -1, *param.shape[1:])
            moved = jnp.zeros_like(chunks)
            for edges in rounds:
                ends = [(t, s, to, at) if back else (s, t, at, to) for s, t, at, to in edges]
                take = dict((source, at) for source, _, at, _ in ends)
                place = dict((target, to) for _, target, _, to in ends)
                order = range(schedule.stages)
                sent = _get(chunks, jnp.array([take[i] for i in order])[me])
                pairs = [(source, target) for source, target, _, _ in ends]
                stays = all(source == target for source, target in pairs)
                came = sent if stays else jax.lax.ppermute(sent, STAGE, pairs)
                moved = jax.lax.dynamic_update_index_in_dim(
                    moved, came, jnp.array([place[i] for i in order])[me], 0
                )
            return moved.reshape(param.shape)

        return jax.tree.map(one, tree)

    def mover(back: bool) -> Callable[[Params], Params]:
        run = stages.manually(STAGE, functools.partial(move, back=back), (_SPLIT,), _SPLIT)

        def moved(tree: Params) -> Params:
            with jax.named_scope("pipeline_layers"):
                return run(tree)

        return moved

    return mover(False), mover(True)
