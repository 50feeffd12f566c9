"""The parser against XLA's own, and against damaged text."""

import re

import pytest
from hypothesis import given, settings, strategies as st

from spmdlab.errors import HloError
from spmdlab.hlo.parse import parse
from spmdlab.hlo.program import Program
from tests.hlo_samples import model
from tests.hlo_samples.chain import survives
from tests.hlo_samples.programs import HEAD, PLATFORMS, SAMPLES, sample, stack

try:
    from jaxlib._hlo import hlo_module_from_text  # private, and the only other reader there is
except ImportError:
    hlo_module_from_text = None

TINY = f"""{HEAD}ENTRY %main (a: f32[8,8]) -> f32[8,8] {{
  %a = f32[8,8]{{1,0}} parameter(0)
  ROOT %b = f32[8,8]{{1,0}} add(%a, %a)
}}
"""


def oracle_opcode(instruction) -> str:
    """``HloOpcode.kAllReduce`` as it is printed: ``all-reduce``."""
    name = str(instruction.opcode).rpartition(".")[2].removeprefix("k")
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


def agree(program: Program, text: str) -> None:
    """Both readers see the same computations, instructions, opcodes and operands.

    XLA writes an async start without a computation (``slice-start``) and reads it into one of
    its own, so those are passed over.
    """
    module = hlo_module_from_text(text)
    theirs = {c.name: c for c in module.computations() if not c.name.startswith("async_wrapped")}
    assert set(theirs) == set(program.computations)
    for name, computation in theirs.items():
        ours = program.computations[name].by_name
        instructions = computation.instructions()
        assert {i.name for i in instructions} == set(ours)
        for instruction in instructions:
            mine = ours[instruction.name]
            assert mine.operands == tuple(o.name for o in instruction.operands())
            if not oracle_opcode(instruction).startswith("async-"):
                assert mine.opcode == oracle_opcode(instruction)


@pytest.mark.skipif(hlo_module_from_text is None, reason="this jaxlib has no HLO reader")
@pytest.mark.parametrize("name", SAMPLES)
def test_reads_stored_dumps_as_xla_does(name):
    agree(parse(sample(name)), sample(name))


@pytest.mark.skipif(hlo_module_from_text is None, reason="this jaxlib has no HLO reader")
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("layout", model.LAYOUTS)
def test_reads_this_jax_as_xla_does(layout, platform):
    text = stack(layout, platform, scanned=True).text
    agree(parse(text), text)


@pytest.mark.parametrize("name", SAMPLES)
def test_header_tables_and_donation(name):
    program = parse(sample(name))
    assert program.is_scheduled
    assert (program.num_partitions, program.num_replicas) == (8, 1)
    # Outputs down, up and the loss; the two weights go back where they came from.
    assert program.aliases == {0: 0, 1: 1}
    assert {frame.file for frame in program.frames.values()} >= {"/home/user/model.py"}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_stack_leads_from_the_layer_outwards(name):
    """What calls the layer differs from case to case; make.py called it all."""
    program = parse(sample(name))
    stacks = [
        [frame.function.rpartition(".")[2] for frame in program.stack(i.stack_frame_id)]
        for c in program.computations.values()
        for i in c.instructions
        if i.opcode in ("dot", "convolution") and i.stack_frame_id
    ]
    assert stacks
    for functions in stacks:
        assert functions[0] == "layer"
        assert functions[-3:] == ["lower", "main", "<module>"]


def test_a_literal_over_several_lines():
    program = parse(
        f"""{HEAD}ENTRY %main () -> f32[2,2] {{
  ROOT %c = f32[2,2]{{1,0}} constant({{ {{ 1, 2 }},
    {{ 3, 4 }} }})
}}
"""
    )
    assert program.entry.root.opcode == "constant"
    assert program.entry.root.operands == ()


def test_operands_with_their_shapes_and_without_percent_signs():
    """The long form that older XLA dumps print."""
    program = parse(
        """HloModule old

ENTRY main {
  p = (f32[8]{0}, /*index=1*/f32[8]{0}) parameter(0)
  a = f32[8]{0} get-tuple-element((f32[8]{0}, f32[8]{0}) p), index=1
  ROOT b = f32[8]{0} add(f32[8]{0} a, f32[8]{0} %a)
}
"""
    )
    assert program.entry.root.operands == ("a", "a")
    assert not program.is_scheduled


def test_a_quote_may_hold_brackets_commas_and_escaped_quotes():
    op_name = r"jit(f)/a[\"x\"], b={c)"
    text = TINY.replace("add(%a, %a)", f'add(%a, %a), metadata={{op_name="{op_name}"}}, x=1')
    root = parse(text).entry.root
    assert root.op_name == 'jit(f)/a["x"], b={c)'
    assert root.attributes["x"] == "1"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        pytest.param("HloModule", "Hlomodule", "expected 'HloModule NAME'", id="header"),
        pytest.param("ENTRY ", "", "no ENTRY", id="entry"),
        pytest.param("add(%a, %a)", "add(%a, %z)", "reads 'z', which is not defined", id="operand"),
        pytest.param("%b = f32", "%a = f32", "'a' is defined twice", id="twice"),
        pytest.param("f32[8,8]{1,0} add", "g32[8,8]{1,0} add", "element type 'g32'", id="dtype"),
        pytest.param("add(%a, %a)", "add(%a, %a", "is not closed", id="open"),
        pytest.param("add(%a, %a)", "add", "no opcode", id="no-opcode"),
        pytest.param("add(%a, %a)", "add(%a, 3)", "names no instruction", id="number"),
        pytest.param("parameter(0)", "parameter(x)", "is not a number", id="parameter"),
        pytest.param("  ROOT", "}\n  ROOT", "not understood", id="outside"),
        pytest.param("add(%a, %a)", "add(%a, %a), {}", "has no name", id="attribute"),
        pytest.param("}\n", "", "cut short", id="cut"),
    ],
)
def test_refuses_with_the_line(old, new, message):
    assert old in TINY
    with pytest.raises(HloError, match=message):
        parse(TINY.replace(old, new))


@pytest.mark.parametrize("text", ["", " \n\n", "// only a comment\n"])
def test_refuses_nothing(text):
    with pytest.raises(HloError, match="empty"):
        parse(text)


FUZZED = ("jax0.10_cpu_fsdp_tensor_scanned", "jax0.12_2xv5e_sliced_scanned")
fuzzed = pytest.mark.parametrize("name", FUZZED)
NUMBERS = st.sampled_from(
    ["-1", "0", "7", "4096", "99999999", str(2**63), "1" + "0" * 30, "9" * 5000]
)


def target_of(name: str) -> str:
    return "cpu:8" if "cpu" in name else "2*v5e:2x4"


def test_the_samples_survive_undamaged():
    for name in FUZZED:
        assert not isinstance(survives(sample(name), target_of(name)), HloError)


@fuzzed
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_truncated_anywhere(name, data):
    text = sample(name)
    end = data.draw(st.integers(0, len(text) - 3))
    assert isinstance(survives(text[:end], target_of(name)), HloError)


@fuzzed
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_characters_changed(name, data):
    text = list(sample(name))
    places = data.draw(st.lists(st.integers(0, len(text) - 1), min_size=1, max_size=8))
    for place in places:
        text[place] = data.draw(st.characters() | st.sampled_from('(){}[],"\\%=\n0a '))
    survives("".join(text), target_of(name))


@fuzzed
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_lines_dropped_doubled_or_moved(name, data):
    lines = sample(name).splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(lines) - 1))
        line = lines.pop(place)
        for _ in range(data.draw(st.sampled_from([0, 2, 1]))):
            lines.insert(data.draw(st.integers(0, len(lines))), line)
    survives("\n".join(lines), target_of(name))


@fuzzed
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_numbers_changed(name, data):
    """Sizes, indices, ids, counts: each may be negative, enormous, or just wrong."""
    text = sample(name)
    start = text.index("\n\n%")  # past the tables
    numbers = [found.span() for found in re.finditer(r"(?<![\w.])-?\d+", text[start:])]
    low, high = data.draw(st.sampled_from(numbers))
    new = data.draw(NUMBERS)
    survives(text[: start + low] + new + text[start + high :], target_of(name))


@fuzzed
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_words_exchanged(name, data):
    """Opcodes, names, types and attributes put where others were."""
    text = sample(name)
    start = text.index("\n\n%")
    words = [found.span() for found in re.finditer(r"[A-Za-z_][\w\-.]*", text[start:])]
    low, high = data.draw(st.sampled_from(words))
    other = data.draw(st.sampled_from(words))
    new = text[start + other[0] : start + other[1]]
    survives(text[: start + low] + new + text[start + high :], target_of(name))


@fuzzed
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_opcodes_exchanged(name, data):
    text = sample(name)
    opcodes = [m.span(1) for m in re.finditer(r"= [^=]*? ([a-z][a-z\-]*)\(", text)]
    low, high = data.draw(st.sampled_from(opcodes))
    new = data.draw(
        st.sampled_from(
            "all-reduce all-gather-start async-start call conditional convolution copy-done "
            "copy-start custom-call dot dynamic-slice-start dynamic-update-slice fusion gather "
            "get-tuple-element map parameter recv reduce reduce-window scatter "
            "select-and-scatter send send-done slice-start sort tuple while".split()
        )
    )
    survives(text[:low] + new + text[high:], target_of(name))


@settings(max_examples=100, deadline=None)
@given(st.text() | st.text(st.sampled_from('(){}[],"\\%=\n0a ')) | st.binary().map(str))
def test_any_text(text):
    assert isinstance(survives(text), HloError)
    survives(f"HloModule x\n{text}")
    survives(f"HloModule x\n\nENTRY %m (a: f32[]) -> f32[] {{\n{text}\n}}\n")
    survives(TINY.replace("add(%a, %a)", f"add(%a, %a), {text}"))
    survives(TINY.replace("add(%a, %a)", text))


LONG = 1_000_000


FILLERS = """( { [ " \\" % a, /* = 1_ , f32[ (f32[],""".split()


@pytest.mark.parametrize(
    "filler",
    [*FILLERS, " ", "{ ", "%a ", "\n", "\n%a =", "\n%a = (", "\n x = f32[] constant({"],
    ids=repr,
)
def test_a_megabyte_of_anything_takes_seconds_at_most(filler):
    """No regular expression goes back over what it has read; no text is copied piece by piece."""
    text = filler * (LONG // len(filler))
    survives(text)
    survives(f"HloModule x, input_output_alias={{ {text}\n")
    survives(f"HloModule x\n{text}\n")
    survives(TINY.replace("f32[8,8]{1,0} add", f"{text} add"))
    survives(TINY.replace("add(%a, %a)", f"add({text})"))
    survives(TINY.replace("add(%a, %a)", f"add(%a, %a), replica_groups={text}"))
    survives(TINY.replace("add(%a, %a)", f"all-reduce(%a), replica_groups={text}"))
    survives(TINY.replace("add(%a, %a)", f"convolution(%a, %a), dim_labels={text}"))
    survives(TINY.replace("add(%a, %a)", f'add(%a, %a), metadata={{op_name="{text}"}}'))


def test_a_megabyte_of_tuple_is_read_in_one_pass():
    parts = LONG // 8
    shape = f"({','.join(['f32[2]'] * parts)})"
    assert parse(TINY.replace("f32[8,8]{1,0} parameter", f"{shape} parameter"))
