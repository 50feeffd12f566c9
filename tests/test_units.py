import re

import pytest
from hypothesis import given, strategies as st

from spmdlab.units import text_of_bytes, text_of_count, text_of_seconds

SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


@given(st.floats(min_value=1e-9, max_value=9e4))
def test_seconds_read_back_to_three_digits(seconds):
    number, unit = text_of_seconds(seconds).split()
    assert float(number) * SECONDS[unit] == pytest.approx(seconds, rel=0.0051)
    assert len(number.replace(".", "").lstrip("0")) == 3 or float(number) >= 1000


@given(st.integers(min_value=0, max_value=2**59))
def test_bytes_read_back_to_three_digits(num_bytes):
    number, unit = text_of_bytes(num_bytes).split()
    assert float(number) * BINARY[unit] == pytest.approx(num_bytes, rel=0.0051)
    assert float(number) < 1024 or unit == "PiB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9996e-3, "1.00 ms"), (0.9994e-3, "999 µs"), (9.996, "10.0 s"), (1e-10, "0.100 ns")],
)
def test_rounding_never_shows_a_thousand_of_a_smaller_unit(seconds, text):
    assert text_of_seconds(seconds) == text


def test_a_count_has_its_prefix_beside_its_unit():
    assert text_of_count(197e12, "FLOP/s") == "197 TFLOP/s"
    assert re.fullmatch(r"1\.00 M", text_of_count(999_999))
    assert text_of_count(12) == "12"
