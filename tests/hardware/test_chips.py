"""The table of chips: complete, sourced, per device."""

import dataclasses

import pytest

from spmdlab.errors import ConfigError
from spmdlab.hardware.chips import CHIPS, NUMBERS, Chip, chip
from spmdlab.hardware.topology import GPU_CHIPS, TPU_CHIPS, parse_topology

every_chip = pytest.mark.parametrize("name", CHIPS)


@every_chip
def test_every_number_has_a_source_and_nothing_else_has(name):
    assert set(CHIPS[name].sources) == set(NUMBERS)
    assert all(CHIPS[name].sources.values())
    assert CHIPS[name].name == name


@every_chip
def test_numbers_are_possible(name):
    for field in NUMBERS:
        value = getattr(CHIPS[name], field)
        if value is None:
            assert field in {"int8_flops_per_s", "fp8_flops_per_s"}
        elif field.endswith("_efficiency"):
            assert 0.5 <= value <= 1
        elif field == "ici_links":
            assert value in {0, 1, 2, 3}
        else:
            assert value > 0


@every_chip
def test_can_key_a_cache(name):
    assert {CHIPS[name]: 1}[dataclasses.replace(CHIPS[name])] == 1


def test_every_chip_a_target_names_is_there():
    assert set(CHIPS) == {"cpu", *TPU_CHIPS, *GPU_CHIPS}


@pytest.mark.parametrize(
    ("name", "chip_flops", "chip_gib"),
    [  # Google's pages, per chip; GiB a program may use as libtpu says, times devices.
        ("v4", 275e12, 30.75),
        ("v5e", 197e12, 15.75),
        ("v5p", 459e12, 95.73),
        ("v6e", 918e12, 31.24),
        ("tpu7x", 2307e12, 2 * 94.74),
    ],
)
def test_peaks_per_device_times_devices_are_the_chips(name, chip_flops, chip_gib):
    found = chip(name)
    assert found.bf16_flops_per_s * found.devices_per_chip == pytest.approx(chip_flops)
    assert found.hbm_bytes * found.devices_per_chip / 2**30 == pytest.approx(chip_gib)
    assert found.f32_flops_per_s * found.devices_per_chip * 6 == pytest.approx(chip_flops)


@pytest.mark.parametrize("text", ["v4:4x4x4", "v5e:4x4", "v5p:4x4x4", "v6e:4x4", "tpu7x:4x4x4"])
def test_chip_and_topology_agree_on_devices_and_dims(text):
    topology = parse_topology(text)
    assert topology.devices_per_chip == chip(topology.chip).devices_per_chip
    assert len(topology.shape) == chip(topology.chip).ici_links


def test_an_override_replaces_the_number_and_its_source_only():
    found = chip("v5e", {"hbm_bytes": 1e9})
    assert found.hbm_bytes == 1e9
    assert "configuration" in found.sources["hbm_bytes"]
    assert dataclasses.replace(
        found, hbm_bytes=CHIPS["v5e"].hbm_bytes, sources=CHIPS["v5e"].sources
    ) == chip("v5e")
    others = {f: source for f, source in CHIPS["v5e"].sources.items() if f != "hbm_bytes"}
    assert found.sources == {**others, "hbm_bytes": found.sources["hbm_bytes"]}
    assert "configuration" not in CHIPS["v5e"].sources["hbm_bytes"]


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        pytest.param("v7e", {}, "Unknown chip 'v7e'.*Known: v4, v5e", id="chip"),
        pytest.param("v5e", {"hbm_byte": 1.0}, "'hbm_byte'.*mean 'hbm_bytes'", id="field"),
        pytest.param("v5e", {"name": 1.0}, "Unknown field", id="not-a-number-field"),
        pytest.param("v5e", {"devices_per_chip": 2}, "Unknown field", id="fixed-by-libtpu"),
        pytest.param("v5e", {"hbm_bytes": 0}, "more than 0", id="zero"),
        pytest.param("v5e", {"hbm_bytes": -1.0}, "at least 0", id="negative"),
        pytest.param("v5e", {"hbm_bytes": float("nan")}, "finite", id="nan"),
        pytest.param("v5e", {"hbm_bytes": True}, "finite number", id="bool"),
        pytest.param("v5e", {"hbm_bytes": "1"}, "finite number", id="text"),
        pytest.param("v5e", {"ici_efficiency": 1.1}, "fraction", id="over-one"),
        pytest.param("v5e", {"ici_links": 4}, "0 .a switch., 1, 2 or 3", id="links"),
    ],
)
def test_refuses(name, overrides, message):
    with pytest.raises(ConfigError, match=message):
        chip(name, overrides)


def test_a_latency_may_be_zero():
    assert chip("v5e", {"ici_hop_latency_s": 0.0}).ici_hop_latency_s == 0.0


def test_a_chip_is_made_by_keyword():
    with pytest.raises(TypeError):
        Chip("v5e")
