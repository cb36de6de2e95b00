"""Turn a rank's state into named tensors, and back.

A name says what the tensor is and which parameter of the unsplit model it belongs to, so that every
layout finds the tensors it needs. The step is the only other state of a run: learning rates, masks,
augmentation and the order of the data depend only on the options and the step.

    model/NAME              parameters, running statistics
    ema/NAME                moving average of these
    optimizer/KIND/NAME     state of the optimizer for a parameter: exp_avg, exp_avg_sq, step, ...
    loss_scale/NAME         the factor of the loss in float16; from the last stage
    outer_old/NAME          weights after the last average, with --average outer
    outer_velocity/NAME     momentum of its outer optimizer
    given/NAME              with --overlap, what was given last for an average,
    given_mean/NAME         and the mean of that over the replicas, once all have given
    residual/NAME           with --compress, what a replica has left out of what it sent
    powersgd_q/NAME         with --compress powersgd, what the next sum begins with
    rows/NAME               with --strategy subnetworks, what a replica owns of the wide model,
    rows/optimizer/...      and with --carry-moments, of what the optimizer keeps of it

Where replicas take steps of their own, each has all of these: replica 0 under these names, so that
its weights are found as those of any run, and replica r under replicaR/NAME. Where all take every
step together, that holds for residuals alone.
"""

import re
from collections.abc import Collection, Mapping
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vigpipe.errors import InputError

if TYPE_CHECKING:
    from vigpipe.run.rank import RankState
    from vigpipe.run.trained import Trained

_RESIDUAL = re.compile("(?:replica([0-9]{1,9})/)?(residual/.*)")


def named_tensors(rank_state: "RankState") -> dict[str, Tensor]:
    """Return the tensors of a rank's state by name, without copying them."""
    tensors = _model_tensors(rank_state)
    trained = rank_state.trained
    for name, parameter in trained.parameters().items():
        for kind, tensor in trained.optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{kind}/{name}"] = tensor
    if rank_state.pipeline.has_last:  # all stages have the same, and one of them keeps it
        tensors |= _loss_scale_tensors(trained)
    if rank_state.reducer.compressor is not None:
        tensors |= rank_state.reducer.compressor.memory()
    return tensors


def _loss_scale_tensors(trained: "Trained") -> dict[str, Tensor]:
    return {} if trained.loss_scale is None else trained.loss_scale.tensors()


def _model_tensors(rank_state: "RankState") -> dict[str, Tensor]:
    """Return the tensors that exist before the first step: weights, statistics, averages."""
    tensors = {f"model/{name}": tensor for name, tensor in rank_state.trained.state().items()}
    tensors |= {f"ema/{name}": tensor for name, tensor in rank_state.trained.average().items()}
    own_steps = rank_state.own_steps
    return tensors if own_steps is None else tensors | dict(own_steps.tensors())


def residuals(rank_state: "RankState") -> dict[str, Tensor]:
    """Return what this replica alone has left out of sums of gradients, named with its number."""
    compressor = rank_state.reducer.compressor
    if compressor is None or rank_state.mesh.shards.rank > 0:  # the others have the same
        return {}
    prefix = replica_prefix(rank_state.mesh.replica_index)
    return {f"{prefix}{name}": tensor for name, tensor in compressor.residuals().items()}


def _old_residuals(names: Collection[str], rank_state: "RankState") -> dict[str, list[str]]:
    """Name, by residual, the terms of a checkpoint that this replica goes on with; it adds them up.

    Of D replicas, replica r takes those of the old replicas r, r + D, r + 2 D ..., so that the sum
    over all replicas stays what it was.
    """
    compressor, num_replicas = rank_state.reducer.compressor, rank_state.run.layout.num_replicas
    own = {} if compressor is None else compressor.residuals()
    found: dict[str, dict[int, str]] = {}
    for name in names:
        match = _RESIDUAL.fullmatch(name)
        if match is None or match[2] not in own:
            continue
        replica = int(match[1] or 0)
        if replica % num_replicas == rank_state.mesh.replica_index:
            found.setdefault(match[2], {})[replica] = name
    return {name: [terms[r] for r in sorted(terms)] for name, terms in found.items()}


def replica_prefix(number: int) -> str:
    """Return what the names of the tensors of a state begin with (`Layout.state_of`)."""
    return f"replica{number}/" if number else ""


def share_of(
    state: Mapping[str, Tensor], replica_index: int, num_replicas: int
) -> dict[str, Tensor]:
    """Choose what one replica of a stage writes: a share of the tensors, of about as many bytes."""
    loads = [0] * num_replicas
    share: dict[str, Tensor] = {}
    for name in sorted(state, key=lambda name: (-state[name].nbytes, name)):
        lightest = loads.index(min(loads))
        loads[lightest] += state[name].nbytes
        if lightest == replica_index:
            share[name] = state[name]
    return share


def needed_tensors(rank_state: "RankState", available: Collection[str]) -> list[str]:
    """List, sorted, which tensors of a checkpoint this rank needs, whose state is newly made."""
    names = set(_model_tensors(rank_state) | _loss_scale_tensors(rank_state.trained))
    parameters = rank_state.trained.parameters()
    of_optimizer = [name for name in available if name.startswith("optimizer/")]
    names |= {name for name in of_optimizer if name.split("/", 2)[-1] in parameters}
    names |= set(chain.from_iterable(_old_residuals(available, rank_state).values()))
    if rank_state.reducer.compressor is not None:
        names |= rank_state.reducer.compressor.memory().keys() & set(available)
    return sorted(names)


def _restore_compressor(rank_state: "RankState", tensors: Mapping[str, Tensor], where: str) -> None:
    """Go on with what was left out of earlier sums; a checkpoint of one replica has nothing."""
    compressor = rank_state.reducer.compressor
    if compressor is None:
        return
    memory = compressor.memory()
    terms = _old_residuals(tensors, rank_state) | {name: [name] for name in memory}
    for name, target in (compressor.residuals() | memory).items():
        found = [tensors[n] for n in terms.get(name, []) if n in tensors]
        total = torch.zeros_like(target, dtype=torch.float64)
        for tensor in found:
            check_fits(name, tensor, target, where)
            total += tensor.to(total)
        if found:
            target.copy_(total)


def check_fits(name: str, tensor: Tensor, target: Tensor, where: str) -> None:
    """Raise InputError unless a tensor of a checkpoint has the shape and dtype of its place."""
    if tensor.shape != target.shape or tensor.dtype != target.dtype:
        raise InputError(
            f"{where}: {name} is {tuple(tensor.shape)} {tensor.dtype}, expected "
            f"{tuple(target.shape)} {target.dtype}; give a checkpoint of this model"
        )


def restore(rank_state: "RankState", tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy the tensors of `needed_tensors` into this rank's state, or raise InputError."""
    targets = _model_tensors(rank_state) | _loss_scale_tensors(rank_state.trained)
    for name, target in targets.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise InputError(f"{where}: has no {name}; give a checkpoint of this model")
        check_fits(name, tensor, target, where)
        target.copy_(tensor)
    _restore_compressor(rank_state, tensors, where)
    _restore_optimizer(rank_state.trained, tensors, where)


def _restore_optimizer(trained: "Trained", tensors: Mapping[str, Tensor], where: str) -> None:
    names = {id(parameter): name for name, parameter in trained.parameters().items()}
    by_parameter: dict[str, dict[str, Tensor]] = {name: {} for name in names.values()}
    for key, tensor in tensors.items():
        if key.startswith("optimizer/"):
            _, kind, name = key.split("/", 2)
            by_parameter.setdefault(name, {})[kind] = tensor
    for name, parameter in trained.parameters().items():
        # A new optimizer has a state only with --carry-moments.
        kinds = trained.optimizer.state.get(parameter, {}).keys()
        if missing := sorted(kinds - by_parameter[name].keys()):
            raise InputError(
                f"{where}: has no optimizer/{missing[0]}/{name}; give a checkpoint of this model"
            )
    groups = trained.optimizer.param_groups
    state: dict[int, dict[str, Tensor]] = {}  # torch numbers parameters in order of the groups
    for number, parameter in enumerate(p for group in groups for p in group["params"]):
        name = names[id(parameter)]
        state[number] = by_parameter[name]
        for kind, tensor in by_parameter[name].items():
            if tensor.dim() and tensor.shape != parameter.shape:
                raise InputError(
                    f"{where}: optimizer/{kind}/{name} is {tuple(tensor.shape)}, expected "
                    f"{tuple(parameter.shape)}; give a checkpoint of this model"
                )
    trained.optimizer.load_state_dict({**trained.optimizer.state_dict(), "state": state})
