"""Count the bytes that the pieces of a model, its gradients and its optimizer need."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vigpipe.launch.device import send
from vigpipe.model.regions import listening
from vigpipe.profiling.trial import Trial
from vigpipe.run.rank import RankState


def activation_bytes(trial: Trial) -> dict[str, int]:
    """Count the bytes that each piece keeps from the forward of a micro-batch to its backward.

    These are the storages that autograd saves, each counted once and parameters left out. Where
    blocks are recomputed, a block keeps its input alone. The readout includes the loss.
    """
    rank_state, batch = trial
    kept: dict[str, int] = {}
    # Weights are held in any case, so their storages do not count.
    weights = (p for model in rank_state.trained.models for p in model.parameters())
    seen = {parameter.untyped_storage().data_ptr() for parameter in weights}
    depth: int = 0

    def listen(name: str, function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        nonlocal depth
        if depth:
            return function(*inputs)
        if rank_state.trained.models[0].recompute and name.startswith("block"):
            x = inputs[0]  # sparse features are those of the graph, which are there anyway
            kept[name] = x.numel() * x.element_size() if isinstance(x, Tensor) else 0
            return function(*inputs)
        depth += 1
        with _count_saved(kept, "readout" if name == "loss" else name, seen):
            result = function(*inputs)
        depth -= 1
        return result

    num_microbatches = rank_state.run.layout.num_microbatches
    inputs, labels = batch.inputs, batch.labels
    assert inputs is not None
    assert labels is not None
    stage_module = rank_state.pipeline.stage_modules[0]
    stage_module.train()
    x, label, keys = (
        torch.tensor_split(rows, num_microbatches)[0] for rows in (inputs, labels, batch.keys)
    )
    draws = stage_module.model.draw(keys, stage_module.dtype)
    draws = draws.sent(partial(send, device=rank_state.device))
    stage_module.begin(batch.sizes, draws, batch.structures)
    with listening(listen):
        logits = stage_module(x.to(rank_state.device))
        listen("loss", rank_state.pipeline.loss, (logits, label.to(rank_state.device)))
    rank_state.trained.statistics.take()
    return kept


@contextmanager
def _count_saved(kept: dict[str, int], name: str, seen: set[int]) -> Iterator[None]:
    """Add the bytes of every storage that autograd saves inside, unless it was seen before."""
    kept.setdefault(name, 0)

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kept[name] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def parameter_bytes(rank_state: RankState, piece: str, *, trained: bool = False) -> int:
    """Count the bytes of the weights of a piece (`stem`, `block 3` or `readout`).

    With `trained`, only those count that are trained.
    """
    model = rank_state.trained.models[0]
    if piece.startswith("block "):
        parameters = list(model.numbered_blocks[piece.removeprefix("block ")].parameters())
    else:
        names = model.stem_names if piece == "stem" else model.readout_names
        parameters = [p for n, p in model.named_parameters() if n.split(".")[0] in names]
    counted = [p for p in parameters if p.requires_grad or not trained]
    return sum(p.numel() * p.element_size() for p in counted)


def optimizer_bytes(rank_state: RankState) -> float:
    """Return the bytes of gradients, optimizer and moving average per byte of trained weights."""
    weights = sum(p.numel() * p.element_size() for p in rank_state.trained.parameters().values())
    state = [v for values in rank_state.trained.optimizer.state.values() for v in values.values()]
    buffers = [v for v in vars(rank_state.reducer.gradients).values() if isinstance(v, Tensor)]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in (*state, *buffers)
        if isinstance(t, Tensor)
    }
    average = weights if rank_state.trained.ema is not None else 0
    return (sum(storages.values()) + average) / weights
