"""Read what a file of weights says about its model and its images, and refuse what cannot be."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vigpipe.errors import InputError
from vigpipe.files.names import escaped, is_plain
from vigpipe.files.untrusted import opened

# The least and the largest value that each number of the images' preparation can have.
_BOUNDS = {"mean": (-1e6, 1e6), "std": (1e-6, 1e6), "crop_pct": (0.1, 1.0)}


class _OtherFormatError(InputError):
    """The file is not in the format safetensors."""


def read_metadata(path: Path) -> dict[str, str]:
    """Read what a file of weights says about its model: texts by name.

    For a file that a run wrote: model, num_classes, in_chans, img_size ("HxW"), mean and std (of
    pixels in 0 ... 1: a number, or one for each channel, "0.485, 0.456, 0.406"), crop_pct,
    class_names (a JSON list) and norm; and those of the options graph, aggregator, stem_stride,
    dist_head and compat that were given.
    """
    opened(path).close()  # refuses a pipe, which safetensors would wait for
    try:
        with safe_open(path, framework="np") as file:  # imports no torch
            return dict(file.metadata() or {})
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except SafetensorError as error:
        raise _OtherFormatError(
            f"{path}: is not a safetensors file ({error}); give the model.safetensors of a run"
        ) from error


def image_preparation(metadata: Mapping[str, str], where: Path) -> dict[str, Any]:
    """Return mean, std and crop_pct of a file's images, as far as its metadata give them.

    Mean and std are tuples of a single number, or of one for each channel.
    """
    facts: dict[str, Any] = {}
    for name, (least, most) in _BOUNDS.items():
        if name not in metadata:
            continue
        counts, kind = ["1"], "a number"
        if name != "crop_pct":
            counts += ["3", metadata.get("in_chans")]
            kind = "a number, or one for each channel,"
        values = tuple(map(_number, metadata[name].split(",")))
        # NaN fails too.
        if str(len(values)) not in counts or not all(least <= value <= most for value in values):
            raise InputError(
                f"{where}: its metadata give {name} as {escaped(metadata[name], 40)}, but it is "
                f"{kind} from {least:g} to {most:g}; write the file again with vigpipe train"
            )
        facts[name] = values[0] if name == "crop_pct" else values
    return facts


def _number(text: str) -> float:
    """Parse a number in ASCII without underscores; NaN if it is none."""
    try:
        return float(text) if text.isascii() and "_" not in text else float("nan")
    except ValueError:
        return float("nan")


def channels_text(numbers: Sequence[float]) -> str:
    """Write a number for each channel, or a single one if they are equal."""
    return ", ".join(map(str, numbers if len(set(numbers)) > 1 else numbers[:1]))


def per_channel(values: Sequence[float], num_channels: int) -> tuple[float, ...]:
    """Return a number for each channel; their mean for channels that they are not meant for."""
    if len(values) == num_channels:
        return tuple(values)
    return (sum(values) / len(values),) * num_channels


def class_names(metadata: Mapping[str, str], where: Path) -> tuple[str, ...]:
    """Return the names of a file's classes by label; empty if its metadata name none."""
    try:
        names = json.loads(metadata.get("class_names", "[]"))
    except (ValueError, RecursionError):
        names = None
    if isinstance(names, list) and all(isinstance(n, str) and is_plain(n) for n in names):
        return tuple(names)
    raise InputError(
        f"{where}: its metadata give class_names as {escaped(metadata['class_names'], 40)}, but "
        "they are a JSON list of texts, each on one line; write the file again with vigpipe train"
    )


def metadata_if_any(path: Path) -> dict[str, str]:
    """Read what `read_metadata` does; nothing of a torch file, or of a damaged one."""
    try:
        return read_metadata(path)
    except _OtherFormatError:  # whoever reads the tensors words its error better
        return {}


def unusable(where: Path, name: str, text: str, wanted: str) -> InputError:
    """Return the error for what the metadata of a file or checkpoint say."""
    given = escaped(text, 40) or "nothing"
    return InputError(
        f"{where}: its metadata give {name} as {given}, expected {wanted}; write the file again "
        "with vigpipe train"
    )
