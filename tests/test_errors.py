"""What a launch script may catch."""

import pytest

from spmdlab import errors


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.ShardingError, ValueError),
        (errors.TargetError, ValueError),
        (errors.HloError, ValueError),
        (errors.CompileError, RuntimeError),
    ],
)
def test_every_error_is_ours_and_a_builtin_one(kind, builtin):
    assert issubclass(kind, errors.SpmdlabError)
    assert issubclass(kind, builtin)


def test_does_not_fit_says_by_how_much():
    error = errors.DoesNotFit("too big", needed_bytes=20.0, capacity_bytes=15.75)
    assert isinstance(error, errors.CompileError)
    assert (str(error), error.needed_bytes, error.capacity_bytes) == ("too big", 20.0, 15.75)
    assert errors.DoesNotFit("unknown").needed_bytes is None
