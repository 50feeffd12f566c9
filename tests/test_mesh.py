"""Meshes: axes over devices, positions over links, activations where the rules want them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from spmdlab.errors import ShardingError
from spmdlab.hardware.topology import parse_topology, row_major_placement
from spmdlab.mesh import build_mesh, constrainer, dcn_sizes, placement
from spmdlab.strategies import Data, Fsdp, Tensor, strategy_from_text
from spmdlab.targets import parse_target

try:
    import libtpu  # noqa: F401
except ImportError:
    needs_libtpu = pytest.mark.skip(reason="libtpu is not installed: pip install 'spmdlab[tpu]'")
else:
    needs_libtpu = pytest.mark.skipif(False, reason="")


def build(strategy: str, target: str):
    return build_mesh(strategy_from_text(strategy), parse_target(target))


def test_a_cpu_mesh_takes_devices_in_order():
    mesh = build_mesh(Tensor(2) * Fsdp(4), parse_target("cpu:8"))
    assert dict(mesh.shape) == {"fsdp": 4, "tensor": 2}
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert list(mesh.devices.flat) == jax.devices("cpu")[:8]


def test_a_lone_parallelism_and_fewer_devices_than_the_process_has():
    mesh = build_mesh(Data(2), parse_target("cpu:2"))
    assert dict(mesh.shape) == {"data": 2}


@pytest.mark.parametrize(
    ("strategy", "target", "message"),
    [
        (
            "fsdp=4 tensor=2",
            "cpu:4",
            r"\(fsdp=4 tensor=2\) needs 8 devices, and cpu:4 has 4; .* fsdp=2 or tensor=1 would",
        ),
        ("fsdp=2 tensor=3", "cpu:8", "needs 6 devices, and cpu:8 has 8; .*tensor=4 would fit"),
        ("data=3 fsdp=5", "cpu:8", "the sizes must multiply up to 8"),
        ("fsdp=8", "v5e:4x4", "and v5e:4x4 has 16; .*fsdp=16 would fit"),
    ],
)
def test_a_mesh_of_another_size_is_refused(strategy, target, message):
    with pytest.raises(ShardingError, match=message):
        build(strategy, target)


@pytest.mark.parametrize(
    ("axes", "slices", "expected"),
    [
        ({"data": 2, "fsdp": 8}, 2, (2, 1)),
        ({"data": 2, "fsdp": 8}, 4, (2, 2)),
        ({"fsdp": 16}, 2, (2,)),
        ({"data": 1, "fsdp": 16}, 2, (1, 2)),
        ({"data": 6, "fsdp": 4}, 3, (3, 1)),
        ({"data": 2, "tensor": 8}, 1, (1, 1)),
    ],
)
def test_the_outermost_axes_go_over_the_slices(axes, slices, expected):
    assert dcn_sizes(axes, parse_topology(f"{slices}*v5e:2x4")) == expected


def test_an_outer_axis_that_fits_no_slices_is_refused():
    with pytest.raises(ShardingError, match="data=3 neither divides nor is a multiple of the 2"):
        dcn_sizes({"data": 3, "fsdp": 16}, parse_topology("2*v5e:2x4"))


TPU_MESHES = [
    ("fsdp=16", "v5e:4x4"),
    ("fsdp=4 tensor=4", "v5e:4x4"),
    ("data=2 fsdp=4 tensor=2", "v5e:4x4"),
    ("fsdp=1", "v6e:1x1"),
    ("fsdp=64 tensor=4", "v6e:16x16"),
    ("fsdp=16 tensor=4", "v4:4x4x4"),
    ("fsdp=16 tensor=4", "v5p:4x4x4"),
    ("data=2 fsdp=2 tensor=2", "tpu7x:2x2x1"),
    ("data=2 fsdp=8", "2*v5e:2x4"),
    ("data=4 fsdp=2 tensor=2", "2*v5e:2x4"),
    ("fsdp=16", "2*v5e:2x4"),
]


@needs_libtpu
@pytest.mark.parametrize(("strategy", "target"), TPU_MESHES)
def test_every_position_of_a_tpu_mesh_has_its_own_place(strategy, target):
    mesh = build(strategy, target)
    placed = placement(mesh, parse_target(target))
    topology = parse_topology(target)
    assert placed.axis_sizes() == strategy_from_text(strategy).mesh_axes
    places = set(zip(placed.slice_index, placed.coords, placed.core, strict=True))
    plain = row_major_placement(topology, placed.axis_sizes())
    assert places == set(zip(plain.slice_index, plain.coords, plain.core, strict=True))
    for device, coords in zip(mesh.devices.flat, placed.coords, strict=True):
        assert tuple(device.coords[: len(coords)]) == coords


@needs_libtpu
@pytest.mark.parametrize(("strategy", "target"), [m for m in TPU_MESHES if m[1].startswith("2*")])
def test_only_the_outermost_axis_crosses_slices(strategy, target):
    mesh = build(strategy, target)
    placed = placement(mesh, parse_target(target))
    grid = np.array(placed.slice_index).reshape(mesh.devices.shape)
    assert len(np.unique(grid)) == 2
    for axis in range(1, grid.ndim):
        assert (np.diff(grid, axis=axis) == 0).all()
    assert (np.diff(grid, axis=0) >= 0).all()


@needs_libtpu
@pytest.mark.parametrize("target", ["v5e:4x4", "v5p:4x4x4", "v4:4x4x4"])
def test_an_axis_as_long_as_a_torus_dim_runs_along_one(target):
    """Neighbours on the tensor axis differ in one coordinate only, so no hop is shared."""
    n = parse_topology(target).num_devices
    mesh = build(f"fsdp={n // 4} tensor=4", target)
    placed = placement(mesh, parse_target(target))
    for group in np.array(placed.coords).reshape(n // 4, 4, -1):
        assert (np.ptp(group, axis=0) > 0).sum() == 1


@needs_libtpu
def test_axes_that_jax_cannot_place_are_refused(monkeypatch):
    def refuse(*_, **__):
        raise NotImplementedError("Failed to find assignment")

    monkeypatch.setattr("jax.experimental.mesh_utils.create_device_mesh", refuse)
    with pytest.raises(ShardingError, match=r"\(fsdp=16 over v5e:4x4\): JAX finds no placement: F"):
        build("fsdp=16", "v5e:4x4")


@needs_libtpu
def test_a_step_compiles_for_a_mesh_over_two_slices():
    """Libtpu gives one slice's program; what crosses slices is a host transfer over DCN.

    Its replica groups count positions within a slice, and say nothing of the outermost axis.
    """
    mesh = build("data=2 fsdp=4 tensor=2", "2*v5e:2x4")
    batch = NamedSharding(mesh, P(("data", "fsdp")))
    x = jax.ShapeDtypeStruct((16, 16), jnp.bfloat16, sharding=batch)
    text = jax.jit(lambda x: x.sum()).lower(x).compile().as_text()
    assert "num_partitions=8" in text
    assert "xla_megascale_runtime" in text


def test_placement_of_emulated_devices_is_their_order():
    target = parse_target("cpu:8")
    placed = placement(build_mesh(Fsdp(4) * Tensor(2), target), target)
    assert placed.coords == tuple((i,) for i in range(8))
    assert set(placed.slice_index) == set(placed.core) == {0}


def test_the_constrainer_puts_an_activation_where_the_rules_say():
    strategy = Fsdp(2) * Tensor(4, sequence="on")
    mesh = build_mesh(strategy, parse_target("cpu:8"))
    constrain = constrainer(mesh, strategy.rules())
    x = jnp.zeros((4, 8, 16))
    y = jax.jit(lambda x: constrain(x, ("act_batch", "act_res_len", "act_embed")))(x)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp", "tensor", None)), 3)
    y = jax.jit(lambda x: constrain(x, ("act_batch", "act_len", "act_mlp")))(x)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp", None, "tensor")), 3)


@pytest.mark.parametrize("ways", [1, 4])
def test_the_constrainer_is_strict_on_any_mesh(ways):
    strategy = strategy_from_text(f"tensor={ways}")
    constrain = constrainer(build_mesh(strategy, parse_target(f"cpu:{ways}")), strategy.rules())
    with pytest.raises(ShardingError, match=r"activation \(act_batch, oops\): dim 1 'oops'"):
        jax.eval_shape(lambda x: constrain(x, ("act_batch", "oops")), jnp.zeros((4, 4)))
    with pytest.raises(ShardingError, match="1 logical axes"):
        constrain(jnp.zeros((4, 4)), ("act_batch",))


def test_an_activation_that_does_not_divide_is_refused_not_padded():
    strategy = strategy_from_text("tensor=4")
    constrain = constrainer(build_mesh(strategy, parse_target("cpu:4")), strategy.rules())
    with pytest.raises(ShardingError, match=r"'act_mlp' of size 6 does not divide 4 ways"):
        jax.eval_shape(lambda x: constrain(x, ("act_batch", "act_mlp")), jnp.zeros((4, 6)))


def test_on_one_device_the_constrainer_returns_the_activation_itself():
    constrain = constrainer(build_mesh(Data(1), parse_target("cpu:1")), (Data(1) * Fsdp(1)).rules())
    x = jnp.zeros((4, 4))
    with pytest.raises(ShardingError, match="'fsdp', which the mesh does not have"):
        constrain(x, ("act_batch", "act_embed"))
    constrain = constrainer(build_mesh(Data(1), parse_target("cpu:1")), {"act_batch": ("data",)})
    assert constrain(x, ("act_batch", None)) is x
