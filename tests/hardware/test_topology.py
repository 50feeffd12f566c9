"""Slices: which exist, how they are wired, and where mesh positions fall without jax."""

import pytest

from spmdlab.errors import ConfigError, ShardingError, TargetError
from spmdlab.hardware.topology import (
    Placement,
    axes_from_text,
    parse_topology,
    row_major_placement,
)


@pytest.mark.parametrize(
    ("text", "devices", "slices", "wrap"),
    [
        ("cpu:1", 1, 1, (False,)),
        ("cpu:8", 8, 1, (False,)),
        ("v5e:1x1", 1, 1, (False, False)),
        ("v5e:8x8", 64, 1, (False, False)),
        ("v5e:8x16", 128, 1, (False, True)),
        ("v6e:16x16", 256, 1, (True, True)),
        ("2*v5e:16x16", 512, 2, (True, True)),
        ("v4:2x2x1", 4, 1, (False,) * 3),
        ("v4:2x2x4", 16, 1, (False,) * 3),
        ("v4:4x4x4", 64, 1, (True,) * 3),
        ("v5p:2x4x4", 32, 1, (False,) * 3),
        ("v5p:16x16x24", 6144, 1, (True,) * 3),
        ("tpu7x:2x2x1", 8, 1, (False,) * 3),
        ("3*tpu7x:4x4x8", 768, 3, (True,) * 3),
        ("h100:1x8", 8, 1, (False,)),
        ("h200:16x8", 128, 16, (False,)),
    ],
)
def test_reads_counts_and_wiring_and_writes_the_text_back(text, devices, slices, wrap):
    topology = parse_topology(text)
    assert (topology.num_devices, topology.num_slices, topology.wrap) == (devices, slices, wrap)
    assert topology.text == text
    assert parse_topology(topology.text) == topology


def test_one_slice_may_be_written_with_or_without_its_count():
    assert parse_topology("1*v5e:4x4") == parse_topology(" v5e:4x4 ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("v5e-8", "Examples: cpu:8", id="form"),
        pytest.param("", "Examples: cpu:8", id="empty"),
        pytest.param("v5e", "Examples", id="no-shape"),
        pytest.param("v5e:4x", "Examples", id="half-a-shape"),
        pytest.param("v5:4x4x4", "mean v5p:4x4x4", id="v5"),
        pytest.param("v7x:4x4x4", "mean tpu7x:4x4x4", id="v7x"),
        pytest.param("v9:4", "unknown chip 'v9'.  Known: cpu, v4", id="unknown"),
        pytest.param("v5e:3x3", "nearest first: v5e:2x4, ", id="odd"),
        pytest.param("v5e:4x2", "ascending order: v5e:2x4", id="order-2d"),
        pytest.param("v5e:32x32", "nearest first: v5e:16x16", id="larger-than-sold"),
        pytest.param("v5e:2x2x1", "nearest first: v5e:2x2", id="3d-of-2d"),
        pytest.param("v5p:4x4", "multiples of 4, ascending, up to 6144", id="2d-of-3d"),
        pytest.param("v5p:4x8x4", "ascending order: v5p:4x4x8", id="order-3d"),
        pytest.param("v5p:16x20x28", "up to 6144 chips", id="v5p-too-large"),
        pytest.param("v4:16x16x20", "up to 4096 chips", id="v4-too-large"),
        pytest.param("v4:4x4x6", "multiples of 4", id="not-of-4"),
        pytest.param("0*v5e:4x4", "at least 1", id="no-slices"),
        pytest.param("cpu:0", "at least 1", id="no-devices"),
        pytest.param("cpu:2x4", "write cpu:8", id="cpu-shape"),
        pytest.param("2*cpu:4", "only TPU slices", id="cpu-slices"),
        pytest.param("2*h100:1x8", "only TPU slices", id="gpu-slices"),
        pytest.param("h100:8", "NODESxGPUS", id="gpu-form"),
        pytest.param("h100:2x6", "1, 2, 4 or 8", id="gpu-node"),
    ],
)
def test_refuses_in_one_line_that_says_what_works(text, message):
    with pytest.raises(TargetError, match=message) as caught:
        parse_topology(text)
    assert "\n" not in str(caught.value)
    assert repr(text) in str(caught.value)


def test_row_major_counts_slices_then_dims_then_cores():
    topology = parse_topology("2*tpu7x:2x2x1")
    placed = row_major_placement(topology, {"data": 2, "fsdp": 4, "tensor": 2})
    assert placed.axis_sizes() == {"data": 2, "fsdp": 4, "tensor": 2}
    assert placed.slice_index == (0,) * 8 + (1,) * 8
    assert placed.core == (0, 1) * 8
    assert placed.coords[:8:2] == ((0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0))


def test_row_major_places_each_device_once_whatever_the_axes():
    topology = parse_topology("v5e:4x8")
    for axes in ({"fsdp": 32}, {"fsdp": 16, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 8}):
        placed = row_major_placement(topology, axes)
        assert sorted(placed.coords) == [(x, y) for x in range(4) for y in range(8)]


def test_row_major_of_nodes_crosses_one_at_the_outermost_axis():
    placed = row_major_placement(parse_topology("h100:2x8"), {"data": 2, "tensor": 8})
    assert placed.slice_index == (0,) * 8 + (1,) * 8
    assert placed.coords == tuple((i,) for i in range(8)) * 2


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(ShardingError, match=r"fsdp=4 tensor=2\) has 8 positions; v5e:4x4 has 16"):
        row_major_placement(parse_topology("v5e:4x4"), {"fsdp": 4, "tensor": 2})


def test_a_placement_whose_parts_disagree_is_refused():
    with pytest.raises(ShardingError, match="needs 4 positions; the mesh has 4, coords 3"):
        Placement(
            axes=(("fsdp", 4),),
            coords=((0, 0), (0, 1), (1, 0)),
            core=(0,) * 4,
            slice_index=(0,) * 4,
            topology=parse_topology("v5e:2x2"),
        )


def test_mesh_axes_are_read_in_the_order_they_are_written():
    assert list(axes_from_text("fsdp=4, data=2 ring=1").items()) == [
        ("fsdp", 4),
        ("data", 2),
        ("ring", 1),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no axis"),
        ("fsdp", "'fsdp' is not of the form axis=size"),
        ("fsdp=0", "'fsdp=0' is not of the form"),
        ("fsdp=x", "'fsdp=x' is not of the form"),
        ("=4", "'=4' is not of the form"),
        ("fsdp=4 fsdp=2", "axis 'fsdp' is there twice"),
    ],
)
def test_mesh_axes_of_another_form_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        axes_from_text(text)
