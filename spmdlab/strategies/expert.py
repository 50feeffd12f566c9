"""Expert parallelism: a mixture's experts on different devices, tokens sent to them."""

import dataclasses

from spmdlab.strategies.base import Rules, check_ways
from spmdlab.strategies.product import Composable


@dataclasses.dataclass(frozen=True)
class Expert(Composable):
    """Splits experts over mesh axis ``expert``, and the batch as well.

    Outside a mixture the axis is one more way to split the batch, with every weight whole on
    it; inside, each device holds its experts and the tokens that chose them.  One all-to-all
    takes tokens there and one takes results back (without a capacity: an all-gather and a
    reduce-scatter).  Multiply by `Tensor` to split each expert, by `Fsdp` to split the rest.

    Source: Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668.
    """

    ways: int

    def __post_init__(self) -> None:
        check_ways("Expert", self.ways)

    def axes(self) -> dict[str, int]:
        return {"expert": self.ways}

    def rules(self) -> Rules:
        return dict.fromkeys(("act_batch", "expert", "act_expert"), ("expert",))

    def text(self) -> str:
        """The words `strategy_from_text` reads."""
        return f"expert={self.ways}"
