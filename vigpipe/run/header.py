"""Say before a run what it will do: data and model, steps and weights, layout and machine."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from vigpipe.launch.environment import num_cores
from vigpipe.messages import plural
from vigpipe.run.facts import Run

_CROWDED = 1.5  # programs that want to run, for each core


def header(run: Run, device: torch.device, folder: Path) -> Iterator[str]:
    """Describe a run in a few lines; its notes follow."""
    yield f"{run.config.model} on {run.job.name}: {run.job.description}"
    yield "; ".join([_course(run), _parameters(run), *_weights(run)])
    yield f"{', '.join(filter(None, (run.layout.in_short(), f'on {device}')))}; results in {folder}"
    if device.type == "cpu":
        yield from crowded(os.getloadavg()[0], num_cores(), torch.get_num_threads())


def _course(run: Run) -> str:
    num_steps, per_epoch = run.num_steps, run.steps_per_epoch
    of_step = run.job.describe_step(run.batch_layout)
    if run.has_subnetworks:
        of_step += " of each sub-network"
    if num_steps % per_epoch:
        return f"{plural(num_steps, 'step')} of {of_step}, {num_steps / per_epoch:.1f} epochs"
    return f"{plural(num_steps // per_epoch, 'epoch')} of {plural(per_epoch, 'step')} of {of_step}"


def _parameters(run: Run) -> str:
    sizes = [(p.numel(), p.requires_grad) for p in run.wide_model.parameters()]
    num, num_trained = sum(n for n, _ in sizes), sum(n for n, is_trained in sizes if is_trained)
    trained = "" if num_trained == num else f", {_count(num_trained)} of them trained"
    return f"{_count(num)} parameters{trained}"


def _count(number: int) -> str:
    return f"{number / 1e6:.1f} M" if number >= 1e6 else f"{number:,}"


def _weights(run: Run) -> Iterator[str]:
    path = run.config.weights
    if path is None:
        return
    kept = ""
    if run.config.new_classifier:
        lasts, _ = run.wide_model.classifier()
        before, now = run.classes_before, len(run.job.class_names)
        classes = "" if before in (None, now) else f" ({before:,} → {now:,} classes)"
        kept = f", except {' and '.join(last.rstrip('.') for last in lasts)}{classes}"
    yield f"weights from {path}{kept}"


def crowded(load: float, cores: int, threads: int) -> Iterator[str]:
    """Say that other programs slow a run down, if so many want to run as the load says."""
    if load > _CROWDED * cores:
        advice = "steps take longer than alone" if threads == 1 else "--threads 1 may be faster"
        yield f"load {load:.0f} on {plural(cores, 'core')}: {advice}"
