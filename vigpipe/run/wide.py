"""What is known of the wide model of sub-networks, which no rank ever makes."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from vigpipe.model.initial import Draw, drawn
from vigpipe.model.slicing import INPUT
from vigpipe.model.staged import StagedModel
from vigpipe.replication.subnetworks.draws import Channels
from vigpipe.replication.subnetworks.moments import Moments, moment_name
from vigpipe.replication.subnetworks.rows import Index, Wide, put_part
from vigpipe.run.facts import Run
from vigpipe.run.initial_weights import initial_state, read_initial
from vigpipe.run.optimizer import begin_state, first_state


def describe_wide(run: Run, models: list[StagedModel], optimizer: torch.optim.Optimizer) -> Wide:
    """Describe the wide model of a rank's stages, which are those of its sub-model.

    Without --weights, it is drawn part by part, by the seed, a tensor's name and the place in it:
    the same whichever rank draws. With --carry-moments, what the optimizer keeps of a weight begins
    as 0, and is divided as the weight is.
    """
    narrow = {name: tensor for model in models for name, tensor in model.state_dict().items()}
    wide = run.wide_model
    whole = {name: tuple(tensor.shape) for name, tensor in wide.state_dict().items()}
    weights: Mapping[str, Tensor] = {}
    draws: Mapping[str, Draw | None] = {}
    if run.config.weights is not None:
        state = read_initial(run.config.weights)  # mapped; `prepare` has looked at its numbers
        like = run.make_wide_model()
        if any(tensor.dtype == torch.float64 for tensor in state.values()):
            like = like.double()  # nothing is rounded before it is copied, tile by tile
        state = initial_state(state, run.config, run.job, like, is_finite=True)
        weights = {name: tensor for name, tensor in state.items() if not tensor.is_meta}
    if len(weights) < len(whole):  # without --weights, or with --new-classifier
        draws = drawn(run.make_wide_model)

    @torch.no_grad()
    def fill(target: Tensor, name: str, index: Index) -> None:
        if name in weights:
            put_part(target, weights[name], index)
        elif (draw := draws[name]) is not None:  # else it is what the sub-model begins with
            (dim, entries), *_ = [*index.items(), (None, None)]
            draw.fill(target, name, run.config.seed, whole[name], dim, entries)

    def choose(channels: Channels) -> None:
        for model in models:
            if (of_input := channels.get(INPUT)) is not None:
                model.input_channels = of_input.to(next(model.parameters()).device)

    shapes, slicing = {name: whole[name] for name in narrow}, run.job.slicing(wide)
    moments: Mapping[str, Tensor] = {}
    if run.config.carry_moments:
        parameters = {name: p for model in models for name, p in model.named_parameters()}
        device = next(iter(parameters.values())).device
        first = first_state(run.config, run.dtype, device)
        begin_state(optimizer, first)
        kinds = [kind for kind, tensor in first.items() if tensor.dim()]
        moments = Moments(optimizer, parameters, kinds)
        of = {moment_name(kind, name): name for kind in kinds for name in parameters}
        shapes |= {moment: whole[name] for moment, name in of.items()}
        sides = {moment: slicing.sides[name] for moment, name in of.items()}
        slicing = replace(slicing, sides={**slicing.sides, **sides})
    return Wide(slicing, shapes, narrow, fill, optimizer, moments, choose)
