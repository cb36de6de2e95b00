"""Measure the profile of a model on this machine: what each of its pieces costs."""

import time
from collections.abc import Sequence
from math import ceil, prod
from statistics import fmean

import torch
import torch.distributed as dist

from vigpipe.job.fit import fit_costs
from vigpipe.launch.device import hardware, peak_bytes
from vigpipe.planning.profile import Piece, Profile
from vigpipe.profiling.contention import Contention
from vigpipe.profiling.memory import activation_bytes, optimizer_bytes, parameter_bytes
from vigpipe.profiling.seconds import (
    NUM_TURNS,
    TimedSteps,
    dispatch_seconds,
    piece_seconds,
    update_seconds,
)
from vigpipe.profiling.transfers import measure_transfer
from vigpipe.profiling.trial import make_trial
from vigpipe.run.facts import Run
from vigpipe.run.provenance import provenance

_MAX_MICROBATCHES = 2  # most micro-batches of a timed step
# What the costs of a model's pieces depend on, beside the model, the images and the machine.
_OPTIONS = (
    *("graph", "aggregator", "stochastic_dilation", "stem_stride", "norm"),
    *("dtype", "recompute", "sync", "opt"),
)


def cost_options(run: Run) -> dict[str, str]:
    """Return the options that a profile of this run's model depends on, as text by name."""
    options = {name: str(getattr(run.config, name)) for name in _OPTIONS}
    if run.config.tf32:  # profiles from before there was a choice do not have it
        options["tf32"] = "True"
    if run.config.freeze is not None:
        options["freeze"] = run.config.freeze
    return {**options, **run.job.cost_options()}


def measure_profile(
    run: Run,
    rank: int,
    device: torch.device,
    microbatch_sizes: Sequence[int],
    slowdown: tuple[float, ...] | None = None,
) -> Profile | None:
    """Profile the unsplit model on rank 0, which alone returns it; all ranks call this together.

    Rank 0 times the pieces at every size of micro-batches, ascending, in turn. Between the turns
    the first two, three, ... ranks train at the same time, unless their slowdown is known; then
    ranks 0 and 1 exchange messages.
    """
    steps = run.job.trials(microbatch_sizes, _MAX_MICROBATCHES)
    base_bytes = peak_bytes(device)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    trials = [make_trial(run, step, device) for step in steps] if rank == 0 else []
    beside = None
    if slowdown is None:
        trial = trials[0] if trials else make_trial(run, steps[0], device)
        beside = Contention(trial, rank, world_size, NUM_TURNS + 1)
    timed = [TimedSteps(trial) for trial in trials]
    for _ in range(NUM_TURNS):
        if beside is not None:
            beside.measure()
        for of_trial in timed:
            of_trial.take_turn()
        if world_size > 1:
            dist.barrier()
    rounds: tuple[tuple[float, ...], ...] = ()
    if beside is not None:
        beside.measure()
        slowdown, rounds = beside.slowdown, beside.rounds
    assert slowdown is not None
    latency, bandwidth = measure_transfer(rank, world_size, device)

    if rank != 0:
        return None
    tables = [of_trial.rows() for of_trial in timed]
    rank_state = trials[0][0]
    activations = [activation_bytes(trial) for trial in trials]
    model = rank_state.trained.models[0]
    names = ["stem", *(f"block {name}" for name in model.numbered_blocks), "readout"]
    boundaries = [sum(map(prod, model.boundary_shapes(i))) for i in range(model.span[1] + 1)]
    sizes = [tuple(step.size.values()) for step in steps]
    amounts = tuple(steps[0].size) if len(steps[0].size) > 1 else ()

    def boundary_bytes(i: int) -> tuple[float, ...]:
        of_row = float(run.boundary_dtype.itemsize * boundaries[min(i, len(boundaries) - 1)])
        return (of_row, *(0.0,) * len(amounts)) if amounts else tuple(of_row * n for (n,) in sizes)

    def by_size(values: Sequence[float]) -> tuple[float, ...]:
        """Return the cost at each size, or what each amount and the micro-batch add to it."""
        return fit_costs(sizes, values) if amounts else tuple(values)

    pieces = [
        Piece(
            name=name,
            forward=by_size([piece_seconds(table, name, "forward") for table in tables]),
            backward=by_size([piece_seconds(table, name, "backward") for table in tables]),
            activation_bytes=by_size([float(by_piece.get(name, 0)) for by_piece in activations]),
            boundary_bytes=boundary_bytes(i),
            parameter_bytes=parameter_bytes(rank_state, name),
            trained_bytes=parameter_bytes(rank_state, name, trained=True),
        )
        for i, name in enumerate(names)
    ]
    update, fixed = update_seconds(tables[0])
    return Profile(
        model=run.config.model,
        options=cost_options(run),
        rows=() if amounts else tuple(microbatch_sizes),
        stem=pieces[0],
        blocks=tuple(pieces[1:-1]),
        readout=pieces[-1],
        slowdown=slowdown,
        rounds=rounds,
        dispatch_seconds=fmean(dispatch_seconds(table, names) for table in tables),
        latency_seconds=latency,
        bandwidth=bandwidth,
        update_seconds=update,
        fixed_seconds=fixed,
        optimizer_bytes=optimizer_bytes(rank_state),
        base_bytes=base_bytes,
        facts={
            "hardware": hardware(device),
            "device": device.type,
            "threads": torch.get_num_threads(),
            "date": time.strftime("%Y-%m-%d"),
            **provenance(),
        },
        amounts=amounts,
    )


def microbatch_sizes_to_profile(
    batch_size: int, num_replicas: int, microbatches: Sequence[int], most: int
) -> list[int]:
    """Choose at most `most` micro-batch sizes, the smallest and the largest among them."""
    sizes = sorted({ceil(batch_size / (num_replicas * m)) for m in microbatches})
    if len(sizes) <= most:
        return sizes
    wanted = [sizes[0] * (sizes[-1] / sizes[0]) ** (i / (most - 1)) for i in range(most)]
    return sorted({min(sizes, key=lambda size: abs(size - w)) for w in wanted})
