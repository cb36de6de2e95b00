"""Trained weights under the unsplit model's parameter names, whatever the layout was.

Load them with one line:

    model.load_state_dict(safetensors.torch.load_file("runs/<time>/model.safetensors"))

The file's metadata say which model that is and what its images look like (`read_metadata`).
"""

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vigpipe.errors import InputError
from vigpipe.files.atomic import replacing
from vigpipe.files.untrusted import opened

if TYPE_CHECKING:
    from vigpipe.run.rank import RankState


def gather_named(
    mine: dict[str, Tensor], stage_group: dist.ProcessGroup | None, to_stage: int
) -> dict[str, Tensor] | None:
    """Tensors of all parts of the model, on the CPU of one rank of a pipeline.

    Args:
        mine: this rank's tensors, by the unsplit model's names.
        stage_group: the ranks of the pipeline; None where there is one stage.
        to_stage: position in the pipeline of the rank that gets them.

    Returns:
        A copy of every tensor on that rank; None on the others.
    """
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in mine.items()}
    if stage_group is None:
        return copies
    receives = stage_group.rank() == to_stage
    pieces: list[dict[str, Tensor]] | None = [{}] * stage_group.size() if receives else None
    dist.gather_object(copies, pieces, group=stage_group, group_dst=to_stage)
    if pieces is None:
        return None
    return {name: tensor for piece in pieces for name, tensor in piece.items()}


def save_run_weights(rank_state: "RankState", path: Path) -> None:
    """Write the weights of all stages, with what is needed to use them; all ranks call this.

    Args:
        rank_state: this rank's state.
        path: the file; the rank that writes the run's files writes it.

    Raises:
        InputError: the file cannot be written.
    """
    to_stage = rank_state.run.layout.pipeline_size - 1
    state = gather_named(rank_state.state(), rank_state.stage_group, to_stage)
    if state is not None and rank_state.is_writer:
        save_weights(path, state, rank_state.run.weights_metadata())


def save_weights(
    path: Path, state: dict[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a state dict as safetensors.

    Args:
        path: the file.
        state: by the unsplit model's names.
        metadata: what `read_metadata` gives back.

    Raises:
        InputError: the file cannot be written.
    """
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    try:
        with replacing(path) as partial:
            write_tensors(partial, tensors, {"format": "pt", **(metadata or {})})
            _sort_metadata(partial)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror or error}); make room or choose another "
            "folder, and go on with --resume"
        ) from error


def write_tensors(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write safetensors with the permissions of the user's umask; the library's own are 0600.

    Raises:
        OSError: the file cannot be written.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error)) from error
    path.chmod(mode)


def _sort_metadata(path: Path) -> None:
    """Put a file's metadata in order: safetensors shuffles them, and equal runs write equal files.

    The format: 8 bytes, the length of a JSON header; the header, which may end in spaces; the data.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= length:
            file.seek(8)
            file.write(text.ljust(length))


def read_metadata(path: Path) -> dict[str, str]:
    """What a file of weights says about its model.

    A file that a run wrote has model, num_classes, in_chans, img_size ("HxW"), mean and std (of the
    pixels in 0 ... 1, the same for every channel), crop_pct, class_names (a JSON list), norm, and
    where they were given graph, aggregator, stem_stride, compat.

    Raises:
        InputError: the file cannot be read, or is no safetensors file.
    """
    opened(path).close()  # safetensors would wait at a pipe
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except SafetensorError as error:
        raise InputError(
            f"{path}: is not a safetensors file ({error}); give the model.safetensors of a run"
        ) from error
