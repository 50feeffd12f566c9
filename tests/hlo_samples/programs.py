"""Programs for tests: the dumps beside this file, and whatever is compiled on the spot."""

import dataclasses
import functools
import gzip
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest
from jax.experimental import topologies

from tests.hlo_samples import model

HERE = pathlib.Path(__file__).parent
SAMPLES = tuple(sorted(path.name.removesuffix(".txt.gz") for path in HERE.glob("*.txt.gz")))
PLATFORMS = ("cpu", "v5e")
HEAD = "HloModule test, is_scheduled=true, num_partitions=8\n\n"


@functools.cache
def sample(name: str) -> str:
    """The text of a stored dump, e.g. ``jax0.12_v5e_fsdp_unrolled``."""
    return gzip.decompress((HERE / f"{name}.txt.gz").read_bytes()).decode()


@functools.cache
def devices(platform: str) -> Sequence[Any]:
    """Eight emulated CPU devices, or those of a v5e:2x4 that is not there."""
    if platform == "cpu":
        return jax.devices()[:8]
    try:
        import libtpu  # noqa: F401
    except ImportError:
        pytest.skip("libtpu is not installed, so nothing can be compiled for TPU")
    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says."""

    text: str
    flops: float
    """By XLA's own count; each loop body once."""
    transcendentals: float


def compiled(lowered: Any) -> Compiled:
    """Compiles; XLA leaves a figure out of its analysis where it is zero."""
    done = lowered.compile()
    costs = done.cost_analysis() or {}
    return Compiled(done.as_text(), costs.get("flops", 0.0), costs.get("transcendentals", 0.0))


@functools.cache
def stack(layout: str, platform: str, *, scanned: bool, remat: bool = True) -> Compiled:
    """The training step of model.py."""
    return compiled(model.lower(layout, devices(platform), scanned=scanned, remat=remat))


def compile_on_one(
    platform: str, function: Callable[..., Any], *arguments: jax.ShapeDtypeStruct
) -> Compiled:
    """Compiles a function of whole arrays for one device."""
    sharding = jax.sharding.SingleDeviceSharding(devices(platform)[0])
    placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in arguments]
    return compiled(jax.jit(function).lower(*placed))
