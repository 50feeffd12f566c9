"""Which data, and how it is divided."""

import dataclasses

STDLIB = "stdlib"
"""The source that every machine has: Python's standard library, as bytes."""


@dataclasses.dataclass(kw_only=True, slots=True)
class DataConfig:
    """A source of tokens, and the rule that divides it into train, valid and test."""

    source: str = STDLIB
    """``stdlib``; or a file of text, a folder of such files, or a ``.npy`` file of token ids."""

    seed: int | None = None
    """Of the order of the examples; None: the experiment's.  The split does not depend on it."""

    valid_percent: float = 10
    """Share of the groups for choosing between runs."""

    test_percent: float = 10
    """Share of the groups that neither training nor choosing may look at."""

    near_duplicate: float = 0.8
    """Jaccard similarity from which two documents are one group, and so in one split."""

    def problems(self) -> list[str]:
        """Everything wrong with these values, one sentence each."""
        found = []
        if not self.source:
            found.append(f"data.source is empty; name a file, a folder, or {STDLIB!r}")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            found.append(f"data.seed must be a whole number from 0 to 2**32 - 1, got {self.seed}")
        for name in ("valid_percent", "test_percent"):
            if not 0 <= getattr(self, name) < 100:
                found.append(
                    f"data.{name} must be at least 0 and below 100, got {getattr(self, name)}"
                )
        if not found and self.valid_percent + self.test_percent >= 100:
            found.append(
                "data.valid_percent + data.test_percent must leave something to train on, got "
                f"{self.valid_percent} + {self.test_percent}"
            )
        if not 0 < self.near_duplicate <= 1:
            found.append(
                f"data.near_duplicate must be above 0 and at most 1, got {self.near_duplicate}"
            )
        return found
