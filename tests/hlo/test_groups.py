"""Replica groups: every printed form gives the groups that the mesh axes give."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from spmdlab.errors import HloError
from spmdlab.hlo.groups import mesh_axes, parse_groups, replica_groups, source_target_pairs

AXES = "abcde"


@st.composite
def meshes(draw):
    """A mesh of up to 64 devices and some of its axes."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    assume(math.prod(sizes) <= 64)
    chosen = draw(st.sets(st.integers(0, len(sizes) - 1)))
    return tuple(sizes), tuple(sorted(chosen))


def groups_along(sizes, chosen, ids=None):
    """Devices that differ in the chosen coordinates alone, by numpy."""
    ids = np.arange(math.prod(sizes)) if ids is None else ids
    others = [d for d in range(len(sizes)) if d not in chosen]
    table = ids.reshape(sizes).transpose(*others, *chosen)
    return table.reshape(-1, math.prod(sizes[d] for d in chosen))


def as_sets(groups):
    return {frozenset(map(int, group)) for group in groups}


def listed(groups):
    return "{" + ",".join("{" + ",".join(map(str, g)) + "}" for g in groups) + "}"


def named(sizes):
    return ",".join(f"'{AXES[d]}'={size}" for d, size in enumerate(sizes))


@settings(max_examples=200, deadline=None)
@given(meshes())
def test_every_form_of_the_same_groups(mesh):
    sizes, chosen = mesh
    total = math.prod(sizes)
    expected = groups_along(sizes, chosen)
    others = [d for d in range(len(sizes)) if d not in chosen]
    shape = f"[{expected.shape[0]},{expected.shape[1]}]"
    dims = ",".join(map(str, sizes))
    order = ",".join(map(str, [*others, *chosen]))
    references = ",".join(f"'{AXES[d]}'" for d in chosen)
    forms = [
        listed(expected),
        f"{shape}<=[{dims}]T({order})",
        f"mesh[{named(sizes)}] {{{references}}}",
        f"mesh[{named(sizes)}], device_ids=([{total}]) {{{references}}}",
        f"mesh[{named(sizes)}], device_ids=({','.join(map(str, range(total)))}) {{{references}}}",
    ]
    for form in forms:
        assert as_sets(parse_groups(form, total)) == as_sets(expected), form
    if order == ",".join(map(str, range(len(sizes)))):
        assert as_sets(parse_groups(f"{shape}<=[{total}]", total)) == as_sets(expected)


@settings(max_examples=200, deadline=None)
@given(meshes())
def test_groups_are_attributed_to_the_axes_they_were_made_of(mesh):
    sizes, chosen = mesh
    axis_sizes = tuple(zip(AXES, sizes, strict=False))
    groups = parse_groups(listed(groups_along(sizes, chosen)), math.prod(sizes))
    found = mesh_axes(groups, axis_sizes)
    assert found.axes == tuple(AXES[d] for d in chosen if sizes[d] > 1)
    assert found.whole


@settings(max_examples=100, deadline=None)
@given(meshes(), st.data())
def test_device_ids_in_another_order(mesh, data):
    """As JAX 0.12 prints a mesh whose devices were laid out along other dims."""
    sizes, chosen = mesh
    total = math.prod(sizes)
    order = data.draw(st.permutations(range(len(sizes))))
    dims = [sizes[d] for d in order]
    back = [order.index(d) for d in range(len(sizes))]
    ids = np.arange(total).reshape(dims).transpose(back).reshape(-1)
    references = ",".join(f"'{AXES[d]}'" for d in chosen)
    device_ids = f"[{','.join(map(str, dims))}]T({','.join(map(str, back))})"
    expected = as_sets(groups_along(sizes, chosen, ids))
    text = f"mesh[{named(sizes)}], device_ids=({device_ids}) {{{references}}}"
    assert as_sets(parse_groups(text, total)) == expected
    # The parser of attributes splits at the comma.
    split = {
        "replica_groups": f"mesh[{named(sizes)}]",
        "device_ids": f"({device_ids}) {{{references}}}",
    }
    assert as_sets(replica_groups(split, total)) == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=3, max_size=3), st.integers(1, 3))
def test_a_part_of_an_axis(factors, other):
    """``'a':(k)m``: the axis is cut into k, m and the rest; the groups run along m."""
    before, size, after = factors
    text = f"mesh['a'={before * size * after},'b'={other}] {{'a':({before}){size}}}"
    expected = groups_along((before, size, after, other), (1,))
    groups = parse_groups(text, expected.size)
    assert as_sets(groups) == as_sets(expected)
    found = mesh_axes(groups, (("a", before * size * after), ("b", other)))
    assert found.axes == (("a",) if size > 1 else ())
    assert found.whole == (size == 1 or before * after == 1)


def test_no_groups_are_one_group_of_all():
    everyone = (tuple(range(8)),)
    assert parse_groups("{}", 8) == parse_groups("{{}}", 8) == everyone
    assert replica_groups({}, 8) == everyone
    assert mesh_axes(everyone, (("data", 2), ("tensor", 4))).axes == ("data", "tensor")


def test_axes_the_compiler_names_itself_are_found_by_ids():
    """Four axes of the compiler's, of size 1 too, for two of the user's."""
    groups = parse_groups("mesh['axis_0'=4,'axis_1'=1,'axis_2'=1,'axis_3'=2] {'axis_3'}", 8)
    assert mesh_axes(groups, (("fsdp", 4), ("tensor", 2))).axes == ("tensor",)


def test_groups_across_two_axes_but_not_all_of_them_are_a_part():
    diagonal = parse_groups("{{0,3},{1,2}}", 4)
    found = mesh_axes(diagonal, (("data", 2), ("tensor", 2)))
    assert (found.axes, found.whole) == (("data", "tensor"), False)


@pytest.mark.parametrize(
    "attributes",
    [
        pytest.param({"source_target_pairs": "{{0,1},{1,2},{2,0}}"}, id="permute"),
        pytest.param(
            {"frontend_attributes": "{_xla_send_recv_source_target_pairs={{0,1},{1,2},{2,0}}}"},
            id="send",
        ),
        pytest.param(
            {"frontend_attributes": '{_xla_send_recv_source_target_pairs="{{0,1},{1,2},{2,0}}"}'},
            id="send-quoted",
        ),
    ],
)
def test_pairs(attributes):
    assert source_target_pairs(attributes) == ((0, 1), (1, 2), (2, 0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("[2,3]<=[8]", "2x3 is not 8", id="count"),
        pytest.param("[8]<=[8]", r"expected \[groups,size\]", id="rank"),
        pytest.param("[2,4]<=[2,4]T(0,0)", "not a permutation", id="permutation"),
        pytest.param("[2,0]<=[2,0]", "a dim of no devices", id="nobody"),
        pytest.param("[2,4]<=[2,4]T(0)", "not a permutation", id="short-permutation"),
        pytest.param("mesh['a'=8] {'b'}", "no mesh axis 'b'", id="axis"),
        pytest.param("mesh['a'=8] {'a':(3)2}", "does not divide 'a'", id="sub-axis"),
        pytest.param("mesh['a'=8] {'a':(0)2}", "does not divide 'a'", id="sub-axis-zero"),
        pytest.param("mesh['a'=8], device_ids=([4]) {'a'}", "4 device ids for 8", id="ids"),
        pytest.param("[1,999999999]<=[999999999]", "more than", id="enormous"),
        pytest.param("mesh['a'=9999999,'b'=9999999] {'a'}", "more than", id="enormous-mesh"),
        pytest.param("{{0,a}}", "not understood", id="letters"),
        pytest.param("", "not understood", id="empty"),
    ],
)
def test_refuses(text, message):
    with pytest.raises(HloError, match=message):
        parse_groups(text, 8)


def test_a_device_outside_the_mesh_is_refused():
    with pytest.raises(HloError, match="names device 8, the mesh data=8 has 8"):
        mesh_axes(((0, 8),), (("data", 8),))
    with pytest.raises(HloError, match="names device 1000"):
        mesh_axes(parse_groups("{{0,1" + "0" * 30 + "}}", 8), (("data", 8),))


def test_pairs_that_are_no_pairs_are_refused():
    with pytest.raises(HloError, match="not pairs"):
        source_target_pairs({"source_target_pairs": "{{0,1,2}}"})


def test_no_text_takes_long():
    many = 300_000
    ones = ",".join("1" * many)
    axes = ",".join(f"'a{k}'=1" for k in range(many))
    for text in (
        f"mesh[]{' ' * many}x",
        f"mesh[{axes}] {{'a1'}}",
        "mesh['a'=8] {" + "'b'," * many + "}",
        f"mesh['a'=8], device_ids=({')' * many}) {{'a'}}",
        "{" * many,
        "{1," * many,
        "[" * many,
        f"[1,1]<=[{ones}]",
        f"[1,1]<=[1]T({ones})",
    ):
        with pytest.raises(HloError):
            parse_groups(text, 8)


def test_groups_of_a_large_slice_come_in_device_order():
    groups = parse_groups("[16,256]<=[16,16,16]T(1,0,2)", 4096)
    expected = groups_along((16, 16, 16), (0, 2))
    assert [list(group) for group in groups] == expected.tolist()
    assert list(itertools.chain(*groups[:1]))[:3] == [0, 1, 2]
