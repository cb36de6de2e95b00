"""`vigpipe.load` and `vigpipe.predict`: use trained weights in a program or a notebook."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from vigpipe.config.typed import typed
from vigpipe.data.images import read_image
from vigpipe.errors import InputError
from vigpipe.inference.description import ModelDescription, matching_weights, read_description
from vigpipe.inference.predict import Prediction, list_files, make_prediction, most_likely
from vigpipe.inference.prepack import can_prepack, prepack
from vigpipe.model.fit import match_state
from vigpipe.model.image import ImageModel
from vigpipe.model.staged import StagedModel
from vigpipe.model.variants import cfg_of_file


@dataclass(frozen=True)
class Transform:
    """Prepares an image as in evaluation: resizes it, crops its centre, normalises it.

    Attributes:
        description: what the weights file says of its model and images.
    """

    description: ModelDescription

    @typed
    def __call__(self, image: Image.Image | Path | str) -> Tensor:
        """Prepare one image, given as such or as the path of its file.

        Returns:
            (C, H, W) float32, of the model's channels and image size.

        Raises:
            InputError: the file cannot be read as an image.
        """
        if not isinstance(image, Image.Image):
            image = read_image(Path(image))
        return self.description.prepare(image)


class LoadedModel(NamedTuple):
    """A trained model and what it takes to use it.

    Attributes:
        model: in evaluation mode; an ordinary PyTorch module from (B, C, H, W) to (B, classes).
        transform: makes the model's input of an image.
        class_names: name of each class, by label.
    """

    model: StagedModel
    transform: Transform
    class_names: tuple[str, ...]


@typed
def load(
    weights: Path | str,
    *,
    model: str | None = None,
    image_size: int | str | None = None,
    device: torch.device | str = "cpu",
) -> LoadedModel:
    """Load the model of a weights file, with the transform of its images and its class names.

    Args:
        weights: safetensors file of a run, or another file that `vigpipe predict --weights` takes.
        model: name of the model; needed only if the file does not tell.
        image_size: side, or "HEIGHTxWIDTH", in pixels; by default that of the training.
        device: where the model is to compute.

    Returns:
        The model, its transform and its class names. `pretrained_cfg` of the model is that of the
        file, so that `timm.data.resolve_model_data_config` describes the same transform.

    Raises:
        InputError: the file cannot be read, does not fit the model, or has metadata that cannot be
            used.
    """
    path, device = Path(weights), usable_device(device)
    size = None if image_size is None else str(image_size)
    description = read_description(path, model, size)
    built = build_from(path, description.build)
    if isinstance(built, ImageModel):
        built.pretrained_cfg = cfg_of_file(built, path)
    return LoadedModel(built.to(device).eval(), Transform(description), description.names())


def usable_device(device: torch.device | str) -> torch.device:
    """Return a device as torch has it; InputError if this machine or this torch has none of it."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise InputError(f"device={str(device)!r}: cannot be used here ({why}); use cpu") from error
    return found


def build_from(weights: Path, build: Callable[[], StagedModel]) -> StagedModel:
    """Build the model that a file says it holds with the file's weights; draw no random numbers."""
    state = matching_weights(weights, build)
    with torch.random.fork_rng(devices=[]):  # building draws weights, which the file's replace
        built = build()
    built.load_state_dict(match_state(state, built, str(weights)))
    return built


@typed
def predict(
    weights: LoadedModel | Path | str,
    images: Path | str | Iterable[Path | str],
    *,
    batch_size: int = 64,
) -> list[Prediction]:
    """Predict the most likely classes of image files, as `vigpipe predict` does.

    Args:
        weights: a model from `load`, which says where it computes, or a weights file.
        images: an image file, a folder of them, or several of both.
        batch_size: number of images that run at once.

    Returns:
        One prediction for each image, in order; folders are listed by name.

    Raises:
        InputError: an image or the weights cannot be read.
        FloatingPointError: an image's logits are NaN or infinite.
    """
    if batch_size < 1:
        raise InputError(f"batch_size {batch_size}: must be at least 1")
    loaded = weights if isinstance(weights, LoadedModel) else load(weights)
    if loaded is not weights and can_prepack(loaded.model, torch.float32):
        prepack(loaded.model)  # nobody else has this model
    given = [images] if isinstance(images, str | Path) else images
    paths = list_files([Path(path) for path in given])
    description = loaded.transform.description
    split = description.split(description.files(paths))
    device = next(loaded.model.parameters()).device
    predictions: list[Prediction] = []
    for first in range(0, len(paths), batch_size):
        batch = range(first, min(first + batch_size, len(paths)))
        with torch.inference_mode():
            logits = loaded.model(split.read(batch).to(device))
        probabilities, labels = (rows.tolist() for rows in most_likely(logits))
        for path, i, p in zip(paths[batch.start : batch.stop], labels, probabilities, strict=True):
            predictions.append(make_prediction(path, loaded.class_names, i, p))
    return predictions
