"""What every verb begins and ends with: the experiment's part that is asked for, and refusals."""

import dataclasses
from collections.abc import Sequence
from importlib import metadata

from spmdlab import errors
from spmdlab.config import Experiment
from spmdlab.lookup import pick
from spmdlab.report.rows import Row
from spmdlab.strategies.text import strategy_from_text
from spmdlab.verify import supervise


def select(
    experiment: Experiment,
    *,
    strategies: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
) -> Experiment:
    """Returns the experiment with only these strategies and targets, checked.

    Raises:
        ConfigError: A name is unknown, a text form does not parse, or the experiment is wrong.
    """
    chosen = experiment.strategies
    if strategies is not None:
        chosen = {}
        for text in strategies:
            known = text in experiment.strategies or "=" not in text
            chosen[text] = (
                pick(experiment.strategies, text, "strategy") if known else strategy_from_text(text)
            )
    selected = dataclasses.replace(
        experiment,
        strategies=chosen,
        targets=tuple(dict.fromkeys(experiment.targets if targets is None else targets)),
    )
    selected.check()
    return selected


def refuse_if_all_refused(rows: Sequence[Row]) -> None:
    """Raises where no row could be had and each for something the user has to change."""
    if not all(kind(row) == "refused" for row in rows):
        return
    reasons = list(dict.fromkeys(row["error"] for row in rows))
    more = len(reasons) - 1
    and_more = f" (and {more} more such {'reason' if more == 1 else 'reasons'})" if more else ""
    first = next(row for row in rows if row["error"] == reasons[0])
    raise getattr(errors, first["error_type"])(
        f"{first['strategy']} on {first['target']}: {reasons[0]}{and_more}"
    )


def kind(row: Row) -> str:
    """Returns a row's outcome in the words of `progress.Watcher`."""
    if row["status"] == "ok":
        return "done"
    return "refused" if row.get("error_type") in supervise.USER_MISTAKES else "failed"


def version(package: str) -> str | None:
    """Returns the version of an installed package; None where it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
