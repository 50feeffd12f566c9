"""Seconds of computing instructions, and what is said of those nobody can price."""

import dataclasses

import pytest

from spmdlab.cost.compute import TRUSTED_RATIO, Compute, ComputeCost
from spmdlab.hardware.chips import chip
from spmdlab.hlo.parse import parse
from tests.hlo_samples.programs import HEAD

CHIP = dataclasses.replace(
    chip("v5e"),
    bf16_flops_per_s=1e14,
    int8_flops_per_s=2e14,
    f32_flops_per_s=1e13,
    hbm_bytes_per_s=1e12,
    clock_hz=1e9,
    matmul_efficiency=1.0,
    hbm_efficiency=1.0,
)
N = 4096
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
MATMUL = 2 * N**3 / 1e14  # seconds in bfloat16


def of(
    line: str, dtype: str = "bf16", on=CHIP, *, fused: str = ""
) -> tuple[ComputeCost, list[str]]:
    """Cost of the last instruction of a program with two square operands."""
    text = f"""{HEAD}{fused}
ENTRY %main (a: {dtype}[{N},{N}], b: {dtype}[{N},{N}]) -> f32[] {{
  %a = {dtype}[{N},{N}]{{1,0}} parameter(0)
  %b = {dtype}[{N},{N}]{{1,0}} parameter(1)
  ROOT %it = {line}
}}
"""
    program = parse(text)
    compute = Compute(program, on)
    return compute.price(program.entry, program.entry.root), compute.notes()


def cycles(count: int) -> str:
    return f'backend_config={{"window_config":{{"estimated_cycles":"{count}"}}}}'


def test_a_matmul_runs_at_the_peak_of_its_type():
    for dtype, factor in (("bf16", 1), ("f32", 1), ("s8", 0.5)):
        cost, _ = of(f"{dtype}[{N},{N}]{{1,0}} dot(%a, %b), {DOT}", dtype)
        assert cost.seconds == pytest.approx(MATMUL * factor)


def test_float32_in_full_precision_takes_six_passes_worth():
    line = f"f32[{N},{N}]{{1,0}} dot(%a, %b), {DOT}, operand_precision={{highest,highest}}"
    assert of(line, "f32")[0].seconds == pytest.approx(MATMUL * 10)  # 1e14 / 1e13 on this chip


@pytest.mark.parametrize(
    ("estimate_s", "taken_s"),
    [
        pytest.param(1.4 * MATMUL, 1.4 * MATMUL, id="trusted"),
        pytest.param(0.5 * MATMUL, MATMUL, id="faster-than-possible"),
        pytest.param(9.0 * MATMUL, TRUSTED_RATIO * MATMUL, id="far-too-slow"),
        pytest.param(2.0**62 / 1e9, MATMUL, id="no-estimate"),
        pytest.param(0.0, MATMUL, id="zero"),
    ],
)
def test_the_compilers_cycles_are_believed_near_the_roofline(estimate_s, taken_s):
    line = f"bf16[{N},{N}]{{1,0}} dot(%a, %b), {DOT}, {cycles(round(estimate_s * 1e9))}"
    assert of(line)[0].seconds == pytest.approx(taken_s, rel=1e-4)


def test_elementwise_work_takes_the_time_of_its_memory_whatever_the_cycles_say():
    line = f"bf16[{N},{N}]{{1,0}} add(%a, %b), {cycles(10**9)}"
    assert of(line)[0].seconds == pytest.approx(3 * N * N * 2 / 1e12)


def test_a_product_inside_a_fusion_counts_as_one():
    fused = f"""%fused (x: bf16[{N},{N}], y: bf16[{N},{N}]) -> bf16[{N},{N}] {{
  %x = bf16[{N},{N}]{{1,0}} parameter(0)
  %y = bf16[{N},{N}]{{1,0}} parameter(1)
  %d = bf16[{N},{N}]{{1,0}} dot(%x, %y), {DOT}
  ROOT %n = bf16[{N},{N}]{{1,0}} negate(%d)
}}
"""
    line = f"bf16[{N},{N}]{{1,0}} fusion(%a, %b), kind=kOutput, calls=%fused"
    cost, notes = of(line, fused=fused)
    assert cost.seconds == pytest.approx(MATMUL)
    assert cost.flops.matmul == 2 * N**3
    assert not notes


def test_an_unknown_custom_call_takes_its_memory_time_and_is_listed():
    line = f'bf16[{N},{N}]{{1,0}} custom-call(%a, %b), custom_call_target="secret"'
    cost, notes = of(line)
    assert cost.flops.total == 0
    assert cost.seconds == pytest.approx(3 * N * N * 2 / 1e12)
    assert notes == ["custom call 'secret': FLOPs unknown, priced by its memory traffic (1x)"]


def test_a_custom_call_that_only_marks_costs_nothing():
    line = f'bf16[{N},{N}]{{1,0}} custom-call(%a), custom_call_target="Sharding"'
    cost, notes = of(line)
    assert cost.seconds == cost.traffic.hbm == 0
    assert not notes


KERNEL = 'custom_call_target="tpu_custom_call"'


def test_a_kernel_is_taken_at_its_authors_word():
    estimate = '{"custom_call_config":{"cost_estimate":{"flops":"1000000000000000"}}}'
    line = f"bf16[{N},{N}]{{1,0}} custom-call(%a, %b), {KERNEL}, backend_config={estimate}"
    cost, notes = of(line)
    assert cost.flops.matmul == 1e15
    assert cost.seconds == pytest.approx(10.0)
    assert not notes


@pytest.mark.parametrize("flops", ["1e999", '"nan"', "1" + "0" * 400, "[]", "-5"])
def test_a_kernels_nonsense_is_no_number(flops):
    estimate = f'{{"custom_call_config":{{"cost_estimate":{{"flops":{flops}}}}}}}'
    line = f"bf16[{N},{N}]{{1,0}} custom-call(%a, %b), {KERNEL}, backend_config={estimate}"
    assert of(line)[0].flops.matmul == 0


@pytest.mark.parametrize(
    ("scope", "products"),
    [
        ("splash_mha_fwd", 2),
        ("splash_mha_dq", 3),
        ("splash_mha_dkv", 4),
        ("flash_attention", 2),
        ("splash", 2),
    ],
)
def test_attention_without_an_estimate_is_priced_from_its_shapes(scope, products):
    """Half of all pairs of a query and a key, under a causal mask."""
    heads, queries, keys, width = 8, 1024, 2048, 128
    text = f"""{HEAD}ENTRY %main (q: bf16[8,1024,128], k: bf16[8,2048,128]) -> bf16[8,1024,128] {{
  %q = bf16[{heads},{queries},{width}]{{2,1,0}} parameter(0)
  %k = bf16[{heads},{keys},{width}]{{2,1,0}} parameter(1)
  ROOT %{scope} = bf16[{heads},{queries},{width}]{{2,1,0}} custom-call(%q, %k), {KERNEL}, \
metadata={{op_name="jit(f)/{scope}/pallas_call"}}
}}
"""
    program = parse(text)
    compute = Compute(program, CHIP)
    cost = compute.price(program.entry, program.entry.root)
    assert cost.flops.matmul == products * 2 * heads * queries * keys * width / 2
    assert any("causal mask assumed" in note for note in compute.notes())
