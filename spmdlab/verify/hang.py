"""Which collective a step sat in when it did not end.

XLA's CPU collectives complain on stderr when not all devices join one: the line names the kind
and the channel, which the compiled program's text leads back to an instruction, and so to the
mesh axes, the parameter and the line of Python.
"""

import contextlib
import json
import os
import pathlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence

from spmdlab.cost.ledger import price
from spmdlab.errors import SpmdlabError
from spmdlab.hardware.chips import chip
from spmdlab.hardware.topology import parse_topology, row_major_placement
from spmdlab.hlo.parse import parse

WARN_AFTER_S = 10
"""After how long XLA says that a device waits for others."""

_WAITING = re.compile(r"waiting for `(?:first call to )?([\w ]+?)\W+RendezvousKey\{([^`]*)\}")
_OP = re.compile(r"op_id=(\d+)")
_PHASE = "phase.json"
_STUCK = "stuck"


def xla_flags(timeout_s: float) -> str:
    """Returns the flags that make XLA name a stuck collective, and leave ending it to us.

    Args:
        timeout_s: When we end it.
    """
    warn_s = max(1, min(WARN_AFTER_S, int(timeout_s / 3)))
    return (
        f"--xla_cpu_collective_call_warn_stuck_timeout_seconds={warn_s} "
        f"--xla_cpu_collective_call_terminate_timeout_seconds={int(timeout_s) + 600}"
    )


def note(
    folder: pathlib.Path, doing: str, collectives: Sequence[Mapping[str, object]] = ()
) -> None:
    """Leaves word of what the process is about to do, should it not come back."""
    (folder / _PHASE).write_text(json.dumps({"doing": doing, "collectives": list(collectives)}))


@contextlib.contextmanager
def limit(folder: pathlib.Path | None, timeout_s: float | None) -> Iterator[None]:
    """Ends this process, for nothing else can, where its body takes longer; leaves word of it."""
    if folder is None or timeout_s is None:
        yield
        return

    def give_up() -> None:
        (folder / _STUCK).write_text(f"{timeout_s:.0f}")
        os._exit(1)

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def stuck(folder: pathlib.Path) -> str | None:
    """Returns what to say of a process that `limit` ended; None if it did not."""
    path = folder / _STUCK
    return f"no end after {path.read_text()} s" if path.exists() else None


def collectives_of(hlo_text: str, mesh_axes: Mapping[str, int], relays: Sequence[str]) -> list:
    """Returns what to say of each collective of a program: kind, channel and text.

    Empty where the program's text cannot be read, which shall not keep it from running.
    """
    size = 1
    for ways in mesh_axes.values():
        size *= ways
    try:
        program = parse(hlo_text)
        place = row_major_placement(parse_topology(f"cpu:{size}"), mesh_axes)
        ledger = price(program, chip("cpu"), place, relays=relays)
    except SpmdlabError:
        return []
    channels = {
        instruction.name: instruction.attributes.get("channel_id")
        for computation in program.computations.values()
        for instruction in computation.instructions
    }
    found = []
    for row in ledger.collectives:
        text = f"{row.kind} {row.name} over {row.wire.axis_key}"
        text += f" of {row.parameter}" if row.parameter else ""
        text += f", {row.op_name}" if row.op_name else ""
        text += f" ({row.source})" if row.source else ""
        found.append({"kind": row.kind, "channel": channels.get(row.name), "text": text})
    return found


def explain(folder: pathlib.Path, log: Sequence[str]) -> str:
    """Returns in one line what a process that did not come back was doing, as far as known.

    Args:
        folder: Where `note` left word.
        log: The last lines of the process's log.
    """
    path = folder / _PHASE
    noted = json.loads(path.read_text()) if path.exists() else {"doing": "", "collectives": []}
    doing = f" while {noted['doing']}" if noted["doing"] else ""
    waiting = dict.fromkeys(
        (found[1].strip().replace(" ", "-"), (_OP.search(found[2]) or ["", ""])[1])
        for line in log
        if (found := _WAITING.search(line))
    )
    if not waiting:
        return f"{doing}; no collective has complained"
    texts = []
    for kind, channel in waiting:
        same = [each for each in noted["collectives"] if each["kind"].startswith(kind)]
        fits = [each["text"] for each in same if each["channel"] in (channel, None)]
        texts.append(" or ".join(fits[:3]) or f"{kind} with channel {channel}")
    return f"{doing}; devices wait for others in {'; and in '.join(texts)}"
