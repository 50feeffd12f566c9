"""How the devices of a target are wired, and where each position of a mesh sits on them.

A TPU slice is a torus of chips joined by ICI; several slices are joined by DCN.  A GPU node
is described in the same terms: its devices are one dim without wrap, and a node is a slice.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Literal

from spmdlab.errors import ConfigError, ShardingError, TargetError

FLAT_SLICES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
"""Slices of v5e and v6e, as sold: https://cloud.google.com/tpu/docs/supported-versions."""

SMALL_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
"""Slices of v4, v5p and tpu7x below 4x4x4; above it all sizes are multiples of 4."""

MAX_CHIPS = {"v4": 4096, "v5p": 6144, "tpu7x": 9216}
"""Largest slice of one job: a v4 pod; https://docs.cloud.google.com/tpu/docs/v5p, 16x16x24; a
tpu7x pod, https://docs.cloud.google.com/tpu/docs/tpu7x."""

MAX_CPU_DEVICES = 1024
"""Emulated devices share one machine: more take minutes and gigabytes to start."""

TPU_CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
GPU_CHIPS = ("h100", "h200", "b200")

_FORMS = "cpu:8, local, v5e:4x8, v6e:16x16, v4:4x4x4, v5p:8x8x8, tpu7x:4x4x4, 2*v5e:16x16, h100:2x8"
_TEXT = re.compile(r"(?:(\d+)\*)?([A-Za-z]\w*):(\d+(?:x\d+)*)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The devices of a target and their wiring."""

    kind: Literal["tpu", "gpu", "cpu"]
    chip: str
    """A key of `spmdlab.hardware.chips.CHIPS`."""
    shape: tuple[int, ...]
    """Chips per torus dim of one slice; of a GPU node, its devices; of cpu:N, (N,)."""
    num_slices: int = 1
    """Slices joined by DCN; of GPUs, nodes."""
    wrap: tuple[bool, ...] = ()
    """Per dim of ``shape``: whether a link closes it into a ring."""
    devices_per_chip: int = 1

    @property
    def num_devices(self) -> int:
        """JAX devices over all slices."""
        return self.num_slices * math.prod(self.shape) * self.devices_per_chip

    @property
    def text(self) -> str:
        """What `parse_topology` accepts."""
        if self.kind == "gpu":
            return f"{self.chip}:{self.num_slices}x{self.shape[0]}"
        slices = f"{self.num_slices}*" if self.num_slices > 1 else ""
        return f"{slices}{self.chip}:{'x'.join(map(str, self.shape))}"


def torus(chip: str, shape: tuple[int, ...], num_slices: int = 1) -> Topology:
    """The topology of TPU slices of any shape, sold or not, with the links a real one has.

    Wrap links: on v5e and v6e along sides of 16; on v4, v5p and tpu7x along all sides when
    each is a multiple of 4 (https://docs.cloud.google.com/tpu/docs/v5p: slices from 4x4x4 on
    are full tori).  The twisted tori sold for some shapes are not modelled.

    v4 is taken in its megacore form, one device per chip; tpu7x has two.
    """
    if chip in ("v5e", "v6e"):
        wrap = tuple(size == 16 for size in shape)
    else:
        wrap = (all(size % 4 == 0 for size in shape),) * len(shape)
    return Topology(
        kind="tpu",
        chip=chip,
        shape=shape,
        num_slices=num_slices,
        wrap=wrap,
        devices_per_chip=2 if chip == "tpu7x" else 1,
    )


def parse_topology(text: str) -> Topology:
    """Reads ``cpu:N``, ``CHIP:AxB[xC]``, ``SLICES*CHIP:...`` or ``GPU:NODESxGPUS``.

    Raises:
        TargetError: The text has another form, or nobody sells such a slice.

    >>> parse_topology("2*v5e:16x16").num_devices
    512
    >>> parse_topology("v6e:8x16").wrap
    (False, True)
    """
    found = _TEXT.fullmatch(text.strip())
    if found is None:
        raise TargetError(f"Target {text!r} has no form we know.  Examples: {_FORMS}.")
    slices, chip = int(found[1] or 1), found[2]
    shape = tuple(int(size) for size in found[3].split("x"))
    if slices < 1 or min(shape) < 1:
        raise TargetError(f"Target {text!r}: all counts must be at least 1.")
    if chip in TPU_CHIPS:
        return _tpu(text, chip, shape, slices)
    if found[1] and chip in ("cpu", *GPU_CHIPS):
        raise TargetError(
            f"Target {text!r}: only TPU slices are multiplied; GPU nodes are the first number of "
            "h100:2x8, and emulated devices have no slices."
        )
    if chip == "cpu":
        if len(shape) != 1:
            raise TargetError(f"Target {text!r}: write cpu:{math.prod(shape)}.")
        if shape[0] > MAX_CPU_DEVICES:
            raise TargetError(
                f"Target {text!r}: at most {MAX_CPU_DEVICES} devices can be emulated here; for "
                "more, name a TPU slice."
            )
        return Topology(kind="cpu", chip="cpu", shape=shape, wrap=(False,))
    if chip in GPU_CHIPS:
        return _gpu(text, chip, shape)
    near = {"v5": "v5p", "v7x": "tpu7x", "v7": "tpu7x", "v5litepod": "v5e"}.get(chip)
    hint = f"  Did you mean {near}:{found[3]}?" if near else ""
    known = ", ".join(("cpu", *TPU_CHIPS, *GPU_CHIPS))
    raise TargetError(f"Target {text!r}: unknown chip {chip!r}.{hint}  Known: {known}.")


def _tpu(text: str, chip: str, shape: tuple[int, ...], slices: int) -> Topology:
    if not _is_sold(chip, shape):
        raise TargetError(f"Target {text!r}: no such slice of {chip}.  {_advice(chip, shape)}")
    return torus(chip, shape, slices)


def _is_sold(chip: str, shape: tuple[int, ...]) -> bool:
    """Whether Google sells the slice.

    libtpu describes many more (any sides that are multiples of 2), but a prediction for a slice
    that cannot be booked helps nobody.
    """
    if chip in ("v5e", "v6e"):
        return shape in FLAT_SLICES
    if shape in SMALL_CUBES:
        return True
    cube = len(shape) == 3 and all(size % 4 == 0 for size in shape)
    return cube and tuple(sorted(shape)) == shape and math.prod(shape) <= MAX_CHIPS[chip]


def _advice(chip: str, shape: tuple[int, ...]) -> str:
    """What would work instead, nearest number of chips first."""
    if _is_sold(chip, ordered := tuple(sorted(shape))):
        return f"Sizes go in ascending order: {chip}:{'x'.join(map(str, ordered))}."
    sold = FLAT_SLICES if chip in ("v5e", "v6e") else tuple(_cubes(chip))
    wanted = math.prod(shape)
    near = sorted(sold, key=lambda s: (abs(math.log(math.prod(s) / wanted)), max(s)))
    rule = (
        ""
        if chip in ("v5e", "v6e")
        else f"  Above 2x4x4, sizes are multiples of 4, ascending, up to {MAX_CHIPS[chip]} chips."
    )
    legal = ", ".join(f"{chip}:{'x'.join(map(str, s))}" for s in near[:6])
    return f"Legal, nearest first: {legal}.{rule}"


def _cubes(chip: str) -> Iterator[tuple[int, ...]]:
    """Every slice of a 3D chip that is sold."""
    yield from SMALL_CUBES
    for shape in itertools.combinations_with_replacement(range(4, 29, 4), 3):
        if _is_sold(chip, shape):
            yield shape


def _gpu(text: str, chip: str, shape: tuple[int, ...]) -> Topology:
    if len(shape) != 2 or shape[1] not in (1, 2, 4, 8):
        raise TargetError(
            f"Target {text!r}: write NODESxGPUS with 1, 2, 4 or 8 GPUs in a node: "
            f"{chip}:1x8, {chip}:2x8, {chip}:16x8."
        )
    nodes, gpus = shape
    return Topology(kind="gpu", chip=chip, shape=(gpus,), num_slices=nodes, wrap=(False,))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where each position of a mesh sits.  Positions count ``mesh.devices.flat``.

    Collectives name positions, so this is what turns a replica group into links.
    """

    axes: tuple[tuple[str, int], ...]
    """Mesh axes and their sizes, outermost first."""
    coords: tuple[tuple[int, ...], ...]
    """Per position: the chip's place in its slice, one number per dim of ``topology.shape``."""
    core: tuple[int, ...]
    """Per position: which device of its chip."""
    slice_index: tuple[int, ...]
    """Per position: which slice (of GPUs: node)."""
    topology: Topology

    def __post_init__(self) -> None:
        size = math.prod(size for _, size in self.axes)
        found = {size, len(self.coords), len(self.core), len(self.slice_index)}
        if found != {self.topology.num_devices}:
            raise ShardingError(
                f"A placement on {self.topology.text} needs {self.topology.num_devices} positions; "
                f"the mesh has {size}, coords {len(self.coords)}, core {len(self.core)}, "
                f"slice_index {len(self.slice_index)}."
            )

    def axis_sizes(self) -> dict[str, int]:
        """Mesh axis -> its size, outermost first."""
        return dict(self.axes)

    def one_slice(self) -> "Placement":
        """The part of the mesh on the first slice, its axes as long as they are there."""
        members = [p for p, index in enumerate(self.slice_index) if index == 0]
        sizes = [size for _, size in self.axes]
        extents = [
            len({p // math.prod(sizes[axis + 1 :]) % size for p in members})
            for axis, size in enumerate(sizes)
        ]
        return Placement(
            axes=tuple((name, n) for (name, _), n in zip(self.axes, extents, strict=True)),
            coords=tuple(self.coords[p] for p in members),
            core=tuple(self.core[p] for p in members),
            slice_index=(0,) * len(members),
            topology=dataclasses.replace(self.topology, num_slices=1),
        )

    def axes_between_slices(self) -> tuple[str, ...]:
        """The mesh axes along which the slice changes."""
        within = dict(self.one_slice().axes)
        return tuple(name for name, size in self.axes if within[name] < size)


def row_major_placement(topology: Topology, axes: Mapping[str, int]) -> Placement:
    """Lays mesh axes onto a topology in order, without jax.

    Assumes that position ``p`` of the mesh is the ``p``-th device when slices are counted
    first, then torus dims in order, then the devices of a chip: the innermost mesh axis runs
    along the last torus dim, and an axis longer or shorter than a dim spans or splits it.  A
    program compiled by us has its real placement, see `spmdlab.mesh.placement`; this one is
    for somebody else's HLO text.

    Raises:
        ShardingError: The axes' sizes do not multiply up to the topology's devices.

    >>> row_major_placement(parse_topology("v5e:2x4"), {"data": 2, "tensor": 4}).coords[:5]
    ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0))
    """
    if (size := math.prod(axes.values())) != topology.num_devices:
        sizes = " ".join(f"{axis}={ways}" for axis, ways in axes.items()) or "no axes"
        raise ShardingError(
            f"Mesh ({sizes}) has {size} positions; {topology.text} has "
            f"{topology.num_devices} devices."
        )
    counts = (topology.num_slices, *topology.shape, topology.devices_per_chip)
    places = list(itertools.product(*map(range, counts)))
    return Placement(
        axes=tuple(axes.items()),
        coords=tuple(place[1:-1] for place in places),
        core=tuple(place[-1] for place in places),
        slice_index=tuple(place[0] for place in places),
        topology=topology,
    )


def axes_from_text(text: str) -> dict[str, int]:
    """Reads mesh axes and sizes, outermost first.

    Raises:
        ConfigError: A word is not of the form ``axis=size``, or an axis is there twice.

    >>> axes_from_text("data=16 fsdp=16")
    {'data': 16, 'fsdp': 16}
    """
    axes: dict[str, int] = {}
    for word in text.replace(",", " ").split():
        name, _, size = word.partition("=")
        if not name.isidentifier() or not size.isdecimal() or not 0 < int(size[:9]) < 10**8:
            raise ConfigError(f"mesh {text!r}: {word!r} is not of the form axis=size (fsdp=16).")
        if name in axes:
            raise ConfigError(f"mesh {text!r}: axis {name!r} is there twice.")
        axes[name] = int(size)
    if not axes:
        raise ConfigError(f"mesh {text!r} names no axis; write 'data=16 fsdp=16'.")
    return axes
