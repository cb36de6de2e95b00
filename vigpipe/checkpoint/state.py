"""A rank's state as named tensors, and back: what an optimizer step reads and writes.

Names say what a tensor is and of which parameter of the unsplit model, so that any layout finds its
own. The rest of a run's state is a number: learning rates, masks, augmentation and the order of the
data depend on the options and the step only.

    model/NAME              parameters, running statistics
    ema/NAME                their moving average
    optimizer/KIND/NAME     what the optimizer keeps of a parameter: exp_avg, exp_avg_sq, step, ...
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from vigpipe.errors import InputError

if TYPE_CHECKING:
    from vigpipe.run.rank import RankState


def named_tensors(rank_state: "RankState") -> dict[str, Tensor]:
    """This rank's state, by name; the tensors themselves.

    Every replica of a stage has the same.
    """
    found = _model_of(rank_state)
    for name, parameter in rank_state.parameters().items():
        for kind, tensor in rank_state.optimizer.state.get(parameter, {}).items():
            found[f"optimizer/{kind}/{name}"] = tensor
    return found


def _model_of(rank_state: "RankState") -> dict[str, Tensor]:
    """The part of a rank's state that is there before the first step."""
    found = {f"model/{name}": tensor for name, tensor in rank_state.state().items()}
    return found | {f"ema/{name}": tensor for name, tensor in rank_state.average().items()}


def share_of(
    state: Mapping[str, Tensor], replica_index: int, num_replicas: int
) -> dict[str, Tensor]:
    """What one of the replicas writes: all write about as many bytes, and no tensor twice."""
    loads = [0] * num_replicas
    mine: dict[str, Tensor] = {}
    for name in sorted(state, key=lambda name: (-state[name].nbytes, name)):
        lightest = loads.index(min(loads))
        loads[lightest] += state[name].nbytes
        if lightest == replica_index:
            mine[name] = state[name]
    return mine


def wanted(rank_state: "RankState", available: Collection[str]) -> list[str]:
    """Of the tensors that a checkpoint has, those that this rank needs."""
    own = set(_model_of(rank_state))
    parameters = set(rank_state.parameters())
    own |= {
        name
        for name in available
        if name.startswith("optimizer/") and name.split("/", 2)[-1] in parameters
    }
    return sorted(own)


def restore(rank_state: "RankState", tensors: Mapping[str, Tensor], where: str) -> None:
    """Put a checkpoint's tensors in the place of this rank's state.

    Args:
        rank_state: this rank's share, new.
        tensors: by name, at least those that are `wanted`.
        where: the checkpoint, for errors.

    Raises:
        InputError: a tensor is missing, or has another shape or type.
    """
    for name, holder in _model_of(rank_state).items():
        tensor = tensors.get(name)
        if tensor is None:
            raise InputError(f"{where}: has no {name}; give a checkpoint of this model")
        if tensor.shape != holder.shape or tensor.dtype != holder.dtype:
            raise InputError(
                f"{where}: {name} is {tuple(tensor.shape)} {tensor.dtype}, expected "
                f"{tuple(holder.shape)} {holder.dtype}; give a checkpoint of this model"
            )
        holder.copy_(tensor)
    _restore_optimizer(rank_state, tensors, where)


def _restore_optimizer(rank_state: "RankState", tensors: Mapping[str, Tensor], where: str) -> None:
    names = {id(parameter): name for name, parameter in rank_state.parameters().items()}
    kept: dict[str, dict[str, Tensor]] = {name: {} for name in names.values()}
    for key, tensor in tensors.items():
        if key.startswith("optimizer/"):
            _, kind, name = key.split("/", 2)
            kept.setdefault(name, {})[kind] = tensor
    empty = rank_state.optimizer.state_dict()  # numbers its parameters in the order of the groups
    state: dict[int, dict[str, Tensor]] = {}
    for group, numbers in zip(
        rank_state.optimizer.param_groups, empty["param_groups"], strict=True
    ):
        for parameter, number in zip(group["params"], numbers["params"], strict=True):
            name = names[id(parameter)]
            state[number] = kept[name]
            for kind, tensor in kept[name].items():
                if tensor.dim() and tensor.shape != parameter.shape:
                    raise InputError(
                        f"{where}: optimizer/{kind}/{name} is {tuple(tensor.shape)}, expected "
                        f"{tuple(parameter.shape)}; give a checkpoint of this model"
                    )
    rank_state.optimizer.load_state_dict({"state": state, "param_groups": empty["param_groups"]})
