"""One lookup, one error."""

import pytest

from spmdlab.errors import ConfigError, TargetError
from spmdlab.lookup import pick

TABLE = {"fsdp": 1, "tensor": 2}


def test_finds_what_is_there():
    assert pick(TABLE, "tensor", "axis") == 2


def test_names_the_near_one_and_all_that_exist():
    with pytest.raises(ConfigError, match=r"axis 'tensr'\.  Did you mean 'tensor'\?  Known: fsdp,"):
        pick(TABLE, "tensr", "axis")


def test_guesses_nothing_for_a_name_far_from_all():
    with pytest.raises(ConfigError) as caught:
        pick(TABLE, "zzzzzz", "axis")
    assert "Did you mean" not in str(caught.value)


def test_raises_the_class_it_is_given():
    with pytest.raises(TargetError):
        pick(TABLE, "x", "axis", TargetError)
