"""Follow what a file of --weights says of its model, or refuse the options that contradict it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from vigpipe.config.check_job import check_job
from vigpipe.config.choices import MOBILE_MODELS
from vigpipe.config.options import OPTIONS, TrainConfig, as_given, check_numbers, parse_image_size
from vigpipe.config.recipes import MODEL_DEFAULTS
from vigpipe.errors import InputError
from vigpipe.files.names import escaped
from vigpipe.files.weights_metadata import (
    channels_text,
    image_preparation,
    metadata_if_any,
    per_channel,
    unusable,
)

IN_WEIGHTS = tuple(name for name, facts in OPTIONS.items() if facts.in_weights)
Options = TypeVar("Options", bound=TrainConfig)
_OF_VIG = ("graph", "aggregator", "stem_stride")  # what models without kNN do not have
_TRUTH = {"True": True, "False": False}


def follow_weights(config: Options) -> Options:
    """Fill in what the file of --weights says of its model and images, and the options leave open.

    Raises:
        InputError: an option says something else than the file, or the file what cannot be.
    """
    path = config.weights
    metadata = {} if path is None else metadata_if_any(path)
    if path is None or "model" not in metadata:
        return config
    model: Any = metadata["model"]
    said = said_options(metadata, path)
    if config.model not in (type(config)().model, model):
        raise InputError(f"--model {config.model}: {path} holds a {model}; leave --model out")
    is_of_run, defaults = "class_names" in metadata, MODEL_DEFAULTS[model]
    # A new last layer may have other heads.
    kept = [n for n in IN_WEIGHTS if not (config.new_classifier and n == "dist_head")]
    for name in kept:
        value, was = getattr(config, name), said.get(name)
        # A run leaves out what its model decides, and published files do not say how they began.
        is_own = is_of_run and was is None and getattr(defaults, name, None) is None
        if value is not None and (is_own or was not in (None, value)):
            had = "the model's own" if was is None else as_given(name, was)
            raise InputError(
                f"{as_given(name, value)}: {path} was trained with {had}; leave it out, or choose "
                "other weights"
            )
    followed = {name: value for name, value in said.items() if getattr(config, name) is None}
    if metadata.get("multi_label") == "True" and not config.new_classifier:
        followed["multi_label"] = True
    if defaults.job == "images":
        followed |= _of_images(metadata, config, path)
    return replace(config, model=model, **followed)


def said_options(metadata: Mapping[str, str], where: Path) -> dict[str, Any]:
    """Return the options in IN_WEIGHTS that metadata with a model give, by name.

    Raises:
        InputError: this version does not have the model, or the model not the option.
    """
    model: Any = metadata["model"]
    if model not in MODEL_DEFAULTS:
        raise InputError(
            f"{where}: is of a model '{escaped(model, 40)}', which this version does not have; its "
            f"models are {', '.join(MODEL_DEFAULTS)}"
        )
    job, hints = MODEL_DEFAULTS[model].job, get_type_hints(TrainConfig)
    said = {
        name: _parsed(name, metadata[name], get_args(hints[name]), where)
        for name in IN_WEIGHTS
        if metadata.get(name) and OPTIONS[name].job in (None, job)
    }
    for name in _OF_VIG if model in MOBILE_MODELS else ():
        if name in said:
            raise unusable(where, name, metadata[name], f"none, as {model} has no such choice")
    try:
        config = TrainConfig(model=model, **said)
        check_numbers(config)
        check_job(config)
    except InputError as error:
        raise InputError(
            f"{where}: what its metadata say of the model cannot be used ({error}); write the file "
            "again with vigpipe train"
        ) from error
    return said


def options_in_weights(config: TrainConfig) -> dict[str, Any]:
    """Return what the weights of a run say of its options; None is left out."""
    return {name: getattr(config, name) for name in IN_WEIGHTS}


def count_in(metadata: Mapping[str, str], name: str, where: Path) -> int:
    """Return a number of things, from 1 to 2^30, that metadata give."""
    text = metadata.get(name, "")
    if text.isdecimal() and text.isascii() and len(text) < 11 and 1 <= int(text) <= 1 << 30:
        return int(text)
    raise unusable(where, name, text, "a number from 1")


def truth_in(metadata: Mapping[str, str], name: str, where: Path) -> bool:
    """Return True or False as metadata give it."""
    text = metadata.get(name, "")
    if text not in _TRUTH:
        raise unusable(where, name, text, " or ".join(_TRUTH))
    return _TRUTH[text]


def _parsed(name: str, text: str, hints: tuple[Any, ...], where: Path) -> Any:
    """Parse what metadata give of an option, which is of one of these types."""
    if int in hints:
        return count_in({name: text}, name, where)
    if bool in hints:
        return truth_in({name: text}, name, where)
    choices = [choice for hint in hints for choice in get_args(hint)]
    if choices and text not in choices:
        raise unusable(where, name, text, " or ".join(dict.fromkeys(choices)))
    return text


def _of_images(metadata: Mapping[str, str], config: TrainConfig, path: Path) -> dict[str, Any]:
    """Return how a file's images are prepared, as far as the options leave it open."""
    defaults, prepared = MODEL_DEFAULTS[metadata["model"]], image_preparation(metadata, path)
    channels = count_in(metadata, "in_chans", path) if "in_chans" in metadata else 3
    for name, own in (("mean", defaults.image_mean), ("std", defaults.image_std)):
        theirs, ours = (per_channel(v, channels) for v in (prepared.get(name, own), own))
        if theirs != ours:
            raise InputError(
                f"{path}: its model takes pixels whose {name} is {channels_text(theirs)}, and a "
                f"run prepares them with {channels_text(ours)} for {metadata['model']}; choose "
                "other weights"
            )
    turned = {}
    if config.exif is None and "class_names" in metadata and "exif" not in metadata:
        turned = {"exif": False}  # runs of earlier versions left images as they are
    if config.image_size is not None or "img_size" not in metadata:
        return turned
    try:
        parse_image_size(metadata["img_size"])
    except InputError as error:
        raise unusable(path, "img_size", metadata["img_size"], "HEIGHTxWIDTH") from error
    size = {"image_size": metadata["img_size"]}
    is_open = config.crop_pct is None and "crop_pct" in prepared
    return turned | size | ({"crop_pct": prepared["crop_pct"]} if is_open else {})
