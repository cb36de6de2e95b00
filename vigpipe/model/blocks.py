"""Derive the blocks of a variant: channels, grids, and how each block gets its graph."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2, prod
from typing import cast

import torch

from vigpipe.config.choices import AGGREGATORS, POLICIES, Policy, parse_names
from vigpipe.errors import InputError
from vigpipe.model.graph import reduce_k
from vigpipe.model.patterns import grid_neighbours, pattern_neighbours, window_nodes
from vigpipe.model.position import Grid, pooled_grid
from vigpipe.model.slicing import divided_width

LARGEST_SIDE = 1 << 14  # pixels
MOST_CHANNELS = 1 << 20  # also classes


def check_sizes(num_classes: int, in_chans: int, img_size: Grid, **rates: float) -> None:
    """Raise InputError for sizes of a model of images, or rates of its masks, that none has."""
    least = {"num_classes": (num_classes, 0), "in_chans": (in_chans, 1)}
    for name, (value, smallest) in least.items():
        if not smallest <= value <= MOST_CHANNELS:
            raise InputError(f"{name}={value}: must be from {smallest} to {MOST_CHANNELS}")
    check_image_size(img_size)
    for name, value in rates.items():
        if not 0 <= value < 1:
            raise InputError(f"{name}={value}: must be at least 0 and below 1")


def check_image_size(img_size: Grid) -> None:
    """Raise InputError for a size in pixels that no image of a model has."""
    if not all(1 <= side <= LARGEST_SIDE for side in img_size):
        raise InputError(f"img_size={img_size}: each side must be from 1 to {LARGEST_SIDE} pixels")


class FewNodesWarning(UserWarning):
    """Warns that images have too few nodes for k * dilation, so that these are lowered."""


@dataclass(frozen=True)
class VigShape:
    """The sizes that distinguish the variants of ViG; an isotropic one has a single stage."""

    blocks: tuple[int, ...]  # of each stage
    channels: tuple[int, ...]  # C of each stage
    k: tuple[int, int] = (9, 18)  # neighbours in the first and the last block; linear in between
    max_dilation: int = 10  # the dilation grows by one every four blocks up to this
    reductions: tuple[int, ...] = (1,)  # r of each stage: candidates are averages of r x r nodes
    relative: bool = False  # add a table of distances in the image to those in feature space
    stem: tuple[int, ...] = (8, 4, 2, 1, 1)  # the widths of the stem are the first C over these
    stem_stride: int = 16  # side, in pixels, of the patch that becomes a node
    img_size: Grid = (224, 224)  # of the images that the variant is designed for, in pixels

    @property
    def stem_widths(self) -> tuple[int, ...]:
        return tuple(self.channels[0] // divisor for divisor in self.stem)

    @property
    def stem_strides(self) -> tuple[int, ...]:
        return stem_strides(len(self.stem), self.stem_stride)

    @property
    def halvings(self) -> int:
        return len(self.blocks) - 1

    def divided(self, num: int) -> "VigShape":
        """Return the sizes of a sub-network that has 1/num of the channels between blocks."""
        for divisor in self.stem:
            divided_width(self.channels[0] // divisor, num, "a convolution of the stem")
        channels = (
            divided_width(c, num, f"pyramid stage {i}") for i, c in enumerate(self.channels)
        )
        return replace(self, channels=tuple(channels))


@dataclass(frozen=True)
class GraphRule:
    """How a block gets its graph."""

    policy: Policy
    k: int  # neighbours per node
    dilation: int = 1  # keep every dilation-th of the k * dilation nearest
    reduction: int = 1  # r; candidates are averages of r x r nodes
    shift: bool = False  # with policy `window`, shift the windows by half a window
    makes_next: bool = False  # with policy `lookahead`, also make a graph for the next block
    # The probability that, in training, a sample's k neighbours are drawn at random from the
    # k * dilation nearest, and the stream number of that draw. The published code has this option,
    # switched off.
    stochastic: float = 0.0
    stream: int = 0


@dataclass(frozen=True)
class BlockSpec:
    """One module of `backbone`: a block, or a downsampling between two stages of a pyramid."""

    rule: GraphRule | None  # None for a downsampling
    aggregator: str  # empty for a downsampling
    before: tuple[Grid, int]  # grid and channels of the input
    channels: int  # of the output
    grid: Grid  # of the output
    stage: int  # of the pyramid
    number: int  # index of the block, not counting downsamplings
    num_given: int = 0  # neighbours per node in the graph of an earlier block; 0 if none is needed
    num_neighbours: int = 0  # neighbours per node in the graph that the block passes on

    @property
    def num_candidates(self) -> int:
        assert self.rule is not None
        return prod(pooled_grid(self.grid, self.rule.reduction))


def stem_strides(num_convs: int, stride: int) -> tuple[int, ...]:
    """Choose the strides of the stem's convolutions: twos as late as possible, but not the last."""
    most = 2 ** (num_convs - 1)
    if stride < 1 or stride > most or stride & (stride - 1):
        raise InputError(
            f"--stem-stride {stride}: this model's stem has {num_convs} convolutions; choose a "
            f"power of two up to {most}"
        )
    num_twos = int(log2(stride))
    return (1,) * (num_convs - 1 - num_twos) + (2,) * num_twos + (1,)


def reduced(size: Grid, strides: Sequence[int]) -> Grid:
    """Return height and width after padded 3x3 convolutions with the given strides."""
    for stride in strides:
        size = pooled_grid(size, stride)
    return size


def make_block_specs(
    shape: VigShape, graph: str, aggregator: str, stochastic: float, grid: Grid
) -> list[BlockSpec]:
    """Specify the blocks and downsamplings of `backbone`, in order, for the grid after the stem.

    The comma-separated policies and aggregators are repeated; an unknown name is an InputError.
    """
    policies = parse_names(graph, POLICIES, "--graph")
    aggregators = parse_names(aggregator, AGGREGATORS, "--aggregator")
    num_blocks = sum(shape.blocks)
    # Computed in float32 and truncated, as the published code does.
    ks = [int(k) for k in torch.linspace(*shape.k, num_blocks, device="cpu").tolist()]
    specs: list[BlockSpec] = []
    before, number = (grid, shape.channels[0]), 0
    for stage, (num_in_stage, channels) in enumerate(
        zip(shape.blocks, shape.channels, strict=True)
    ):
        if stage > 0:
            grid = reduced(grid, (2,))
            specs.append(BlockSpec(None, "", before, channels, grid, stage, number))
        before = (grid, channels)
        # How the previous block of this stage gets its graph, and how many neighbours the nodes
        # have in the graph that it passes on.
        previous: GraphRule | None = None
        num_passed = 0
        for i in range(num_in_stage):
            policy = cast(Policy, policies[number % len(policies)])
            following = policies[(number + 1) % len(policies)]
            wants_next = i + 1 < num_in_stage and following in ("reuse", "lookahead")
            reduction = shape.reductions[stage]
            if policy in ("reuse", "lookahead"):
                if previous is None:
                    policy: Policy = "knn"  # no earlier block of this stage has a graph
                else:
                    reduction = previous.reduction
                    if policy == "reuse" and previous.policy in ("grid", "pattern"):
                        policy = previous.policy  # cheaper to make again than to pass on
            if policy in ("grid", "pattern", "window"):
                reduction = 1
            convolution = aggregators[number % len(aggregators)]
            rule = GraphRule(
                policy,
                ks[number],
                min(number // 4 + 1, shape.max_dilation),
                reduction,
                shift=policy == "window" and number % 2 == 1,
                makes_next=policy == "lookahead" and wants_next,
                stochastic=stochastic,
                stream=2 * num_blocks + 1 + number,
            )
            takes_given = policy in ("reuse", "lookahead")
            num_given = num_passed if takes_given else 0
            if rule.makes_next or not takes_given:
                num_passed = _num_neighbours(rule, grid)
            specs.append(
                BlockSpec(
                    rule, convolution, before, channels, grid, stage, number, num_given, num_passed
                )
            )
            previous, number = rule, number + 1
    return specs


def warn_of_few_nodes(specs: Sequence[BlockSpec], img_size: Grid) -> None:
    """Warn if images of so many pixels are too small for some block's k or dilation."""
    blocks = [(spec, spec.rule) for spec in specs if spec.rule is not None]
    lowered = [
        (spec, rule)
        for spec, rule in blocks
        if rule.policy in ("knn", "lookahead")
        and reduce_k(rule.k, rule.dilation, spec.num_candidates) != (rule.k, rule.dilation)
    ]
    if lowered:
        spec, rule = lowered[-1]
        k, dilation = reduce_k(rule.k, rule.dilation, spec.num_candidates)
        warnings.warn(
            f"images of {img_size[0]}x{img_size[1]} give too few nodes for k * dilation in "
            f"{len(lowered)} of {len(blocks)} blocks: the last chooses from "
            f"{spec.num_candidates} nodes and takes k = {k}, dilation = {dilation} instead of "
            f"{rule.k}, {rule.dilation}",
            FewNodesWarning,
            stacklevel=3,
        )


def _num_neighbours(rule: GraphRule, grid: Grid) -> int:
    if rule.policy == "grid":
        return grid_neighbours(*grid)
    if rule.policy == "pattern":
        return pattern_neighbours(*grid)
    if rule.policy == "window":
        return min(rule.k, window_nodes(*grid))
    return min(rule.k, prod(pooled_grid(grid, rule.reduction)))
