"""Shapes as HLO text prints them."""

import math

import pytest
from hypothesis import given, settings, strategies as st

from spmdlab.errors import HloError
from spmdlab.hlo.shapes import DTYPE_BITS, HBM, HOST, VMEM, parse_shape


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("f32[]", 4),
        ("pred[3]{0}", 3),
        ("bf16[2,3]{1,0}", 12),
        ("s4[5]{0}", 3),  # 20 bits
        ("f8e4m3fn[7]", 7),
        ("c64[2]", 16),
        ("token[]", 0),
        ("f32[0,8]", 0),
        ("f32[<=16,2]", 128),
        ("()", 0),
        ("(f32[2], (s32[], bf16[4]))", 8 + 4 + 8),
    ],
)
def test_bytes(text, num_bytes):
    assert parse_shape(text).num_bytes == num_bytes


def test_layouts_and_memory_spaces():
    shape = parse_shape("bf16[2,256,8]{2,0,1:T(8,128)(2,1)S(1)}")
    assert shape.minor_to_major == (2, 0, 1)
    assert shape.memory_space == VMEM
    assert parse_shape("f32[8]{0:T(128)}").memory_space == HBM
    assert parse_shape("f32[8]{0:S(5)}").memory_space == HOST


def test_bytes_by_memory_space_of_a_tuple():
    shape = parse_shape("(f32[8]{0:S(1)}, f32[4]{0}, (f32[2]{0:S(1)}, u32[]))")
    assert (shape.bytes_in(VMEM), shape.bytes_in(HBM)) == (40, 20)
    assert [str(array) for array in shape.arrays] == ["f32[8]", "f32[4]", "f32[2]", "u32[]"]


def test_long_tuples_carry_comments():
    parts = [f"{'/*index=5*/' if n == 5 else ''}f32[{n}]{{0}}" for n in range(8)]
    assert parse_shape(f"({', '.join(parts)})").num_elements == sum(range(8))


arrays = st.builds(
    lambda dtype, dims: f"{dtype}[{','.join(map(str, dims))}]",
    st.sampled_from(sorted(DTYPE_BITS)),
    st.lists(st.integers(0, 99), max_size=4),
)
shapes = st.recursive(
    arrays,
    lambda inner: st.lists(inner, max_size=4).map(lambda p: f"({', '.join(p)})"),
    max_leaves=9,
)


@settings(max_examples=100, deadline=None)
@given(shapes)
def test_prints_what_it_read(text):
    assert str(parse_shape(text)) == text


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 99), max_size=4))
def test_elements(dims):
    assert parse_shape(f"f32[{','.join(map(str, dims))}]").num_elements == math.prod(dims)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "not a shape", id="empty"),
        pytest.param("f32", "not a shape", id="no-dims"),
        pytest.param("q7[2]", "unknown element type 'q7'", id="dtype"),
        pytest.param("f32[-1]", "dim '-1'", id="negative"),
        pytest.param("f32[x]", "dim 'x'", id="letters"),
        pytest.param(f"f32[{10**30}]", "is not a number", id="enormous"),
        pytest.param(f"f32[{10**14},{10**14}]", "elements", id="enormous-product"),
        pytest.param(f"f32[{','.join('1' * 100)}]", "64 dims", id="rank"),
        pytest.param("(f32[2], f32[3]", "not", id="open"),
        pytest.param("(f32[2] f32[3])", "not closed", id="comma"),
        pytest.param("f32[2])", "unexpected text", id="closed-twice"),
        pytest.param("(" * 50 + ")" * 50, "nested deeper", id="deep"),
    ],
)
def test_refuses(text, message):
    with pytest.raises(HloError, match=message):
        parse_shape(text)
