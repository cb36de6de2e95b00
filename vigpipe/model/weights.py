"""Load weights files: published ones, those of mmpretrain's port, and those of vigpipe's runs.

A file that does not fit the model exactly is refused; `match_state` lists the few exceptions.
"""

import argparse
import io
import mmap
import re
import stat
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vigpipe.errors import InputError
from vigpipe.files.pickled import NUM_PICKLES, OF_NUMPY, check_nesting, imported_by
from vigpipe.model.blocks import reduced
from vigpipe.model.grapher import Grapher
from vigpipe.model.position import Grid, resized_embedding
from vigpipe.model.staged import StagedModel
from vigpipe.model.vig import VisionGnn

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
MOST_NAMED = 10  # keys of each kind that an error lists


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
                f"{value.dtype}, shape {_text(value)}) of this file; save dense tensors"
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


def to_reference_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the parameters of mmpretrain's port to those of the authors' code.

    Layouts: `mmpretrain/models/backbones/vig.py` and `heads/vig_head.py` of open-mmlab/mmpretrain;
    `vig_pytorch` of huawei-noah/Efficient-AI-Backbones. Names of neither layout stay as they are.
    The readout's matrices, which may be 2-D, become 1x1 convolutions.
    """
    ported = ("backbone.stem.", "backbone.blocks.", "backbone.stages.", "head.")
    if not any(name.startswith(ported) for name in state):
        return dict(state)
    # Modules of every stage, downsamplings included; the authors number them consecutively.
    sizes: dict[int, int] = {}
    for name in state:
        found = re.match(r"backbone\.stages\.(\d+)\.(\d+)\.", name)
        if found:
            stage, spec = int(found[1]), int(found[2])
            sizes[stage] = max(sizes.get(stage, 0), spec + 1)

    def numbered(found: re.Match[str]) -> str:
        stage, spec = int(found[1]), int(found[2])
        number = sum(size for other, size in sizes.items() if other < stage) + spec
        return f"backbone.{number}." + ("conv." if stage > 0 and spec == 0 else "")

    renamed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        name = re.sub(r"^backbone\.pos_embed$", "pos_embed", name)
        name = re.sub(r"^backbone\.stem\.", "stem.convs.", name)
        name = re.sub(r"^backbone\.blocks\.", "backbone.", name)
        name = re.sub(r"^backbone\.stages\.(\d+)\.(\d+)\.", numbered, name)
        name = re.sub(r"^head\.fc1\.", "prediction.0.", name)
        name = re.sub(r"^head\.bn\.", "prediction.1.", name)
        name = re.sub(r"^head\.fc2\.", "prediction.4.", name)
        if re.match(r"prediction\.[04]\.weight$", name) and tensor.dim() == 2:
            tensor = tensor[..., None, None]
        renamed[name] = tensor
    return renamed


def match_state(
    state: Mapping[str, Tensor],
    model: nn.Module,
    source: str,
    *,
    new_classifier: bool = False,
    is_finite: bool = False,
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
    would be. With `is_finite`, no tensor is read to look for them.
    """
    model_state = model.state_dict()
    matched = with_relative_positions(state, model_state, model)
    if new_classifier:
        assert isinstance(model, StagedModel)
        last, _ = model.classifier()
        matched = {name: tensor for name, tensor in matched.items() if not name.startswith(last)}
        matched |= {name: model_state[name] for name in model_state if name.startswith(last)}
    embedding, target = matched.get("pos_embed"), model_state.get("pos_embed")
    if embedding is not None and target is not None and _is_embedding(embedding, target):
        size = target.shape[2], target.shape[3]
        matched["pos_embed"] = resized_embedding(embedding.to(target.dtype), size)
    differences = Differences.between(matched, model_state)
    if differences.count:
        advice = "choose the model and the options that the weights were trained with"
        there, wanted = (_num_classes(s, model) for s in (matched, model_state))
        if there is not None and there != wanted:
            advice = (
                f"the file has {there} classes and the model {wanted}: leave the file's last layer "
                "out with vigpipe train --new-classifier, or create the model with "
                f"num_classes={there}"
            )
        raise InputError(f"{source}: does not fit the model: {differences}; {advice}")
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


def _num_classes(state: Mapping[str, Tensor], model: nn.Module) -> int | None:
    """Return of how many classes the last layer in a state dict is; None if that cannot be told."""
    last, dims = model.classifier() if isinstance(model, StagedModel) else ("", {})
    for name, dim in dims.items():
        if last + name in state and state[last + name].dim() > dim:
            return state[last + name].shape[dim]
    return None


def with_classes(
    state: Mapping[str, Tensor], model: StagedModel, order: list[int]
) -> dict[str, Tensor]:
    """Return a state dict whose class i is that which was `order[i]` of a model's state dict."""
    last, dims = model.classifier()
    index = torch.tensor(order)
    reordered = {
        last + name: state[last + name].index_select(dim, index) for name, dim in dims.items()
    }
    return {**state, **reordered}


def _is_embedding(tensor: Tensor, target: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_floating_point() and tensor.shape[:2] == target.shape[:2]


def with_relative_positions(
    state: Mapping[str, Tensor], model_state: Mapping[str, Tensor], model: nn.Module
) -> dict[str, Tensor]:
    """Give a state dict the model's tables of relative positions; see `match_state`."""
    is_relative = isinstance(model, VisionGnn) and model.shape.relative
    tables = {name for name in {*state, *model_state} if name.endswith(".relative_pos")}
    matched = {name: tensor for name, tensor in state.items() if name not in tables}
    for name in sorted(tables):
        if name not in model_state:
            if not is_relative:
                matched[name] = state[name]  # `Differences` calls it unexpected
        elif name in state and not _is_table(state[name]):
            matched[name] = state[name]  # `Differences` says that it has another shape
        else:
            assert isinstance(model, VisionGnn)
            block = int(name.split(".")[1])
            grapher = model.get_submodule(name.removesuffix(".relative_pos"))
            assert isinstance(grapher, Grapher)
            grid = reduced(_grid_of(state, model), (2,) * model.specs[block].stage)
            matched[name] = grapher.table_from(state.get(name), grid)
    return matched


def _is_table(tensor: Tensor) -> bool:
    """Return whether this can be a `relative_pos`, (1, N, M)."""
    shape = tensor.shape
    return len(shape) == 3 and shape[0] == 1 and tensor.numel() > 0 and tensor.is_floating_point()


def _grid_of(state: Mapping[str, Tensor], model: VisionGnn) -> Grid:
    """Return the grid of nodes that a state dict is for, before the first downsampling."""
    embedding = state.get("pos_embed")
    if embedding is None or not _is_embedding(embedding, model.pos_embed):
        return model.grid  # any grid will do: `match_state` refuses the state dict
    return embedding.shape[2], embedding.shape[3]


@dataclass(frozen=True)
class Differences:
    """The tensors that keep a model from loading a state dict."""

    missing: Sequence[str]
    unexpected: Sequence[str]  # the model lacks them
    misshapen: Sequence[str]  # with both shapes

    @classmethod
    def between(
        cls, state: Mapping[str, Tensor], model_state: Mapping[str, Tensor]
    ) -> "Differences":
        misshapen = [
            f"{name} ({_text(tensor)} in the file, {_text(model_state[name])} in the model)"
            for name, tensor in state.items()
            if name in model_state
            and (
                tensor.shape != model_state[name].shape
                or tensor.is_floating_point() != model_state[name].is_floating_point()
                or tensor.is_complex()
            )
        ]
        return cls(
            [name for name in model_state if name not in state],
            [name for name in state if name not in model_state],
            misshapen,
        )

    @property
    def count(self) -> int:
        return len(self.missing) + len(self.unexpected) + len(self.misshapen)

    def __str__(self) -> str:
        parts: list[str] = []
        kinds = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "of another shape": self.misshapen,
        }
        for kind, names in kinds.items():
            if names:
                more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
                parts.append(f"{len(names)} {kind}: {', '.join(names[:MOST_NAMED])}{more}")
        return "; ".join(parts)


def _text(tensor: Tensor) -> str:
    kind = "" if tensor.is_floating_point() else f" {str(tensor.dtype).removeprefix('torch.')}"
    return "x".join(map(str, tensor.shape)) + kind if tensor.dim() else f"a number{kind}"


def load_weights(
    model: nn.Module, path: Path, *, ema: bool = False, new_classifier: bool = False
) -> None:
    """Load a weights file into a model; every tensor must fit, as `match_state` describes.

    `ema` is that of `read_weights`, `new_classifier` that of `match_state`.

    Raises:
        InputError: the file cannot be read or does not fit.
    """
    state = to_reference_names(read_weights(path, ema=ema))
    model.load_state_dict(match_state(state, model, str(path), new_classifier=new_classifier))
