"""Compiles one optimizer step of a workload under a strategy, for a target that need not exist.

Nothing is allocated: the step is lowered from shapes and shardings.  What comes out is text and
numbers; the executable is dropped.
"""

import dataclasses
import re
import time
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdlab.cost.memory import CompiledMemory
from spmdlab.errors import CompileError, ConfigError, DoesNotFit, SpmdlabError
from spmdlab.hardware.topology import Placement
from spmdlab.mesh import MeshShards, build_mesh, constrainer, placement
from spmdlab.strategies.plan import ShardingPlan, plan
from spmdlab.strategies.product import Strategy
from spmdlab.targets import Target
from spmdlab.train.state import (
    abstract_batch,
    abstract_state,
    batch_arrays,
    by_path,
    state_arrays,
)
from spmdlab.train.step import make_step
from spmdlab.workload import Workload

RELAYS = ("spmdlab/mesh.py", "spmdlab/models/weights.py", "spmdlab/compile.py")
"""Files of ours that lay an array out on behalf of the model's line that asked for it."""

_NEEDED = re.compile(
    r"\((\d+(?:\.\d+)?)([KMGT]?)\)?[^()]*exceeds[^()]*available[^()]*\((\d+(?:\.\d+)?)([KMGT]?)\)"
)
_USED = re.compile(r"Used (\d+(?:\.\d+)?)([KMGT]?) of (\d+(?:\.\d+)?)([KMGT]?) hbm")
_NO_OPTION = re.compile(r"No such compile option: '([^']*)'")
_UNIT = {"": 1.0, "K": 2.0**10, "M": 2.0**20, "G": 2.0**30, "T": 2.0**40}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """One compiled optimizer step.  Sizes are per device."""

    hlo_text: str
    """Optimised and scheduled."""
    memory: CompiledMemory
    argument_bytes: Mapping[str, float]
    """params, optimizer, batch -> bytes of the arrays, from the sharding plan."""
    xla_flops: float | None
    """XLA's own total, which counts each loop body once."""
    placement: Placement
    compile_s: float
    """Wall time of lowering and compiling."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A workload laid out on a mesh: what is needed to run or to compile its step."""

    mesh: Mesh
    plan: ShardingPlan

    def sharding(self, path: str) -> NamedSharding:
        """The sharding of one array of the state or the batch."""
        return NamedSharding(self.mesh, self.plan.specs[path])

    def shardings(self, tree: Any, prefix: str = "") -> Any:
        """A tree of shardings like ``tree``, whose paths start with ``prefix``."""
        known = {path: self.sharding(path) for path in self.plan.specs}
        return by_path(tree, known, prefix)


def lay_out(workload: Workload, strategy: Strategy, target: Target) -> Layout:
    """Builds the mesh and the plan.

    Raises:
        ShardingError: An array cannot be laid out, or the mesh does not match the target.
        TargetError: The target's devices cannot be had.
    """
    mesh = build_mesh(strategy, target)
    arrays = [*state_arrays(workload), *batch_arrays(workload, strategy.num_devices)]
    return Layout(mesh=mesh, plan=plan(arrays, strategy))


def jitted_step(workload: Workload, strategy: Strategy, layout: Layout, seed: int = 0) -> Any:
    """Returns the step under ``jax.jit``: the state is donated, its layout kept."""
    rules = strategy.rules()
    step = make_step(
        workload,
        strategy,
        constrainer(layout.mesh, rules),
        constrain_gradient=constrainer(layout.mesh, {**rules, **strategy.gradient_rules()}),
        constrain_optimizer=constrainer(layout.mesh, {**rules, **strategy.optimizer_rules()}),
        shards=MeshShards(layout.mesh, rules, strategy.sequence_split),
        seed=seed,
    )
    state = layout.shardings(abstract_state(workload))
    whole = NamedSharding(layout.mesh, PartitionSpec())
    return jax.jit(step, donate_argnums=0, out_shardings=(state, whole))


def compile_step(
    workload: Workload, strategy: Strategy, target: Target, seed: int = 0
) -> CompiledStep:
    """Compiles one step.

    Raises:
        ShardingError: See `lay_out`.
        TargetError: The target's devices cannot be had.
        DoesNotFit: It needs more memory than a device has; says how much.
        CompileError: XLA refuses it, in XLA's words.
        ConfigError: A compiler option is unknown.
    """
    start = time.monotonic()
    layout = lay_out(workload, strategy, target)
    step = jitted_step(workload, strategy, layout, seed)
    state = placed(abstract_state(workload), layout)
    batch = placed(abstract_batch(workload, strategy.num_devices), layout, "batch")
    compiled = compile_lowered(step.lower(state, batch), strategy)
    compile_s = time.monotonic() - start
    sizes = layout.plan.local_bytes
    return CompiledStep(
        hlo_text=compiled.as_text(),
        memory=_memory(compiled),
        argument_bytes={
            "params": sizes["param"],
            "optimizer": sizes["optimizer"] + sizes["step"],
            "batch": sizes["batch"],
        },
        xla_flops=_xla_flops(compiled),
        placement=placement(layout.mesh, target),
        compile_s=compile_s,
    )


def compile_lowered(lowered: Any, strategy: Strategy) -> Any:
    """Returns the executable, compiled with the strategy's options.

    Raises:
        DoesNotFit, CompileError, ConfigError: As `compile_step`.
    """
    try:
        return lowered.compile(compiler_options=dict(strategy.compiler_options) or None)
    except jax.errors.JaxRuntimeError as error:
        raise _refusal(error) from error


def placed(tree: Any, layout: Layout, prefix: str = "") -> Any:
    """Returns a tree of `jax.ShapeDtypeStruct`s with their shardings; see `Layout.shardings`."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        layout.shardings(tree, prefix),
    )


def _memory(compiled: Any) -> CompiledMemory:
    stats = compiled.memory_analysis()
    if stats is None:
        raise CompileError("the compiler gives no memory analysis for this target")
    return CompiledMemory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        peak_bytes=getattr(stats, "peak_memory_in_bytes", 0),
    )


def _xla_flops(compiled: Any) -> float | None:
    analysis = compiled.cost_analysis()
    if isinstance(analysis, list):
        analysis = analysis[0] if analysis else None
    flops = (analysis or {}).get("flops", -1.0)
    return float(flops) if flops >= 0 else None


def _refusal(error: Exception) -> SpmdlabError:
    """What XLA's exception means, in one line."""
    text = " ".join(str(error).split())
    if option := _NO_OPTION.search(text):
        return ConfigError(
            f"compiler option {option[1]!r} is unknown to this compiler; see its own list of "
            "options, or leave it out"
        )
    found = _NEEDED.search(text) or _USED.search(text)
    if "RESOURCE_EXHAUSTED" in text and found:
        needed = float(found[1]) * _UNIT[found[2]]
        capacity = float(found[3]) * _UNIT[found[4]]
        over = (needed - capacity) / 2**30
        return DoesNotFit(
            f"needs {needed / 2**30:.2f} GiB per device, {over:.2f} GiB more than the "
            f"{capacity / 2**30:.2f} GiB it has",
            needed_bytes=needed,
            capacity_bytes=capacity,
        )
    if "RESOURCE_EXHAUSTED" in text:
        return DoesNotFit(f"the compiler ran out of memory: {text[:300]}")
    return CompileError(f"the compiler refused: {text[:300]}")
