"""The training state and the batch: abstract, described by logical axes, and made.

A state is ``{"step": int32[], "params": {...}, "optimizer": {...}}``.
"""

from typing import Any

import jax
import jax.numpy as jnp

from spmdlab.models.params import init_params, param_axes
from spmdlab.strategies.plan import ArrayAxes
from spmdlab.train.optimizer import optimizer
from spmdlab.workload import Workload

State = dict[str, Any]
BATCH_AXES = ("act_batch", "act_len")
_BATCH_DTYPES = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}


def _init(workload: Workload, key: jax.Array) -> State:
    params = init_params(workload.model, key)
    return {
        "step": jnp.zeros((), jnp.int32),
        "params": params,
        "optimizer": optimizer(workload.optimizer, workload.model).init(params),
    }


def init_state(workload: Workload, key: jax.Array, shardings: Any = None) -> State:
    """Returns a fresh state, each array created in its shards, never whole on one device.

    Args:
        workload: What is trained.
        key: Decides the values, which are the same to the bit for any ``shardings``.
        shardings: A tree of shardings like the state (see `by_path`), or None for one
            device.
    """
    return jax.jit(lambda key: _init(workload, key), out_shardings=shardings)(key)


def abstract_state(workload: Workload) -> State:
    """Returns the state as `jax.ShapeDtypeStruct`s.  Uses no memory."""
    return jax.eval_shape(lambda key: _init(workload, key), jax.random.key(0))


def abstract_batch(workload: Workload, num_devices: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the global batch of one step as `jax.ShapeDtypeStruct`s."""
    shape = (workload.global_batch(num_devices), workload.batch.seq_len)
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in _BATCH_DTYPES.items()}


def paths(tree: Any, prefix: str = "") -> Any:
    """Returns a tree like ``tree`` with each leaf's dotted path, after ``prefix``."""

    def name(path: tuple[Any, ...], leaf: Any) -> str:
        del leaf
        dotted = jax.tree_util.keystr(path, simple=True, separator=".")
        return f"{prefix}.{dotted}" if prefix else dotted

    return jax.tree_util.tree_map_with_path(name, tree)


def by_path(tree: Any, values: Any, prefix: str = "") -> Any:
    """Returns a tree like ``tree`` with ``values[path]`` at each leaf.

    It turns a plan's specs, or shardings, by path into the tree that ``jax.jit`` wants.
    """
    return jax.tree.map(values.__getitem__, paths(tree, prefix))


def state_arrays(workload: Workload) -> list[ArrayAxes]:
    """Returns path, shape, dtype and logical axes of every array in the state.

    An array of the optimizer has its parameter's axes, so it can be laid out like it;
    counters have none.
    """
    state = abstract_state(workload)
    is_axes = lambda node: isinstance(node, tuple)  # noqa: E731
    axes_of = dict(
        zip(
            jax.tree.leaves(paths(state["params"])),
            jax.tree.leaves(param_axes(workload.model), is_leaf=is_axes),
            strict=True,
        )
    )
    arrays = []
    for path, leaf in zip(jax.tree.leaves(paths(state)), jax.tree.leaves(state), strict=True):
        role, _, rest = path.partition(".")
        if role == "optimizer" and leaf.ndim:
            rest = rest.split(".", 2)[2]  # behind the transformation's and the moment's name
        arrays.append(
            ArrayAxes(
                path=path,
                shape=leaf.shape,
                dtype=str(leaf.dtype),
                logical_axes=axes_of[rest] if leaf.ndim else (),
                role={"params": "param"}.get(role, role),
            )
        )
    return arrays


def batch_arrays(workload: Workload, num_devices: int) -> list[ArrayAxes]:
    """Returns path (``batch.tokens``), shape, dtype and logical axes of the batch's arrays."""
    return [
        ArrayAxes(
            path=f"batch.{name}",
            shape=leaf.shape,
            dtype=str(leaf.dtype),
            logical_axes=BATCH_AXES,
            role="batch",
        )
        for name, leaf in abstract_batch(workload, num_devices).items()
    ]
