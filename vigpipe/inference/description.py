"""Read from a weights file which model it holds and how its images are prepared."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vigpipe.config.choices import GRAPH_MODELS, MODELS
from vigpipe.config.of_weights import said_options
from vigpipe.config.options import TrainConfig, parse_image_size, with_model_defaults
from vigpipe.config.recipes import MODEL_DEFAULTS
from vigpipe.data.formats.folders import Files
from vigpipe.data.images import in_channels, to_rgb
from vigpipe.data.split import Preparation, Split
from vigpipe.data.stored import InMemory, Look, StoredImages, upright
from vigpipe.data.texts import pack
from vigpipe.errors import InputError
from vigpipe.files.weights_metadata import (
    class_names,
    image_preparation,
    metadata_if_any,
    per_channel,
)
from vigpipe.model.blocks import FewNodesWarning
from vigpipe.model.fit import match_state
from vigpipe.model.identify import has_second_head, identify
from vigpipe.model.published import to_own_names
from vigpipe.model.shapes import MOBILE_SHAPES, SHAPES, VIG_SHAPES
from vigpipe.model.staged import StagedModel
from vigpipe.model.variants import create_model, pretrained_cfg
from vigpipe.model.weights import read_weights

NUM_IMAGENET_CLASSES = 1000
# vig_study is not in timm's registry, so it has no pretrained_cfg.
STUDY: dict[str, Any] = {"num_classes": 10, "input_size": (3, 32, 32)}


@dataclass(frozen=True)
class ModelDescription:
    """Everything that is needed to build a model and to prepare its images."""

    model: str
    num_classes: int
    in_chans: int  # channels of the images, 1 or 3
    image_size: tuple[int, int]  # (H, W) in pixels
    mean: tuple[float, ...]  # of each channel's pixels, which lie in 0 ... 1; it is subtracted
    std: tuple[float, ...]  # that they are divided by afterwards
    crop_pct: float  # fraction of the side of a resized image that is kept
    exif: bool = False  # whether images are turned as the EXIF of their files says
    class_names: tuple[str, ...] = ()  # by label; empty if the file has no names
    # Those of training that the file gives, as arguments of `create_model`.
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> StagedModel:
        """Build the model, with random weights from torch's global generator."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FewNodesWarning)  # running the model warns again
            return create_model(
                self.model,
                num_classes=self.num_classes,
                in_chans=self.in_chans,
                img_size=self.image_size,
                **self.options,
            )

    def names(self) -> tuple[str, ...]:
        """Name every label: by the file, by ImageNet for 1,000 classes, else by its number."""
        if self.class_names:
            return self.class_names
        if self.num_classes == NUM_IMAGENET_CLASSES:
            from timm.data.imagenet_info import ImageNetInfo

            info = ImageNetInfo()
            return tuple(info.index_to_description(i) for i in range(self.num_classes))
        return tuple(str(i) for i in range(self.num_classes))

    def files(self, paths: Sequence[Path]) -> StoredImages:
        """Make of image files what their split is made of; all labels are 0."""
        labels = np.zeros(len(paths), dtype=np.int64)
        images = StoredImages(labels, Files(pack(map(str, paths)), self.in_chans))
        return upright(images) if self.exif else images

    def split(self, images: StoredImages, look: Look | None = None) -> Split:
        """Make a split of images of the model's channels, prepared as in evaluation."""
        preparation = Preparation(self.image_size, self.mean, self.std, self.crop_pct)
        return Split(images, look or Look(self.in_chans), preparation)

    def read_file(self, path: Path) -> Tensor:
        """Read one image file, prepared as in evaluation: (1, C, H, W) float32."""
        return self.split(self.files([path])).read([0])

    def prepare(self, image: Image.Image) -> Tensor:
        """Prepare one image as in evaluation: (C, H, W) float32."""
        own_info = dict(image.info)
        try:
            rgb = in_channels(to_rgb(image), self.in_chans)
            images = StoredImages(np.zeros(1, dtype=np.int64), InMemory([rgb], "the image"))
            return self.split(upright(images) if self.exif else images).read([0])[0]
        finally:
            image.info = own_info  # which may be that of the same image

    def pixels(self, images: Tensor) -> np.ndarray:
        """Turn prepared images back into pixels: (B, C, H, W) -> (B, H, W, 3) uint8 RGB."""
        std, mean = (torch.tensor(v).view(-1, 1, 1) for v in (self.std, self.mean))
        pixels = (images * std + mean).clamp(0, 1).mul(255).round().to(torch.uint8)
        return pixels.expand(-1, 3, -1, -1).movedim(1, -1).numpy()


def matching_weights(weights: Path, build: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """Read the weights of a file; raise InputError unless they fit the model that is built."""
    state = to_own_names(read_weights(weights))
    with torch.device("meta"):  # takes no memory, though a file may claim to hold any model
        claimed = build()
    match_state(state, claimed, str(weights))
    return state


def read_description(
    weights: Path | None, model: str | None = None, image_size: str | None = None
) -> ModelDescription:
    """Find out which model a weights file holds, and how its images are prepared.

    The file's metadata come first, then the shapes of its tensors, then the model's defaults.
    Without weights, which are then random, a model must be given. `image_size` overrides the file.
    """
    if weights is None:
        if model is None:
            raise InputError(
                f"--model: say which model, or give --weights; the models are {', '.join(MODELS)}"
            )
        return _describe({}, model, image_size, Path())
    metadata = metadata_if_any(weights)
    if "model" in metadata:
        if model not in (None, metadata["model"]):
            raise InputError(
                f"--model {model}: {weights} holds a {metadata['model']}; leave --model out"
            )
        model = metadata["model"]
        if model in GRAPH_MODELS:
            raise InputError(
                f"{weights}: holds a {model}, which is a model of a graph, and a model of images "
                f"is expected; vigpipe predict --weights {weights} --data GRAPH predicts nodes, "
                "and in Python vigpipe.load_graph_model loads it"
            )
        if model not in MODELS:
            raise InputError(
                f"{weights}: is of a model {model!r}, which this version does not have; its "
                f"models are {', '.join(MODELS)}"
            )
    else:
        state = to_own_names(read_weights(weights))
        model = model or _recognise(state, weights)
        metadata = {**_facts_from_shapes(state, model), **metadata}
    description = describe_image_model(metadata, model, weights, image_size)
    if description.in_chans not in (1, 3):
        raise InputError(
            f"{weights}: the model takes images of {description.in_chans} channels, but image "
            "files are read as grey (1) or colour (3)"
        )
    return description


def describe_image_model(
    metadata: Mapping[str, str], model: str, weights: Path, image_size: str | None = None
) -> ModelDescription:
    """Find out what the metadata of a file or checkpoint say of a model, which is one of MODELS."""
    try:
        return _describe(metadata, model, image_size, weights)
    except InputError:
        raise
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{weights}: what its metadata say of the model cannot be used ({error}); write the "
            "file again with vigpipe train or vigpipe weights convert"
        ) from error


def _describe(
    metadata: Mapping[str, str], model: str, image_size: str | None, weights: Path
) -> ModelDescription:
    published = pretrained_cfg(model) if model in SHAPES else STUDY
    defaults = MODEL_DEFAULTS[model]
    size = parse_image_size(image_size or metadata.get("img_size")) or published["input_size"][1:]
    text = f"{size[0]}x{size[1]}"
    config = with_model_defaults(TrainConfig(model=model, image_size=text))  # pyrefly: ignore[bad-argument-type]
    options = said_options({**metadata, "model": model}, weights)
    in_chans = int(metadata.get("in_chans", published["input_size"][0]))
    prepared: dict[str, Any] = {
        "mean": defaults.image_mean,
        "std": defaults.image_std,
        "crop_pct": config.crop_pct or 1.0,
    } | image_preparation(metadata, weights)
    description = ModelDescription(
        model=model,
        num_classes=int(metadata.get("num_classes", published["num_classes"])),
        in_chans=in_chans,
        image_size=size,
        mean=per_channel(prepared["mean"], in_chans),
        std=per_channel(prepared["std"], in_chans),
        crop_pct=prepared["crop_pct"],
        exif=options.pop("exif", False),
        class_names=class_names(metadata, weights),
        options=options,
    )
    if description.class_names and len(description.class_names) != description.num_classes:
        raise ValueError(
            f"{len(description.class_names)} names for {description.num_classes} classes"
        )
    return description


def _recognise(state: Mapping[str, Tensor], weights: Path) -> str:
    if "blocks.0.grapher.graph_conv.lin_rel.weight" in state:
        return "vig_study"
    return identify(state, str(weights)).name


def _facts_from_shapes(state: Mapping[str, Tensor], model: str) -> dict[str, str]:
    """Read classes, channels, heads and image size off the shapes of the tensors, as metadata."""
    facts = {}
    for key, dimension, names in (
        ("num_classes", 0, ("prediction.4.weight", "fc2.weight")),
        ("in_chans", 1, ("stem.convs.0.weight", "blocks.0.grapher.fc1.0.weight")),
    ):
        for name in names:
            if name in state and state[name].dim() > dimension:
                facts[key] = str(state[name].shape[dimension])
    table = state.get("pos_embed")
    if model in VIG_SHAPES and table is not None and table.dim() == 4:
        height, width = (side * VIG_SHAPES[model].stem_stride for side in table.shape[2:])
        facts["img_size"] = f"{height}x{width}"
    if model in MOBILE_SHAPES and not has_second_head(state):
        facts["dist_head"] = "False"
    return facts
