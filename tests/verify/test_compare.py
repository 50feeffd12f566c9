"""Differences against tolerances, on arrays small enough to check by hand."""

import math

import numpy as np
import pytest

from spmdlab.verify.compare import (
    Expected,
    Setting,
    check_alike,
    copies_differ,
    difference,
    gradient_differences,
    initial_differences,
    state_differences,
)

U = 2.0**-24
SETTING = Setting(mesh_axes={"data": 8}, tolerance=1e-4, unit_roundoff=U)


def f32(*values):
    return np.array(values, np.float32)


def test_an_error_is_a_share_of_the_largest_element():
    [one] = gradient_differences({"w": f32(1, -10)}, {"w": f32(1.5, -10)}, SETTING)
    assert one.error == pytest.approx(0.05)
    assert not one.matches


def test_a_gradient_far_below_all_others_is_noise_and_not_compared_by_itself():
    """At float32 the scale of any gradient is at least 2^-12 of the largest."""
    expected = {"big": f32(1.0), "noise": f32(1e-9)}
    found = {"big": f32(1.0), "noise": f32(-1e-9)}
    big, noise = gradient_differences(found, expected, SETTING)
    assert big.matches
    assert noise.scale == 2.0**-12
    assert noise.matches
    [alone] = gradient_differences({"noise": f32(-1e-9)}, {"noise": f32(1e-9)}, SETTING)
    assert not alone.matches


def test_a_gradient_of_zero_proves_nothing_but_must_be_zero():
    expected = {"w": f32(1), "idle": f32(0, 0)}
    ok = gradient_differences({"w": f32(1), "idle": f32(0, 0)}, expected, SETTING)
    assert [each.proves for each in ok] == [True, False]
    bad = gradient_differences({"w": f32(1), "idle": f32(0, 1)}, expected, SETTING)
    assert [each.matches for each in bad] == [True, False]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_never_matches(value):
    [one] = gradient_differences({"w": f32(value, 1)}, {"w": f32(1, 1)}, SETTING)
    assert not one.matches


def test_a_parameter_may_differ_by_one_rounding_of_its_own_besides():
    """An update of 1e-4 to a weight of 1: a unit in the last place is 1.2e-3 of the update."""
    before = {"params.w": f32(1.0), "step": np.int32(0)}
    after = {"params.w": f32(1.0 + 1e-4), "step": np.int32(1)}
    expected = Expected(loss=1.0, grads={}, before=before, state=after)
    bumped = np.nextafter(after["params.w"], np.float32(2))
    near, counter = state_differences({**after, "params.w": bumped}, expected, SETTING)
    assert near.error == pytest.approx(2.0**-23 / 1e-4, rel=0.01)
    assert near.matches
    assert counter.matches
    far, _ = state_differences({**after, "params.w": f32(1.0 + 1.01e-4)}, expected, SETTING)
    assert not far.matches


def test_a_counter_must_be_equal():
    expected = Expected(loss=1.0, grads={}, before={"step": np.int32(1_000_000)},
                        state={"step": np.int32(1_000_001)})  # fmt: skip
    [one] = state_differences({"step": np.int32(1_000_002)}, expected, SETTING)
    assert not one.matches


def test_initial_values_may_differ_in_the_last_bits_only():
    expected = {"w": f32(1.0, 0.5)}
    assert initial_differences({"w": f32(1.0 + 2 * U, 0.5)}, expected, SETTING)[0].matches
    assert not initial_differences({"w": f32(1.0 + 1e-5, 0.5)}, expected, SETTING)[0].matches


def test_copies_that_differ():
    assert not copies_differ("w", [f32(1, 2), f32(1, 2)], 1e-6)
    assert copies_differ("w", [f32(1, 2), f32(1, 2.1)], 1e-6)


def test_zero_matches_only_zero():
    assert difference("w", f32(0), f32(0), 0.0, 0.0).error == 0
    assert difference("w", f32(1), f32(0), 1.0, 0.0).error == math.inf


def test_refuses_other_paths_and_shapes():
    with pytest.raises(ValueError, match="only one side has b"):
        check_alike({"a": f32(1)}, {"a": f32(1), "b": f32(1)})
    with pytest.raises(ValueError, match=r"a has shape \(2,\), not \(1,\)"):
        check_alike({"a": f32(1, 2)}, {"a": f32(1)})
