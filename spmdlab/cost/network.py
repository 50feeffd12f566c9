"""Seconds a collective takes on the wires, from where its devices sit.

A group of devices spans some dims of the torus.  Along a dim that closes into a ring a device
has two links, along an open line the busiest link carries everything one way; a group that
spans several dims uses the links of all of them at once.  The part of a group that lies in
other slices is reached over DCN, after the part inside the slice.

Sources: https://jax-ml.github.io/scaling-book/sharding for the ring formulas (with the
(n-1)/n that it drops for large rings); all-to-all from the bisection of each dim; a permute from
the messages on its busiest link.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence

from spmdlab.hardware.chips import Chip
from spmdlab.hardware.topology import Placement
from spmdlab.hlo.collectives import Collective
from spmdlab.hlo.groups import Groups, MeshAxes, mesh_axes

# How many times the array crosses the wires, relative to one all-gather of it.
_PASSES = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "collective-broadcast": 1.0}


@dataclasses.dataclass(frozen=True, slots=True)
class WireTime:
    """What a collective costs on the network, per device and execution."""

    seconds: float
    wire_bytes: float
    """Bytes one device sends."""
    mesh_axes: MeshAxes
    link: str
    """ici, dcn, or none for a group of one."""
    resources: tuple[str, ...]
    """The links it occupies: two collectives that share one cannot overlap."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Span:
    """How the largest group lies on one slice and across slices."""

    dims: tuple[tuple[int, int, int, bool], ...]
    """(dim, devices along it, stride, closed into a ring) for each torus dim spanned."""
    devices: int
    """Members inside one slice."""
    slices: int
    regular: bool
    """Whether the members fill a box; an irregular group is priced on one link."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Route:
    """How a permute's messages run through the torus."""

    load: float
    """Messages on the busiest link, in one direction."""
    hops: int
    """Links on the longest way."""
    resources: tuple[str, ...]


class Network:
    """The wires between the positions of one mesh."""

    def __init__(self, placement: Placement, chip: Chip, num_devices: int | None = None) -> None:
        """Takes the placement of the whole mesh.

        Args:
            placement: Where each position of the mesh sits.
            chip: What each position is.
            num_devices: Positions that the program's groups count; of a program for several
                slices, those of one slice.  By default all.
        """
        self._between = placement
        slices = placement.topology.num_slices
        total = placement.topology.num_devices
        one = slices > 1 and num_devices is not None and num_devices * slices == total
        self._placement = placement.one_slice() if one else placement
        self._chip = chip
        self._spans: dict[Groups, _Span] = {}
        self._routes: dict[Groups, _Route] = {}

    def price(self, collective: Collective) -> WireTime:
        """Time and bytes of one execution.

        Raises:
            HloError: The groups name devices that the mesh lacks.
        """
        if collective.rendezvous:
            return self._between_slices(collective)
        groups = collective.groups
        axes = mesh_axes(groups, self._placement.axes)
        if collective.kind in ("collective-permute", "send", "recv"):
            return self._permute(collective, axes)
        span = self._span(groups)
        members = span.devices * span.slices
        if members <= 1:
            return WireTime(0.0, 0.0, axes, "none", ())
        payload = float(collective.payload_bytes)
        if collective.kind.endswith("all-to-all"):
            ici = self._exchange_s(span, collective.operand_bytes)
            over_dcn = collective.operand_bytes * (span.slices - 1) / span.slices
            wire = collective.operand_bytes * (members - 1) / members
        else:
            passes = _PASSES.get(collective.kind, 1.0)
            ici = passes * self._ring_s(span, payload)
            over_dcn = passes * payload / span.devices * (span.slices - 1) / span.slices
            wire = passes * payload * (members - 1) / members
        chip = self._chip
        dcn = 0.0
        if span.slices > 1:
            dcn = over_dcn / (chip.dcn_bytes_per_s * chip.dcn_efficiency) + chip.dcn_latency_s
        return WireTime(
            seconds=ici + dcn,
            wire_bytes=wire,
            mesh_axes=axes,
            link="dcn" if span.slices > 1 else "ici",
            resources=self._resources(span),
        )

    def _between_slices(self, collective: Collective) -> WireTime:
        """A collective over DCN: each device exchanges its part with its peers."""
        slices = self._between.topology.num_slices
        axes = MeshAxes(self._between.axes_between_slices(), True)
        payload = float(collective.payload_bytes)
        wire = payload
        if collective.kind != "collective-permute":
            wire *= _PASSES.get(collective.kind, 1.0) * (slices - 1) / slices
        chip = self._chip
        seconds = wire / (chip.dcn_bytes_per_s * chip.dcn_efficiency) + chip.dcn_latency_s
        return WireTime(seconds, wire, axes, "dcn", ("dcn",))

    def _ring_s(self, span: _Span, payload: float) -> float:
        """All-gather (or reduce-scatter) of ``payload`` bytes inside each slice."""
        n = span.devices
        if n <= 1:
            return 0.0
        bandwidth, hops = 0.0, 0
        for _, size, stride, ring in span.dims:
            # Groups that lie between each other share the links of a strided dim.
            bandwidth += (2.0 if ring else 1.0) / stride
            hops += size // 2 if ring else size - 1
        links = bandwidth if span.regular else 1.0
        # Devices of one chip share its links; a group that holds both has the share of both.
        cores = self._cores(span)
        link = self._chip.ici_link_bytes_per_s * self._chip.ici_efficiency
        seconds = (
            payload * (n - 1) / n / (max(links, 1e-9) * cores * link)
            if span.dims
            else (payload * (n - 1) / n / link)
        )
        return seconds + max(hops, 1) * self._chip.ici_hop_latency_s

    def _exchange_s(self, span: _Span, operand_bytes: float) -> float:
        """All-to-all: half of the data crosses the middle of each dim."""
        link = self._chip.ici_link_bytes_per_s * self._chip.ici_efficiency
        if not span.dims:  # a switch: everything leaves through one port
            n = span.devices
            return operand_bytes * (n - 1) / n / link + self._chip.ici_hop_latency_s
        slowest = max(
            operand_bytes * size / 4 / ((2.0 if ring else 1.0) / stride)
            for _, size, stride, ring in span.dims
        )
        hops = sum(size // 2 if ring else size - 1 for _, size, _, ring in span.dims)
        return slowest / link + hops * self._chip.ici_hop_latency_s

    def _permute(self, collective: Collective, axes: MeshAxes) -> WireTime:
        pairs = tuple(pair for pair in collective.groups if pair[0] != pair[1])
        if not pairs:
            return WireTime(0.0, 0.0, axes, "none", ())
        place, chip = self._placement, self._chip
        payload = float(collective.operand_bytes)
        if any(place.slice_index[a] != place.slice_index[b] for a, b in pairs):
            if collective.kind == "recv":  # the other end of a send, and priced there
                return WireTime(0.0, 0.0, axes, "dcn", ())
            seconds = payload / (chip.dcn_bytes_per_s * chip.dcn_efficiency) + chip.dcn_latency_s
            return WireTime(seconds, payload, axes, "dcn", ("dcn",))
        if collective.kind == "recv":
            return WireTime(0.0, 0.0, axes, "ici", ())
        if pairs not in self._routes:
            self._routes[pairs] = self._route(pairs)
        route = self._routes[pairs]
        link = chip.ici_link_bytes_per_s * chip.ici_efficiency
        seconds = payload * route.load / link + route.hops * chip.ici_hop_latency_s
        return WireTime(seconds, payload, axes, "ici", route.resources)

    def _route(self, pairs: Groups) -> "_Route":
        """Sends every pair dim by dim, the short way round, and counts what each link carries."""
        place = self._placement
        if place.topology.kind != "tpu":
            return _Route(1, 1, ("ici",))
        load: Counter[tuple[tuple[int, ...], int, int]] = Counter()
        hops = 1
        resources: set[str] = set()
        for source, target in pairs:
            at = list(place.coords[source])
            offsets = self._offsets(source, target)
            hops = max(hops, sum(map(abs, offsets)))
            for dim, offset in enumerate(offsets):
                way = 1 if offset > 0 else -1
                for _ in range(abs(offset)):
                    load[tuple(at), dim, way] += 1
                    at[dim] = (at[dim] + way) % place.topology.shape[dim]
                if offset:
                    resources.add(f"ici{dim}{'+' if offset > 0 else '-'}")
        # Devices of one chip have half a link each and share both halves.
        busiest = max(load.values(), default=1) / place.topology.devices_per_chip
        return _Route(max(1.0, busiest), hops, tuple(sorted(resources)) or ("ici",))

    def _offsets(self, source: int, target: int) -> list[int]:
        """Signed hops along each torus dim, the short way round."""
        topology = self._placement.topology
        offsets: list[int] = []
        for dim, size in enumerate(topology.shape):
            delta = self._placement.coords[target][dim] - self._placement.coords[source][dim]
            if topology.wrap[dim] and abs(delta) > size // 2:
                delta -= size if delta > 0 else -size
            offsets.append(delta)
        return offsets

    def _span(self, groups: Groups) -> _Span:
        if groups not in self._spans:
            self._spans[groups] = self._measure(max(groups, key=len, default=()))
        return self._spans[groups]

    def _measure(self, group: Sequence[int]) -> _Span:
        place = self._placement
        topology = place.topology
        slices = {place.slice_index[p] for p in group}
        home = [p for p in group if place.slice_index[p] == place.slice_index[group[0]]]
        if topology.kind != "tpu":
            return _Span((), len(home), len(slices), True)
        dims: list[tuple[int, int, int, bool]] = []
        regular = True
        for dim, size in enumerate(topology.shape):
            places = sorted({place.coords[p][dim] for p in home})
            if len(places) < 2:
                continue
            gaps = {b - a for a, b in itertools.pairwise(places)}
            stride = min(gaps)
            regular = regular and len(gaps) == 1
            ring = topology.wrap[dim] and len(places) * stride == size
            dims.append((dim, len(places), stride, ring))
        cores = len({place.core[p] for p in home})
        box = math.prod(size for _, size, _, _ in dims) * cores
        return _Span(tuple(dims), len(home), len(slices), regular and box == len(home))

    def _cores(self, span: _Span) -> int:
        chips = math.prod(size for _, size, _, _ in span.dims)
        return max(1, span.devices // chips) if span.regular else 1

    def _resources(self, span: _Span) -> tuple[str, ...]:
        names = [f"ici{dim}{way}" for dim, _, _, _ in span.dims for way in "+-"]
        if not names and span.devices > 1:
            names = ["ici"]
        return (*names, "dcn") if span.slices > 1 else tuple(names)


def axis_key(axes: MeshAxes) -> str:
    """The key of a collective's axes in totals: one name, or several joined by "+"."""
    return "+".join(axes.axes) or "none"
