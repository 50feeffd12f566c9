"""Replica groups: every printed form to lists of ids, and from ids to mesh axes.

Ids are positions in the mesh's flat device order (``mesh.devices.flat``), not device ids.
Names printed by the compiler (``axis_0``) are those of its own factorisation of the devices,
so the user's axes are always found by id algebra.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence

from spmdlab.errors import HloError

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"^\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(
    r"^(?:@\w+\s*)?mesh\[([^\]]*)\]\s*(?:,\s*)?(?:device_ids=\((.*?)\)\s*)?\{([^{}]*)\}$"
)
_MESH_AXIS = re.compile(r"'([^']+)'\s*=\s*(\d{1,7})")
_MESH_REF = re.compile(r"'([^']+)'(?::\((\d{1,7})\)(\d{1,7}))?")
_DEVICE_IDS = re.compile(r"^\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?$")
_SEND_PAIRS = re.compile(r'_xla_send_recv_source_target_pairs="?(\{[\d,{}\s]*\})')
_LIST = re.compile(r"\{([\d,\s]*)\}")
MAX_DEVICES = 1 << 17
MAX_RANK = 64


def replica_groups(attributes: Mapping[str, str], num_devices: int) -> Groups:
    """The groups of a collective; ``{}`` and a missing attribute mean one group of all.

    Raises:
        HloError: The form is unknown, or names more than ``MAX_DEVICES`` devices.
    """
    text = attributes.get("replica_groups", "{}")
    if text.startswith("mesh[") and "device_ids" in attributes and "{" not in text:
        text = f"{text}, device_ids={attributes['device_ids']}"
    return parse_groups(text.strip(), num_devices)


@functools.lru_cache(maxsize=4096)
def parse_groups(text: str, num_devices: int) -> Groups:
    """Groups from their text.

    >>> parse_groups("[2,4]<=[8]", 8)
    ((0, 1, 2, 3), (4, 5, 6, 7))
    >>> parse_groups("[4,2]<=[2,4]T(1,0)", 8)
    ((0, 4), (1, 5), (2, 6), (3, 7))
    >>> parse_groups("mesh['a'=2,'b'=4] {'b'}", 8)
    ((0, 1, 2, 3), (4, 5, 6, 7))
    >>> parse_groups("{{0,2},{1,3}}", 4)
    ((0, 2), (1, 3))
    """
    if found := _IOTA.match(text):
        shape = _ints(found[1])
        if len(shape) != 2:
            raise HloError(f"replica groups {text[:80]!r}: expected [groups,size]")
        ids = _iota(_ints(found[2]), _ints(found[3] or ""), text)
        if math.prod(shape) != len(ids):
            raise HloError(f"replica groups {text[:80]!r}: {shape[0]}x{shape[1]} is not {len(ids)}")
        return tuple(ids[g * shape[1] : (g + 1) * shape[1]] for g in range(shape[0]))
    if found := _MESH.match(text):
        return _mesh_groups(found[1], found[2], found[3], text)
    if text.startswith("{") and text.endswith("}") and not text.strip("{}, \t0123456789"):
        lists = [_ints(part) for part in _LIST.findall(text[1:-1])]
        if any(lists):
            return tuple(group for group in lists if group)
        _limit(num_devices, text)
        return (tuple(range(num_devices)),)
    raise HloError(f"replica groups {text[:80]!r}: a form not understood")


def source_target_pairs(attributes: Mapping[str, str]) -> Groups:
    """The (source, target) pairs of a permute, or of a send or recv; empty if not printed."""
    text = attributes.get("source_target_pairs", "")
    if not text:
        found = _SEND_PAIRS.search(attributes.get("frontend_attributes", ""))
        text = found[1] if found else "{}"
    pairs = tuple(_ints(part) for part in _LIST.findall(text[1:-1]))
    if any(len(pair) != 2 for pair in pairs):
        raise HloError(f"source_target_pairs {text[:80]!r}: not pairs")
    return pairs


@dataclasses.dataclass(frozen=True, slots=True)
class MeshAxes:
    """Which axes of the mesh a set of groups runs along."""

    axes: tuple[str, ...]
    """Axes whose coordinate differs inside a group, in mesh order."""
    whole: bool
    """Whether each group holds every device along these axes; False for a part of an axis."""


@functools.lru_cache(maxsize=4096)
def mesh_axes(groups: Groups, axis_sizes: tuple[tuple[str, int], ...]) -> MeshAxes:
    """Attributes groups to mesh axes by the coordinates of their members.

    Args:
        groups: Positions in the mesh's flat device order.
        axis_sizes: The mesh's axes with their sizes, outermost first.

    Raises:
        HloError: A position lies outside the mesh.

    >>> mesh_axes(((0, 2), (1, 3)), (("data", 2), ("tensor", 2)))
    MeshAxes(axes=('data',), whole=True)
    """
    total = math.prod(size for _, size in axis_sizes)
    varying: set[str] = set()
    sizes: set[int] = set()
    for group in groups:
        if max(group, default=0) >= total:
            named = " ".join(f"{name}={size}" for name, size in axis_sizes)
            raise HloError(f"replica group names device {max(group)}, the mesh {named} has {total}")
        sizes.add(len(set(group)))
        stride = total
        for name, size in axis_sizes:
            stride //= size
            if name not in varying and len({p // stride % size for p in group}) > 1:
                varying.add(name)
    axes = tuple(name for name, _ in axis_sizes if name in varying)
    span = math.prod(size for name, size in axis_sizes if name in varying)
    return MeshAxes(axes, sizes == {span})


def _mesh_groups(axes_text: str, device_ids: str | None, refs_text: str, text: str) -> Groups:
    axes = [(name, int(size)) for name, size in _MESH_AXIS.findall(axes_text)]
    _limit_rank(len(axes), text)
    total = math.prod(size for _, size in axes)
    _limit(total, text)
    order = _device_order(device_ids, total, text)
    # Factor each axis named with a sub-axis ``'x':(before)size`` into its three parts.
    refs = [(name, before, size) for name, before, size in _MESH_REF.findall(refs_text)]
    _limit_rank(len(refs), text)
    cuts: dict[str, set[int]] = {}
    for name, before, size in refs:
        if before:
            cuts.setdefault(name, set()).update({int(before), int(before) * int(size)})
    factors: list[tuple[str, int, int]] = []  # axis, product of the factors before it, size
    for name, size in axes:
        edges = sorted({1, size} | cuts.get(name, set()))
        if any(b == 0 or a == 0 or b % a for a, b in itertools.pairwise(edges)):
            raise HloError(f"replica groups {text[:80]!r}: sub-axis does not divide {name[:40]!r}")
        parts = [(name, a, b // a) for a, b in itertools.pairwise(edges)]
        factors += parts or [(name, 1, 1)]
    known = {name for name, _ in axes}
    if unknown := [name for name, _, _ in refs if name not in known]:
        raise HloError(f"replica groups {text[:80]!r}: no mesh axis {unknown[0][:40]!r}")

    def selected(name: str, before: int, size: int) -> bool:
        return any(
            ref == name and (not start or int(start) <= before <= int(start) * int(length) // size)
            for ref, start, length in refs
        )

    inside = [selected(*factor) for factor in factors]
    groups: dict[tuple[int, ...], list[int]] = {}
    for position in range(total):
        rest, key = position, []
        for (_, _, size), chosen in zip(reversed(factors), reversed(inside), strict=True):
            rest, coordinate = divmod(rest, size)
            if not chosen:
                key.append(coordinate)
        groups.setdefault(tuple(key), []).append(order[position])
    return tuple(tuple(group) for group in groups.values())


def _device_order(device_ids: str | None, total: int, text: str) -> Sequence[int]:
    if not device_ids:
        return range(total)
    if found := _DEVICE_IDS.match(device_ids):
        order = _iota(_ints(found[2] or found[1]), _ints(found[3] or ""), text)
    else:
        order = _ints(device_ids)
    if len(order) != total:
        raise HloError(f"replica groups {text[:80]!r}: {len(order)} device ids for {total} devices")
    return order


@functools.lru_cache(maxsize=1024)
def _iota(dims: tuple[int, ...], permutation: tuple[int, ...], text: str) -> tuple[int, ...]:
    """``range(n).reshape(dims).transpose(permutation).flatten()``."""
    _limit_rank(len(dims), text)
    _limit(math.prod(dims), text)
    if min(dims, default=0) < 1:
        raise HloError(f"replica groups {text[:80]!r}: a dim of no devices")
    permutation = permutation or tuple(range(len(dims)))
    if sorted(permutation) != list(range(len(dims))):
        raise HloError(f"replica groups {text[:80]!r}: not a permutation of {len(dims)} dims")
    strides = [math.prod(dims[d + 1 :]) for d in range(len(dims))]
    ranges = [range(0, dims[d] * strides[d], strides[d]) for d in permutation]
    return tuple(sum(index) for index in itertools.product(*ranges))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part[:12]) for part in re.findall(r"\d+", text))


def _limit_rank(rank: int, text: str) -> None:
    if rank > MAX_RANK:
        raise HloError(f"replica groups {text[:80]!r}: more than {MAX_RANK} dims")


def _limit(num_devices: int, text: str) -> None:
    if num_devices > MAX_DEVICES:
        raise HloError(f"replica groups {text[:80]!r}: more than {MAX_DEVICES} devices")
