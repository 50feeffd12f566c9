import pytest

from spmdlab.run.guard import PATIENCE, RATIO, Guard


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_ends_the_run(bad):
    assert Guard().problem(bad, 1.0) == f"loss is {bad}"
    assert Guard().problem(1.0, bad) == f"grad_norm is {bad}"


def test_a_high_loss_ends_it_only_when_it_lasts():
    guard = Guard()
    assert guard.problem(1.0, 1.0) is None
    for _ in range(PATIENCE - 1):
        assert guard.problem(1.01 * RATIO, 1.0) is None
    assert guard.problem(RATIO, 1.0) is None  # Not above: the count begins again.
    for _ in range(PATIENCE - 1):
        assert guard.problem(1.01 * RATIO, 1.0) is None
    assert f"for {PATIENCE} steps" in guard.problem(1.01 * RATIO, 1.0)


def test_the_lowest_loss_is_known_from_before():
    guard = Guard(best=1.0, high=PATIENCE - 1)
    assert "lowest, 1" in guard.problem(RATIO + 1, 1.0)
