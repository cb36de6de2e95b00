"""Names of the tensors in published files, and those that the models of vigpipe have."""

import re
from collections.abc import Mapping

from torch import Tensor


def to_own_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the parameters of published files to those of the models here.

    Those of ViG are the authors' own; names that are in no published layout stay as they are.
    """
    if any(name.startswith("stem.stem.") for name in state):
        return _from_mobile(state)
    return _from_port(state)


# How the names in a block of the models without kNN begin in published files, and here. MobileViG
# has other names for its local blocks, and MobileViGv2 for their layer scale.
_IN_BLOCK = {
    "mlp.fc1.": "fc1.0.",
    "mlp.norm1.": "fc1.1.",
    "mlp.mid.": "mid.0.",
    "mlp.mid_norm.": "mid.1.",
    "mlp.fc2.": "fc2.0.",
    "mlp.norm2.": "fc2.1.",
    "dws.pw1.": "fc1.0.",
    "dws.norm1.": "fc1.1.",
    "dws.dw.": "mid.0.",
    "dws.norm2.": "mid.1.",
    "dws.pw2.": "fc2.0.",
    "dws.norm3.": "fc2.1.",
    "mixer.cpe.pe.": "0.position.conv.",
    "mixer.": "0.",
    "ffn.0.": "1.fc1.0.",
    "ffn.1.": "1.fc1.1.",
    "ffn.3.": "1.fc2.0.",
    "ffn.4.": "1.fc2.1.",
}
_AROUND = {
    "stem.stem.": "stem.convs.",
    "high_res_branch.conv.": "high_res_branch.convs.",
    "prediction.1.": "prediction.0.",
    "prediction.2.": "prediction.1.",
    "head.": "prediction.4.",
    "dist_head.": "prediction.5.",
}
_ATTENTION = tuple(f"mixer.graph_conv.{name}_conv." for name in "qkv")


def _from_mobile(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the parameters of MobileViG, MobileViGv2, GreedyViG, AdaptViG and LogViG.

    Layouts: `models/` of the repositories that `model.mobile` names. Blocks are numbered within
    `local_backbone` and `backbone`, or within each resolution of `backbone`, and here through.
    """
    has_two_lists = any(name.startswith("local_backbone.") for name in state)
    depth = 1 if has_two_lists else 2  # of the numbers after `backbone.`
    number = r"\.(?:0|[1-9]\d{0,3})"
    block = re.compile(rf"(local_backbone|backbone)((?:{number}){{{depth}}})\.(.*)")
    found = {name: block.fullmatch(name) for name in state}
    places = {_place(match) for match in found.values() if match}
    numbers = {place: i for i, place in enumerate(sorted(places))}
    has_graph = {
        _place(match) for match in found.values() if match and match[3].startswith("mixer.")
    }
    renamed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        match = found[name]
        own = _with_prefix(name, _AROUND)
        if match is not None:
            place, inner = _place(match), match[3]
            if inner.startswith(_ATTENTION) and tensor.shape[2:] == (1, 1):
                tensor = tensor.flatten(1)  # its convolutions are linear layers here
            if scale := re.fullmatch(r"layer_scale_([12])", inner):
                half = f"{int(scale[1]) - 1}." if place in has_graph else ""
                inner, tensor = f"{half}fc2.scale", tensor.flatten()
            own = f"backbone.{numbers[place]}.{_with_prefix(inner, _IN_BLOCK)}"
        # Where two tensors would have a name here, one keeps its own, which no model has.
        renamed[name if own in renamed else own] = tensor
    return renamed


def _place(match: re.Match[str]) -> tuple[int, ...]:
    """Return where a block is: its list, 0 for `local_backbone`, and its numbers there."""
    return (int(match[1] == "backbone"), *map(int, match[2].split(".")[1:]))


def _with_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """Replace the first of some prefixes that a name has."""
    for published, own in prefixes.items():
        if name.startswith(published):
            return own + name.removeprefix(published)
    return name


def _from_port(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the parameters of mmpretrain's port of ViG to those of the authors' code.

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
