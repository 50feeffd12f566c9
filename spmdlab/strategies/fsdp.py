"""Fully sharded data parallelism (ZeRO-3), and its milder forms ZeRO-1 and ZeRO-2."""

import dataclasses
from typing import Literal

from spmdlab.strategies.base import Rules, check_choice, check_ways
from spmdlab.strategies.product import Composable


@dataclasses.dataclass(frozen=True)
class Fsdp(Composable):
    """Splits the batch over mesh axis ``fsdp``, and what belongs to each weight as well.

    What is split along the model width, each device updating its share of every weight:

    - ``zero=1``: the optimizer state.  Gradients are summed, and added up over microbatches,
      whole on every device.
    - ``zero=2``: gradients too, from where they arise: a device keeps its share of a sum.
    - ``zero=3``: weights too.  Each is all-gathered before use; under the other two they stay
      whole, and new ones are gathered once a step.

    Norm scales stay whole: they are small, and a gather of each costs more than it saves.

    Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054.
    """

    ways: int
    zero: Literal[1, 2, 3] = 3

    def __post_init__(self) -> None:
        check_ways("Fsdp", self.ways)
        check_choice("Fsdp", "zero", self.zero, (1, 2, 3))

    def axes(self) -> dict[str, int]:
        return {"fsdp": self.ways}

    def rules(self) -> Rules:
        return self._split(self.zero == 3)

    def gradient_rules(self) -> Rules:
        """Where gradients of weights go."""
        return self._split(self.zero >= 2)

    def optimizer_rules(self) -> Rules:
        """Where optimizer state goes: split under all three."""
        return self._split(True)

    def _split(self, embed: bool) -> Rules:
        return {"act_batch": ("fsdp",), **({"embed": ("fsdp",)} if embed else {})}

    def text(self) -> str:
        """The words `strategy_from_text` reads."""
        return f"fsdp={self.ways}" + ("" if self.zero == 3 else f" zero={self.zero}")
