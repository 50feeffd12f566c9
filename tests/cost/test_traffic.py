"""Bytes through memory, counted by hand."""

import pytest

from spmdlab.cost.traffic import Traffic, traffic
from spmdlab.hlo.parse import parse
from tests.hlo_samples.programs import HEAD

BIG, SMALL = 1024 * 256 * 4, 8 * 256 * 4
VMEM = "{1,0:T(8,128)S(1)}"


def of(line: str, *before: str, fused: str = "") -> Traffic:
    """Traffic of the last instruction of a program with a large and a small operand."""
    text = "\n".join(
        [
            f"{HEAD}{fused}",
            "ENTRY %main (big: f32[1024,256], small: f32[8,256], i: s32[]) -> f32[] {",
            "  %big = f32[1024,256]{1,0} parameter(0)",
            "  %small = f32[8,256]{1,0} parameter(1)",
            "  %i = s32[] parameter(2)",
            *(f"  {part}" for part in before),
            f"  ROOT %it = {line}",
            "}",
            "",
        ]
    )
    program = parse(text)
    return traffic(program, program.entry, program.entry.root)


def test_elementwise_reads_its_operands_and_writes_its_result():
    assert of("f32[1024,256]{1,0} add(%big, %big)") == Traffic(hbm=3 * BIG)


def test_an_update_in_place_moves_the_update_alone():
    moved = of("f32[1024,256]{1,0} dynamic-update-slice(%big, %small, %i, %i)")
    assert moved == Traffic(hbm=2 * SMALL)


@pytest.mark.parametrize("opcode", ["dynamic-slice(%big, %i, %i)", "slice(%big)"])
def test_a_slice_reads_what_it_returns(opcode):
    assert of(f"f32[8,256]{{1,0}} {opcode}") == Traffic(hbm=2 * SMALL)


def test_a_slice_of_vmem_reads_vmem():
    moved = of(
        "f32[8,256]{1,0} dynamic-slice(%near, %i, %i)",
        f"%near = f32[1024,256]{VMEM} copy(%big)",
    )
    assert moved == Traffic(hbm=SMALL, vmem=SMALL)


def test_vmem_costs_no_hbm():
    moved = of(
        "f32[1024,256]{1,0} add(%near, %big)",
        f"%near = f32[1024,256]{VMEM} copy(%big)",
    )
    assert moved == Traffic(hbm=2 * BIG, vmem=BIG)


def test_a_copy_into_vmem():
    moved = of(
        f"(f32[1024,256]{VMEM}, f32[1024,256]{{1,0}}, u32[]{{:S(2)}}) copy-start(%big)",
    )
    assert moved == Traffic(hbm=BIG, vmem=BIG)


def test_a_sliced_copy_moves_the_slice():
    moved = of(
        f"((f32[1024,256]{{1,0}}), f32[8,256]{VMEM}, s32[]{{:S(2)}}) slice-start(%big)",
    )
    assert moved == Traffic(hbm=SMALL, vmem=SMALL)


def test_host_memory_is_apart():
    host = "{1,0:T(8,128)S(5)}"
    moved = of(f"(f32[1024,256]{host}, f32[1024,256]{{1,0}}, u32[]) copy-start(%big)")
    assert moved == Traffic(hbm=BIG, host=BIG)


@pytest.mark.parametrize(
    "line",
    [
        "f32[2,512,256]{2,1,0} bitcast(%big)",
        "(f32[1024,256]{1,0}, f32[8,256]{1,0}) tuple(%big, %small)",
        "f32[1024,256]{1,0} copy-done(%start)",
        "f32[1024,256]{1,0} optimization-barrier(%big)",
    ],
)
def test_what_only_names_a_buffer_moves_nothing(line):
    start = "%start = (f32[1024,256]{1,0}, f32[1024,256]{1,0}, u32[]) copy-start(%big)"
    assert of(line, start) == Traffic()


SLICED = """%fused (x: f32[1024,256], i: s32[]) -> f32[8,256] {
  %x = f32[1024,256]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[8,256]{1,0} dynamic-slice(%x, %i, %i), dynamic_slice_sizes={8,256}
  ROOT %n = f32[8,256]{1,0} negate(%s)
}
"""


def test_a_fusion_that_slices_reads_the_slice():
    """As a scanned layer reads its own part of the stacked weights."""
    moved = of("f32[8,256]{1,0} fusion(%big, %i), kind=kLoop, calls=%fused", fused=SLICED)
    assert moved.hbm == pytest.approx(2 * SMALL, abs=8)  # and the 4 bytes of the index, twice


def test_a_fusion_that_slices_and_also_reads_all_reads_all():
    both = SLICED.replace(
        "ROOT %n = f32[8,256]{1,0} negate(%s)",
        "%r = f32[8,256]{1,0} slice(%x), slice={[0:8], [0:256]}\n"
        "  %whole = f32[1024,256]{1,0} negate(%x)\n"
        "  %t = f32[8,256]{1,0} slice(%whole), slice={[0:8], [0:256]}\n"
        "  ROOT %n = f32[8,256]{1,0} add(%s, %t)",
    )
    moved = of("f32[8,256]{1,0} fusion(%big, %i), kind=kLoop, calls=%fused", fused=both)
    assert moved.hbm == pytest.approx(BIG + SMALL, abs=8)


def test_slices_that_overlap_read_no_more_than_there_is():
    twice = """%fused (x: f32[1024,256]) -> (f32[1000,256], f32[1000,256]) {
  %x = f32[1024,256]{1,0} parameter(0)
  %a = f32[1000,256]{1,0} slice(%x), slice={[0:1000], [0:256]}
  %b = f32[1000,256]{1,0} slice(%x), slice={[24:1024], [0:256]}
  %n = f32[1000,256]{1,0} negate(%a)
  %m = f32[1000,256]{1,0} negate(%b)
  ROOT %t = (f32[1000,256]{1,0}, f32[1000,256]{1,0}) tuple(%n, %m)
}
"""
    line = "(f32[1000,256]{1,0}, f32[1000,256]{1,0}) fusion(%big), kind=kLoop, calls=%fused"
    assert of(line, fused=twice) == Traffic(hbm=BIG + 2 * 1000 * 256 * 4)


UPDATED = """%fused (x: f32[1024,256], y: f32[8,256], i: s32[]) -> f32[1024,256] {
  %x = f32[1024,256]{1,0} parameter(0)
  %y = f32[8,256]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %n = f32[8,256]{1,0} negate(%y)
  ROOT %u = f32[1024,256]{1,0} dynamic-update-slice(%x, %n, %i, %i)
}
"""


def test_a_fusion_that_updates_in_place_writes_the_update():
    """As a scanned layer stacks what the backward pass needs."""
    moved = of(
        "f32[1024,256]{1,0} fusion(%big, %small, %i), kind=kLoop, calls=%fused", fused=UPDATED
    )
    assert moved.hbm == pytest.approx(2 * SMALL, abs=8)


def test_a_fusion_of_two_results_writes_both():
    two = """%fused (x: f32[8,256]) -> (f32[8,256], f32[8,256]) {
  %x = f32[8,256]{1,0} parameter(0)
  %n = f32[8,256]{1,0} negate(%x)
  %a = f32[8,256]{1,0} abs(%x)
  ROOT %t = (f32[8,256]{1,0}, f32[8,256]{1,0}) tuple(%n, %a)
}
"""
    line = "(f32[8,256]{1,0}, f32[8,256]{1,0}) fusion(%small), kind=kLoop, calls=%fused"
    assert of(line, fused=two) == Traffic(hbm=3 * SMALL)


def test_a_loop_itself_moves_nothing_whatever_its_state():
    """Its state stays where it is; only what the body does is counted."""
    loop = """%condition (s: (f32[1024,256], s32[])) -> pred[] {
  %s = (f32[1024,256]{1,0}, s32[]) parameter(0)
  ROOT %go = pred[] constant(false)
}

%body (s: (f32[1024,256], s32[])) -> (f32[1024,256], s32[]) {
  ROOT %s = (f32[1024,256]{1,0}, s32[]) parameter(0)
}
"""
    moved = of(
        "(f32[1024,256]{1,0}, s32[]) while(%state), condition=%condition, body=%body",
        "%state = (f32[1024,256]{1,0}, s32[]) tuple(%big, %i)",
        fused=loop,
    )
    assert moved == Traffic()
