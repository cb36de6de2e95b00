"""Build a model of images by its name: `create_model`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from vigpipe.config.choices import MODELS, Divided, Impl, Norm
from vigpipe.config.recipes import MODEL_DEFAULTS
from vigpipe.config.typed import typed
from vigpipe.errors import InputError
from vigpipe.files.weights_metadata import (
    class_names,
    image_preparation,
    metadata_if_any,
    per_channel,
)
from vigpipe.model.blocks import reduced
from vigpipe.model.fit import load_weights
from vigpipe.model.image import ImageModel
from vigpipe.model.shapes import MOBILE_SHAPES, SHAPES, VIG_SHAPES, make_variant
from vigpipe.model.staged import StagedModel
from vigpipe.model.study import VigStudy


def pretrained_cfg(name: str) -> dict[str, Any]:
    """Return timm's default configuration of a variant: input, normalisation, names of layers."""
    shape, defaults = SHAPES[name], MODEL_DEFAULTS[name]
    channels = 1 if name == "vig_digits" else 3
    heads = ("prediction.4", "prediction.5") if name in MOBILE_SHAPES else "prediction.4"
    strides = (*shape.stem_strides, *(2,) * shape.halvings)
    return {
        "num_classes": 1000 if shape.img_size == (224, 224) else 10,
        "input_size": (channels, *shape.img_size),
        "pool_size": reduced(shape.img_size, strides),
        "crop_pct": defaults.crop_pct,
        "interpolation": "bicubic",
        "mean": per_channel(defaults.image_mean, channels),
        "std": per_channel(defaults.image_std, channels),
        "first_conv": "stem.convs.0",
        "classifier": heads,
    }


@typed
def create_model(
    name: str,
    *,
    num_classes: int,
    in_chans: int = 3,
    img_size: int | tuple[int, int] | None = None,
    norm: Norm = "batch",
    drop_path_rate: float = 0.0,
    drop_rate: float = 0.0,
    graph: str | None = None,
    aggregator: str | None = None,
    stochastic_dilation: float = 0.0,
    stem_stride: int | None = None,
    compat: Literal["reference"] | None = None,
    dist_head: bool | None = None,
    impl: Impl = "fused",
    narrow: int = 1,
    divided: Divided = "inner",
    branch_rescale: bool = False,
    checkpoint_path: Path | str | None = None,
) -> StagedModel:
    """Build a model, with weights drawn from torch's global generator or read from a file.

    Args:
        name: name of the model, such as `vig_ti_224`; `vigpipe.config.choices.MODELS` lists all.
        num_classes: number of logits; with 0 the model returns the readout's hidden layer.
        in_chans: channels of the images.
        img_size: height and width of the images in pixels, or one number for both; by default the
            size that the variant is designed for.
        norm: normalisation: batch, layer or group.
        drop_path_rate: drop-path rate of the last block; the rate rises linearly from 0 in the
            first.
        drop_rate: dropout rate in the readout.
        graph: graph policy, as in VisionGnn; for vig_study `grid` (the default) or `knn`. Models
            without kNN have links of their own.
        aggregator: as in VisionGnn. This and the next three options are for ViG alone.
        stochastic_dilation: as in VisionGnn.
        stem_stride: as in VisionGnn.
        compat: as in VisionGnn.
        dist_head: as in MobileGnn; only for the models without kNN.
        impl: `fused` operators where there are any, or `plain` ones everywhere.
        narrow: make a sub-network of 1/narrow of the widths; 1 for the model itself. The names of
            its parameters are the model's. Models without kNN have no sub-networks.
        divided: the widths that sub-networks share: inner or tied; vig_study has inner only.
        branch_rescale: as in VisionGnn.
        checkpoint_path: weights file to load (`vigpipe.model.weights`); by default the weights are
            random. The model's `pretrained_cfg` then tells what the file does: its classes, and the
            size, mean, standard deviation and crop of its images, for `timm.data`.

    Returns:
        The model, in training mode.

    Raises:
        InputError: the name is unknown, the model does not have one of the options, the images are
            too small, `narrow` does not divide a width, or the weights file does not fit.
    """
    common: dict[str, Any] = {
        "num_classes": num_classes,
        "in_chans": in_chans,
        "norm": norm,
        "drop_path_rate": drop_path_rate,
        "drop_rate": drop_rate,
    }
    of_vig = {
        "--aggregator": aggregator,
        "--stochastic-dilation": stochastic_dilation or None,
        "--stem-stride": stem_stride,
        "--divided": None if divided == "inner" else divided,
    }
    sub_network = {"narrow": narrow, "branch_rescale": branch_rescale}
    if name in MOBILE_SHAPES:
        of_sub_networks = {"narrow": None if narrow == 1 else narrow}
        of_sub_networks["--branch-rescale"] = branch_rescale or None
        _refuse_options(name, {"--graph": graph, **of_vig, **of_sub_networks})
        heads: dict[str, Any] = {"dist_head": dist_head is not False, "compat": compat}
        model: StagedModel = make_variant(name, **common, **heads, img_size=img_size)
    elif dist_head is not None:
        flag = "--dist-head" if dist_head else "--no-dist-head"
        raise InputError(f"{flag}: {name} has one head; leave it out")
    elif name == "vig_study":
        _refuse_options(name, {**of_vig, "--compat": compat})
        if graph not in (None, "grid", "knn"):
            raise InputError(f"--graph {graph}: vig_study has grid and knn; choose one of them")
        size = (32, 32) if img_size is None else img_size
        model = VigStudy(**common, **sub_network, img_size=size, graph=graph or "grid")
    elif name in VIG_SHAPES:
        model = make_variant(
            name,
            **common,
            **sub_network,
            img_size=img_size,
            graph=graph or "knn",
            aggregator=aggregator or "max",
            stochastic_dilation=stochastic_dilation,
            stem_stride=stem_stride,
            compat=compat,
            divided=divided,
        )
    else:
        raise InputError(f"--model {name}: no such model; choose one of {', '.join(MODELS)}")
    if isinstance(model, ImageModel):
        model.pretrained_cfg = pretrained_cfg(name)
        if dist_head is False:
            model.pretrained_cfg["classifier"] = "prediction.4"
    model.set_impl(impl)
    if checkpoint_path is not None:
        load_weights(model, Path(checkpoint_path))
        if isinstance(model, ImageModel):
            model.pretrained_cfg = cfg_of_file(model, Path(checkpoint_path))
    return model


def _refuse_options(name: str, options: Mapping[str, object]) -> None:
    """Raise InputError for an option that a model does not have, and that is given."""
    for flag, value in options.items():
        if value is not None and value is not False:
            text = flag if value is True else f"{flag} {value}"
            raise InputError(f"{text}: {name} has no such choice; leave it out")


def cfg_of_file(model: ImageModel, path: Path) -> dict[str, Any]:
    """Return a model's configuration for timm, with what the metadata of its weights file add."""
    metadata = metadata_if_any(path)
    cfg, names = model.pretrained_cfg, class_names(metadata, path)
    facts = {name: cfg[name] for name in ("mean", "std", "crop_pct")}
    facts |= image_preparation(metadata, path)
    return {
        **cfg,
        "num_classes": model.num_classes,
        "input_size": (model.in_chans, *model.img_size),
        "pool_size": model.pool_size,
        "mean": per_channel(facts["mean"], model.in_chans),
        "std": per_channel(facts["std"], model.in_chans),
        "crop_pct": facts["crop_pct"],
        **({"label_names": names} if names else {}),
    }
