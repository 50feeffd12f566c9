"""One way to look a name up in a table."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

from spmdlab.errors import ConfigError, SpmdlabError

T = TypeVar("T")


def pick(
    table: Mapping[str, T], name: str, what: str, error: type[SpmdlabError] = ConfigError
) -> T:
    """Returns ``table[name]``.

    Args:
        table: The names that exist.
        name: The name asked for.
        what: What the names are names of, for the message.
        error: The class to raise.

    Raises:
        ConfigError: (or ``error``) The name is absent.  The message lists the names that exist.

    >>> pick({"v5e": 197, "v6e": 918}, "v5e", "chip")
    197
    >>> pick({"v5e": 197, "v6e": 918}, "v7e", "chip")
    Traceback (most recent call last):
        ...
    spmdlab.errors.ConfigError: Unknown chip 'v7e'.  Did you mean 'v6e'?  Known: v5e, v6e.
    """
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=1)
    hint = f"  Did you mean {near[0]!r}?" if near else ""
    raise error(f"Unknown {what} {name!r}.{hint}  Known: {', '.join(table)}.")
