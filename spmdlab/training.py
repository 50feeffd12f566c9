"""What a training run is told beyond its workload.  No JAX."""

import dataclasses
import math


@dataclasses.dataclass(kw_only=True, slots=True)
class TrainingConfig:
    """How long a run lasts, and how often it looks up from the step."""

    steps: int = 1000
    """Optimizer steps, counted from the beginning of the run and not from where it resumes."""

    log_every: int = 10
    """Steps between two lines of metrics."""

    evaluate_every: int = 100
    """Steps between two evaluations on the valid split; the last step is always evaluated."""

    evaluate_batches: int = 8
    """Batches per evaluation, the same ones each time; fewer where the split has fewer."""

    target: float | None = None
    """Loss on the valid split, in nats per token, at which the run ends early."""

    checkpoint_every: int = 100
    """Steps between two checkpoints; the last step is always saved."""

    keep_checkpoints: int = 3
    """Newest checkpoints to keep, beside the one with the lowest loss on the valid split."""

    def problems(self) -> list[str]:
        """Everything wrong with these values, one sentence each."""
        found = [
            f"training.{field.name} must be at least 1, got {getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if field.name != "target" and not getattr(self, field.name) >= 1
        ]
        if self.target is not None and not 0 < self.target < math.inf:
            found.append(f"training.target must be above 0 and finite, got {self.target}")
        return found
