"""The table of model variants, and `create_model`, which builds one by its name."""

from pathlib import Path
from typing import Any, Literal

from vigpipe.config.choices import MODELS, Divided, Impl, Norm
from vigpipe.config.typed import typed
from vigpipe.errors import InputError
from vigpipe.files.weights_metadata import (
    class_names,
    image_preparation,
    metadata_if_any,
    per_channel,
)
from vigpipe.model.blocks import VigShape, reduced, stem_strides
from vigpipe.model.staged import StagedModel
from vigpipe.model.study import VigStudy
from vigpipe.model.vig import VisionGnn
from vigpipe.model.weights import load_weights


def _pyramid(blocks: tuple[int, ...], channels: tuple[int, ...], **changes: Any) -> VigShape:
    published: dict[str, Any] = {
        "k": (9, 9),
        "max_dilation": 5,
        "reductions": (4, 2, 1, 1),
        "relative": True,
        "stem": (2, 1, 1),
        "stem_stride": 4,
    }
    return VigShape(blocks, channels, **(published | changes))


VIG_SHAPES = {
    "vig_ti_224": VigShape((12,), (192,)),
    "vig_s_224": VigShape((16,), (320,)),
    "vig_b_224": VigShape((16,), (640,)),
    "pvig_ti_224": _pyramid((2, 2, 6, 2), (48, 96, 240, 384)),
    "pvig_s_224": _pyramid((2, 2, 6, 2), (80, 160, 400, 640)),
    "pvig_m_224": _pyramid((2, 2, 16, 2), (96, 192, 384, 768)),
    "pvig_b_224": _pyramid((2, 2, 18, 2), (128, 256, 512, 1024)),
    "vig_cifar_ti": VigShape((8,), (128,), k=(9, 9), stem_stride=4, img_size=(32, 32)),
    "pvig_cifar_ti": _pyramid(
        (2, 2, 4, 2), (32, 64, 128, 256), max_dilation=1, stem_stride=1, img_size=(32, 32)
    ),
    "vig_digits": VigShape((4,), (48,), k=(9, 9), stem=(2, 1), stem_stride=1, img_size=(8, 8)),
}


def pretrained_cfg(name: str) -> dict[str, Any]:
    """Return timm's default configuration of a variant: input, normalisation, names of layers."""
    shape = VIG_SHAPES[name]
    is_digits, is_imagenet = name == "vig_digits", shape.img_size == (224, 224)
    strides = stem_strides(len(shape.stem), shape.stem_stride)
    return {
        "num_classes": 1000 if is_imagenet else 10,
        "input_size": (1 if is_digits else 3, *shape.img_size),
        "pool_size": reduced(shape.img_size, (*strides, *(2,) * (len(shape.blocks) - 1))),
        "crop_pct": (0.95 if name == "pvig_b_224" else 0.9) if is_imagenet else 1.0,
        "interpolation": "bicubic",
        "mean": (0.0,) if is_digits else (0.5, 0.5, 0.5),
        "std": (1.0,) if is_digits else (0.5, 0.5, 0.5),
        "first_conv": "stem.convs.0",
        "classifier": "prediction.4",
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
        graph: graph policy, as in VisionGnn; for vig_study `grid` (the default) or `knn`.
        aggregator: as in VisionGnn. This and the next three options do not apply to vig_study.
        stochastic_dilation: as in VisionGnn.
        stem_stride: as in VisionGnn.
        compat: as in VisionGnn.
        impl: `fused` operators where there are any, or `plain` ones everywhere.
        narrow: make a sub-network of 1/narrow of the widths; 1 for the model itself. The names of
            its parameters are the model's.
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
        "narrow": narrow,
        "branch_rescale": branch_rescale,
    }
    if name == "vig_study":
        common["img_size"] = (32, 32) if img_size is None else img_size
        others = {
            "--aggregator": aggregator,
            "--stochastic-dilation": stochastic_dilation or None,
            "--stem-stride": stem_stride,
            "--compat": compat,
            "--divided": None if divided == "inner" else divided,
        }
        for flag, value in others.items():
            if value is not None:
                raise InputError(f"{flag} {value}: vig_study has no such choice; leave it out")
        if graph not in (None, "grid", "knn"):
            raise InputError(f"--graph {graph}: vig_study has grid and knn; choose one of them")
        model: StagedModel = VigStudy(**common, graph=graph or "grid")
    elif name in VIG_SHAPES:
        model = VisionGnn(
            VIG_SHAPES[name],
            **common,
            img_size=img_size,
            graph=graph or "knn",
            aggregator=aggregator or "max",
            stochastic_dilation=stochastic_dilation,
            stem_stride=stem_stride,
            compat=compat,
            divided=divided,
        )
        model.pretrained_cfg = pretrained_cfg(name)
    else:
        raise InputError(f"--model {name}: no such model; choose one of {', '.join(MODELS)}")
    model.set_impl(impl)
    if checkpoint_path is not None:
        load_weights(model, Path(checkpoint_path))
        if isinstance(model, VisionGnn):
            model.pretrained_cfg = cfg_of_file(model, Path(checkpoint_path))
    return model


def cfg_of_file(model: VisionGnn, path: Path) -> dict[str, Any]:
    """Return a model's configuration for timm, with what the metadata of its weights file add."""
    metadata = metadata_if_any(path)
    cfg, names = model.pretrained_cfg, class_names(metadata, path)
    facts = {name: cfg[name] for name in ("mean", "std", "crop_pct")}
    facts |= image_preparation(metadata, path)
    return {
        **cfg,
        "num_classes": model.num_classes,
        "input_size": (model.in_chans, *model.img_size),
        "pool_size": reduced(model.grid, (2,) * (len(model.shape.blocks) - 1)),
        "mean": per_channel(facts["mean"], model.in_chans),
        "std": per_channel(facts["std"], model.in_chans),
        "crop_pct": facts["crop_pct"],
        **({"label_names": names} if names else {}),
    }
