"""What the rows of metrics.jsonl say of the samples of a step, for every kind of job."""

import math
from collections.abc import Mapping
from typing import Any


def samples_in(row: Mapping[str, Any]) -> int | None:
    """Return what the loss of a step was the mean of; None for a row that does not say so.

    Args:
        row: of an optimizer step: with `training_nodes` for a graph, else with
            `images_per_second`.
    """
    names = "images_per_second", "step_seconds"
    values = [row["training_nodes"]] if "training_nodes" in row else [row.get(n) for n in names]
    numbers = [v for v in values if isinstance(v, int | float) and math.isfinite(v)]
    return round(math.prod(numbers)) if len(numbers) == len(values) else None
