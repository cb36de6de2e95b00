"""Find out which variant the tensors of a weights file belong to."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vigpipe.errors import InputError
from vigpipe.model.differences import Differences, with_relative_positions
from vigpipe.model.image import ImageModel
from vigpipe.model.position import Grid
from vigpipe.model.shapes import MOBILE_SHAPES, SHAPES, VIG_SHAPES, make_variant

_STEM, _CLASSIFIER, _POSITIONS = "stem.convs.0.weight", "prediction.4.weight", "pos_embed"
SECOND_HEAD = "prediction.5."
LEARNED = "merge.adjust.weight"  # what published files of LogViG lack


@dataclass(frozen=True)
class Variant:
    """A variant, as far as the shapes of its tensors show."""

    name: str
    num_classes: int
    in_chans: int
    img_size: Grid
    num_heads: int = 1
    compat: Literal["reference"] | None = None

    def build(self) -> ImageModel:
        options: dict[str, Any] = {"compat": self.compat}
        if self.name in MOBILE_SHAPES:
            options["dist_head"] = self.num_heads == 2
        sizes = self.num_classes, self.in_chans, self.img_size
        with warnings.catch_warnings(action="ignore"):  # running it warns of few nodes again
            return make_variant(self.name, *sizes, **options)

    def differences(self, state: Mapping[str, Tensor]) -> Differences:
        with torch.device("meta"):
            model = self.build()
        expected = model.state_dict()
        return Differences.between(with_relative_positions(state, expected, model), expected)

    @property
    def description(self) -> str:
        return f"{self.name} for {self.num_classes} classes"


def identify(state: Mapping[str, Tensor], source: str = "these weights") -> Variant:
    """Find out which variant a state dict belongs to, judging by its names and shapes.

    Classes, channels and, of ViG, the image size are read off the tensors, whose names are those of
    the models here. The strides of the stem, and whether max or edge aggregates, are taken to be
    the variant's defaults. If several variants fit, the one whose default image size gives this
    grid comes first.

    Raises:
        InputError: no variant fits; the message names the closest.
    """
    candidates = _candidates(state)
    if not candidates:
        absent = [name for name in _required(state) if not _has_four(state, name)]
        raise InputError(
            f"{source}: not the whole of a model: it has no {' and no '.join(absent)} of four "
            "dimensions; give a file with stem, backbone and classifier"
        )
    closest, differences = _closest(candidates, state)
    if differences.count == 0:
        return closest
    raise InputError(
        f"{source}: of no variant; closest is {closest.description}, "
        f"from which it differs: {differences}; build the model with the options it was "
        "trained with and load it there"
    )


def has_second_head(state: Mapping[str, Tensor]) -> bool:
    """Tell whether a state dict has the weights of a second head."""
    return f"{SECOND_HEAD}weight" in state


def recognised(state: Mapping[str, Tensor]) -> Variant | None:
    """Return the variant that a state dict belongs to, if its names and shapes are those of one."""
    candidates = _candidates(state)
    if not candidates:
        return None
    try:
        closest, differences = _closest(candidates, state)
    except InputError:  # the sizes are those of no model
        return None
    return closest if differences.count == 0 else None


def _closest(
    candidates: Sequence[Variant], state: Mapping[str, Tensor]
) -> tuple[Variant, Differences]:
    """Return the first variant that fits a state dict, or else the one that differs least."""
    found: list[tuple[Variant, Differences]] = []
    for variant in candidates:
        found.append((variant, variant.differences(state)))
        if found[-1][1].count == 0:
            return found[-1]
    return min(found, key=lambda one: one[1].count)


def _candidates(state: Mapping[str, Tensor]) -> list[Variant]:
    """List the variants that a state dict may be of, the most likely ones first."""
    if not all(_has_four(state, name) for name in _required(state)):
        return []
    stem, classifier, num_heads = state[_STEM], state[_CLASSIFIER], 1 + has_second_head(state)
    grid = state[_POSITIONS].shape[2:] if _is_vig(state) else None
    found: list[Variant] = []
    for name, shape in (MOBILE_SHAPES if grid is None else VIG_SHAPES).items():
        size = shape.img_size
        if grid is not None:
            side = VIG_SHAPES[name].stem_stride
            size = grid[0] * side, grid[1] * side
        # What was published of LogViG lacks a layer that only its own random one can stand for.
        has_branch = name in MOBILE_SHAPES and MOBILE_SHAPES[name].traits.has_branch
        is_random = has_branch and LEARNED not in state
        compat = "reference" if is_random else None
        found.append(Variant(name, len(classifier), stem.shape[1], size, num_heads, compat))

    def mismatches(variant: Variant) -> tuple[bool, bool]:
        shape = SHAPES[variant.name]
        width = shape.stem_widths[0]
        return width != len(stem), shape.img_size != variant.img_size

    return sorted(found, key=mismatches)


def _is_vig(state: Mapping[str, Tensor]) -> bool:
    return _POSITIONS in state or any(".graph_conv.gconv." in name for name in state)


def _required(state: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Name the tensors that tell the sizes of a model; only a ViG has a table of positions."""
    return (_STEM, _CLASSIFIER, *([_POSITIONS] if _is_vig(state) else []))


def _has_four(state: Mapping[str, Tensor], name: str) -> bool:
    """Tell whether there is a tensor of four dimensions, none of them empty."""
    return name in state and state[name].dim() == 4 and 0 not in state[name].shape
