"""Parallelisms and their product, the strategy.  Imports no jax."""

from spmdlab.strategies.base import (
    Parallelism as Parallelism,
    Rules as Rules,
    SequenceSplit as SequenceSplit,
)
from spmdlab.strategies.context import Context as Context
from spmdlab.strategies.data import Data as Data
from spmdlab.strategies.expert import Expert as Expert
from spmdlab.strategies.fsdp import Fsdp as Fsdp
from spmdlab.strategies.pipeline import Pipeline as Pipeline
from spmdlab.strategies.product import (
    Composable as Composable,
    Strategy as Strategy,
    as_strategy as as_strategy,
)
from spmdlab.strategies.spatial import Spatial as Spatial
from spmdlab.strategies.tensor import Tensor as Tensor
from spmdlab.strategies.text import (
    PARALLELISMS as PARALLELISMS,
    Words as Words,
    strategy_from_text as strategy_from_text,
)
