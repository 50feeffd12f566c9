"""Bytes, FLOPs, seconds and counts as text for people: three significant digits and a unit."""

import math
from collections.abc import Sequence

_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))

UNKNOWN = "-"
"""What stands where a value cannot be known."""


def _three_digits(value: float) -> str:
    """Returns ``value`` with three significant digits, or all those before the point."""
    if value == 0:
        return "0"
    if abs(value) < 999.5:
        value = float(f"{value:.3g}")  # First, so that 9.996 reads 10.0 and not 10.00.
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def _scaled(value: float, base: float, units: tuple[str, ...]) -> tuple[str, str]:
    """Returns digits and unit; rounding never leaves a full ``base`` of a smaller unit."""
    size, step = abs(value), 0
    while step < len(units) - 1 and round(size) >= base:
        size /= base
        step += 1
    return _three_digits(math.copysign(size, value)), units[step]


def text_of_bytes(num_bytes: float | None) -> str:
    """Returns bytes in powers of 1024.

    >>> text_of_bytes(0), text_of_bytes(1023), text_of_bytes(1536), text_of_bytes(16 * 2**30)
    ('0 B', '1023 B', '1.50 KiB', '16.0 GiB')
    >>> text_of_bytes(None)
    '-'
    """
    if num_bytes is None:
        return UNKNOWN
    if abs(num_bytes) < 1023.5:
        return f"{num_bytes:.0f} B"
    digits, unit = _scaled(num_bytes, 1024, _BINARY)
    return f"{digits} {unit}"


def text_of_count(count: float | None, unit: str = "") -> str:
    """Returns a count in powers of 1000, followed by ``unit``.

    >>> text_of_count(950), text_of_count(8030261248), text_of_count(1.97e14, "FLOP/s")
    ('950', '8.03 G', '197 TFLOP/s')
    """
    if count is None:
        return UNKNOWN
    if abs(count) < 1000 and float(count).is_integer():
        digits, prefix = f"{count:.0f}", ""
    else:
        digits, prefix = _scaled(count, 1000, _DECIMAL)
    return f"{digits} {prefix}{unit}".rstrip()


def text_of_flops(flops: float | None) -> str:
    """Returns a number of floating point operations.

    >>> text_of_flops(2 * 4096**3)
    '137 GFLOP'
    """
    return text_of_count(flops, "FLOP")


def text_of_seconds(seconds: float | None) -> str:
    """Returns a duration in the largest unit that leaves a digit before the point.

    >>> text_of_seconds(0.01234), text_of_seconds(4.5e-7), text_of_seconds(75), text_of_seconds(0)
    ('12.3 ms', '450 ns', '75.0 s', '0 s')
    """
    if seconds is None:
        return UNKNOWN
    if seconds == 0:
        return "0 s"
    # 0.9996 ms rounds to 1.00 ms, not to 1000 µs.
    large_enough = (each for each in _SECONDS if abs(seconds) >= each[0] * 0.9995)
    scale, unit = next(large_enough, _SECONDS[-1])
    return f"{_three_digits(seconds / scale)} {unit}"


def text_of_share(share: float | None) -> str:
    """Returns a fraction as a percentage.

    >>> text_of_share(0.4567), text_of_share(1.0), text_of_share(None)
    ('45.7%', '100.0%', '-')
    """
    return UNKNOWN if share is None else f"{100 * share:.1f}%"


def text_of_pair(texts: Sequence[str], between: str) -> str:
    """Joins two quantities, saying a unit that they share once.

    >>> text_of_pair(["9.22 ms", "15.4 ms"], " .. "), text_of_pair(["9.22 ms", "1.5 s"], " .. ")
    ('9.22 .. 15.4 ms', '9.22 ms .. 1.5 s')
    >>> text_of_pair(["-", "-"], " / ")
    '-'
    """
    first, second = texts
    if first == second == UNKNOWN:
        return UNKNOWN
    number, _, unit = first.partition(" ")
    if unit and second.endswith(f" {unit}"):
        first = number
    return f"{first}{between}{second}"
