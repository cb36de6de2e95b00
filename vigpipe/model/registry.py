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

from vigpipe.model.fit import match_state
from vigpipe.model.image import ImageModel
from vigpipe.model.mobile import GraphBlock, LocalBlock, Merge
from vigpipe.model.position import resized_embedding
from vigpipe.model.published import to_own_names
from vigpipe.model.readout import Readout
from vigpipe.model.shapes import SHAPES, VIG_SHAPES, make_variant
from vigpipe.model.stem import ConvStem, Downsample
from vigpipe.model.variants import pretrained_cfg
from vigpipe.model.vig import Block

default_cfgs = generate_default_cfgs({name: pretrained_cfg(name) for name in SHAPES})

# torch.fx must not trace into these, because what they do depends on sizes.
for _module in (ConvStem, Block, LocalBlock, GraphBlock, Downsample, Merge, Readout):
    register_notrace_module(_module)
register_notrace_function(resized_embedding)


def checkpoint_filter_fn(state: dict[str, Any], model: ImageModel) -> dict[str, Any]:
    """Convert a file's state dict to the model's names and sizes; timm calls this when loading.

    First and last layers of other channels or classes are returned unchanged: timm adapts the
    former and drops the latter afterwards.
    """
    whole, expected = to_own_names(state), model.state_dict()
    state = dict(whole)
    _, of_classes = model.classifier()
    for_timm = {
        name: state.pop(name)
        for name in ("stem.convs.0.weight", *of_classes)
        if name in state and (name not in expected or state[name].shape != expected[name].shape)
    }
    placeholders = {name: expected[name] for name in for_timm if name in expected}
    return match_state(state | placeholders, model, "checkpoint", whole=whole) | for_timm


def _entry_point(name: str) -> Callable[..., Any]:
    blocks = SHAPES[name].blocks
    num_levels = len(blocks) if len(blocks) > 1 else sum(VIG_SHAPES[name].blocks)
    # Four feature levels: the resolutions, or the end of every quarter of the blocks.
    num_taken = min(4, num_levels)
    levels = tuple(num_levels * (i + 1) // num_taken - 1 for i in range(num_taken))

    def create(pretrained: bool = False, **kwargs: Any) -> Any:
        return build_model_with_cfg(
            partial(make_variant, name),
            name,
            pretrained,
            pretrained_filter_fn=checkpoint_filter_fn,
            feature_cfg={"out_indices": levels, "feature_cls": "getter"},
            **kwargs,
        )

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"{name} for timm.create_model."
    return create


for _name in SHAPES:
    globals()[_name] = register_model(_entry_point(_name))
