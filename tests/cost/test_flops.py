"""FLOPs: XLA's own totals on programs without loops, closed forms on those with."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from spmdlab.cost.flops import FlopCounter, Flops
from spmdlab.cost.kernels import FREE_TARGETS
from spmdlab.cost.ledger import Ledger, price
from spmdlab.errors import HloError
from spmdlab.hardware.chips import chip
from spmdlab.hardware.topology import parse_topology, row_major_placement
from spmdlab.hlo.parse import parse
from tests.hlo_samples import model
from tests.hlo_samples.programs import (
    HEAD,
    PLATFORMS,
    compile_on_one,
    compiled,
    devices,
    sample,
    stack,
)

# XLA adds its per-instruction counts up in float32: one rounding of 2^-24 for each instruction.
XLA_SUM = 1e-5

N = 256


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def conv(strides, padding, lhs_dilation=(1, 1), rhs_dilation=(1, 1), groups=1):
    def run(x, k):
        return lax.conv_general_dilated(
            x,
            k,
            strides,
            padding,
            lhs_dilation=lhs_dilation,
            rhs_dilation=rhs_dilation,
            feature_group_count=groups,
        )

    return run


def max_pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


IMAGE, KERNEL = f32(2, 8, 32, 32), f32(16, 8, 3, 3)
CASES = {
    "dot": (jnp.matmul, [f32(N, 128), f32(128, 64)]),
    "dot_bf16": (jnp.matmul, [jax.ShapeDtypeStruct((N, N), jnp.bfloat16)] * 2),
    "vector": (jnp.matmul, [f32(N, N), f32(N)]),
    "batch_dot": (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), [f32(8, 64, 32), f32(8, 32, 48)]),
    "attention": (
        lambda q, k: jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k), axis=-1),
        [f32(2, 4, 64, 32)] * 2,
    ),
    "conv_same": (conv((1, 1), "SAME"), [IMAGE, KERNEL]),
    "conv_valid": (conv((1, 1), "VALID"), [IMAGE, KERNEL]),
    "conv_stride": (conv((2, 3), "SAME"), [IMAGE, KERNEL]),
    "conv_dilated": (conv((1, 1), "SAME", rhs_dilation=(2, 3)), [IMAGE, KERNEL]),
    "conv_transposed": (conv((1, 1), ((2, 1), (1, 2)), lhs_dilation=(2, 2)), [IMAGE, KERNEL]),
    "conv_coprime": (conv((3, 2), ((4, 5), (3, 1)), lhs_dilation=(2, 3)), [IMAGE, KERNEL]),
    "conv_groups": (conv((1, 1), "SAME", groups=4), [IMAGE, f32(16, 2, 3, 3)]),
    "conv_gradient": (
        lambda x, k: jax.grad(lambda k: conv((2, 2), "SAME")(x, k).sum())(k),
        [IMAGE, KERNEL],
    ),
    "max_pool": (max_pool, [f32(2, 16, 16, 8)]),
    "max_pool_gradient": (
        lambda x: jax.grad(lambda x: max_pool(x).sum())(x),
        [f32(2, 16, 16, 8)],
    ),
    "sum": (lambda a: a.sum(1), [f32(N, N)]),
    "max": (lambda a: a.max(0), [f32(N, N)]),
    "argmax": (lambda a: jnp.argmax(a, 1), [f32(N, N)]),
    "cumsum": (lambda a: jnp.cumsum(a, axis=1), [f32(N, N)]),
    "sort": (lambda a: jnp.sort(a, axis=1), [f32(N, N)]),
    "softmax": (lambda a: jax.nn.softmax(a, axis=-1), [f32(N, N)]),
    "gelu": (jax.nn.gelu, [f32(N, N)]),
    "gather": (lambda a, i: jnp.take(a, i, axis=0), [f32(N, N), i32(64)]),
    "scatter": (lambda a, i: a.at[i].add(1.0), [f32(N, N), i32(64)]),
    "update": (lambda a, b: lax.dynamic_update_slice(a, b, (3, 0)), [f32(N, N), f32(8, N)]),
    "transpose": (lambda a: a.T + 1, [f32(N, 64)]),
    "select": (lambda a: jnp.where(a > 0, a, 0.5), [f32(N, N)]),
    "power": (lambda a: a**2.5 + lax.rsqrt(a), [f32(N, N)]),
}


def counted(text: str) -> Flops:
    program = parse(text)
    counter = FlopCounter(program)
    total = counter.computation(program.entry.name)
    unknown = {name.removeprefix("custom-call ") for name in counter.unknown}
    assert not unknown - FREE_TARGETS
    return total


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("case", CASES)
def test_equals_xla_on_a_program_without_loops(case, platform):
    function, arguments = CASES[case]
    xla = compile_on_one(platform, function, *arguments)
    assert " while(" not in xla.text  # XLA counts a body once: such a case proves nothing here
    ours = counted(xla.text)
    assert ours.total == pytest.approx(xla.flops, rel=XLA_SUM)
    assert ours.transcendental == pytest.approx(xla.transcendentals, rel=XLA_SUM)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("layout", model.LAYOUTS)
def test_equals_xla_on_an_unrolled_training_step(layout, platform):
    xla = stack(layout, platform, scanned=False)
    assert counted(xla.text).total == pytest.approx(xla.flops, rel=XLA_SUM)


def ledger_of(text: str, axes: dict[str, int], target: str) -> Ledger:
    topology = parse_topology(target)
    return price(parse(text), chip(topology.chip), row_major_placement(topology, axes))


def ledger_of_stack(layout: str, platform: str, *, scanned: bool, remat: bool) -> Ledger:
    text = stack(layout, platform, scanned=scanned, remat=remat).text
    target = {"cpu": "cpu:8", "v5e": "v5e:2x4"}[platform]
    return ledger_of(text, model.LAYOUTS[layout][0], target)


# One matmul of the stack on one device, whichever of its dims is split eight ways.
MATMUL = 2 * model.BATCH * model.LEN * model.EMBED * model.MLP / 8


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("layout", model.LAYOUTS)
def test_scanned_counts_every_layer_and_device_share(layout, platform):
    """Per layer two matmuls forwards, one recomputed under remat, and four backwards."""
    ledger = ledger_of_stack(layout, platform, scanned=True, remat=True)
    assert ledger.flops().matmul == model.LAYERS * (2 + 1 + 4) * MATMUL
    assert not ledger.unmodelled
    assert all(row.counted for row in ledger.rows)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_scanned_equals_unrolled(platform):
    """But for one matmul: the gradient for the input of the first layer is used by nobody.

    Unrolled it is dead code, and in a scanned program part of the loop's body.
    """
    scanned = ledger_of_stack("fsdp", platform, scanned=True, remat=False)
    unrolled = ledger_of_stack("fsdp", platform, scanned=False, remat=False)
    assert scanned.flops().matmul == model.LAYERS * (2 + 4) * MATMUL
    assert unrolled.flops().matmul == scanned.flops().matmul - MATMUL


@pytest.mark.parametrize("name", ["jax0.10_cpu", "jax0.12_cpu", "jax0.10_v5e", "jax0.12_v5e"])
def test_counts_every_layer_of_stored_dumps_of_both_jax_lines(name):
    text = sample(f"{name}_fsdp_tensor_scanned")
    target = "cpu:8" if "cpu" in name else "v5e:2x4"
    ledger = ledger_of(text, model.LAYOUTS["fsdp_tensor"][0], target)
    assert ledger.flops().matmul == model.LAYERS * 7 * MATMUL


STEPS, LAYERS = 3, 5


def nested(x, w):
    """Gradient accumulation around layers, as a training step has them."""

    def microbatch(total, x):
        return total + lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0], None

    return lax.scan(microbatch, jnp.zeros_like(x[0]), x)[0]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_nested_loops_multiply(platform):
    xla = compile_on_one(platform, nested, f32(STEPS, 64, 128), f32(LAYERS, 128, 128))
    ledger = ledger_of_one(xla.text, platform)
    one = 2 * 64 * 128 * 128
    assert ledger.flops().matmul == STEPS * LAYERS * one
    assert ledger.flops().transcendental == STEPS * LAYERS * 64 * 128
    assert xla.flops < 2.5 * one  # what XLA says: each body once


def ledger_of_one(text: str, platform: str) -> Ledger:
    topology = parse_topology({"cpu": "cpu:8", "v5e": "v5e:2x4"}[platform])
    placement = row_major_placement(topology, {"data": 8})
    return price(parse(text), chip(topology.chip), placement)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_loop_that_ends_on_data_is_reported_and_not_called_counted(platform):
    def halve(x, w):
        return lax.while_loop(lambda x: jnp.sum(x) > 1.0, lambda x: x @ w, x)

    ledger = ledger_of_one(compile_on_one(platform, halve, f32(64, 64), f32(64, 64)).text, platform)
    products = [row for row in ledger.rows if row.flops.matmul]
    assert products
    assert not any(row.counted for row in products)
    assert any("trip count unknown" in note for note in ledger.unmodelled)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_reductions_over_the_mesh_count_as_xla_counts_them(platform):
    mesh = Mesh(devices(platform), ("data",))
    x = jax.ShapeDtypeStruct((64, N, N), jnp.float32, sharding=NamedSharding(mesh, P("data")))

    def scattered(x):
        return lax.with_sharding_constraint(x.sum(0), NamedSharding(mesh, P("data")))

    for function in (lambda x: x.sum(0), scattered):
        xla = compiled(jax.jit(function).lower(x))
        assert counted(xla.text).total == pytest.approx(xla.flops, rel=XLA_SUM)


def text_of(line: str) -> str:
    return f"""{HEAD}ENTRY %main (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {{
  %a = f32[8,8]{{1,0}} parameter(0)
  %b = f32[8,8]{{1,0}} parameter(1)
  ROOT %c = {line}
}}
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param("f32[8,8]{1,0} convolution(%a, %b)", "without dim_labels", id="no-labels"),
        pytest.param(
            "f32[8,8]{1,0} convolution(%a, %b), dim_labels=bf0_io0->bf0", "do not match", id="rank"
        ),
        pytest.param(
            "f32[8,8]{1,0} convolution(%a, %b), dim_labels=bb_io->bf", "a dim twice", id="twice"
        ),
        pytest.param(
            "f32[8,8]{1,0} convolution(%a, %b), dim_labels=b0_0o->b0", "lack b, f, i", id="lacks"
        ),
        pytest.param(
            "f32[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={2}, rhs_contracting_dims={0}",
            "outside of f32",
            id="dim",
        ),
    ],
)
def test_refuses(line, message):
    with pytest.raises(HloError, match=message):
        counted(text_of(line))


def test_an_opcode_without_a_rule_is_listed_with_its_count():
    program = parse(text_of("f32[8,8]{1,0} triangular-solve(%a, %b), left_side=true"))
    counter = FlopCounter(program)
    assert counter.computation("main") == Flops()
    assert counter.unknown == {"triangular-solve": 1}
