"""Find where numbers stop being finite, for a step that was not applied, and say what to do."""

import re
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from vigpipe.model.graph import collected_anomalies
from vigpipe.ops.sparse_rows import SparseRows
from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.parallel.values import all_gather_values
from vigpipe.run.facts import Run
from vigpipe.run.rank import RankState

_NUMBERS_AT_ONCE = 1 << 22


def find_anomaly(rank_state: RankState, batch: ReplicaBatch) -> str:
    """Repeat a step, on all ranks; say in which block features first stop being finite."""
    for model in rank_state.trained.models:
        model.set_detect_anomaly(True)
    rank_state.reducer.gradients.clear()
    with collected_anomalies() as own_messages:
        rank_state.pipeline.train_step(batch, eager=True)
    rank_state.trained.statistics.take()
    for model in rank_state.trained.models:
        model.set_detect_anomaly(rank_state.run.config.detect_anomaly)
    by_rank = all_gather_values(own_messages[:1], *rank_state.strategy.peers)
    first_messages = list(chain.from_iterable(by_rank))
    if not first_messages:
        return "the features of all blocks are finite, so look at the readout and the gradients"
    return min(first_messages, key=lambda message: int(re.findall("[0-9]+", message)[0]))


def find_largest(rank_state: RankState, batch: ReplicaBatch) -> str:
    """Say, on all ranks, which number of a batch's inputs is the largest."""
    by_rank = all_gather_values(_largest(batch), *rank_state.strategy.peers)
    return max(found for found in by_rank if found is not None)[1]


def advise(run: Run, largest: str | None = None, *, have_moved: bool) -> str:
    """Say what to do; before the weights have moved, the rate cannot be the cause."""
    if have_moved:
        return "lower --lr, or bound the gradient with --clip 1"
    inputs = "the input" if largest is None else f"the input, {largest}"
    weights = "" if run.config.weights is None else ", or in --weights"
    return (
        f"no weight has moved yet, so look for the cause in {inputs}{weights}, and mend or scale it"
    )


def _largest(batch: ReplicaBatch) -> list[float | str] | None:
    """Find the largest number of the inputs, and say which it is; None if this rank has none."""
    if batch.inputs is None:
        return None
    inputs = batch.without_padding(batch.inputs)
    found = [(0.0, "which is all 0")]
    if inputs.numel():
        size, number = _size(inputs)
        row, *place = map(int, np.unravel_index(number, inputs.shape))
        what = f"feature {place[0]} of node" if len(place) == 1 else "a pixel of image"
        found.append((size, f"whose largest number is {size:.3g} ({what} {row} of the batch)"))
    for part in chain.from_iterable(batch.structures):
        if isinstance(part, SparseRows) and len(part.values):
            size, number = _size(part.values)
            row, column = (int(ends[number]) for ends in (part.places.targets, part.places.indices))
            what = f"feature {column} of node {row} of the batch"
            found.append((size, f"whose largest number is {size:.3g} ({what})"))
    return list(max(found))


def _size(numbers: Tensor) -> tuple[float, int]:
    """Return the largest absolute value, infinite for NaN, and its place in the flat tensor."""
    largest, place, first = -1.0, 0, 0
    for some in numbers.detach().flatten().split(_NUMBERS_AT_ONCE):  # memory may be nearly full
        sizes = some.abs().double().nan_to_num(nan=torch.inf, posinf=torch.inf)
        number = int(sizes.argmax())
        if float(sizes[number]) > largest:
            largest, place = float(sizes[number]), first + number
        first += len(some)
    return largest, place
