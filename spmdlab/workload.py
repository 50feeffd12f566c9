"""What is computed in one optimizer step, whatever the layout.  No JAX."""

import dataclasses
import math

from spmdlab.errors import ConfigError
from spmdlab.models.config import DecoderConfig


@dataclasses.dataclass(kw_only=True, slots=True)
class BatchConfig:
    """Sizes of the batch.  Exactly one of the two batch sizes is set."""

    global_batch: int | None = None
    """Sequences per optimizer step, over all devices: the same work on every target."""

    per_device_batch: float | None = None
    """Sequences per optimizer step and device: work grows with the target.  Less than one
    where a sequence is shared by several devices."""

    seq_len: int
    """Tokens per sequence."""

    def problems(self) -> list[str]:
        """Everything wrong with these values, one sentence each."""
        found = []
        if (self.global_batch is None) == (self.per_device_batch is None):
            found.append(
                "set exactly one of batch.global_batch and batch.per_device_batch, "
                f"got {self.global_batch} and {self.per_device_batch}"
            )
        for name in ("global_batch", "per_device_batch", "seq_len"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                found.append(f"batch.{name} must be above 0, got {value}")
        return found


@dataclasses.dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW with clipping by the global norm."""

    learning_rate: float = 3e-4

    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0; 0 turns warm-up off."""

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8

    weight_decay: float = 0.1
    """Of every weight but the norms' scales."""

    clip_norm: float = 1.0
    """Largest global norm of the gradient; longer gradients are scaled down to it."""

    def problems(self) -> list[str]:
        """Everything wrong with these values, one sentence each."""
        found = [
            f"optimizer.{name} must be above 0 and finite, got {getattr(self, name)}"
            for name in ("learning_rate", "eps", "clip_norm")
            if not 0 < getattr(self, name) < math.inf
        ]
        found += [
            f"optimizer.{name} must be at least 0, got {getattr(self, name)}"
            for name in ("warmup_steps", "weight_decay")
            if not getattr(self, name) >= 0
        ]
        found += [
            f"optimizer.{name} must be at least 0 and below 1, got {getattr(self, name)}"
            for name in ("b1", "b2")
            if not 0 <= getattr(self, name) < 1
        ]
        return found


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model, a batch and an optimizer: what every strategy must compute alike."""

    model: DecoderConfig
    batch: BatchConfig
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)

    def problems(self) -> list[str]:
        """Everything wrong with these values, one sentence each."""
        return [*self.model.problems(), *self.batch.problems(), *self.optimizer.problems()]

    def global_batch(self, num_devices: int) -> int:
        """Sequences per optimizer step on this many devices.

        Raises:
            ConfigError: ``per_device_batch`` gives no whole number of sequences.
        """
        if self.batch.global_batch is not None:
            return self.batch.global_batch
        sequences = self.batch.per_device_batch * num_devices
        if sequences < 1 or sequences != int(sequences):
            raise ConfigError(
                f"batch.per_device_batch={self.batch.per_device_batch} on {num_devices} devices "
                f"gives {sequences:g} sequences; it must give a whole number, at least 1."
            )
        return int(sequences)

    def global_model_flops(self, num_devices: int) -> float:
        """Model FLOPs of one optimizer step over all devices; see `DecoderConfig.model_flops`."""
        return self.model.model_flops(
            global_batch=self.global_batch(num_devices), seq_len=self.batch.seq_len
        )
