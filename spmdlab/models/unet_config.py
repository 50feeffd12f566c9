"""Sizes of a U-Net, and what follows from them in closed form.  No JAX."""

import dataclasses
from typing import get_args

from spmdlab.models.config import FloatType

WINDOW = 3
"""Tiles on a side that a convolution looks at."""


@dataclasses.dataclass(kw_only=True, slots=True)
class UNetConfig:
    """A U-Net: images in, an image of predictions out, through ever coarser levels and back."""

    height: int
    """Of the images; each level but the first has half, so it divides ``2**(levels - 1)``."""

    width: int
    """As ``height``."""

    in_channels: int
    out_channels: int

    channels: tuple[int, ...] = (16, 32, 64)
    """Width of each level, the finest first.  A block is twice as wide between its two
    convolutions."""

    norm_eps: float = 1e-5

    param_dtype: FloatType = "float32"
    """Dtype of the stored weights and of the optimizer state."""

    compute_dtype: FloatType = "float32"
    """Dtype of convolutions, and of weights and gradients on the wire."""

    def problems(self) -> list[str]:
        """Everything wrong with these values, one sentence each."""
        found = []
        sizes = {name: getattr(self, name) for name in ("height", "width")}
        sizes |= {name: getattr(self, name) for name in ("in_channels", "out_channels")}
        sizes |= {f"channels[{level}]": size for level, size in enumerate(self.channels)}
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                found.append(f"model.{name} must be a positive whole number, got {value!r}")
        if not self.channels:
            found.append("model.channels is empty; name the width of one level at least")
        if found:
            return found
        coarsest = 2 ** (len(self.channels) - 1)
        for name in ("height", "width"):
            if (size := getattr(self, name)) % coarsest:
                above = size - size % coarsest + coarsest
                found.append(
                    f"model.{name} ({size}) must be a multiple of {coarsest}, to be halved "
                    f"{len(self.channels) - 1} times; pad it to {above}"
                )
        if not self.norm_eps > 0:
            found.append(f"model.norm_eps must be above 0, got {self.norm_eps}")
        for name in ("param_dtype", "compute_dtype"):
            if (value := getattr(self, name)) not in get_args(FloatType):
                known = ", ".join(get_args(FloatType))
                found.append(f"model.{name} must be one of {known}, got {value!r}")
        return found

    @property
    def tiles(self) -> int:
        """Positions of one image that a loss is taken at."""
        return self.height * self.width

    def products(self) -> list[tuple[int, int]]:
        """Each convolution's weights (all but norms), and the positions that it is applied to."""
        found = [(self.in_channels * self.channels[0], self.tiles)]
        for level, width in enumerate(self.channels):
            positions = self.tiles // 4**level
            block = 2 * WINDOW**2 * width * 2 * width
            last = level == len(self.channels) - 1
            found += [(block, positions)] * (1 if last else 2)
            if not last:
                between = width * self.channels[level + 1]
                found += [(between, positions // 4), (between, positions // 4)]
        return [*found, (self.channels[0] * self.out_channels, self.tiles)]

    def model_flops(self, *, global_batch: int) -> float:
        """Model FLOPs of one optimizer step over all devices.

        Six per weight of a convolution and position (two forward, four backward), windows that
        reach over the edge counted whole.  Not counted: norms, activations, the optimizer.
        """
        return 6.0 * global_batch * sum(weights * at for weights, at in self.products())
