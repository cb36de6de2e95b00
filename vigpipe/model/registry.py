"""Put the models into timm's registry, for `timm.create_model("vig_ti_224")`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    register_model,
    register_notrace_function,
    register_notrace_module,
)

from vigpipe.model.position import resized_embedding
from vigpipe.model.readout import Readout
from vigpipe.model.stem import ConvStem, Downsample
from vigpipe.model.variants import VIG_SHAPES, pretrained_cfg
from vigpipe.model.vig import Block, VisionGnn
from vigpipe.model.weights import match_state, to_reference_names

default_cfgs = generate_default_cfgs({name: pretrained_cfg(name) for name in VIG_SHAPES})

# torch.fx must not trace into these, because what they do depends on sizes.
for _module in (ConvStem, Block, Downsample, Readout):
    register_notrace_module(_module)
register_notrace_function(resized_embedding)


def checkpoint_filter_fn(state: dict[str, Any], model: VisionGnn) -> dict[str, Any]:
    """Convert a file's state dict to the model's names and sizes; timm calls this when loading.

    First and last layers of other channels or classes are returned unchanged: timm adapts the
    former and drops the latter afterwards.
    """
    state, expected = to_reference_names(state), model.state_dict()
    for_timm = {
        name: state.pop(name)
        for name in ("stem.convs.0.weight", "prediction.4.weight", "prediction.4.bias")
        if name in state and (name not in expected or state[name].shape != expected[name].shape)
    }
    placeholders = {name: expected[name] for name in for_timm if name in expected}
    return match_state(state | placeholders, model, "checkpoint") | for_timm


def _entry_point(name: str) -> Callable[..., Any]:
    shape = VIG_SHAPES[name]
    num_levels = len(shape.blocks) if len(shape.blocks) > 1 else sum(shape.blocks)
    # Four feature levels: the stages of a pyramid, or the end of every quarter of the blocks.
    levels = tuple(num_levels * (i + 1) // 4 - 1 for i in range(4))

    def create(pretrained: bool = False, **kwargs: Any) -> Any:
        return build_model_with_cfg(
            partial(VisionGnn, shape),
            name,
            pretrained,
            pretrained_filter_fn=checkpoint_filter_fn,
            feature_cfg={"out_indices": levels, "feature_cls": "getter"},
            **kwargs,
        )

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"{name} for timm.create_model."
    return create


for _name in VIG_SHAPES:
    globals()[_name] = register_model(_entry_point(_name))
