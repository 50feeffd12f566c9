"""Data parallelism: every device holds every weight and a part of the batch."""

import dataclasses

from spmdlab.strategies.base import Rules, check_ways
from spmdlab.strategies.product import Composable


@dataclasses.dataclass(frozen=True)
class Data(Composable):
    """Splits the batch over mesh axis ``data``; gradients are all-reduced once a step."""

    ways: int

    def __post_init__(self) -> None:
        check_ways("Data", self.ways)

    def axes(self) -> dict[str, int]:
        return {"data": self.ways}

    def rules(self) -> Rules:
        return {"act_batch": ("data",)}

    def text(self) -> str:
        """The words `strategy_from_text` reads."""
        return f"data={self.ways}"
