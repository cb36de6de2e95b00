"""Fit state dicts to models, load weights files into them, and convert these to safetensors.

A file that does not fit the model exactly is refused; `match_state` lists the few exceptions.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from vigpipe.errors import InputError
from vigpipe.files.atomic import replacing
from vigpipe.files.outputs import check_converted_file
from vigpipe.files.weights_metadata import metadata_if_any
from vigpipe.model.differences import Differences, is_embedding, with_relative_positions
from vigpipe.model.identify import LEARNED, SECOND_HEAD, has_second_head, identify, recognised
from vigpipe.model.image import ImageModel
from vigpipe.model.mobile import MobileGnn
from vigpipe.model.position import resized_embedding
from vigpipe.model.published import to_own_names
from vigpipe.model.shapes import MOBILE_SHAPES
from vigpipe.model.staged import StagedModel
from vigpipe.model.weights import read_weights


def match_state(
    state: Mapping[str, Tensor],
    model: nn.Module,
    source: str,
    *,
    new_classifier: bool = False,
    is_finite: bool = False,
    whole: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Turn a state dict into one that a model loads strictly, or report everything that differs.

    Names and shapes must be those of the model, with these exceptions:

    - `pos_embed` of another grid of nodes is resized to the model's (bicubic in 2-D);
    - `relative_pos` of the model's grid is kept, as the weights were trained with it. For another
      grid, as the file's `pos_embed` tells, it becomes what `VisionGnn.set_input_size` makes of it:
      interpolated along the raster with `compat="reference"`, else computed anew, with positions
      relative to the image. A missing one is computed. Blocks of a pyramid that make no kNN graph
      have none, and leave the file's out;
    - floating-point tensors are cast to the model's dtype;
    - with `new_classifier`, the model keeps its own last layer, whatever the number of classes.

    A tensor with NaN or infinity, in the model's dtype, is refused: all that is computed with it
    would be. With `is_finite`, no tensor is read to look for them. `whole` is what the file has, if
    that is more or other than the state dict, to tell of which variant it is.
    """
    model_state = model.state_dict()
    matched = with_relative_positions(state, model_state, model)
    if new_classifier:
        assert isinstance(model, StagedModel)
        lasts, _ = model.classifier()
        if isinstance(model, MobileGnn):
            lasts += (SECOND_HEAD,)  # which the model may be without
        matched = {name: tensor for name, tensor in matched.items() if not name.startswith(lasts)}
        matched |= {name: model_state[name] for name in model_state if name.startswith(lasts)}
    embedding, target = matched.get("pos_embed"), model_state.get("pos_embed")
    if embedding is not None and target is not None and is_embedding(embedding, target):
        size = target.shape[2], target.shape[3]
        matched["pos_embed"] = resized_embedding(embedding.to(target.dtype), size)
    differences = Differences.between(matched, model_state)
    if differences.count:
        raise _does_not_fit(whole or state, matched, model, differences, source)
    fitting = {
        name: matched[name].to(target.dtype) if target.is_floating_point() else matched[name]
        for name, target in model_state.items()
    }
    if not is_finite:
        _check_finite(fitting, source)
    return fitting


def _check_finite(state: Mapping[str, Tensor], source: str) -> None:
    """Raise InputError if there is NaN or infinity; this reads each tensor once, in place."""
    for name, tensor in state.items():
        if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
            continue
        least, most = tensor.aminmax()  # NaN is both; isfinite takes ten times as long, and memory
        if not (least.isfinite() and most.isfinite()):
            dtype = str(tensor.dtype).removeprefix("torch.")
            number = int((~tensor.isfinite()).sum())
            raise InputError(
                f"{source}: {number} of the {tensor.numel()} numbers of {name} are NaN or infinite "
                f"in {dtype}; give weights from before that, such as an earlier checkpoint's"
            )


def _does_not_fit(
    state: Mapping[str, Tensor],
    matched: Mapping[str, Tensor],
    model: nn.Module,
    differences: Differences,
    source: str,
) -> InputError:
    """Return the error for a state dict that differs from a model's, even once it is matched."""
    whose, advice = "", "choose the model and the options that the weights were trained with"
    is_mobile = isinstance(model, MobileGnn)
    if isinstance(model, ImageModel):
        variant = recognised(state)
        whose = f" (it is of {variant.description})" if variant else ""
    if isinstance(model, StagedModel):
        there, wanted = num_classes_in(matched, model), model.num_classes
        if is_mobile and has_second_head(matched) and model.num_heads == 1 and wanted:
            advice = (
                "where the model is right, leave the second head out with vigpipe weights convert "
                "--no-dist-head"
            )
        elif LEARNED in differences.missing:
            advice = (
                "where the model is right, the file is a published one without the layer that its "
                "code makes anew at every call: make the model with --compat reference"
            )
        elif is_mobile and f"{SECOND_HEAD}weight" in differences.missing:
            advice = (
                "where the model is right, the file has no second head: make the model with "
                "--no-dist-head, in Python dist_head=False"
            )
        elif there is not None and there != wanted:
            advice = (
                f"the file has {there} classes and the model {wanted}: leave the file's last layer "
                "out with vigpipe train --new-classifier, or create the model with "
                f"num_classes={there}"
            )
    return InputError(f"{source}: does not fit the model{whose}: {differences}; {advice}")


def num_classes_in(state: Mapping[str, Tensor], model: StagedModel) -> int | None:
    """Return of how many classes the last layer in a state dict is; None if that cannot be told."""
    _, dims = model.classifier()
    for name, dim in dims.items():
        if name in state and state[name].dim() > dim:
            return state[name].shape[dim]
    return None


def with_classes(
    state: Mapping[str, Tensor], model: StagedModel, order: list[int]
) -> dict[str, Tensor]:
    """Return a state dict whose class i is that which was `order[i]` of a model's state dict."""
    _, dims = model.classifier()
    index = torch.tensor(order)
    return {**state, **{name: state[name].index_select(dim, index) for name, dim in dims.items()}}


def load_weights(
    model: nn.Module, path: Path, *, ema: bool = False, new_classifier: bool = False
) -> None:
    """Load a weights file into a model; every tensor must fit, as `match_state` describes.

    `ema` is that of `read_weights`, `new_classifier` that of `match_state`.

    Raises:
        InputError: the file cannot be read or does not fit.
    """
    state = to_own_names(read_weights(path, ema=ema))
    model.load_state_dict(match_state(state, model, str(path), new_classifier=new_classifier))


def convert(
    source: Path,
    target: Path,
    *,
    ema: bool = False,
    dist_head: bool = True,
    overwrite: bool = False,
) -> str:
    """Convert a weights file to safetensors with the names here, and name its variant.

    Without `dist_head`, the second of a model's two heads is left out.
    """
    check_converted_file(source, target, overwrite=overwrite)
    state = to_own_names(read_weights(source, ema=ema))
    variant = identify(state, str(source))
    if not dist_head:
        if variant.num_heads == 1:
            raise InputError(
                f"--no-dist-head: {source} is of {variant.description} and has one head; leave it "
                "out"
            )
        variant = replace(variant, num_heads=1)
        state = {n: tensor for n, tensor in state.items() if not n.startswith(SECOND_HEAD)}
    model = variant.build()
    if any(tensor.dtype == torch.float64 for tensor in state.values()):
        model = model.double()  # float32 would lose the last digits
    weights = {
        name: tensor.contiguous() for name, tensor in match_state(state, model, str(source)).items()
    }
    height, width = variant.img_size
    # What a run has said of its model and images is kept.
    said = metadata_if_any(source)
    metadata = {"img_size": f"{height}x{width}", **said, "format": "pt", "model": variant.name}
    metadata["num_classes"] = str(variant.num_classes)
    metadata["in_chans"] = str(variant.in_chans)
    if variant.name in MOBILE_SHAPES and variant.num_heads == 1:
        metadata["dist_head"] = "False"
    if variant.compat is not None:
        metadata["compat"] = variant.compat
    try:
        with replacing(target) as partial:
            save_file(weights, partial, metadata)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{target}: cannot be written ({error}); choose a folder that exists, is writable and "
            "has room"
        ) from error
    return variant.name
