"""What there is to say of the samples of a step, also in rows of metrics.jsonl, for every job."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

RATE = "_per_second"  # ends the name of a row's throughput, which begins with what is counted
PARTIAL_BATCH, FULL_BATCH = "partial_batch", "full_batch"  # fields of `Fill` in a row


class Fill(NamedTuple):
    """How much of a full batch a step takes, over all replicas that take it together."""

    samples: int  # images, or sub-graphs of one large graph
    full_batch: int

    @property
    def is_full(self) -> bool:
        return self.samples >= self.full_batch


def members(unit: str) -> str:
    """Return what batches are made of in a job that counts images or nodes."""
    return "sub-graphs" if unit == "nodes" else "samples"


def partial_batch(fill: Fill) -> dict[str, float]:
    """Return what the row of a step says of its batch: nothing if that is full."""
    if fill.is_full:
        return {}
    return {PARTIAL_BATCH: fill.samples, FULL_BATCH: fill.full_batch}


def unit_in(names: Iterable[str]) -> str:
    """Return what a row of a step counts, images or nodes; images if it has no throughput."""
    return next((n.removesuffix(RATE) for n in names if n.endswith(RATE)), "images")


def trained_on(unit: str) -> str:
    """Return what the loss of a step is the mean of: all of its images, or some of its nodes."""
    return "training nodes" if unit == "nodes" else unit


def samples_in(row: Mapping[str, Any]) -> int | None:
    """Return of how many samples a row's loss is the mean; None for a row that does not say so."""
    names = "images_per_second", "step_seconds"
    values = [row["training_nodes"]] if "training_nodes" in row else [row.get(n) for n in names]
    numbers = [v for v in values if isinstance(v, int | float) and math.isfinite(v)]
    return round(math.prod(numbers)) if len(numbers) == len(values) else None
