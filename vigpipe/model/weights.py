"""Read weights files: published ones, those of mmpretrain's port, and those of vigpipe's runs."""

import argparse
import io
import mmap
import re
import stat
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from vigpipe.errors import InputError
from vigpipe.files.pickled import NUM_PICKLES, OF_NUMPY, check_nesting, imported_by

# Keys under which training scripts store the state dict; the first that is present is taken. The
# running average comes last, because it is only wanted if the user asks for it.
AVERAGED = ("state_dict_ema", "model_ema")
WRAPPERS = ("state_dict", "model", *AVERAGED)
PREFIX = "module."  # added by DistributedDataParallel
# Parts of names that torch.compile, FSDP and checkpointing add, anywhere.
_ADDED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Where other frameworks keep the model; removed if all names have one. Names of this package's
# models and of mmpretrain's port can all begin with `backbone.` too.
_HOLDERS = ("model.", "encoder.", "backbone.", "net.", "network.")
_BACKBONES = re.compile(r"backbone\.(\d|stem\.\d|blocks\.\d+\.\d|stages\.)")
PLAIN = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def read_weights(path: Path, *, ema: bool = False) -> dict[str, Tensor]:
    """Read a state dict from a safetensors or a torch file; nothing in the file is executed.

    A torch file (zip or legacy format, .pth, .pt, .pth.tar) is the state dict itself, or contains
    it under `state_dict` or `model`, or else under `state_dict_ema` or `model_ema`. If a file has
    both kinds, the running average is read only on request. What DistributedDataParallel,
    torch.compile and FSDP add to names is removed, and so is a prefix of all names, such as
    `model.`, under which other frameworks keep a model. Numbers of NumPy beside the state dict are
    read past.

    Args:
        path: the file; its format is recognised by its content, not by its name.
        ema: read the running average of the weights instead of the weights.

    Returns:
        Tensors on the CPU, by name. Those of a zip file are mapped into memory, so the file must
        not change while they are in use.

    Raises:
        InputError: the file does not exist, is not a weights file, is damaged, or would execute
            code when loaded.
    """
    content = _read_file(path)
    if not isinstance(content, Mapping):
        raise InputError(
            f"{path}: holds a {type(content).__name__} where a state dict (tensors by name) is "
            "expected; save model.state_dict()"
        )
    wanted = AVERAGED if ema else WRAPPERS
    found = [name for name in wanted if isinstance(content.get(name), Mapping)]
    if ema and not found:
        raise InputError(
            f"{path}: has no running average of the weights, neither {' nor '.join(AVERAGED)}; "
            "take the weights themselves"
        )
    state = content[found[0]] if found else content
    return _checked(path, state)


def _read_file(path: Path) -> Any:
    try:
        mode, size = path.stat().st_mode, path.stat().st_size
        head = b""
        if stat.S_ISREG(mode):  # opening a pipe would wait for its writer
            with path.open("rb") as file:
                head = file.read(9)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the file") from None
    if not stat.S_ISREG(mode):
        kind = "folder" if stat.S_ISDIR(mode) else "pipe or device"
        raise InputError(f"{path}: is a {kind} where a file of weights is expected; name the file")
    is_zip = head.startswith(b"PK\x03\x04")
    # Eight bytes with the length of a JSON object, then the object.
    if head[8:] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        read, kind = load_file, "safetensors"
    elif is_zip or head.startswith(b"\x80"):
        read, kind = (read_torch_zip if is_zip else _read_torch), "torch"
    elif needed := imported_by(path):
        raise InputError(_would_execute(path, needed))
    else:
        raise InputError(
            f"{path}: its {size} bytes are neither a safetensors nor a torch file of weights; "
            "it may be damaged or not wholly downloaded"
        )
    try:
        # TorchScript archives warn, and are then refused.
        with warnings.catch_warnings(action="ignore"):
            return read(path)
    except Exception as error:  # damaged bytes make the readers raise almost anything
        raise InputError(_why_not(path, kind, error)) from error


def read_torch_zip(path: Path, known: Sequence[Any] = ()) -> Any:
    """Read a file of torch.save, with nothing executed; any damage is an exception of any type.

    Besides tensors and plain values it may hold what is `known`, as torch's `safe_globals` are.
    """
    with zipfile.ZipFile(path) as archive:
        if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
            # torch would map the compressed bytes as numbers, and unpack a pickle of any size.
            raise ValueError("it is compressed, which torch.save never does; pack it with zip -0")
    # What torch finds in the file, where other readers of zip files may find something else.
    content = torch._C.PyTorchFileReader(str(path))
    names = [name.lower() for name in content.get_all_records()]
    if len(set(names)) < len(names):
        raise ValueError("two of its members have the same name")
    # Before torch 2.12, nothing but unpacking it tells how large it is.
    size_of = getattr(content, "get_record_size", lambda name: len(content.get_record(name)))
    if size_of("data.pkl") > path.stat().st_size:
        raise ValueError("its pickle is compressed, which torch.save never does")
    check_nesting(io.BytesIO(content.get_record("data.pkl")))
    return _read_torch(path, maps_file=True, known=known)


class NumpyValue:
    """Stands for a number, an array or a type of NumPy in a file, none of which is made."""

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def _read_torch(path: Path, maps_file: bool | None = None, known: Sequence[Any] = ()) -> Any:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content.find(b"bytearray\n") >= 0:  # its name in a pickle: it allocates any size
            raise ValueError("it holds a bytearray, which no state dict does")
        if not maps_file:
            check_nesting(file, NUM_PICKLES)
    # timm's training script puts its parsed arguments into every checkpoint.
    common: list[Any] = [argparse.Namespace, *((NumpyValue, name) for name in OF_NUMPY)]
    with torch.serialization.safe_globals([*common, *known]):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=maps_file)


def _why_not(path: Path, kind: str, error: Exception) -> str:
    """Word the error message for an exception that a file reader raised."""
    message = "".join(c if c.isprintable() or c == "\n" else "?" for c in str(error))
    named = re.search(r"GLOBAL (\S+)", message)
    needed = named[1] if named else None
    if isinstance(error, UnpicklingError) and not named:
        needed = imported_by(path)  # torch does not know every instruction of newer pickles
    if needed:
        return _would_execute(path, needed)
    unpickler = re.search(r"WeightsUnpickler error: (.*)", message)
    reason = (unpickler[1] if unpickler else message).strip().split("\n")[0][:200].rstrip(" .:")
    return (
        f"{path}: cannot be read as a {kind} file of weights "
        f"({type(error).__name__}{': ' if reason else ''}{reason}); it may be damaged or not "
        "wholly downloaded"
    )


def _would_execute(path: Path, needed: str) -> str:
    return (
        f"{path}: is not plain data: it needs {needed}, and loading that would execute code from "
        "the file; where the file is from, save the model's state_dict() alone"
    )


def _checked(path: Path, state: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Return the tensors by name without prefixes; refuse any other content."""
    size = path.stat().st_size
    weights: dict[str, Tensor] = {}
    names = _without_prefixes([key for key in state if isinstance(key, str)])
    for key, value in state.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise InputError(
                f"{path}: {key!r} is a {type(value).__name__} where a state dict has tensors by "
                f"name, and none of {', '.join(WRAPPERS)} holds one; save model.state_dict()"
            )
        name = names[key]
        if not name.isprintable():
            raise InputError(f"{path}: {name[:80]!r} is not a name for a tensor; rename it")
        # With a damaged size, torch enlarges the storage beyond the file; with strides of 0, a
        # tensor is larger than its storage.
        is_plain = value.layout == torch.strided and value.device.type == "cpu"
        if (
            not is_plain
            or value.dtype not in PLAIN
            or max(value.untyped_storage().nbytes(), value.nbytes) > size
        ):
            raise InputError(
                f"{path}: {key} is not a plain tensor ({value.layout}, {value.device}, "
                f"{value.dtype}, shape {shape_text(value)}) of this file; save dense tensors"
            )
        if name in weights:
            raise InputError(
                f"{path}: {name} is there twice, with and without what {PREFIX} or "
                f"{' or '.join(_ADDED)} adds to a name; keep one of the two"
            )
        weights[name] = value.detach()
    if not weights:
        raise InputError(f"{path}: holds no tensors; save model.state_dict()")
    return weights


def _without_prefixes(keys: Sequence[str]) -> dict[str, str]:
    """Return each key with the name of the tensor in the model."""
    names = {key: ".".join(part for part in key.split(".") if part not in _ADDED) for key in keys}
    while True:
        for key, name in names.items():
            while name.startswith(PREFIX):
                name = name.removeprefix(PREFIX)
            names[key] = name
        holder = next((h for h in _HOLDERS if all(n.startswith(h) for n in names.values())), None)
        is_own = any(map(_BACKBONES.match, names.values()))
        if not names or holder is None or (holder == "backbone." and is_own):
            return names
        names = {key: name.removeprefix(holder) for key, name in names.items()}


def shape_text(tensor: Tensor) -> str:
    """Write a tensor's shape, and its type if that is no floating-point one."""
    kind = "" if tensor.is_floating_point() else f" {str(tensor.dtype).removeprefix('torch.')}"
    return "x".join(map(str, tensor.shape)) + kind if tensor.dim() else f"a number{kind}"
