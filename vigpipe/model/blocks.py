"""From a variant to its blocks: channels, grids, and how each block comes by its graph."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2, prod
from typing import cast

import torch

from vigpipe.config.choices import AGGREGATORS, POLICIES, Policy
from vigpipe.errors import InputError
from vigpipe.model.graph import reduce_k
from vigpipe.model.patterns import WINDOW, grid_neighbours, pattern_neighbours
from vigpipe.model.position import Grid, pooled_grid


class FewNodesWarning(UserWarning):
    """Images have too few nodes for k * dilation, which is lowered."""


@dataclass(frozen=True)
class VigShape:
    """What tells one variant from another.

    Attributes:
        blocks: Grapher + FFN pairs of each stage of the pyramid; one number if it is none.
        channels: C of each stage.
        k: neighbours in the first and in the last block, rising linearly between them.
        most_dilation: the dilation grows by one every four blocks, up to this.
        reductions: r of each stage: neighbours are averages of r x r nodes.
        relative: whether the distance in the image is added to that in feature space.
        stem: what the first C is divided by to give the width of each convolution of the stem.
        stem_stride: pixels along a side of the patch that becomes a node.
        img_size: height and width of the images it is meant for.
    """

    blocks: tuple[int, ...]
    channels: tuple[int, ...]
    k: tuple[int, int] = (9, 18)
    most_dilation: int = 10
    reductions: tuple[int, ...] = (1,)
    relative: bool = False
    stem: tuple[int, ...] = (8, 4, 2, 1, 1)
    stem_stride: int = 16
    img_size: Grid = (224, 224)


@dataclass(frozen=True)
class GraphRule:
    """How a block comes by its graph.

    Attributes:
        policy: see `vigpipe.config.choices.Policy`.
        k: neighbours per node.
        dilation: keep every dilation-th of the k * dilation nearest.
        reduction: r; neighbours are averages of r x r nodes.
        shift: move the windows by half of one.
        makes_next: of lookahead, whether a later block wants the graph.
        stochastic: probability that, in training, a sample's k neighbours are drawn from the
            k * dilation nearest instead; as in the published code, where it is off.
        stream: number of that draw among the random masks.
    """

    policy: Policy
    k: int
    dilation: int = 1
    reduction: int = 1
    shift: bool = False
    makes_next: bool = False
    stochastic: float = 0.0
    stream: int = 0


@dataclass(frozen=True)
class BlockSpec:
    """One entry of `backbone`: a block, or a downsampling between two stages of a pyramid.

    Attributes:
        rule: how a block comes by its graph; None of a downsampling.
        aggregator: of a block.
        before: C and grid of what it is given.
        channels: C of its result.
        grid: height and width of its result.
        stage: of the pyramid.
        number: of the block, downsamplings not counted.
        num_given: neighbours in the graph that an earlier block hands on; 0 where none is needed.
        num_neighbours: in the graph it uses or, of lookahead, makes.
    """

    rule: GraphRule | None
    aggregator: str
    before: tuple[Grid, int]
    channels: int
    grid: Grid
    stage: int
    number: int
    num_given: int = 0
    num_neighbours: int = 0

    @property
    def num_candidates(self) -> int:
        """Nodes that a kNN graph chooses from."""
        assert self.rule is not None
        return prod(pooled_grid(self.grid, self.rule.reduction))


def stem_strides(num_convs: int, stride: int) -> tuple[int, ...]:
    """Strides of the stem's convolutions: the twos as late as can be, but never the last.

    Raises:
        InputError: the stride is no power of two, or too large for so few convolutions.
    """
    most = 2 ** (num_convs - 1)
    if stride < 1 or stride > most or stride & (stride - 1):
        raise InputError(
            f"--stem-stride {stride}: this model's stem has {num_convs} convolutions; choose a "
            f"power of two up to {most}"
        )
    num_twos = int(log2(stride))
    return (1,) * (num_convs - 1 - num_twos) + (2,) * num_twos + (1,)


def reduced(size: Grid, strides: Sequence[int]) -> Grid:
    """Height and width after padded 3x3 convolutions of these strides."""
    height, width = size
    for stride in strides:
        height, width = ceil(height / stride), ceil(width / stride)
    return height, width


def make_entries(
    shape: VigShape, grid: Grid, graph: str, aggregator: str, stochastic: float
) -> list[BlockSpec]:
    """The entries of `backbone` in order.

    Args:
        shape: the variant.
        grid: height and width of what the stem gives.
        graph: policies, a comma list repeated over the blocks.
        aggregator: likewise.
        stochastic: of every GraphRule.

    Raises:
        InputError: a policy or an aggregator is unknown.
    """
    policies = listed(graph, POLICIES, "--graph")
    aggregators = listed(aggregator, AGGREGATORS, "--aggregator")
    num_blocks = sum(shape.blocks)
    # As the reference computes them: in float32, and truncated.
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
        made: BlockSpec | None = None  # by the block before, in this stage
        for i in range(num_in_stage):
            policy = cast(Policy, policies[number % len(policies)])
            following = policies[(number + 1) % len(policies)]
            wants_next = i + 1 < num_in_stage and following in ("reuse", "lookahead")
            reduction = shape.reductions[stage]
            if policy in ("reuse", "lookahead") and made is None:
                policy: Policy = "knn"  # there is no graph yet
            if made is not None and made.rule is not None and policy in ("reuse", "lookahead"):
                reduction = made.rule.reduction
                if policy == "reuse" and made.rule.policy in ("grid", "pattern"):
                    policy = made.rule.policy  # cheaper to make than to hand on
            if policy in ("grid", "pattern", "window"):
                reduction = 1
            rule = GraphRule(
                policy,
                ks[number],
                min(number // 4 + 1, shape.most_dilation),
                reduction,
                shift=policy == "window" and number % 2 == 1,
                makes_next=policy == "lookahead" and wants_next,
                stochastic=stochastic,
                stream=2 * num_blocks + 1 + number,
            )
            takes = policy in ("reuse", "lookahead") and made is not None
            num_given = made.num_neighbours if takes else 0  # pyright: ignore[reportOptionalMemberAccess]
            made = BlockSpec(
                rule,
                aggregators[number % len(aggregators)],
                before,
                channels,
                grid,
                stage,
                number,
                num_given,
                _num_neighbours(rule, grid) if rule.makes_next or not takes else num_given,
            )
            specs.append(made)
            number += 1
    return specs


def warn_of_few_nodes(specs: Sequence[BlockSpec], img_size: Grid) -> None:
    """Warn once if images are too small for some block's k or dilation."""
    blocks = [spec for spec in specs if spec.rule is not None]
    lowered = [
        (spec, spec.rule)
        for spec in blocks
        if spec.rule is not None
        and spec.rule.policy in ("knn", "lookahead")
        and reduce_k(spec.rule.k, spec.rule.dilation, spec.num_candidates)
        != (spec.rule.k, spec.rule.dilation)
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


def listed(names: str, known: Sequence[str], flag: str) -> list[str]:
    """The names of a comma list.

    Raises:
        InputError: one of them is not known.
    """
    found = [name.strip() for name in names.split(",")]
    unknown = [name for name in found if name not in known]
    if unknown:
        raise InputError(f"{flag} {names}: {unknown[0]!r} is none of {', '.join(known)}")
    return found


def _num_neighbours(rule: GraphRule, grid: Grid) -> int:
    if rule.policy == "grid":
        return grid_neighbours(*grid)
    if rule.policy == "pattern":
        return pattern_neighbours(*grid)
    if rule.policy == "window":
        return min(rule.k, min(WINDOW, grid[0]) * min(WINDOW, grid[1]))
    return min(rule.k, prod(pooled_grid(grid, rule.reduction)))
