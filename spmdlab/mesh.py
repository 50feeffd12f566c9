"""Meshes: a strategy's axes laid over a target's devices, so that the busiest stay close."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from spmdlab.errors import ShardingError
from spmdlab.hardware.topology import Placement, Topology
from spmdlab.strategies.base import Parallelism, Rules, SequenceSplit
from spmdlab.strategies.product import Strategy, as_strategy
from spmdlab.strategies.resolve import partition_spec
from spmdlab.targets import Target, devices, slice_index

Constrain = Callable[[jax.Array, Sequence[str | None]], jax.Array]
"""Pins an activation to where the rules want it; the second argument names its dims."""


def build_mesh(strategy: Strategy | Parallelism, target: Target) -> Mesh:
    """Lays a strategy's mesh axes over a target's devices.

    On a TPU slice the axes follow the torus, as `mesh_utils.create_device_mesh` finds best;
    an axis that fills no whole torus dims splits one.  Over several slices the outermost axes
    go over DCN.  CPU devices are taken in order.  All axes are of type Auto: shardings come
    from constraints.

    Raises:
        ShardingError: The sizes do not multiply up to the devices, or the outermost axes
            cannot be cut along the slices.
        TargetError: The devices cannot be had (see `spmdlab.targets.devices`).
    """
    axes = as_strategy(strategy).mesh_axes
    topology = target.topology
    if math.prod(axes.values()) != topology.num_devices:
        raise ShardingError(_size_message(axes, target.text, topology.num_devices))
    over_dcn = dcn_sizes(axes, topology)
    found = devices(target)
    sizes = tuple(axes.values())
    if topology.kind == "cpu":
        grid = np.array(found, dtype=object).reshape(sizes)
    else:
        within = tuple(size // n for size, n in zip(sizes, over_dcn, strict=True))
        grid = _torus_grid(within, over_dcn, found, f"{_text(axes)} over {topology.text}")
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def dcn_sizes(axes: Mapping[str, int], topology: Topology) -> tuple[int, ...]:
    """How many ways each axis, outermost first, is cut along the slices.

    Raises:
        ShardingError: The outermost axes do not multiply up to the slices, so that an inner
            axis would cross DCN while an outer one does not.

    >>> from spmdlab.hardware.topology import parse_topology
    >>> dcn_sizes({"data": 2, "fsdp": 64, "tensor": 2}, parse_topology("4*v5e:8x8"))
    (2, 2, 1)
    """
    left = topology.num_slices
    found = []
    for axis, size in axes.items():
        if left % size == 0:
            found.append(size)
            left //= size
        elif size % left == 0:
            found.append(left)
            left = 1
        else:
            raise ShardingError(
                f"Mesh ({_text(axes)}) on {topology.text}: the outermost axes go over the slices, "
                f"but {axis}={size} neither divides nor is a multiple of the {left} slices left to "
                f"split; make {axis} a divisor or a multiple of {left}."
            )
    return tuple(found)


def _torus_grid(
    within: tuple[int, ...], over_dcn: tuple[int, ...], found: Sequence[jax.Device], what: str
) -> np.ndarray:
    """Devices shaped like the mesh.

    Splitting torus dims is only a last resort of JAX's: wherever whole dims will do, the mesh
    is the same as without it.
    """
    try:
        if math.prod(over_dcn) == 1:
            return mesh_utils.create_device_mesh(
                within, devices=found, allow_split_physical_axes=True
            )
        return mesh_utils.create_hybrid_device_mesh(
            within,
            over_dcn,
            devices=found,
            process_is_granule=found[0].platform != "tpu",
            allow_split_physical_axes=True,
        )
    except NotImplementedError as error:
        reason = " ".join(str(error).split())
        raise ShardingError(f"Mesh ({what}): JAX finds no placement: {reason}") from error


def placement(mesh: Mesh, target: Target) -> Placement:
    """Where each position of a mesh sits on its target."""
    topology = target.topology
    flat = list(mesh.devices.flat)
    axes = tuple((str(axis), size) for axis, size in mesh.shape.items())
    if topology.kind == "tpu":
        rank = len(topology.shape)
        # Local devices may be a part of a larger slice that does not begin at its corner.
        corner = [min(d.coords[i] for d in flat) for i in range(rank)]
        coords = [tuple(d.coords[i] - corner[i] for i in range(rank)) for d in flat]
        slices = sorted({slice_index(device) for device in flat})
        return Placement(
            axes=axes,
            coords=tuple(coords),
            core=tuple(device.core_on_chip for device in flat),
            slice_index=tuple(slices.index(slice_index(device)) for device in flat),
            topology=topology,
        )
    per_node = topology.shape[0]
    ordered = sorted(flat, key=lambda device: (device.process_index, device.id))
    place = {device: i for i, device in enumerate(ordered)}
    return Placement(
        axes=axes,
        coords=tuple((place[device] % per_node,) for device in flat),
        core=(0,) * len(flat),
        slice_index=tuple(place[device] // per_node for device in flat),
        topology=topology,
    )


def constrainer(mesh: Mesh, rules: Rules) -> Constrain:
    """Returns the function models call on every activation.

    It resolves the activation's dims strictly, also on a mesh of one device, where it then
    returns the activation as it is.

    Raises (the function, while tracing):
        ShardingError: See `spmdlab.strategies.resolve.partition_spec`.
    """
    mesh_shape = {str(axis): size for axis, size in mesh.shape.items()}

    def constrain(x: jax.Array, logical_axes: Sequence[str | None]) -> jax.Array:
        name = f"activation ({', '.join(map(str, logical_axes))})"
        spec = partition_spec(name, x.shape, logical_axes, rules, mesh_shape)
        if mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(_current(mesh), spec))

    return constrain


def _current(mesh: Mesh) -> Mesh | AbstractMesh:
    """The mesh as the code being traced sees it: some axes are manual inside a pipeline."""
    context = jax.sharding.get_abstract_mesh()
    return context if context.manual_axes else mesh


@dataclasses.dataclass(frozen=True, eq=False)
class MeshShards:
    """Runs functions on each device's own part of arrays (see `spmdlab.models.weights.Shards`)."""

    mesh: Mesh
    rules: Rules
    sequence_split: SequenceSplit | None = None

    def ways(self, axis: str) -> int:
        """Parts that the dims of a logical axis are split into."""
        return math.prod(self.mesh.shape[mesh_axis] for mesh_axis in self.rules[axis])

    def locally(
        self,
        function: Callable[..., Any],
        axes_in: Sequence[Sequence[str | None]],
        axes_out: tuple[str | None, ...] | list[tuple[str | None, ...]],
        *,
        checked: bool = True,
    ) -> Callable[..., Any]:
        """Returns ``function`` run on each device's parts; see `spmdlab.models.weights.Shards`.

        All mesh axes are manual inside, so what differs between devices differs by their parts
        alone.  Within a function that is manual over some axes already (a pipeline's), those
        stay as they are.

        Raises (the function returned, while tracing):
            ShardingError: A dim does not divide.
        """
        if self.mesh.size == 1:
            return function
        mesh_shape = {str(axis): size for axis, size in self.mesh.shape.items()}
        around = jax.sharding.get_abstract_mesh()
        manual = {str(axis) for axis in around.manual_axes}

        def spec(axes: Sequence[str | None]) -> PartitionSpec:
            mesh_axes = [self.rules[axis] if axis else () for axis in axes]
            free = [tuple(m for m in found if m not in manual) for found in mesh_axes]
            return PartitionSpec(*(found or None for found in free))

        several = isinstance(axes_out, list)
        on_parts = functools.partial(
            jax.shard_map,
            mesh=around if manual else self.mesh,
            axis_names=set(mesh_shape) - manual,
            check_vma=checked,
        )
        specs_in = tuple(spec(axes) for axes in axes_in)
        specs_out = tuple(map(spec, axes_out)) if several else spec(axes_out)
        if manual:
            # Where nothing is proven, no gradient is summed over an axis that its array lacks.
            assert checked or len({_mesh_axes(spec) for spec in (*specs_in, specs_out)}) == 1
            mapped = _within(function, on_parts, specs_in, specs_out, checked=checked)
        else:
            mapped = on_parts(function, in_specs=specs_in, out_specs=specs_out)

        def run(*arrays: jax.Array) -> Any:
            for array, axes in zip(arrays, axes_in, strict=True):
                partition_spec(f"{tuple(axes)}", array.shape, axes, self.rules, mesh_shape)
            return mapped(*arrays)

        return run

    def manually(
        self, axis: str, function: Callable[..., Any], specs_in: Any, specs_out: Any
    ) -> Callable[..., Any]:
        """Returns ``function`` run on each position of one mesh axis; the others stay automatic.

        Args:
            axis: A mesh axis.
            function: May name ``axis`` in JAX's collectives.
            specs_in: Partition specs of the arguments, which name no other axis.
            specs_out: The same for the results.
        """
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=specs_in, out_specs=specs_out, axis_names={axis}
        )


def _within(
    function: Callable[..., Any],
    on_parts: Callable[..., Callable[..., Any]],
    specs_in: tuple[PartitionSpec, ...],
    specs_out: PartitionSpec | tuple[PartitionSpec, ...],
    *,
    checked: bool,
) -> Callable[..., Any]:
    """Returns ``function`` on each device's parts, inside one that is manual over other axes.

    JAX leaves two things to us there.  What it saves from a region, for its backward pass or for
    a loop's next turn, it lays out over the axes around as well, which does not lower: so the
    backward pass is a region of its own that begins with the arguments, and `jax.checkpoint`
    keeps constants in.  And unless it proves over which axes results vary, they lose the axes
    around: left so, a cotangent would be summed over these.
    """
    mapped = on_parts(jax.checkpoint(function), in_specs=specs_in, out_specs=specs_out)

    def pull(arrays: tuple[jax.Array, ...], cotangent: Any) -> tuple[jax.Array, ...]:
        if not checked:
            # Results of operations lose their type here, arguments do not, and a backward pass
            # may not mix the two: so these become results.
            arrays, cotangent = jax.tree.map(lambda x: x * 1, (arrays, cotangent))
        return jax.vjp(function, *arrays)[1](cotangent)

    @jax.custom_vjp
    def run(*arrays: jax.Array) -> Any:
        axes = frozenset[str]().union(*(_varying(array) for array in arrays))
        return jax.tree.map(lambda x: _vary_over(axes, x), mapped(*arrays))

    def forward(*arrays: jax.Array) -> tuple[Any, tuple[jax.Array, ...]]:
        return run(*arrays), arrays

    def backward(arrays: tuple[jax.Array, ...], cotangent: Any) -> tuple[jax.Array, ...]:
        mapped_back = on_parts(
            jax.checkpoint(pull), in_specs=(specs_in, specs_out), out_specs=specs_in
        )
        found = mapped_back(arrays, cotangent)
        return tuple(_vary_over(_varying(a), x) for a, x in zip(arrays, found, strict=True))

    run.defvjp(forward, backward)
    return run


def _mesh_axes(spec: PartitionSpec) -> frozenset[str]:
    return frozenset[str]().union(*(dim for dim in spec if dim))


def _varying(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def _vary_over(axes: frozenset[str], x: jax.Array) -> jax.Array:
    missing = tuple(sorted(axes - _varying(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _text(axes: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in axes.items())


def _size_message(axes: Mapping[str, int], target: str, wanted: int) -> str:
    """Both numbers, and per axis the size that would make them equal."""
    size = math.prod(axes.values())
    fits = []
    for axis, ways in axes.items():
        others = size // ways
        if wanted % others == 0:
            fits.append(f"{axis}={wanted // others}")
    works = (
        f"with the other axes as they are, {' or '.join(fits)} would fit"
        if fits
        else f"the sizes must multiply up to {wanted}"
    )
    return f"Mesh ({_text(axes)}) needs {size} devices, and {target} has {wanted}; {works}."
