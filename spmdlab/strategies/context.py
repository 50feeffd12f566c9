"""Context parallelism: each sequence's tokens split over devices, through attention too."""

import dataclasses
from typing import Literal

from spmdlab.errors import ConfigError
from spmdlab.strategies.base import (
    Method,
    Order,
    Rules,
    SequenceSplit,
    check_choice,
    check_ways,
)
from spmdlab.strategies.product import Composable


@dataclasses.dataclass(frozen=True)
class Context(Composable):
    """Splits every sequence over mesh axis ``context``; weights stay whole.

    All but attention needs only a token's own device.  In attention:

    - ``method="ring"``: queries stay; keys and values go round the ring of devices, and each
      device adds what it receives to a running softmax.  Hidden behind the products where
      blocks are large.  Computed in plain JAX, block by block, also with
      ``model.attention="flash"``: the kernel has no form that can be added up.
    - ``method="all_to_all"``: inside attention each device holds whole sequences and a part of
      the heads instead, so ``ways`` (times ``tensor``) must divide the query heads.  Uses the
      kernel with ``model.attention="flash"``.

    A later token looks back at more, so equal stretches are unequal work.  With
    ``order="zigzag"`` each device holds one early and one late chunk, ``i`` and
    ``2 * ways - 1 - i``: every device then has the same work at every hop, and half of it.
    With ``order="contiguous"`` all devices wait for the last one.  The default is zigzag for the
    ring; the exchange is balanced anyhow, and knows contiguous only.

    Raises:
        ConfigError: A value makes no sense, or ``method="all_to_all"`` with zigzag.

    Source: Liu et al. 2023, https://arxiv.org/abs/2310.01889 (ring); Brandon et al. 2023,
    https://arxiv.org/abs/2311.09431 (its load balance) and Llama 3, section 3.3.2,
    https://arxiv.org/abs/2407.21783 (chunks ``i`` and ``2 * ways - 1 - i``); Jacobs et al. 2023,
    https://arxiv.org/abs/2309.14509 (Ulysses, the exchange).
    """

    ways: int
    method: Method = "ring"
    order: Order | None = None
    """None: the method's own; never None afterwards."""

    def __post_init__(self) -> None:
        check_ways("Context", self.ways)
        check_choice("Context", "method", self.method, ("ring", "all_to_all"))
        if self.order is None:
            object.__setattr__(self, "order", _own_order(self.method))
        check_choice("Context", "order", self.order, ("zigzag", "contiguous"))
        if self.method == "all_to_all" and self.order == "zigzag":
            raise ConfigError(
                "Context: method='all_to_all' is balanced with order='contiguous', and knows no "
                "order='zigzag'; leave order out."
            )

    def axes(self) -> dict[str, int]:
        return {"context": self.ways}

    def rules(self) -> Rules:
        return {"act_len": ("context",), "act_res_len": ("context",)}

    def sequence_split(self) -> SequenceSplit:
        """How attention reaches the tokens on other devices."""
        assert self.order is not None
        return SequenceSplit(axis="context", ways=self.ways, method=self.method, order=self.order)

    def text(self) -> str:
        """The words `strategy_from_text` reads."""
        method = "" if self.method == "ring" else f" method={self.method}"
        order = "" if self.order == _own_order(self.method) else f" order={self.order}"
        return f"context={self.ways}{method}{order}"


def _own_order(method: str) -> Literal["zigzag", "contiguous"]:
    return "zigzag" if method == "ring" else "contiguous"
