"""Targets: what a step is compiled for, and the devices that stand for it.

``cpu:N`` are emulated devices, ``local`` what this process (or its whole job) has, and a TPU
slice is described by libtpu without a TPU.  Reading a target starts no backend.
"""

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from spmdlab.errors import TargetError
from spmdlab.hardware.chips import Chip, chip
from spmdlab.hardware.topology import Topology, parse_topology, torus

if TYPE_CHECKING:
    import jax

LOCAL = "local"

_TPU_ENVIRONMENT = {
    # Off Google's cloud the metadata server never answers, and libtpu waits for it.
    "TPU_SKIP_MDS_QUERY": "1",
    # Without these two it warns that it does not know where it runs.
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}
_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
    "NVIDIA H100": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "cpu": "cpu",
}
"""Beginning of a device's kind, as JAX names it -> our chip."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What a step is compiled for.  Made by `parse_target`.

    ``topology`` and ``chip`` are known at once, except of ``local``: that one asks JAX when
    first read, which starts its backend.
    """

    text: str
    platform: Literal["cpu", "tpu", "gpu", "local"]
    chip_overrides: tuple[tuple[str, tuple[tuple[str, float], ...]], ...] = ()
    """Chip -> field -> value, from the configuration."""

    @property
    def emulated(self) -> bool:
        """Whether its devices are CPU devices that stand for others: times mean little."""
        return self.platform == "cpu"

    @property
    def topology(self) -> Topology:
        """Its devices and their wiring.

        Raises:
            TargetError: Of ``local``: the devices here are of a kind we have no figures for.
        """
        return _local_topology() if self.platform == LOCAL else parse_topology(self.text)

    @property
    def chip(self) -> Chip:
        """Its peaks, per device.  Of a CPU they are nominal, ``local`` or not."""
        name = self.topology.chip
        return chip(name, dict(dict(self.chip_overrides).get(name, ())))


def parse_target(
    text: str, chip_overrides: Mapping[str, Mapping[str, float]] | None = None
) -> Target:
    """Reads a target without starting JAX.

    Args:
        text: ``local`` or what `spmdlab.hardware.topology.parse_topology` reads.
        chip_overrides: Chip -> field of `Chip` -> value to use instead of ours.

    Raises:
        TargetError: The text names no target.
        ConfigError: An override names an unknown chip or field, or an impossible value.

    >>> parse_target("2*v5e:16x16").topology.num_devices
    512
    """
    overrides = {name: dict(fields) for name, fields in (chip_overrides or {}).items()}
    for name, fields in overrides.items():
        chip(name, fields)
    frozen = tuple((name, tuple(fields.items())) for name, fields in overrides.items())
    if text.strip() == LOCAL:
        return Target(text=LOCAL, platform=LOCAL, chip_overrides=frozen)
    topology = parse_topology(text)
    return Target(text=topology.text, platform=topology.kind, chip_overrides=frozen)


def prepare_environment(targets: Sequence[str]) -> None:
    """Sets up this process for all its targets.  Call it before JAX's first use.

    Keeps JAX on the CPU, so that a TPU slice can be described anywhere, with as many emulated
    devices as the largest ``cpu:N`` needs.  If ``local`` is among the targets, the choice of
    platform and what the machine's own TPU needs are left as they are.

    Raises:
        TargetError: A target does not exist, or JAX has started with too few CPU devices, or
            on another platform than the CPU.
    """
    parsed = [parse_target(text) for text in targets]
    local = any(target.platform == LOCAL for target in parsed)
    num_cpu = max((t.topology.num_devices for t in parsed if t.platform == "cpu"), default=0)
    if any(target.platform == "tpu" for target in parsed):
        # Two processes that compile at once would abort on libtpu's lock file.
        os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
        if not local:
            for name, value in _TPU_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
    if not local:
        os.environ["JAX_PLATFORMS"] = "cpu"

    import jax

    if _has_started():
        _check_started(num_cpu, local)
        return
    if not local:
        # The variable is only read when jax is imported, which may have been before.
        jax.config.update("jax_platforms", "cpu")
    if num_cpu:
        jax.config.update("jax_num_cpu_devices", num_cpu)


def devices(target: Target) -> "list[jax.Device]":
    """The devices that stand for a target, in JAX's order.

    Raises:
        TargetError: The process has too few CPU devices, libtpu is missing or refuses the
            slice, or the target is a GPU topology, which a later release will compile for.
    """
    import jax

    match target.platform:
        case "local":
            return jax.devices()
        case "cpu":
            wanted = target.topology.num_devices
            found = jax.devices("cpu")
            if len(found) < wanted:
                raise TargetError(_too_few(wanted, len(found)))
            return found[:wanted]
        case "tpu":
            return list(_described(target.topology))
        case _:
            raise TargetError(
                f"Target {target.text!r}: compiling for GPUs that are not present comes in a later "
                "release; use 'local' on a machine that has them."
            )


@functools.lru_cache(maxsize=64)
def _described(topology: Topology) -> "tuple[jax.Device, ...]":
    """Devices of a TPU topology.  Kept, so that two meshes over one slice are equal."""
    from jax.experimental import topologies

    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise TargetError(
            f"Target {topology.text!r} needs libtpu, which is not installed: "
            "pip install 'spmdlab[tpu]' (it needs no TPU)."
        )
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    sides = "x".join(map(str, topology.shape))
    options: dict[str, Any] = {
        "wrap": (*topology.wrap, *(False,) * (3 - len(topology.wrap))),
        "num_slices": topology.num_slices,
    }
    if topology.chip == "v4":
        options["chip_config_name"] = "megacore"  # One device per chip instead of two.
    if topology.shape == (1, 1):
        options["chips_per_host_bounds"] = (1, 1, 1)  # libtpu 0.0.42 assumes a host of 2x2.
    try:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{topology.chip}:{sides}", **options
        )
    except Exception as error:  # The classes libtpu's errors arrive as differ between versions.
        raise TargetError(f"Target {topology.text!r}: {_reason(error)}") from error
    found = tuple(described.devices)
    if len(found) != topology.num_devices:
        raise TargetError(
            f"Target {topology.text!r} has {topology.num_devices} devices by our figures, and "
            f"{len(found)} by this libtpu's: this version is not supported."
        )
    return found


def _reason(error: Exception) -> str:
    """One line for what libtpu said."""
    text = " ".join(str(error).split())
    if "lockfile" in text:
        return (
            "another process holds libtpu.  Set ALLOW_MULTIPLE_LIBTPU_LOAD=1 before the first "
            "use, in both, as prepare_environment does."
        )
    return f"libtpu refuses it: {text[:300]}"


def _has_started() -> bool:
    from jax._src import xla_bridge  # No public way to ask without starting a backend.

    return xla_bridge.backends_are_initialized()


def _check_started(num_cpu: int, local: bool) -> None:
    import jax

    if not local and jax.default_backend() != "cpu":
        raise TargetError(
            f"JAX has already started on {jax.default_backend()}; call prepare_environment, or set "
            "JAX_PLATFORMS=cpu, before its first use, or ask for the target 'local'."
        )
    if num_cpu and (found := len(jax.devices("cpu"))) < num_cpu:
        raise TargetError(_too_few(num_cpu, found))


def _too_few(wanted: int, found: int) -> str:
    return (
        f"Target 'cpu:{wanted}' needs {wanted} CPU devices, and JAX has started with {found}; "
        f"call prepare_environment, or set JAX_NUM_CPU_DEVICES={wanted}, before its first use, "
        f"or use cpu:{found}."
    )


def _local_topology() -> Topology:
    """The topology of the devices of this job, from what JAX says about them."""
    import jax

    return topology_of(jax.devices())


def topology_of(found: "Sequence[jax.Device]") -> Topology:
    """The topology that a job's devices form.

    Raises:
        TargetError: We have no figures for their kind, or they do not fill whole slices.
    """
    kind = found[0].device_kind
    names = [name for start, name in _KINDS.items() if _is_kind(kind, start)]
    if not names:
        raise TargetError(
            f"Target 'local': no figures for devices of kind {kind!r}.  Known: {', '.join(_KINDS)}."
        )
    name = names[-1]
    if found[0].platform == "cpu":
        return Topology(kind="cpu", chip=name, shape=(len(found),), wrap=(False,))
    if found[0].platform != "tpu":
        nodes = len({device.process_index for device in found})
        if len(found) % nodes:
            raise TargetError(
                f"Target 'local': {len(found)} devices over {nodes} processes; each needs as many."
            )
        return Topology(
            kind="gpu", chip=name, shape=(len(found) // nodes,), num_slices=nodes, wrap=(False,)
        )
    rank = 2 if name in ("v5e", "v6e") else 3
    coords = [device.coords[:rank] for device in found]
    shape = tuple(max(axis) - min(axis) + 1 for axis in zip(*coords, strict=True))
    slices = len({slice_index(device) for device in found})
    per_chip = len({device.core_on_chip for device in found})
    topology = dataclasses.replace(torus(name, shape, slices), devices_per_chip=per_chip)
    if topology.num_devices != len(found):
        raise TargetError(
            f"Target 'local': {len(found)} devices do not fill {topology.text}, the smallest "
            "slices around them."
        )
    if per_chip != chip(name).devices_per_chip:
        raise TargetError(
            f"Target 'local': {per_chip} devices per chip, and our figures for {name} are for "
            f"{chip(name).devices_per_chip}; start libtpu in its default (megacore) form."
        )
    return topology


def _is_kind(kind: str, start: str) -> bool:
    """Whether ``kind`` begins with ``start`` as whole words, so that v5 is not v5 lite."""
    return kind == start or (start.startswith("NVIDIA") and kind.startswith(start))


def slice_index(device: "jax.Device") -> int:
    """The slice a device is in; 0 where there is only one."""
    return getattr(device, "slice_index", None) or 0
