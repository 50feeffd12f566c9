"""Programs that no compiler prints, each refused with its line and reason."""

import pytest

from spmdlab.errors import HloError
from spmdlab.hlo.parse import parse
from spmdlab.hlo.shapes import parse_shape
from spmdlab.hlo.validate import MAX_DEPTH, MAX_EXPANDED, same_structure
from tests.hlo_samples.chain import survives
from tests.hlo_samples.programs import HEAD

INNER = """%inner (x: f32[8], n: s32[]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %n = s32[] parameter(1)
  ROOT %y = f32[8]{0} negate(%x)
}
"""
LOOP = """%condition (s: (f32[8], s32[])) -> pred[] {
  %s = (f32[8]{0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=1
  ROOT %go = pred[] compare(%i, %i), direction=LT
}

%body (s: (f32[8], s32[])) -> (f32[8], s32[]) {
  ROOT %s = (f32[8]{0}, s32[]) parameter(0)
}
"""


def text(*lines: str, before: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"""{HEAD}{before}
ENTRY %main (p: f32[8], k: s32[]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  %k = s32[] parameter(1)
  %t = (f32[8]{{0}}, s32[]) tuple(%p, %k)
{body}
}}
"""


GOOD = text(
    "%e = f32[8]{0} get-tuple-element(%t), index=0",
    "%f = f32[8]{0} fusion(%e, %k), kind=kLoop, calls=%inner",
    "%w = (f32[8]{0}, s32[]) while(%t), condition=%condition, body=%body",
    "%d = f32[] dot(%f, %f), lhs_contracting_dims={0}, rhs_contracting_dims={0}",
    "%c = (f32[8]{0}, f32[8]{0}, u32[]) copy-start(%f)",
    "ROOT %r = f32[8]{0} copy-done(%c)",
    before=f"{INNER}\n{LOOP}",
)


def test_the_program_that_the_cases_below_damage_is_good():
    assert parse(GOOD).num_instructions == 3 + 3 + 1 + 9


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        pytest.param("index=0", "index=2", r"takes part \(2,\) of 2", id="part"),
        pytest.param("index=0", "index=-1", r"takes part \(-1,\) of 2", id="negative-part"),
        pytest.param("(%t), index=0", "(%p), index=0", r"takes part \(0,\) of 0", id="no-tuple"),
        pytest.param("%e = f32[8]", "%e = f32[9]", r"says f32\[9\], but the part", id="part-shape"),
        pytest.param("tuple(%p, %k)", "tuple(%p, %p)", "parts of other shapes", id="tuple"),
        pytest.param("tuple(%p, %k)", "tuple(%p)", "parts of other shapes", id="tuple-length"),
        pytest.param("(%e, %k), kind", "(%e), kind", "does not pass what 'inner'", id="arguments"),
        pytest.param(
            "(%e, %k), kind", "(%k, %e), kind", "does not pass what 'inner'", id="argument-shapes"
        ),
        pytest.param("%f = f32[8]", "%f = f32[7]", "'inner' returns", id="result"),
        pytest.param(", calls=%inner", "", "calls nothing", id="calls-nothing"),
        pytest.param("calls=%inner", "calls=%outer", "calls 'outer', which", id="missing"),
        pytest.param("(%t), condition", "(%p), condition", "does not take and return", id="state"),
        pytest.param("(%t), condition", "(%t, %t), condition", "lacks its state", id="states"),
        pytest.param(
            "%s = (f32[8]{0}, s32[]) parameter(0)\n  %i",
            "%s = (f32[8]{0}, s32[]) constant({})\n  %i",
            "does not take and return",
            id="condition-of-nothing",
        ),
        pytest.param(", body=%body", "", "lacks its state, its condition or", id="no-body"),
        pytest.param("body=%body", "body=%inner", "does not take and return", id="body"),
        pytest.param("lhs_contracting_dims={0}", "lhs_contracting_dims={1}", "outside", id="dim"),
        pytest.param("dims={0}, rhs", "dims={-1}, rhs", "outside", id="negative-dim"),
        pytest.param(
            "dims={0}, rhs", f"dims={{{'9' * 30}}}, rhs", "is out of range", id="enormous-dim"
        ),
        pytest.param("dot(%f, %f)", "dot(%f)", "has 1 operands, needs 2", id="operands"),
        pytest.param("copy-done(%c)", "copy-done()", "has 0 operands, needs 1", id="done"),
        pytest.param(
            "(f32[8]{0}, f32[8]{0}, u32[]) copy-start",
            "f32[8]{0} copy-start",
            "source and",
            id="dma",
        ),
        pytest.param("%n = s32[] parameter(1)", "%n = s32[] parameter(2)", "numbered 0", id="gap"),
        pytest.param(
            "%n = s32[] parameter(1)", "%n = s32[] parameter(0)", "numbered 0", id="twice"
        ),
        pytest.param("%d = f32[] dot", "ROOT %d = f32[] dot", "two ROOTs", id="roots"),
        pytest.param("num_partitions=8", "num_partitions=0, replica_count=0", "neither", id="none"),
    ],
)
def test_refuses(old, new, message):
    assert old in GOOD
    with pytest.raises(HloError, match=message):
        parse(GOOD.replace(old, new, 1))


def test_an_error_names_the_line():
    line = next(n for n, row in enumerate(GOOD.splitlines(), 1) if " dot(" in row)
    with pytest.raises(HloError, match=f"^line {line}: dot 'd' has 1 operands"):
        parse(GOOD.replace("dot(%f, %f)", "dot(%f)"))


def calling(name: str, callee: str, times: int = 1) -> str:
    calls = "\n".join(
        f"  {'ROOT ' if k == times - 1 else ''}%c{k} = f32[8]{{0}} call(%x), to_apply=%{callee}"
        for k in range(times)
    )
    return f"%{name} (x: f32[8]) -> f32[8] {{\n  %x = f32[8]{{0}} parameter(0)\n{calls}\n}}\n"


LEAF = """%f0 (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %y = f32[8]{0} negate(%x)
}
"""


def nest(depth: int, times: int = 1) -> str:
    inner = [LEAF, *(calling(f"f{k + 1}", f"f{k}", times) for k in range(depth))]
    return text(f"ROOT %r = f32[8]{{0}} call(%p), to_apply=%f{depth}", before="\n".join(inner))


def test_calls_in_a_ring_are_refused():
    ring = [calling("f0", "f1"), calling("f1", "f0")]
    with pytest.raises(HloError, match="calls itself"):
        parse(text("ROOT %r = f32[8]{0} call(%p), to_apply=%f0", before="\n".join(ring)))


def test_calls_may_be_nested_deep_but_not_without_end():
    assert not isinstance(survives(nest(MAX_DEPTH - 2)), HloError)
    assert "nested deeper" in str(survives(nest(MAX_DEPTH + 1)))
    assert "nested deeper" in str(survives(nest(5000)))


def test_calls_that_multiply_are_refused_before_they_are_walked():
    """Thirty levels of two calls each are a billion instructions."""
    assert not isinstance(survives(nest(5, times=2)), HloError)
    assert f"over {MAX_EXPANDED} lines" in str(survives(nest(30, times=2)))


def test_loops_inside_loops_are_refused_where_they_multiply():
    def level(k: int) -> str:
        return f"""%body{k + 1} (s: (f32[8], s32[])) -> (f32[8], s32[]) {{
  %s = (f32[8]{{0}}, s32[]) parameter(0)
  ROOT %w = (f32[8]{{0}}, s32[]) while(%s), condition=%condition, body=%body{k}
}}
"""

    for depth, refused in ((8, False), (40, True)):
        before = "\n".join([LOOP.replace("%body", "%body0"), *map(level, range(depth))])
        line = f"ROOT %w = (f32[8]{{0}}, s32[]) while(%t), condition=%condition, body=%body{depth}"
        assert isinstance(survives(text(line, before=before)), HloError) == refused


def test_structure_leaves_layouts_aside():
    left = parse_shape("(f32[8,4]{1,0:T(8,128)S(1)}, s32[])")
    assert same_structure(left, parse_shape("(f32[8,4]{0,1}, s32[])"))
    assert not same_structure(left, parse_shape("(f32[4,8]{1,0}, s32[])"))
    assert not same_structure(left, parse_shape("(bf16[8,4]{1,0}, s32[])"))
    assert not same_structure(left, parse_shape("(f32[8,4]{1,0}, s32[], s32[])"))
