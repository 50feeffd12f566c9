"""The assertions pass where they should, and fail with a message that helps."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from spmdlab.errors import ConfigError, HloError, TargetError
from spmdlab.testing import assert_collectives, assert_same_gradients, emulate_devices

STEPS = 3


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(emulate_devices(8)).reshape(4, 2), ("fsdp", "tensor"))


@pytest.fixture(scope="module")
def lowered(mesh):
    """In a loop of three: a sum over tensor each time; and one sum over all devices at the end."""

    def f(x):
        x, _ = jax.lax.scan(
            lambda x, _: (jax.lax.psum(jnp.sin(x), "tensor"), None), x, length=STEPS
        )
        return jax.lax.psum(jnp.sum(x), ("fsdp", "tensor"))

    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("fsdp"), out_specs=P(), check_vma=False)
    return jax.jit(mapped).lower(jnp.ones((8, 16)))


EXPECTED = {"all-reduce": {"tensor": STEPS, "fsdp+tensor": 1}}


def test_counts_by_axis_with_loops_multiplied_out(lowered, mesh):
    assert_collectives(lowered, EXPECTED, mesh)
    assert_collectives(lowered.compile(), EXPECTED, {"fsdp": 4, "tensor": 2})
    assert_collectives(lowered.compile().as_text(), EXPECTED, "fsdp=4 tensor=2")
    assert_collectives(lowered, {"all-reduce": STEPS + 1}, mesh)


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        ({"all-reduce": {"tensor": 2, "fsdp+tensor": 1}}, "over tensor: expected 2, found 3"),
        ({"all-reduce": 2}, "all-reduce: expected 2, found 4"),
        ({"all-reduce": {"tensor": 3}}, r"over fsdp\+tensor: expected 0, found 1"),
        ({}, "over tensor: expected 0, found 3"),
        ({**EXPECTED, "all-gather": {"fsdp": 1}}, "all-gather over fsdp: expected 1, found 0"),
    ],
)
def test_other_counts_are_refused_and_named(lowered, mesh, expected, words):
    with pytest.raises(AssertionError, match=words):
        assert_collectives(lowered, expected, mesh)


def test_names_the_line_of_what_is_too_much(lowered, mesh):
    with pytest.raises(AssertionError, match=r"3 × .*psum"):
        assert_collectives(lowered, {}, mesh)


def test_others_can_be_ignored(lowered, mesh):
    assert_collectives(lowered, {"all-reduce": {"tensor": STEPS}}, mesh, others="ignore")
    with pytest.raises(AssertionError, match="expected 4, found 3"):
        assert_collectives(lowered, {"all-reduce": {"tensor": 4}}, mesh, others="ignore")


def test_refuses_what_is_no_step_or_no_mesh(lowered):
    with pytest.raises(ConfigError, match="needs a compiled step, got function"):
        assert_collectives(lambda x: x, {}, "fsdp=8")
    with pytest.raises(ConfigError, match="is no mesh"):
        assert_collectives(lowered, {}, 8)
    with pytest.raises(ConfigError, match="axis=size"):
        assert_collectives(lowered, {}, "fsdp")


PARAMS = {"w": jnp.arange(1.0, 9.0), "b": jnp.float32(2.0)}
ROWS = 16


def plain(params, x):
    return jnp.mean(jnp.square(x @ params["w"] + params["b"]))


def batch():
    return jax.random.normal(jax.random.key(0), (ROWS, 8))


def sharded(mesh, factor=1.0):
    def loss(params, x):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(("fsdp", "tensor"))))
        value = plain(params, x)
        # The value stays; the gradient is multiplied.
        return value * factor + jax.lax.stop_gradient(value * (1 - factor))

    return jax.jit(loss)


def test_the_same_gradients_pass_on_a_mesh(mesh):
    assert_same_gradients(plain, sharded(mesh), PARAMS, batch(), reduction_length=ROWS * 8)


def test_a_gradient_reduced_twice_is_named_with_its_axis(mesh):
    with pytest.raises(AssertionError, match=r"gradient of w: exactly 4 times .* over fsdp"):
        assert_same_gradients(
            plain, sharded(mesh, 4.0), PARAMS, batch(), reduction_length=128, mesh=mesh
        )


def test_a_small_error_is_too_much_for_a_short_sum(mesh):
    almost = sharded(mesh, 1 + 1e-3)
    assert_same_gradients(plain, almost, PARAMS, batch(), reduction_length=100_000)
    with pytest.raises(AssertionError, match=r"allowed: 7.6e-06, 128 roundings"):
        assert_same_gradients(plain, almost, PARAMS, batch(), reduction_length=128)


def test_refuses_dtypes_that_prove_little():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    with pytest.raises(ConfigError, match="bfloat16"):
        assert_same_gradients(plain, plain, params, batch(), reduction_length=1)


def test_emulates_devices_again_and_refuses_what_it_cannot_do():
    assert len(emulate_devices(2)) == 2
    assert len(emulate_devices(8)) == 8
    with pytest.raises(ConfigError, match="whole number"):
        emulate_devices(0)
    with pytest.raises(TargetError, match="needs 64 CPU devices, and JAX has started with 8"):
        emulate_devices(64)


def test_emulates_devices_in_a_fresh_process():
    code = "from spmdlab.testing import emulate_devices; print(len(emulate_devices(3)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "3", done.stderr


def test_a_program_for_other_devices_is_refused(lowered):
    with pytest.raises(HloError):
        assert_collectives(lowered, EXPECTED, "fsdp=2")
