"""Tensor parallelism: a layer's width split over devices (Megatron)."""

import dataclasses
from typing import Literal

from spmdlab.strategies.base import Rules, check_choice, check_ways
from spmdlab.strategies.product import Composable


@dataclasses.dataclass(frozen=True)
class Tensor(Composable):
    """Splits heads, feed-forward width and vocabulary over mesh axis ``tensor``.

    Each block then ends in one all-reduce of the residual stream.  With ``sequence="on"``
    the residual stream between blocks is split along the sequence over the same axis, and
    that all-reduce becomes a reduce-scatter before and an all-gather after the norms.

    A head is never cut.  Where the key and value heads are too few for the ways, ask for
    ``kv="replicate"``: every device then computes all of them.

    ``True`` and ``False`` are read as ``"on"`` and ``"off"``.

    Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053; for ``sequence``,
    Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198.
    """

    ways: int
    sequence: Literal["off", "on"] = "off"
    kv: Literal["split", "replicate"] = "split"

    def __post_init__(self) -> None:
        if isinstance(self.sequence, bool):
            object.__setattr__(self, "sequence", "on" if self.sequence else "off")
        check_ways("Tensor", self.ways)
        check_choice("Tensor", "sequence", self.sequence, ("off", "on"))
        check_choice("Tensor", "kv", self.kv, ("split", "replicate"))

    def axes(self) -> dict[str, int]:
        return {"tensor": self.ways}

    def rules(self) -> Rules:
        claimed = ["heads", "mlp", "vocab", "act_heads", "act_mlp", "act_vocab"]
        if self.kv == "split":
            claimed += ["kv_heads", "act_kv_heads"]
        if self.sequence == "on":
            claimed += ["act_res_len"]
        return dict.fromkeys(claimed, ("tensor",))

    def text(self) -> str:
        """The words `strategy_from_text` reads."""
        sequence = "" if self.sequence == "off" else f" sequence={self.sequence}"
        kv = "" if self.kv == "split" else f" kv={self.kv}"
        return f"tensor={self.ways}{sequence}{kv}"
