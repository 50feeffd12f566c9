"""Published numbers of the chips we model, per JAX device, each with its source.

Per device, because that is what a mesh position is.  v4 (compiled in its megacore form) and
v5p join their two cores into one device; tpu7x shows two devices per chip, so its compute,
memory and links are halved here.
"""

import dataclasses
import math
from collections.abc import Mapping

from spmdlab.errors import ConfigError
from spmdlab.lookup import pick

GIB = 2.0**30


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """One JAX device of a chip.  All rates are per device and per second."""

    name: str
    devices_per_chip: int
    """JAX devices the sold part shows."""
    bf16_flops_per_s: float
    """Peak of dense bfloat16 matrix products."""
    int8_flops_per_s: float | None
    """The same for int8; None where the chip has no such unit."""
    fp8_flops_per_s: float | None
    """The same for float8; None where the chip has no such unit."""
    f32_flops_per_s: float
    """Peak of dots computed in full float32 (on TPU six bfloat16 passes, Precision.HIGHEST)."""
    hbm_bytes: float
    """What a program may use, not what is soldered on."""
    hbm_bytes_per_s: float
    ici_link_bytes_per_s: float
    """One direction of one link.  On a GPU: what one device sends into its switch."""
    ici_links: int
    """Torus dims a device has a pair of links in; 0 where devices hang on a switch."""
    ici_hop_latency_s: float
    dcn_bytes_per_s: float
    """One direction, one device's share of its host's network."""
    dcn_latency_s: float
    clock_hz: float
    """Turns the compiler's estimated cycles into seconds."""
    matmul_efficiency: float
    """Fraction of the peak that large matrix products reach; so for the three below."""
    hbm_efficiency: float
    ici_efficiency: float
    dcn_efficiency: float
    sources: Mapping[str, str] = dataclasses.field(hash=False)
    """Field -> where its value comes from."""


NUMBERS = tuple(
    field.name
    for field in dataclasses.fields(Chip)
    if field.name not in {"name", "devices_per_chip", "sources"}
)
"""The fields that carry a source and may be overridden."""

_BOOK = "https://jax-ml.github.io/scaling-book/tpus"
_GPU_BOOK = "https://jax-ml.github.io/scaling-book/gpus"
_GOOGLE = "https://docs.cloud.google.com/tpu/docs/"
_TPU_INFO = "jax/_src/tpu_info.py of jax 0.12.0.1"
_LIBTPU = "'available HBM' of libtpu 0.0.50.1's out-of-memory message"
_CYCLES = "libtpu's estimated cycles against its 16384^3 bf16 matmul's FLOPs"
_RECIPES = "https://github.com/AI-Hypercomputer/tpu-recipes microbenchmarks"
_NVIDIA = "NVIDIA's data sheet, dense (without sparsity)"
_NOMINAL = "nominal: emulated devices have no real figure"

_TPU_SOURCES = {
    "f32_flops_per_s": "bf16 peak / 6: Precision.HIGHEST makes six bf16 passes",
    "ici_link_bytes_per_s": f"{_BOOK}, one way per link",
    "ici_links": f"{_BOOK}, dims of the torus",
    "ici_hop_latency_s": f"{_BOOK}, about 1 us per hop",
    "dcn_latency_s": "assumed: no published figure for a small message between slices",
    "clock_hz": "libtpu's estimated cycles of large matmuls matched to the bf16 peak",
    "matmul_efficiency": _CYCLES,
    "hbm_efficiency": f"{_RECIPES}: copy on v6e, 1359.6 of 1638 GB/s; kept for other chips",
    "ici_efficiency": (
        "between 0.95 (v5e ring all-gather, scaling-book PR 82; v5p and v6e ppermute, marin "
        "issue 6736) and 0.65 (v6e 16x16 all-reduce, tpu-recipes)"
    ),
    "dcn_efficiency": "assumed: published all-reduces between slices do not state their size",
}


def _tpu(sources: Mapping[str, str], **numbers: float | int | str | None) -> Chip:
    """A TPU; fills in what all of them share."""
    common: dict[str, float | int | str | None] = {
        "devices_per_chip": 1,
        "int8_flops_per_s": None,
        "fp8_flops_per_s": None,
        "f32_flops_per_s": float(numbers["bf16_flops_per_s"] or 0) / 6,
        "ici_hop_latency_s": 1e-6,
        "dcn_latency_s": 5e-5,
        "hbm_efficiency": 0.85,
        "ici_efficiency": 0.90,
        "dcn_efficiency": 0.80,
    }
    return Chip(**{**common, **numbers}, sources={**_TPU_SOURCES, **sources})  # type: ignore[arg-type]


_GPU_SOURCES = {
    "bf16_flops_per_s": f"{_GPU_BOOK}; {_NVIDIA}",
    "int8_flops_per_s": _NVIDIA,
    "fp8_flops_per_s": _NVIDIA,
    "f32_flops_per_s": f"{_NVIDIA}, FP32 outside the tensor cores",
    "hbm_bytes": f"{_GPU_BOOK}; physical size, the share XLA may use is a setting",
    "hbm_bytes_per_s": _GPU_BOOK,
    "ici_link_bytes_per_s": f"{_GPU_BOOK}, NVLink into the node's switch, one way",
    "ici_links": "devices of a node hang on a switch, not in a torus",
    "ici_hop_latency_s": "marin issue 6736: 8x H100 all-reduce of little data, 20 us over 14 steps",
    "dcn_bytes_per_s": f"{_GPU_BOOK}, node egress 400 GB/s over 8 devices",
    "dcn_latency_s": "assumed: rtt_us=10 is what XLA's latency estimator is usually given",
    "clock_hz": "bf16 peak over SMs and FLOPs per SM and cycle; nothing of ours uses it",
    "matmul_efficiency": "assumed, as XLA's own cost model gives 0.76 to a mid-sized H100 matmul",
    "hbm_efficiency": "assumed, as for TPU",
    "ici_efficiency": "nccl-tests issue 212: 370 of 450 GB/s in ring all-gathers on 8x H100",
    "dcn_efficiency": "assumed",
}


def _gpu(**numbers: float | str | None) -> Chip:
    """A GPU; fills in what all of them share."""
    common: dict[str, float | int | str | None] = {
        "devices_per_chip": 1,
        "ici_links": 0,
        "ici_hop_latency_s": 1.5e-6,
        "dcn_bytes_per_s": 5e10,
        "dcn_latency_s": 1e-5,
        "matmul_efficiency": 0.80,
        "hbm_efficiency": 0.85,
        "ici_efficiency": 0.82,
        "dcn_efficiency": 0.80,
    }
    return Chip(**{**common, **numbers}, sources=_GPU_SOURCES)  # type: ignore[arg-type]


CHIPS: dict[str, Chip] = {
    "v4": _tpu(
        name="v4",
        bf16_flops_per_s=2.75e14,
        hbm_bytes=30.75 * GIB,
        hbm_bytes_per_s=1.2e12,
        ici_link_bytes_per_s=4.5e10,
        ici_links=3,
        dcn_bytes_per_s=6.25e9,
        clock_hz=1.05e9,
        matmul_efficiency=0.94,
        sources={
            "bf16_flops_per_s": _BOOK,
            "int8_flops_per_s": f"{_TPU_INFO}: not available",
            "fp8_flops_per_s": f"{_TPU_INFO}: not available",
            "hbm_bytes": _LIBTPU,
            "hbm_bytes_per_s": _BOOK,
            "dcn_bytes_per_s": _BOOK,
        },
    ),
    "v5e": _tpu(
        name="v5e",
        bf16_flops_per_s=1.97e14,
        int8_flops_per_s=3.94e14,
        hbm_bytes=15.75 * GIB,
        hbm_bytes_per_s=8.1e11,
        ici_link_bytes_per_s=4.5e10,
        ici_links=2,
        dcn_bytes_per_s=3.125e9,
        clock_hz=1.5e9,
        matmul_efficiency=0.95,
        sources={
            "bf16_flops_per_s": _BOOK,
            "int8_flops_per_s": f"{_BOOK}; {_TPU_INFO}",
            "fp8_flops_per_s": f"{_TPU_INFO}: not available",
            "hbm_bytes": _LIBTPU,
            "hbm_bytes_per_s": _BOOK,
            "dcn_bytes_per_s": _BOOK,
            "matmul_efficiency": f"{_CYCLES}: 0.92; 0.97 for 4096^3",
        },
    ),
    "v5p": _tpu(
        name="v5p",
        bf16_flops_per_s=4.59e14,
        int8_flops_per_s=9.18e14,
        hbm_bytes=95.73 * GIB,
        hbm_bytes_per_s=2.765e12,
        ici_link_bytes_per_s=9e10,
        ici_links=3,
        dcn_bytes_per_s=6.25e9,
        clock_hz=1.75e9,
        matmul_efficiency=0.95,
        sources={
            "bf16_flops_per_s": f"{_GOOGLE}v5p",
            "int8_flops_per_s": f"{_BOOK}; {_TPU_INFO}",
            "fp8_flops_per_s": f"{_TPU_INFO}: not available ({_GOOGLE}v5p runs it at bf16's rate)",
            "hbm_bytes": f"{_LIBTPU} (0.0.42.1 says 95.74)",
            "hbm_bytes_per_s": f"{_GOOGLE}v5p (tpu_info.py says 2.46e12)",
            "dcn_bytes_per_s": f"{_GOOGLE}v5p, 50 Gbit/s",
            "matmul_efficiency": f"{_CYCLES}: 0.94; 0.96 for 4096^3",
        },
    ),
    "v6e": _tpu(
        name="v6e",
        bf16_flops_per_s=9.18e14,
        int8_flops_per_s=1.836e15,
        fp8_flops_per_s=9.18e14,
        hbm_bytes=31.24 * GIB,
        hbm_bytes_per_s=1.638e12,
        ici_link_bytes_per_s=9e10,
        ici_links=2,
        dcn_bytes_per_s=1.25e10,
        clock_hz=1.75e9,
        matmul_efficiency=0.90,
        sources={
            "bf16_flops_per_s": f"{_GOOGLE}v6e (tpu_info.py says 9.2e14)",
            "int8_flops_per_s": f"{_GOOGLE}v6e, twice bf16",
            "fp8_flops_per_s": f"{_TPU_INFO}: bf16's rate",
            "hbm_bytes": f"{_LIBTPU} (0.0.42.1 says 31.25)",
            "hbm_bytes_per_s": f"{_GOOGLE}v6e",
            "dcn_bytes_per_s": f"{_GOOGLE}v6e, 100 Gbit/s",
            "matmul_efficiency": f"{_RECIPES}: 827.5 TFLOP/s measured for 8192^3",
        },
    ),
    "tpu7x": _tpu(
        name="tpu7x",
        devices_per_chip=2,
        bf16_flops_per_s=2.307e15 / 2,
        fp8_flops_per_s=4.614e15 / 2,
        hbm_bytes=94.74 * GIB,
        hbm_bytes_per_s=7.38e12 / 2,
        ici_link_bytes_per_s=1e11 / 2,
        ici_links=3,
        dcn_bytes_per_s=1.25e10 / 2,
        clock_hz=2.2e9,
        matmul_efficiency=0.85,
        hbm_efficiency=0.87,
        sources={
            "bf16_flops_per_s": f"{_GOOGLE}tpu7x, half a chip",
            "int8_flops_per_s": f"{_TPU_INFO}: not available",
            "fp8_flops_per_s": f"{_GOOGLE}tpu7x, half a chip",
            "hbm_bytes": f"{_LIBTPU} (0.0.42.1 says 94.75)",
            "hbm_bytes_per_s": f"{_GOOGLE}tpu7x, half a chip",
            "ici_link_bytes_per_s": (
                f"{_GOOGLE}tpu7x: 1200 GB/s both ways over six links of a chip is 1e11 one way; "
                "its two devices share a link, so half.  Core to core on a chip is about six links "
                "(jax pull request 39340) and not modelled here"
            ),
            "dcn_bytes_per_s": f"{_GOOGLE}tpu7x, 100 Gbit/s, half a chip",
            "hbm_efficiency": "accelerator-microbenchmarks, Ironwood: copy at 3210 GB/s per core",
        },
    ),
    "h100": _gpu(
        name="h100",
        bf16_flops_per_s=9.89e14,
        int8_flops_per_s=1.979e15,
        fp8_flops_per_s=1.979e15,
        f32_flops_per_s=6.7e13,
        hbm_bytes=8.0e10,
        hbm_bytes_per_s=3.35e12,
        ici_link_bytes_per_s=4.5e11,
        clock_hz=1.83e9,
    ),
    "h200": _gpu(
        name="h200",
        bf16_flops_per_s=9.89e14,
        int8_flops_per_s=1.979e15,
        fp8_flops_per_s=1.979e15,
        f32_flops_per_s=6.7e13,
        hbm_bytes=1.41e11,
        hbm_bytes_per_s=4.8e12,
        ici_link_bytes_per_s=4.5e11,
        clock_hz=1.83e9,
    ),
    "b200": _gpu(
        name="b200",
        bf16_flops_per_s=2.25e15,
        int8_flops_per_s=4.5e15,
        fp8_flops_per_s=4.5e15,
        f32_flops_per_s=7.5e13,
        hbm_bytes=1.92e11,
        hbm_bytes_per_s=8e12,
        ici_link_bytes_per_s=9e11,
        clock_hz=1.86e9,
    ),
    "cpu": Chip(
        # Round figures, alike on every machine: they rank strategies on an emulated mesh and
        # say nothing about the machine that runs them.
        name="cpu",
        devices_per_chip=1,
        bf16_flops_per_s=5e10,
        int8_flops_per_s=None,
        fp8_flops_per_s=None,
        f32_flops_per_s=5e10,
        hbm_bytes=16 * GIB,
        hbm_bytes_per_s=2e10,
        ici_link_bytes_per_s=5e9,
        ici_links=1,
        ici_hop_latency_s=1e-6,
        dcn_bytes_per_s=5e9,
        dcn_latency_s=1e-5,
        clock_hz=1e9,
        matmul_efficiency=0.95,
        hbm_efficiency=0.85,
        ici_efficiency=0.90,
        dcn_efficiency=0.80,
        sources=dict.fromkeys(NUMBERS, _NOMINAL),
    ),
}
"""Every chip a target can name."""


def chip(name: str, overrides: Mapping[str, float] | None = None) -> Chip:
    """Looks a chip up.  There is no fallback: a guessed peak makes every MFU wrong.

    Args:
        name: A key of `CHIPS`.
        overrides: Field -> value to use instead of ours, per device.

    Raises:
        ConfigError: The chip or a field is unknown, or a value cannot be right.

    >>> chip("v5e", {"ici_efficiency": 0.7}).sources["ici_efficiency"]
    'set by the configuration'
    """
    found = pick(CHIPS, name, "chip")
    if not overrides:
        return found
    for field, value in overrides.items():
        pick(dict.fromkeys(NUMBERS), field, f"field of chip {name!r}")
        _check(name, field, value)
    sources = {**found.sources, **dict.fromkeys(overrides, "set by the configuration")}
    return dataclasses.replace(found, **overrides, sources=sources)  # type: ignore[arg-type]


def _check(name: str, field: str, value: object) -> None:
    """Raises ConfigError unless ``value`` is possible for ``field``."""
    where = f"chip {name!r}: {field} = {value!r}"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:  # type: ignore[arg-type,operator]
        raise ConfigError(f"{where} must be a finite number of at least 0.")
    if field == "ici_links":
        if value not in (0, 1, 2, 3):
            raise ConfigError(f"{where} must be 0 (a switch), 1, 2 or 3 (dims of the torus).")
    elif value == 0 and not field.endswith("_latency_s"):
        raise ConfigError(f"{where} must be more than 0.")
    if field.endswith("_efficiency") and value > 1:  # type: ignore[operator]
        raise ConfigError(f"{where} is a fraction and cannot be more than 1.")
