"""Fully sharded data parallelism (ZeRO-3), and its milder form ZeRO-1."""

import dataclasses
from typing import Literal

from spmdlab.strategies.base import Rules, check_choice, check_ways
from spmdlab.strategies.product import Composable


@dataclasses.dataclass(frozen=True)
class Fsdp(Composable):
    """Splits the batch over mesh axis ``fsdp``, and what belongs to each weight as well.

    With ``zero=3`` weights, gradients and optimizer state are split along the model width;
    each weight is all-gathered before use and its gradient reduce-scattered.  With ``zero=1``
    only the optimizer state is split: weights stay whole, and are gathered once a step.

    Norm scales stay whole: they are small, and a gather of each costs more than it saves.

    Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, stages 1 and 3.
    """

    ways: int
    zero: Literal[1, 3] = 3

    def __post_init__(self) -> None:
        check_ways("Fsdp", self.ways)
        check_choice("Fsdp", "zero", self.zero, (1, 3))

    def axes(self) -> dict[str, int]:
        return {"fsdp": self.ways}

    def rules(self) -> Rules:
        weights = {"embed": ("fsdp",)} if self.zero == 3 else {}
        return {"act_batch": ("fsdp",), **weights}

    def optimizer_rules(self) -> Rules:
        """Under both stages the optimizer state is split along the model width."""
        return {"act_batch": ("fsdp",), "embed": ("fsdp",)}

    def text(self) -> str:
        """The words `strategy_from_text` reads."""
        return f"fsdp={self.ways}" + ("" if self.zero == 3 else f" zero={self.zero}")
