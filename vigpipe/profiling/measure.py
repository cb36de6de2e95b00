"""Measure what the pieces of a model cost here: time, memory, transfers, and ranks side by side."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil, prod
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vigpipe.data.batches import ReplicaBatch
from vigpipe.launch.device import hardware, peak_bytes, synchronize
from vigpipe.model.regions import listening
from vigpipe.parallel.layout import Layout
from vigpipe.planning.profile import Piece, Profile
from vigpipe.run.batches import batches
from vigpipe.run.facts import Run
from vigpipe.run.provenance import provenance
from vigpipe.run.rank import RankState, make_rank_state
from vigpipe.spans import COMPUTE
from vigpipe.timing.clock import make_clock
from vigpipe.timing.recorder import Recorder, Row
from vigpipe.train import train_step

NUM_WARMUP = 2
_LEAST_STEPS, _MOST_STEPS, _SECONDS = 4, 30, 3.0  # of every size of a micro-batch
_MOST_SECONDS = 20.0  # after which a single step must do
_NUM_PIECES = 2  # micro-batches of a step that is timed
_NUM_ROUNDS = 3  # alone and side by side, in turn
_NUM_EXCHANGES = 20
_LARGE = 1 << 22  # bytes of a transfer that is timed for the bandwidth

# What the costs of a model's pieces depend on, beside the model, the images and the machine.
_OPTIONS = (
    "graph",
    "aggregator",
    "stochastic_dilation",
    "stem_stride",
    "norm",
    "dtype",
    "recompute",
    "sync",
    "opt",
)


def cost_options(run: Run) -> dict[str, str]:
    """What a profile of this run's model depends on, as text."""
    options = {name: str(getattr(run.config, name)) for name in _OPTIONS}
    return {
        **options,
        "images": "x".join(map(str, run.image_shape)),
        "classes": str(run.source.num_classes),
    }


def measure(
    run: Run, rank: int, device: torch.device, microbatch_sizes: Sequence[int]
) -> Profile | None:
    """Profile the unsplit model in one process: rank 0's; others only stand beside it.

    All ranks call this together. The pieces are timed on rank 0 while the others wait; then the
    first two, three, ... ranks train at once, which shows how they hinder one another; then rank 0
    and 1 exchange messages.

    Args:
        run: whose model, data and options are meant; its layout is not.
        rank: position in the world.
        device: of this rank.
        microbatch_sizes: samples of a micro-batch, ascending.

    Returns:
        The profile on rank 0, else None.
    """
    base_bytes = peak_bytes(device)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    trials = [_trial(run, n, device) for n in microbatch_sizes] if rank == 0 else []
    tables = [_timed(*trial, device) for trial in trials]
    if world_size > 1:
        dist.barrier()
    slowdown = _slowdown(
        trials[0] if trials else _trial(run, microbatch_sizes[0], device), rank, world_size
    )
    latency, bandwidth = _transfer(rank, world_size, device)

    if rank != 0:
        return None
    rank_state = trials[0][0]
    kept = [_activation_bytes(*trial) for trial in trials]
    model = rank_state.models[0]
    names = ["stem", *(f"block {name}" for name in model.numbered_blocks), "readout"]
    boundaries = [prod(model.boundary_shape(i)) for i in range(model.span[1] + 1)]
    width = run.boundary_dtype.itemsize
    pieces = [
        Piece(
            name=name,
            forward=tuple(_of(table, name, "forward") for table in tables),
            backward=tuple(_of(table, name, "backward") for table in tables),
            activation_bytes=tuple(float(own.get(name, 0)) for own in kept),
            boundary_bytes=tuple(
                float(width * n * boundaries[min(i, len(boundaries) - 1)]) for n in microbatch_sizes
            ),
            parameter_bytes=_parameter_bytes(rank_state, name),
        )
        for i, name in enumerate(names)
    ]
    update, fixed = _update_seconds(tables[0])
    facts = provenance()
    return Profile(
        model=run.config.model,
        options=cost_options(run),
        rows=tuple(microbatch_sizes),
        stem=pieces[0],
        blocks=tuple(pieces[1:-1]),
        readout=pieces[-1],
        slowdown=slowdown,
        dispatch_seconds=fmean(_dispatch_seconds(table, names) for table in tables),
        latency_seconds=latency,
        bandwidth=bandwidth,
        update_seconds=update,
        fixed_seconds=fixed,
        optimizer_bytes=_optimizer_bytes(rank_state),
        base_bytes=base_bytes,
        facts={
            "hardware": hardware(device),
            "threads": torch.get_num_threads(),
            "date": time.strftime("%Y-%m-%d"),
            **facts,
        },
    )


# ---- time ------------------------------------------------------------------------------------

Trial = tuple[RankState, ReplicaBatch]


def _trial(run: Run, microbatch_size: int, device: torch.device) -> Trial:
    """The unsplit model, and a step of micro-batches of so many samples."""
    num_microbatches = max(1, min(_NUM_PIECES, len(run.source.train) // microbatch_size))
    unsplit = replace(
        run.unsplit(),
        config=replace(run.config, batch_size=microbatch_size * num_microbatches),
        layout=Layout(num_microbatches=num_microbatches),
    )
    recorder = Recorder(make_clock(device), 0, 0, num_warmup=NUM_WARMUP, num_steps=_MOST_STEPS)
    rank_state = make_rank_state(unsplit, 0, device, recorder)
    _, batch, _ = next(batches(rank_state))
    rank_state.reader.close()
    return rank_state, batch


def _timed(rank_state: RankState, batch: ReplicaBatch, device: torch.device) -> list[Row]:
    """The rows of timing.csv of several steps."""
    assert rank_state.recorder is not None
    began = time.perf_counter()
    for number in range(NUM_WARMUP + _MOST_STEPS):
        with rank_state.timed("train", number):
            train_step(rank_state, batch)
        synchronize(device)
        passed = time.perf_counter() - began
        if number == NUM_WARMUP - 1:
            began = time.perf_counter()
        elif number >= NUM_WARMUP:
            has_enough = number >= NUM_WARMUP + _LEAST_STEPS
            if passed > (_SECONDS if has_enough else _MOST_SECONDS):
                break
    return rank_state.recorder.take_rows()


def _of(table: Sequence[Row], name: str, direction: str) -> float:
    """Seconds of a piece on one micro-batch, median over the steps; the readout has the loss."""
    names = (name, "loss") if name == "readout" else (name,)
    return sum(
        median(values)
        for one in names
        if (
            values := [
                r.seconds / r.count for r in table if (r.name, r.direction) == (one, direction)
            ]
        )
    )


def _dispatch_seconds(table: Sequence[Row], names: Sequence[str]) -> float:
    """Seconds of a forward or a backward that no piece has."""
    regions = {*names, "loss"}
    whole = [row for row in table if row.name in COMPUTE]
    inside = [row for row in table if row.name in regions and row.direction in COMPUTE]
    spent = sum(row.seconds for row in whole) - sum(row.seconds for row in inside)
    return max(0.0, spent / sum(row.count for row in whole))


def _update_seconds(table: Sequence[Row]) -> tuple[float, float]:
    """Seconds a step of what is done once, and of that what every stage does whatever its size."""
    by_step: dict[int, dict[str, float]] = {}
    for row in table:
        by_step.setdefault(row.step, {})[row.name] = row.seconds
    fixed = median(step.get("other", 0.0) for step in by_step.values())
    whole = median(
        sum(step.get(name, 0.0) for name in ("other", "optimizer", "all-reduce"))
        for step in by_step.values()
    )
    return whole, min(fixed, whole)


def _slowdown(trial: Trial, rank: int, world_size: int) -> tuple[float, ...]:
    """How many times longer a step takes while 1, 2, ... ranks train at once."""
    rank_state, batch = trial

    def step_seconds(num_ranks: int) -> float:
        """Mean over the ranks that train."""
        if world_size > 1:
            dist.barrier()
        mine = 0.0
        if rank < num_ranks:
            seconds: list[float] = []
            for _ in range(_LEAST_STEPS):
                start = time.perf_counter()
                train_step(rank_state, batch)
                synchronize(rank_state.device)
                seconds.append(time.perf_counter() - start)
            mine = median(seconds)
        total = torch.tensor([mine], dtype=torch.float64, device=rank_state.device)
        if world_size > 1:
            dist.all_reduce(total)
        return float(total) / num_ranks

    if world_size == 1:
        return (1.0,)
    counts = range(1, world_size + 1)
    rounds = [[step_seconds(n) for n in counts] for _ in range(1 + _NUM_ROUNDS)][1:]
    factors = [median(seconds[n - 1] / seconds[0] for seconds in rounds) for n in counts]
    return tuple(max(1.0, factor) for factor in factors)


def _transfer(rank: int, world_size: int, device: torch.device) -> tuple[float, float]:
    """Seconds of a small message between neighbours, and bytes a second of a large one."""
    if world_size == 1:
        return 0.0, 1e12  # no neighbour to ask: as good as free

    def one_way(num_bytes: int) -> float:
        box = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        seconds: list[float] = []
        for _ in range(_NUM_EXCHANGES):
            start = time.perf_counter()
            if rank == 0:
                dist.send(box, 1)
                dist.recv(box, 1)
            elif rank == 1:
                dist.recv(box, 0)
                dist.send(box, 0)
            synchronize(device)
            seconds.append((time.perf_counter() - start) / 2)
        return median(seconds)

    small, large = one_way(8), one_way(_LARGE)
    found = torch.tensor([small, _LARGE / large], dtype=torch.float64, device=device)
    dist.broadcast(found, 0)
    return float(found[0]), float(found[1])


# ---- memory ----------------------------------------------------------------------------------


def _activation_bytes(rank_state: RankState, batch: ReplicaBatch) -> dict[str, int]:
    """Bytes that each piece keeps from the forward of a micro-batch to its backward.

    What autograd saves, every storage once, parameters left out; what recomputation keeps of a
    block is its input.
    """
    own = {p.untyped_storage().data_ptr() for p in rank_state.parameters().values()}
    kept: dict[str, int] = {}
    seen: set[int] = set(own)
    depth = 0

    def listen(name: str, function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:  # noqa: ANN401
        nonlocal depth
        if depth:
            return function(*inputs)
        if rank_state.models[0].recompute and name.startswith("block"):
            features = inputs[0]
            kept[name] = features.numel() * features.element_size()
            return function(*inputs)
        depth += 1
        with _counting(kept, "readout" if name == "loss" else name, seen):
            result = function(*inputs)
        depth -= 1
        return result

    pieces = rank_state.run.layout.num_microbatches
    images, labels = batch.images, batch.labels
    assert images is not None
    assert labels is not None
    stage_module = rank_state.pipeline.stage_modules[0]
    stage_module.train()
    stage_module.begin_step()
    first = torch.tensor_split(torch.arange(len(images)), pieces)[0]
    with listening(listen):
        logits = stage_module(images[first].to(rank_state.device), batch.keys[first])
        listen("loss", rank_state.pipeline.loss, (logits, labels[first].to(rank_state.device)))
    rank_state.statistics.take(1)
    return kept


@contextmanager
def _counting(kept: dict[str, int], name: str, seen: set[int]) -> Iterator[None]:
    kept.setdefault(name, 0)

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kept[name] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _parameter_bytes(rank_state: RankState, piece: str) -> int:
    model = rank_state.models[0]
    if piece.startswith("block "):
        own = list(model.numbered_blocks[piece.removeprefix("block ")].parameters())
    else:
        names = model.stem_names if piece == "stem" else model.readout_names
        own = [p for n, p in model.named_parameters() if n.split(".")[0] in names]
    return sum(p.numel() * p.element_size() for p in own)


def _optimizer_bytes(rank_state: RankState) -> float:
    """Bytes of gradients, optimizer state and moving average by byte of the weights."""
    weights = sum(p.numel() * p.element_size() for p in rank_state.parameters().values())
    state = [v for own in rank_state.optimizer.state.values() for v in own.values()]
    buffers = [v for v in vars(rank_state.replicas.gradients).values() if isinstance(v, Tensor)]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in (*state, *buffers)
        if isinstance(t, Tensor)
    }
    average = weights if rank_state.ema is not None else 0
    return (sum(storages.values()) + average) / weights


def sizes(batch_size: int, num_replicas: int, microbatches: Sequence[int], most: int) -> list[int]:
    """Choose at most `most` micro-batch sizes to profile for these numbers of micro-batches."""
    candidates = sorted({ceil(batch_size / (num_replicas * m)) for m in microbatches})
    if len(candidates) <= most:
        return candidates
    wanted = [
        candidates[0] * (candidates[-1] / candidates[0]) ** (i / (most - 1)) for i in range(most)
    ]
    return sorted({min(candidates, key=lambda n: abs(n - w)) for w in wanted})
