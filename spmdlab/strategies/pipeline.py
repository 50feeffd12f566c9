"""Pipeline parallelism: groups of layers on different devices, microbatches passing through."""

import dataclasses
import functools

from spmdlab.errors import ConfigError
from spmdlab.pipeline.schedule import Schedule, make_schedule
from spmdlab.strategies.base import Rules, check_ways
from spmdlab.strategies.product import Composable


@dataclasses.dataclass(frozen=True)
class Pipeline(Composable):
    """Splits the layers over mesh axis ``stage``, and the batch into microbatches.

    The layers must divide into ``ways * repeats`` chunks.  Where the model begins and ends no
    stage waits for another: embedding, its gradient and the head's share of the work are spread
    over all stages (see `spmdlab.train.pipeline`).

    Every other parallelism goes on inside a stage.  Experts are balanced microbatch by
    microbatch, unless ``load_balance_over="group"``; so more microbatches are another loss.

    ``schedule`` is ``"gpipe"``, ``"circular"``, ``"1f1b"``, or a table of one's own, see
    `spmdlab.pipeline.schedule`.  ``repeats`` is how many chunks each stage has.

    With a table, ``microbatches`` and ``repeats`` are the table's.
    """

    ways: int
    schedule: str | Schedule = "gpipe"
    microbatches: int | None = None
    repeats: int | None = None

    def __post_init__(self) -> None:
        check_ways("Pipeline", self.ways)
        if isinstance(self.schedule, Schedule):
            for name, of_table in (
                ("ways", self.schedule.stages),
                ("microbatches", self.schedule.microbatches),
                ("repeats", self.schedule.repeats),
            ):
                if getattr(self, name) not in (None, of_table):
                    raise ConfigError(
                        f"Pipeline: {name}={getattr(self, name)!r}, but the table has {of_table}."
                    )
                object.__setattr__(self, name, of_table)
            return
        if self.microbatches is None:
            raise ConfigError(
                f"Pipeline({self.ways}) needs microbatches=...; with as many as stages or fewer, "
                "half the time is bubble."
            )
        if self.repeats is None:
            object.__setattr__(self, "repeats", 2 if self.schedule == "circular" else 1)
        make_schedule(self.schedule, self.ways, self.microbatches, self.repeats)

    def axes(self) -> dict[str, int]:
        return {"stage": self.ways}

    def rules(self) -> Rules:
        return {"layers": ("stage",)}

    def pipeline_schedule(self) -> Schedule:
        """The table that the step follows."""
        if isinstance(self.schedule, Schedule):
            return self.schedule
        return _made(self.schedule, self.ways, self.microbatches, self.repeats)

    def text(self) -> str:
        """The words `strategy_from_text` reads; it cannot read a table of one's own."""
        named = self.schedule.name if isinstance(self.schedule, Schedule) else self.schedule
        usual = 2 if named == "circular" else 1
        repeats = "" if self.repeats == usual else f" repeats={self.repeats}"
        return f"stage={self.ways} schedule={named} microbatches={self.microbatches}{repeats}"


@functools.lru_cache(maxsize=64)
def _made(name: str, stages: int, microbatches: int, repeats: int) -> Schedule:
    return make_schedule(name, stages, microbatches, repeats)
