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

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from spmdlab.cost.phase import TICK_SCOPE
from spmdlab.errors import ConfigError
from spmdlab.models import parts
from spmdlab.models.moe import Routing
from spmdlab.models.params import Params, param_axes
from spmdlab.models.weights import RESIDUAL, Layout
from spmdlab.pipeline.schedule import Phase, Schedule
from spmdlab.pipeline.slots import FIELDS, SHARED_FIELDS, assign_slots
from spmdlab.train.homeward import movers
from spmdlab.train.stage import STAGE, Carry, Pipe, Stages, on_stage
from spmdlab.workload import Workload

_SPLIT, _WHOLE = PartitionSpec(STAGE), PartitionSpec()
_SPLIT_TOKENS = PartitionSpec(None, STAGE)


def pipelined_loss_and_grads(
    workload: Workload,
    schedule: Schedule,
    params: Params,
    batch_M: dict[str, jax.Array],
    tokens: jax.Array,
    *,
    layout: Layout,
    stages: Stages,
    accumulate: int,
    remat: str,
    dropout_keys_M: jax.Array | None,
) -> tuple[tuple[jax.Array, Routing | None], Params]:
    """Returns the loss of a batch, its routing, and its gradients, laid out like the parameters.

    With experts the loss has their load-balance loss in it, each microbatch's and layer's own.

    Args:
        workload: What is computed.
        schedule: Who does what, when.
        params: As without a pipeline; the layers are split in order over ``stage``.
        batch_M: ``tokens``, ``targets``, ``weights``, each [M, B, T].
        tokens: What the loss is divided by.
        layout: How arrays are laid out.
        stages: Runs functions on each stage.
        accumulate: How many such batches make a step; loss and routing are shares of its.
        remat: What of a chunk's forward its backward keeps, between computing it again and
            using it.
        dropout_keys_M: A key for each microbatch; None switches dropout off.

    Raises:
        ConfigError: Layers or tokens do not divide into stages, or layers are not stacked.
    """
    check_divides(workload, schedule)
    pipe = Pipe(
        workload=workload,
        schedule=schedule,
        layout=layout,
        remat=remat,
        tokens=tokens,
        accumulate=accumulate,
        has_dropout=dropout_keys_M is not None,
    )
    layers, home = params["layers"], None
    if schedule.repeats > 1:
        away, home = movers(schedule, stages)
        layers = away(layers)
    names = parts.head_names(workload.model)
    fixed = {"layers": layers, "head": {name: params[name] for name in names}}
    if dropout_keys_M is not None:
        fixed["keys"] = jax.random.key_data(dropout_keys_M)
    slots = assign_slots(schedule)
    own = np.stack([np.array(slots.own[name], np.int32) for name in FIELDS], axis=-1)
    shared = np.stack([np.array(slots.shared[name], np.int32) for name in SHARED_FIELDS], axis=-1)
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
    loss, routing = _over_stages((carry["loss"], carry["routing"]))
    if routing is not None:
        loss += workload.model.moe.load_balance_weight * routing.load_balance
    return (loss, routing), {name: grads[name] for name in params}


def check_divides(workload: Workload, schedule: Schedule) -> None:
    """Raises ConfigError unless layers and tokens divide evenly, and layers are stacked."""
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


def _over_stages(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), tree)


def _start(
    pipe: Pipe, params: Params, shape_BT: tuple[int, ...], inputs: int, cotangents: int
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

    zero = layout.constrain(jnp.zeros((stages,), pipe.loss_dtype), ("layers",))
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
        "loss": zero,
        "routing": Routing(load_balance=zero, dropped_fraction=zero) if model.moe else None,
    }


def _tick(
    pipe: Pipe,
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
    shared = dict(zip(SHARED_FIELDS, shared_F, strict=True))

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
        functools.partial(on_stage, pipe, phase),
        (_SPLIT, _SPLIT, specs),
        _SPLIT,
    )
    return run(carry, own_SF, given), None
