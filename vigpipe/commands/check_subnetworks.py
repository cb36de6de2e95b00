"""Compare sub-networks with one process, which holds the wide model and trains them in turn."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vigpipe.commands.check_replicas import InTurn, Model, mean_of, stored_kinds
from vigpipe.commands.differences import Kinds
from vigpipe.model.slicing import INPUT
from vigpipe.replication.record import Recorded
from vigpipe.replication.subnetworks.draws import Channels, draw_channels
from vigpipe.replication.subnetworks.moments import moment_name
from vigpipe.run.facts import Run
from vigpipe.run.wide import describe_wide


class SubnetworksInTurn(InTurn):
    """The m sub-networks of a wide model, which this process has as a whole; see `InTurn`."""

    def __init__(self, run: Run, recorded: Sequence[Recorded], device: torch.device) -> None:
        super().__init__(run, recorded, device)
        first = self.models[0].state
        wide = describe_wide(first.run, first.trained.models, first.trained.optimizer)
        self._slicing, self._seed, self._round = wide.slicing, run.config.seed, 0
        self._carries = run.config.carry_moments
        self._wide = {
            name: torch.zeros(shape, dtype=wide.narrow[name].dtype)
            for name, shape in wide.shapes.items()
            if name in wide.narrow
        }
        self._moments: dict[tuple[str, str], Tensor] = {}  # keys: kind, parameter
        for name, tensor in self._wide.items():
            wide.fill(tensor, name, {})
        self._copy_slices()

    def carry_out(self) -> list[Kinds]:
        traces = super().carry_out()
        self._put_back_slices()
        stored = map(self._stored, range(len(self.models)))
        return [{**trace, **stored_kinds(rows)} for trace, rows in zip(traces, stored, strict=True)]

    def _stored(self, replica: int) -> dict[str, Tensor]:
        """Return what a replica's ranks store of the wide model."""
        moments = {moment_name(*of): tensor for of, tensor in self._moments.items()}
        rows: dict[str, Tensor] = {}
        for name, tensor in (self._wide | moments).items():
            if (dim := self._slicing.owned(name)) is not None:
                entries = self._slicing.owned_entries(name, len(self.models), replica)
                rows[name] = tensor.index_select(dim, entries)
        return rows

    @torch.no_grad()
    def _average_weights(self, group: Sequence[Model]) -> None:
        for model in group:
            model.acts.popleft()
            model.samples = 0
            if not self._carries:
                model.state.trained.optimizer.state.clear()
        self._put_back_slices()
        self._round += 1
        self._copy_slices()

    @torch.no_grad()
    def _copy_slices(self) -> None:
        for model, channels in zip(self.models, self._channels(), strict=True):
            for stage in model.state.trained.models:
                stage.input_channels = channels.get(INPUT)
            for name, tensor in model.state.trained.state().items():
                tensor.copy_(self._wide[name][self._entries(name, channels)])
            for (kind, name), tensor in self._moments.items():
                own = model.state.trained.optimizer.state[model.state.trained.parameters()[name]]
                own[kind].copy_(tensor[self._entries(name, channels)])

    @torch.no_grad()
    def _put_back_slices(self) -> None:
        """Put the slices of the sub-models back, and average what all of them have."""
        states = [model.state.trained.state() for model in self.models]
        for name, tensor in self._wide.items():
            if self._slicing.owned(name) is None:
                if tensor.is_floating_point():
                    tensor.copy_(_mean(name, states))
                continue
            for state, channels in zip(states, self._channels(), strict=True):
                tensor[self._entries(name, channels)] = state[name].cpu()
        for state in states:  # tensors that are not sliced become the same in all sub-models
            for name, tensor in state.items():
                if self._slicing.owned(name) is None and tensor.is_floating_point():
                    tensor.copy_(self._wide[name])
        if self._carries:
            self._put_back_moments()

    def _put_back_moments(self) -> None:
        trained = [model.state.trained for model in self.models]
        for name, of_first in trained[0].parameters().items():
            states = [each.optimizer.state[each.parameters()[name]] for each in trained]
            for kind, first in states[0].items():
                if first.shape != of_first.shape:
                    continue  # not a moment, but the number of steps
                wide = self._moments.setdefault((kind, name), torch.zeros_like(self._wide[name]))
                moments: list[Tensor] = [state[kind] for state in states]
                if self._slicing.owned(name) is None:
                    wide.copy_(mean_of(moments, [1] * len(moments)))
                    continue
                for moment, channels in zip(moments, self._channels(), strict=True):
                    wide[self._entries(name, channels)] = moment.cpu()

    def _channels(self) -> list[Channels]:
        return draw_channels(self._slicing.sizes, len(self.models), self._seed, self._round)

    def _entries(self, name: str, channels: Channels) -> tuple[Tensor, ...]:
        """Return one index for each dimension of a tensor, for all combinations."""
        shape, sides = self._wide[name].shape, self._slicing.sides[name]
        entries = [
            torch.arange(length)
            if side is None
            else side.entries(channels[side.group], self._slicing.sizes[side.group])
            for length, side in zip(shape, sides, strict=True)
        ]
        return tuple(torch.meshgrid(*entries, indexing="ij")) if entries else ()


def _mean(name: str, states: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return the mean of a tensor that all sub-models have; of variances, that of all values."""
    values, counts = [state[name] for state in states], [1] * len(states)
    if name.endswith("running_var"):
        means = [state[name.replace("running_var", "running_mean")] for state in states]
        mean = mean_of(means, counts)
        values = [v + (m - mean).square() for v, m in zip(values, means, strict=True)]
    return mean_of(values, counts)
