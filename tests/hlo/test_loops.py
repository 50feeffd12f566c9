"""Trip counts, against loops that are run, and against what XLA recorded."""

import operator
import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

from spmdlab.hlo.loops import Loops
from spmdlab.hlo.parse import parse
from tests.hlo_samples import model
from tests.hlo_samples.programs import HEAD, PLATFORMS, SAMPLES, compile_on_one, sample

COMPARE = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "NE": operator.ne,
}
MIRROR = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


def trip_counts(text: str) -> dict[str, int | None]:
    program = parse(text)
    loops = Loops(program)
    return {
        instruction.name: loops.trip_count(computation, instruction)
        for computation in program.computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "while"
    }


def stripped(text: str) -> str:
    """CPU text as TPU prints it, without the recorded count."""
    return re.sub(r'"known_trip_count":\{"n":"\d+"\},?', "", text)


def loop_text(
    start: int,
    limit: int,
    step: int,
    direction: str,
    *,
    carried: bool = False,
    swapped: bool = False,
    fused: bool = False,
    subtracted: bool = False,
) -> str:
    """A loop as the compiler may print it: the limit in the state, operands swapped, fused."""
    bound = (
        "%n = s32[] get-tuple-element(%s), index=1" if carried else f"%n = s32[] constant({limit})"
    )
    pair = "%n, %i" if swapped else "%i, %n"
    if swapped:
        direction = MIRROR[direction]
    compare = f"compare(%p0, %p1), direction={direction}"
    if fused:
        deciding = f"fusion({pair}), kind=kLoop, calls=%less"
    else:
        deciding = f"compare({pair}), direction={direction}"
    return f"""{HEAD}%less (p0: s32[], p1: s32[]) -> pred[] {{
  %p0 = s32[] parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %c = pred[] {compare}
}}

%condition (s: (s32[], s32[], f32[4])) -> pred[] {{
  %s = (s32[], s32[], f32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  {bound}
  ROOT %go = pred[] {deciding}
}}

%body (s: (s32[], s32[], f32[4])) -> (s32[], s32[], f32[4]) {{
  %s = (s32[], s32[], f32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=1
  %x = f32[4]{{0}} get-tuple-element(%s), index=2
  %step = s32[] constant({-step if subtracted else step})
  %next = s32[] {"subtract" if subtracted else "add"}(%i, %step)
  %y = f32[4]{{0}} add(%x, %x)
  ROOT %t = (s32[], s32[], f32[4]{{0}}) tuple(%next, %n, %y)
}}

ENTRY %main (x: f32[4]) -> f32[4] {{
  %x = f32[4]{{0}} parameter(0)
  %start = s32[] constant({start})
  %copied = s32[] copy(%start)
  %limit = s32[] constant({limit})
  %state = (s32[], s32[], f32[4]{{0}}) tuple(%copied, %limit, %x)
  %loop = (s32[], s32[], f32[4]{{0}}) while(%state), condition=%condition, body=%body
  ROOT %y = f32[4]{{0}} get-tuple-element(%loop), index=2
}}
"""


def run(start: int, limit: int, step: int, direction: str, at_most: int = 500) -> int | None:
    """Runs the loop; None if it goes on and on."""
    count, i = 0, start
    while COMPARE[direction](i, limit):
        count, i = count + 1, i + step
        if count > at_most:
            return None
    return count


@settings(max_examples=200, deadline=None)
@given(
    start=st.integers(-20, 20),
    limit=st.integers(-20, 20),
    step=st.integers(-5, 5),
    direction=st.sampled_from(sorted(COMPARE)),
    carried=st.booleans(),
    swapped=st.booleans(),
    fused=st.booleans(),
    subtracted=st.booleans(),
)
def test_counts_what_running_the_loop_counts(start, limit, step, direction, **forms):
    counted = trip_counts(loop_text(start, limit, step, direction, **forms))["loop"]
    expected = run(start, limit, step, direction)
    if step:
        assert counted == expected
    else:  # nothing tells the variable from the limit: unknown will do, wrong will not
        assert counted in (None, expected)


def test_the_recorded_count_wins_and_an_absurd_one_is_not_read():
    text = loop_text(0, 12, 1, "LT")
    recorded = text.replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}'
    )
    assert trip_counts(recorded)["loop"] == 7
    assert trip_counts(recorded.replace('"7"', f'"{"9" * 5000}"'))["loop"] == 12


def test_a_limit_that_changes_in_the_body_is_unknown():
    text = loop_text(0, 12, 1, "LT", carried=True)
    changing = text.replace("tuple(%next, %n, %y)", "tuple(%next, %next, %y)")
    assert trip_counts(changing)["loop"] is None


def test_a_limit_that_is_an_argument_is_unknown():
    text = loop_text(0, 12, 1, "LT", carried=True)
    argument = text.replace("%limit = s32[] constant(12)", "%limit = s32[] parameter(1)")
    assert trip_counts(argument)["loop"] is None


@pytest.mark.parametrize("name", SAMPLES)
def test_finds_the_layers_of_a_real_dump_without_the_recorded_count(name):
    """One loop forwards and one backwards; over two slices the first turn of that is peeled off."""
    text = stripped(sample(name))
    assert "known_trip_count" not in text
    backwards = model.LAYERS - ("sliced" in name)
    expected = [model.LAYERS, backwards] if "scanned" in name else []
    assert sorted(trip_counts(text).values(), reverse=True) == expected


def from_seven(x):
    return lax.fori_loop(7, 19, lambda i, x: jnp.sin(x) * i, x)


def backwards(x):
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), c), x, jnp.stack([x] * 6), reverse=True)


def by_threes(x):
    def more(state):
        return state[0] <= 20

    return lax.while_loop(more, lambda s: (s[0] + 3, jnp.sin(s[1]) * s[0]), (2, x))[1]


def downwards(x):
    def more(state):
        return state[0] > -4

    return lax.while_loop(more, lambda s: (s[0] - 2, jnp.sin(s[1]) * s[0]), (9, x))[1]


def nested(x):
    def outer(x, _):
        return lax.scan(lambda c, _: (jnp.tanh(c @ x), None), x, length=5)[0], None

    return lax.scan(outer, x, length=3)[0]


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(
    ("function", "counts"),
    [
        pytest.param(from_seven, [12], id="fori-from-7-to-19"),
        pytest.param(backwards, [6], id="reversed-scan"),
        pytest.param(by_threes, [7], id="2-5-8-11-14-17-20"),
        pytest.param(downwards, [7], id="9-7-5-3-1-minus-1-minus-3"),
        pytest.param(nested, [3, 5], id="nested"),
    ],
)
def test_real_loops(function, counts, platform):
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    text = stripped(compile_on_one(platform, function, x).text)
    assert sorted(trip_counts(text).values()) == counts


def test_shared_values_do_not_take_time_that_doubles_with_each():
    """A chain of x + x, 150 long: followed naively that is 2 ** 150 values."""
    chain = "\n".join(f"  %v{k + 1} = s32[] add(%v{k}, %v{k})" for k in range(150))
    text = loop_text(0, 12, 1, "LT").replace(
        "%next = s32[] add(%i, %step)",
        f"%v0 = s32[] add(%i, %step)\n{chain}\n  %next = s32[] add(%v150, %v150)",
    )
    assert trip_counts(text)["loop"] is None
