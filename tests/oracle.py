"""The contract's reference in plain words: one process, micro-batch after micro-batch."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2

from vigpipe.commands.differences import Kinds
from vigpipe.data import Source
from vigpipe.data.batches import epoch_order
from vigpipe.data.job import ImageJob
from vigpipe.model.keyed_dropout import sample_keys
from vigpipe.model.norm import BatchNorm
from vigpipe.model.study import StudyHalf
from vigpipe.run.facts import Run


class _FirstOf:
    def __init__(self, split, num_samples):
        self.split, self.labels = split, split.labels[:num_samples]

    def __len__(self):
        return len(self.labels)

    def __getattr__(self, name: str):
        return getattr(self.split, name)

    def __reduce__(self):
        return _FirstOf, (self.split, len(self))  # __getattr__ needs what a pickle has not set yet

    def decode(self, indices, *args):
        assert max(indices) < len(self)
        return self.split.decode(indices, *args)


def first_of(split: Any, num_samples: int) -> Any:
    """The first samples of a split."""
    return _FirstOf(split, num_samples)


def images_of(run: Run) -> Source:
    """The images that a run trains on."""
    assert isinstance(run.job, ImageJob)
    return run.job.source


def with_images(run: Run, source: Source) -> Run:
    """The run, on other images."""
    assert isinstance(run.job, ImageJob)
    return replace(run, job=replace(run.job, source=source))


def shortened(source: Source, num_train: int, num_test: int) -> Source:
    """A source with few samples, so that a test sees the end of an epoch."""
    return replace(
        source,
        train=first_of(source.train, num_train),
        test=first_of(source.test, num_test),
    )


def oracle(run: Run, num_steps: int) -> Kinds:
    """Train the unsplit model on the same D x M micro-batches, gradients accumulated.

    Cuts with numpy, accumulates in float64, takes running statistics from the concatenated inputs
    of every BatchNorm: nothing of the pipeline's own cutting, summing or pooling. The learning
    rate is constant (no warm-up, no schedule).
    """
    model = run.build().train()
    norms = {n: m for n, m in model.named_modules() if isinstance(m, BatchNorm)}
    seen: dict[str, list[torch.Tensor]] = {}

    def keep_inputs_of(name: str):
        def keep(_, inputs):
            x, bias = inputs[0], inputs[4] if len(inputs) > 4 else torch.zeros(())
            seen[name].append((x + bias).detach().flatten(0, -2))

        return keep

    for name, norm in norms.items():
        norm.momentum = 0.0  # its own update then moves nothing
        seen[name] = []
        norm.register_forward_pre_hook(keep_inputs_of(name))
    # vig_study folds a linear layer and its norm, which then is not called: what it would be given.
    unfolded: dict[str, list[torch.Tensor]] = {name: [] for name in norms}

    def keep_linear_of(name: str, linear: torch.nn.Module):
        def keep(_, inputs):
            unfolded[name].append(linear(inputs[0]).detach().flatten(0, -2))

        return keep

    for name, stage_module in model.named_modules():
        if isinstance(stage_module, StudyHalf):
            stage_module.register_forward_pre_hook(
                keep_linear_of(f"{name}.fc1.1", stage_module.fc1[0])
            )
    config = run.config
    assert config.opt is not None
    assert config.weight_decay is not None
    optimizer = create_optimizer_v2(
        model,
        opt=config.opt,
        lr=config.lr,
        weight_decay=config.weight_decay,
        layer_decay=None if config.layer_decay == 1 else config.layer_decay,
        fused=True,  # rounds in its own way, and so do near-ties after it
    )
    for group in optimizer.param_groups:
        group["lr"] *= group.get("lr_scale", 1.0)
    parameters = dict(model.named_parameters())
    pieces = run.layout.num_replicas * run.layout.num_microbatches
    losses: list[float] = []
    every_gradient: dict[str, torch.Tensor] = {}
    epoch, position, order = 0, 0, np.empty(0, dtype=int)
    for step in range(num_steps):
        if position >= len(order):
            epoch, position = epoch + 1, 0
            order = epoch_order(config.seed, epoch, len(images_of(run).train))
        batch = order[position : position + run.batch_size]
        position += len(batch)
        loss = 0.0
        total = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in parameters.items()}
        places = np.array_split(np.arange(len(batch)), pieces)
        for place in places:
            if len(place) == 0:
                continue
            pixels = images_of(run).train.read(batch[place].tolist(), epoch)
            # One-channel images have strides that may mean two memory formats, and convolutions
            # round differently in each: a fresh tensor has the plain ones.
            images = torch.zeros(pixels.shape, dtype=run.dtype).copy_(pixels)
            labels = torch.from_numpy(images_of(run).train.labels[batch[place]])
            keys = sample_keys(config.seed, step, torch.from_numpy(place))
            logits = model(images, keys)
            heads = logits if isinstance(logits, tuple) else (logits,)
            totals = [F.cross_entropy(head, labels, reduction="sum") for head in heads]
            share = torch.stack(totals).mean() / len(batch)
            for name, g in zip(
                parameters, torch.autograd.grad(share, list(parameters.values())), strict=True
            ):
                total[name] += g
            loss += float(share.detach())
        gradients = {name: g.to(run.dtype) for name, g in total.items()}
        if config.clip is not None:
            # Not torch's clip_grad_norm_, which adds 1e-6 to the norm.
            squares = [g.double().square().sum() for g in gradients.values()]
            norm = float(torch.stack(squares).sum().sqrt())
            for g in gradients.values() if norm > config.clip else ():
                g.mul_(config.clip / norm)
        losses.append(loss)
        every_gradient |= {f"{name} (step {step + 1})": g for name, g in gradients.items()}
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].clone()
        optimizer.step()
        for name, norm in norms.items():
            rows = torch.cat(seen[name] or unfolded[name]).double()
            seen[name].clear()
            unfolded[name].clear()
            norm.running_mean += 0.1 * (rows.mean(0) - norm.running_mean)
            norm.running_var += 0.1 * (rows.var(0) - norm.running_var)
    state = {n: tensor for n, tensor in model.state_dict().items() if tensor.is_floating_point()}
    return {
        "loss": {"loss": torch.tensor(losses, dtype=torch.float64)},
        "gradients": every_gradient,
        "weights": {name: state[name] for name in parameters},
        "running statistics": {n: tensor for n, tensor in state.items() if n not in parameters},
    }
