"""Spatial parallelism: each image's rows split over devices."""

import dataclasses

from spmdlab.strategies.base import Rules, check_ways
from spmdlab.strategies.product import Composable


@dataclasses.dataclass(frozen=True)
class Spatial(Composable):
    """Splits the height of every image over mesh axis ``spatial``; weights stay whole.

    A convolution needs a row of each neighbour at the edge: one collective-permute each way.
    For images too large for one device, or batches smaller than the mesh.  The coarsest level
    of a U-Net must still divide.

    Source: Dryden et al. 2019, https://arxiv.org/abs/1903.06681.
    """

    ways: int

    def __post_init__(self) -> None:
        check_ways("Spatial", self.ways)

    def axes(self) -> dict[str, int]:
        return {"spatial": self.ways}

    def rules(self) -> Rules:
        return {"act_height": ("spatial",)}

    def text(self) -> str:
        """The words `strategy_from_text` reads."""
        return f"spatial={self.ways}"
