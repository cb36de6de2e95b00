"""Find out which variant a weights file belongs to, and convert it to safetensors."""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from vigpipe.errors import InputError
from vigpipe.files.atomic import replacing
from vigpipe.files.outputs import check_converted_file
from vigpipe.model.position import Grid
from vigpipe.model.variants import VIG_SHAPES, create_model
from vigpipe.model.vig import VisionGnn
from vigpipe.model.weights import (
    Differences,
    match_state,
    read_weights,
    to_reference_names,
    with_relative_positions,
)


@dataclass(frozen=True)
class Variant:
    """A variant, as far as the shapes of its tensors show."""

    name: str
    num_classes: int
    in_chans: int
    img_size: Grid

    def build(self) -> VisionGnn:
        with warnings.catch_warnings(action="ignore"):  # running it warns of few nodes again
            model = create_model(**asdict(self))
        assert isinstance(model, VisionGnn)
        return model

    def differences(self, state: Mapping[str, Tensor]) -> Differences:
        with torch.device("meta"):
            model = self.build()
        expected = model.state_dict()
        return Differences.between(with_relative_positions(state, expected, model), expected)


def identify(state: Mapping[str, Tensor], source: str = "these weights") -> Variant:
    """Find out which variant a state dict belongs to, judging by its names and shapes.

    Classes, channels and image size are read off the tensors, which have the authors' names. The
    strides of the stem, and whether max or edge aggregates, are taken to be the variant's defaults.
    If several variants fit, the one whose default image size gives this grid comes first.
    """
    required = ("stem.convs.0.weight", "pos_embed", "prediction.4.weight")
    absent = [n for n in required if n not in state or state[n].dim() != 4 or 0 in state[n].shape]
    if absent:
        raise InputError(
            f"{source}: not the whole of a ViG: it has no {' and no '.join(absent)} of four "
            "dimensions; give a file with stem, backbone and classifier"
        )
    stem, embedding, classifier = (state[name] for name in required)
    _, channels, height, width = embedding.shape
    candidates: list[Variant] = []
    for name, shape in VIG_SHAPES.items():
        size = height * shape.stem_stride, width * shape.stem_stride
        candidates.append(Variant(name, len(classifier), stem.shape[1], size))

    def mismatches(variant: Variant) -> tuple[bool, bool]:
        shape = VIG_SHAPES[variant.name]
        return shape.channels[0] != channels, shape.img_size != variant.img_size

    differences: dict[Variant, Differences] = {}
    for variant in sorted(candidates, key=mismatches):
        differences[variant] = variant.differences(state)
        if differences[variant].count == 0:
            return variant
    closest = min(differences, key=lambda variant: differences[variant].count)
    raise InputError(
        f"{source}: of no variant; closest is {closest.name} for {closest.num_classes} classes, "
        f"from which it differs: {differences[closest]}; build the model with the options it was "
        "trained with and load it there"
    )


def convert(source: Path, target: Path, *, ema: bool = False, overwrite: bool = False) -> str:
    """Convert a weights file to safetensors with the authors' names, and name its variant."""
    check_converted_file(source, target, overwrite=overwrite)
    state = to_reference_names(read_weights(source, ema=ema))
    variant = identify(state, str(source))
    model = variant.build()
    if any(tensor.dtype == torch.float64 for tensor in state.values()):
        model = model.double()  # float32 would lose the last digits
    weights = {
        name: tensor.contiguous() for name, tensor in match_state(state, model, str(source)).items()
    }
    height, width = variant.img_size
    metadata = {
        "format": "pt",
        "model": variant.name,
        "num_classes": str(variant.num_classes),
        "in_chans": str(variant.in_chans),
        "img_size": f"{height}x{width}",
    }
    try:
        with replacing(target) as partial:
            save_file(weights, partial, metadata)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{target}: cannot be written ({error}); choose a folder that exists, is writable and "
            "has room"
        ) from error
    return variant.name
