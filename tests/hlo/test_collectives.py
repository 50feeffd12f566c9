"""Collectives found in hand-made programs, in every way they are printed."""

import re

import pytest

from spmdlab.hlo.collectives import Collective, Collectives
from spmdlab.hlo.parse import parse
from tests.hlo_samples import model
from tests.hlo_samples.programs import HEAD, sample

REDUCER = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}
"""


def found(text: str) -> dict[str, tuple[str, Collective | None]]:
    """Instruction of the entry -> its part in a collective, where it has one."""
    program = parse(text)
    collectives = Collectives(program)
    roles = {i.name: collectives.role(program.entry, i) for i in program.entry.instructions}
    return {name: (r.part, r.collective) for name, r in roles.items() if r.part != "none"}


def entry(*lines: str, before: str = "") -> str:
    return "\n".join(
        [
            f"{HEAD}{REDUCER}\n{before}",
            "ENTRY %main (p: f32[8,16]) -> f32[8,16] {",
            "  %p = f32[8,16]{1,0} parameter(0)",
            *(f"  {line}" for line in lines),
            "}",
            "",
        ]
    )


BYTES = 8 * 16 * 4
PAIRS = "replica_groups={{0,1},{2,3},{4,5},{6,7}}"
FOURS = "replica_groups=[2,4]<=[8]"


@pytest.mark.parametrize(
    ("line", "kind", "operand", "result"),
    [
        pytest.param(
            f"f32[32,16]{{1,0}} all-gather(%p), {FOURS}, dimensions={{0}}",
            "all-gather",
            BYTES,
            4 * BYTES,
            id="all-gather",
        ),
        pytest.param(
            f"f32[8,16]{{1,0}} all-reduce(%p), {FOURS}, to_apply=%add",
            "all-reduce",
            BYTES,
            BYTES,
            id="all-reduce",
        ),
        pytest.param(
            f"f32[2,16]{{1,0}} reduce-scatter(%p), {FOURS}, dimensions={{0}}, to_apply=%add",
            "reduce-scatter",
            BYTES,
            BYTES // 4,
            id="reduce-scatter",
        ),
        pytest.param(
            f"f32[8,16]{{1,0}} all-to-all(%p), {FOURS}, dimensions={{0}}",
            "all-to-all",
            BYTES,
            BYTES,
            id="all-to-all",
        ),
        pytest.param(
            "f32[8,16]{1,0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}",
            "collective-permute",
            BYTES,
            BYTES,
            id="permute",
        ),
    ],
)
def test_synchronous(line, kind, operand, result):
    ((part, collective),) = found(entry(f"ROOT %c = {line}")).values()
    assert (part, collective.kind) == ("sync", kind)
    assert (collective.operand_bytes, collective.result_bytes) == (operand, result)
    assert collective.payload_bytes == max(operand, result)
    assert collective.dtype == "f32"


def test_combined_into_one_tuple():
    lines = (
        "%q = bf16[8,16]{1,0} convert(%p)",
        f"%c = (f32[8,16]{{1,0}}, bf16[8,16]{{1,0}}) all-reduce(%p, %q), {PAIRS}, to_apply=%add",
        "ROOT %r = f32[8,16]{1,0} get-tuple-element(%c), index=0",
    )
    _, collective = found(entry(*lines))["c"]
    assert collective.operand_bytes == collective.result_bytes == BYTES + BYTES // 2
    assert collective.dtype == "f32+bf16"


def test_a_start_is_the_collective_and_its_done_is_not():
    lines = (
        f"%s = (f32[8,16]{{1,0}}, f32[32,16]{{1,0}}) all-gather-start(%p), {FOURS}, "
        "dimensions={0}",
        "%d = f32[32,16]{1,0} all-gather-done(%s)",
        f"%t = f32[8,16]{{1,0}} all-reduce-start(%p), {PAIRS}, to_apply=%add",
        "%e = f32[8,16]{1,0} all-reduce-done(%t)",
        "%u = (f32[8,16]{1,0}, f32[8,16]{1,0}, u32[], u32[]) collective-permute-start(%p), "
        "source_target_pairs={{0,1}}",
        "ROOT %f = f32[8,16]{1,0} collective-permute-done(%u)",
    )
    roles = found(entry(*lines))
    assert [part for part, _ in roles.values()] == ["start", "done"] * 3
    gather, reduce, permute = (roles[name][1] for name in "stu")
    assert (gather.kind, gather.operand_bytes, gather.result_bytes) == (
        "all-gather",
        BYTES,
        4 * BYTES,
    )
    assert (reduce.kind, reduce.payload_bytes) == ("all-reduce", BYTES)
    assert (permute.kind, permute.payload_bytes) == ("collective-permute", BYTES)
    assert permute.groups == ((0, 1),)


def test_gpu_text_is_read_by_opcode_whatever_its_names_and_flags_say():
    """A synchronous op named after a start, and a start that is marked synchronous."""
    lines = (
        f"%all-reduce-start.1 = f32[8,16]{{1,0}} all-reduce(%p), {PAIRS}, to_apply=%add, "
        'metadata={op_name="x" scheduling_name="all-reduce-start.1"}',
        f"%s = f32[8,16]{{1,0}} all-reduce-start(%all-reduce-start.1), {PAIRS}, to_apply=%add, "
        'backend_config={"collective_backend_config":{"is_sync":true,"backend":"DEFAULT"}}',
        "ROOT %d = f32[8,16]{1,0} all-reduce-done(%s)",
    )
    parts = {name: part for name, (part, _) in found(entry(*lines)).items()}
    assert parts == {"all-reduce-start.1": "sync", "s": "start", "d": "done"}


def test_an_async_wrapper_is_its_inner_collective():
    wrapped = f"""%wrapped (q: f32[8,16]) -> f32[2,16] {{
  %q = f32[8,16]{{1,0}} parameter(0)
  ROOT %rs = f32[2,16]{{1,0}} reduce-scatter(%q), {FOURS}, dimensions={{0}}, to_apply=%add
}}
"""
    lines = (
        "%s = ((f32[8,16]{1,0}), f32[2,16]{1,0}, s32[]) async-start(%p), calls=%wrapped",
        "%u = ((f32[8,16]{1,0}), f32[2,16]{1,0}, s32[]) async-update(%s)",
        "ROOT %d = f32[2,16]{1,0} async-done(%u)",
    )
    roles = found(entry(*lines, before=wrapped))
    assert {name: part for name, (part, _) in roles.items()} == {"s": "start", "d": "done"}
    collective = roles["s"][1]
    assert (collective.kind, collective.operand_bytes, collective.result_bytes) == (
        "reduce-scatter",
        BYTES,
        BYTES // 4,
    )


def test_an_async_wrapper_of_compute_is_no_collective():
    wrapped = """%wrapped (q: f32[8,16]) -> f32[8,16] {
  %q = f32[8,16]{1,0} parameter(0)
  ROOT %n = f32[8,16]{1,0} negate(%q)
}
"""
    lines = (
        "%s = ((f32[8,16]{1,0}), f32[8,16]{1,0}, s32[]) async-start(%p), calls=%wrapped",
        "ROOT %d = f32[8,16]{1,0} async-done(%s)",
    )
    assert found(entry(*lines, before=wrapped)) == {}


def test_a_fusion_of_all_reduce_and_slice_is_a_reduce_scatter():
    fused = f"""%all-reduce-scatter (q: f32[8,16], i: s32[]) -> f32[2,16] {{
  %q = f32[8,16]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %r = f32[8,16]{{1,0}} all-reduce(%q), {FOURS}, to_apply=%add
  ROOT %s = f32[2,16]{{1,0}} dynamic-slice(%r, %i, %z), dynamic_slice_sizes={{2,16}}
}}
"""
    lines = (
        "%i = s32[] constant(0)",
        "ROOT %f = f32[2,16]{1,0} fusion(%p, %i), kind=kCustom, calls=%all-reduce-scatter",
    )
    ((part, collective),) = found(entry(*lines, before=fused)).values()
    assert (part, collective.kind) == ("sync", "reduce-scatter")
    assert (collective.operand_bytes, collective.result_bytes) == (BYTES, BYTES // 4)


def test_a_fusion_that_keeps_the_whole_sum_is_an_all_reduce():
    fused = f"""%fused (q: f32[8,16]) -> f32[8,16] {{
  %q = f32[8,16]{{1,0}} parameter(0)
  %r = f32[8,16]{{1,0}} all-reduce(%q), {FOURS}, to_apply=%add
  ROOT %n = f32[8,16]{{1,0}} negate(%r)
}}
"""
    lines = ("ROOT %f = f32[8,16]{1,0} fusion(%p), kind=kCustom, calls=%fused",)
    ((_, collective),) = found(entry(*lines, before=fused)).values()
    assert (collective.kind, collective.result_bytes) == ("all-reduce", BYTES)


SEND = "channel_id=1, frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,2}}}"


def test_send_and_recv_start_what_their_dones_wait_for():
    lines = (
        "%t = token[] after-all()",
        f"%r = (f32[8,16]{{1,0}}, u32[], token[]) recv(%t), {SEND}",
        f"%s = (f32[8,16]{{1,0}}, u32[], token[]) send(%p, %t), {SEND}",
        "%rd = (f32[8,16]{1,0}, token[]) recv-done(%r), channel_id=1",
        "%sd = token[] send-done(%s), channel_id=1",
        "ROOT %x = f32[8,16]{1,0} get-tuple-element(%rd), index=0",
    )
    roles = found(entry(*lines))
    assert {name: part for name, (part, _) in roles.items()} == {
        "r": "start",
        "s": "start",
        "rd": "done",
        "sd": "done",
    }
    for name in "rs":
        assert roles[name][1].groups == ((0, 1), (1, 2))
        assert roles[name][1].payload_bytes == BYTES


def test_a_send_to_the_host_is_no_collective():
    lines = (
        "%t = token[] after-all()",
        "%s = (f32[8,16]{1,0}, u32[], token[]) send(%p, %t), is_host_transfer=true",
        "%sd = token[] send-done(%s)",
        "ROOT %x = f32[8,16]{1,0} copy(%p)",
    )
    assert {part for part, _ in found(entry(*lines)).values()} <= {"done"}


def roles_everywhere(text: str) -> list[tuple[str, str, Collective | None]]:
    """Of the computations that are run as they stand, not as part of a fusion."""
    program = parse(text)
    collectives = Collectives(program)
    fused = {
        called
        for computation in program.computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "fusion"
        for called in instruction.called
    }
    return [
        (instruction.name, role.part, role.collective)
        for computation in program.computations.values()
        if computation.name not in fused
        for instruction in computation.instructions
        if (role := collectives.role(computation, instruction)).part != "none"
    ]


def test_a_tpu_async_collective_fusion_is_one_collective():
    """Each weight is gathered for the forward pass and again for the backward pass.

    The text shows the gathers that were made asynchronous three times over or more: in the
    start, in the compute fusions that carry them, and in the done, all on one channel.
    """
    text = sample("jax0.12_v5e_fsdp_unrolled")
    roles = roles_everywhere(text)
    gathers = [c for _, part, c in roles if c is not None and c.kind == "all-gather"]
    weight = model.EMBED * model.MLP * 2  # bfloat16
    assert {gather.result_bytes for gather in gathers} == {weight}
    assert len(gathers) == 2 * 2 * model.LAYERS
    channels = re.findall(r" all-gather\(.*?channel_id=(\d+)", text)
    assert len(gathers) == len(set(channels)) < len(channels) / 2
    starts = [name for name, part, _ in roles if part == "start"]
    dones = [name for name, part, _ in roles if part == "done"]
    assert len(starts) == len(dones) == text.count('"AsyncCollectiveStart"') > 0


@pytest.mark.parametrize("line", ["jax0.10", "jax0.12"])
def test_says_which_algorithm_the_tpu_compiler_chose(line):
    """It says so where it runs the collective at once, not for the asynchronous ones."""
    roles = roles_everywhere(sample(f"{line}_v5e_fsdp_tensor_scanned"))
    chosen = {c.algorithm for _, part, c in roles if part == "sync" and c.kind == "all-gather"}
    assert chosen == {"1DAllGatherNonMajorDim"}
