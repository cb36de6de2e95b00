"""ViG, isotropic and pyramid: Han et al. 2022, "Vision GNN", arXiv:2206.00272.

Parameter names and shapes are those of the authors' code (huawei-noah/Efficient-AI-Backbones,
vig_pytorch), so published state dicts fit. The models also have the methods that timm expects.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vigpipe.config.choices import Divided, Norm
from vigpipe.config.typed import typed
from vigpipe.model.aggregator import AGGREGATORS
from vigpipe.model.blocks import (
    BlockSpec,
    VigShape,
    make_block_specs,
    stem_strides,
    warn_of_few_nodes,
)
from vigpipe.model.ffn import FFN
from vigpipe.model.grapher import BlockGraph, Grapher
from vigpipe.model.image import ImageModel, Pool, as_pair
from vigpipe.model.keyed_dropout import Draws
from vigpipe.model.layer import Layer
from vigpipe.model.position import Grid, resized_embedding
from vigpipe.model.readout import WIDTH, Readout
from vigpipe.model.regions import region
from vigpipe.model.slicing import Side, Sides, Slicing, bound, divided_width
from vigpipe.model.stem import ConvStem, Downsample
from vigpipe.model.tokens import Tokens


class Block(nn.Sequential):
    """A Grapher and an FFN; the published names are `0` and `1`."""

    def forward(  # pyrefly: ignore[bad-override]
        self, x: Tensor, draws: Draws | None, given: Tensor | None
    ) -> tuple[Tensor, BlockGraph, Tensor]:
        """Run the block: (B, H, W, C) -> (B, H, W, C), the graph used, and the one to pass on.

        `given` is the graph, (B, N, K) int64, that the previous block passes on, if this reuses it.
        """
        grapher, ffn = self
        x, graph, following = region("grapher", grapher, x, draws, given)
        return region("ffn", ffn, x, draws), graph, following


class VisionGnn(ImageModel):
    """ViG: stem, positional embedding, blocks on graphs of the nodes, readout.

    Images of another size than `img_size` work too: the positional tables are resized in both
    directions, and k * dilation is lowered to the number of nodes.

    Args:
        shape: the sizes of the variant.
        num_classes: number of logits; with 0 the model returns the readout's hidden layer.
        in_chans: channels of the images.
        img_size: height and width of the images in pixels, or one number for both; by default the
            variant's.
        norm: normalisation: batch, layer or group.
        drop_path_rate: drop-path rate of the last block; the rate rises linearly from 0 in the
            first.
        drop_rate: dropout rate in the readout.
        graph: a policy (`config.choices.Policy`), or a comma-separated list of them that is
            repeated over the blocks: `knn,reuse,reuse` makes a graph in every third block. Where
            there is no graph to reuse, in the first block and after each downsampling, the policy
            is knn.
        aggregator: max, edge, sage, gin or maxmean, or a comma-separated list of them that is
            repeated over the blocks.
        stochastic_dilation: probability that a training sample's neighbours are drawn at random
            from the k * dilation nearest.
        stem_stride: side of a patch in pixels, a power of two; by default the variant's.
        compat: `reference` resizes relative positions along the raster, as the published code does.
        global_pool: `avg` averages the nodes; an empty string gives every node its own logits.
        narrow: make a sub-network of 1/narrow of the widths; 1 for the model itself.
        divided: the widths that sub-networks share: inner or tied.
        branch_rescale: in a sub-network, multiply the last product of a residual branch by
            `narrow` before its bias is added, so that the merged model's product is the mean of
            the sub-networks' instead of their sum. The norm comes after that: it makes the merged
            branch as large as theirs in any case, so with BatchNorm only its running statistics
            change. A factor after it would leave the merged branch too small by `narrow`.
        device: where to make the weights.
        dtype: type of the weights.

    Raises:
        InputError: a size or rate that no model has, an unknown policy or aggregator, a stem stride
            that the stem cannot have, or a width that `narrow` does not divide.
    """

    stem_names = ("stem", "pos_embed")
    tokens: Tokens | None = None

    @typed
    def __init__(
        self,
        shape: VigShape,
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int | Grid | None = None,
        norm: Norm = "batch",
        drop_path_rate: float = 0.0,
        drop_rate: float = 0.0,
        graph: str = "knn",
        aggregator: str = "max",
        stochastic_dilation: float = 0.0,
        stem_stride: int | None = None,
        compat: Literal["reference"] | None = None,
        global_pool: Pool = "avg",
        narrow: int = 1,
        divided: Divided = "inner",
        branch_rescale: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        wide, is_tied = shape, divided == "tied"
        shape = wide.divided(narrow) if is_tied else wide
        head = divided_width(WIDTH, narrow, "the readout") if is_tied else WIDTH
        rescale = float(narrow) if branch_rescale else 1.0
        stride = shape.stem_stride if stem_stride is None else stem_stride
        strides = stem_strides(len(shape.stem), stride)
        super().__init__(
            num_blocks=sum(shape.blocks) + len(shape.blocks) - 1,
            num_classes=num_classes,
            in_chans=in_chans,
            img_size=as_pair(shape.img_size if img_size is None else img_size),
            strides=strides,
            channels=shape.channels,
            hidden=head,
            global_pool=global_pool,
            drop_path_rate=drop_path_rate,
            drop_rate=drop_rate,
        )
        self.shape = shape
        specs_on = partial(make_block_specs, shape, graph, aggregator, stochastic_dilation)
        specs = specs_on(self.grid)
        self.specs, self._specs_on = specs, specs_on
        self._has_warned = False

        path_rates = torch.linspace(0, drop_path_rate, sum(shape.blocks), device="cpu").tolist()
        with torch.device(device) if device is not None else nullcontext():
            self.stem = ConvStem(in_chans, shape.stem_widths, strides, norm)
            self.pos_embed = nn.Parameter(torch.zeros(1, shape.channels[0], *self.grid))
            self.backbone = nn.ModuleDict()
            for i, spec in enumerate(specs):
                if spec.rule is None:
                    self.backbone[str(i)] = Downsample(spec.before[1], spec.channels, norm)
                    continue
                whole, rate = wide.channels[spec.stage], path_rates[spec.number]
                is_relative = shape.relative and spec.rule.policy in ("knn", "lookahead")
                grapher = Grapher(
                    spec,
                    _conv_width(whole, narrow, spec.aggregator, i),
                    norm,
                    rate,
                    relative=whole if is_relative else None,
                    by_raster=compat == "reference",
                    rescale=rescale,
                )
                hidden = divided_width(4 * whole, narrow, f"the FFN of block {i}")
                stream = 2 * spec.number + 1
                ffn = FFN(spec.channels, hidden, norm, rate, stream, rescale)
                self.backbone[str(i)] = Block(grapher, ffn)
            stream = 2 * sum(shape.blocks)
            self.prediction = Readout(
                shape.channels[-1], num_classes, norm, drop_rate, stream, global_pool, head
            )
        self.feature_info = _feature_info(specs, strides)
        if dtype is not None:
            self.to(dtype)
        warn_of_few_nodes(specs, self.img_size)

    # ---- stages of a pipeline ---------------------------------------------------------------

    def boundary_shapes(self, block: int) -> tuple[tuple[int, ...], ...]:
        """Return (H, W, C), or (H, W, C + K) if the block needs the graph of an earlier block."""
        if block == len(self.specs):
            return ((*self.specs[-1].grid, self.specs[-1].channels),)
        (height, width), channels = self.specs[block].before
        return ((height, width, channels + self.specs[block].num_given),)

    def embed(self, images: Tensor) -> Tensor:
        """Run the stem and add the positional embedding: (B, C_in, H, W) -> (B, H', W', C)."""
        x = self.stem(images)
        grid = (x.shape[1], x.shape[2])
        is_symbolic = torch.compiler.is_compiling() or isinstance(images, torch.fx.Proxy)
        if not is_symbolic and not self._has_warned and grid != self.grid:
            self._has_warned = True
            warn_of_few_nodes(self._specs_on(grid), (images.shape[2], images.shape[3]))
        x = x + resized_embedding(self.pos_embed, grid).movedim(1, -1)
        return x if self.tokens is None else self.tokens.own(x)

    def run_blocks(
        self, x: Tensor, draws: Draws | None, graphs: dict[int, BlockGraph] | None = None
    ) -> Tensor:
        """Run the blocks that are present, and put the graph that each used into `graphs`."""
        x, given = self._unpacked(x)
        for name, block in self.backbone.items():
            x, graph, given = self.run_module(name, block, x, draws, given)
            if graphs is not None and graph is not None:
                graphs[int(name)] = graph
        return self._packed(x, given)

    def run_each(self, x: Tensor) -> Iterator[tuple[str, Tensor]]:
        given = None
        for name, block in self.backbone.items():
            x, _, given = self.run_module(name, block, x, None, given)
            yield name, x

    def run_module(
        self, name: str, block: nn.Module, x: Tensor, draws: Draws | None, given: Tensor | None
    ) -> tuple[Tensor, BlockGraph | None, Tensor | None]:
        """Run one module; return its result, the graph it used, and the graph to pass on."""
        if isinstance(block, Downsample):
            tokens, (grid, _) = self.tokens, self.specs[int(name)].before
            x = x if tokens is None else tokens.whole(x, grid)
            x = self.run(name, block, x)
            return (x if tokens is None else tokens.own(x)), None, None
        return self.run(name, block, x, draws, given)

    def _unpacked(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        first = self.span[0]
        num_given = self.specs[first].num_given if first < len(self.specs) else 0
        if num_given == 0 or self.has_stem:
            return x, None
        x, graph = x.split((x.shape[-1] - num_given, num_given), dim=-1)
        return x.contiguous(), graph.detach().flatten(1, 2).long()

    def _packed(self, x: Tensor, graph: Tensor | None) -> Tensor:
        # Stages exchange one tensor, so indices travel as floats: exact in float32 up to 2^24.
        end = self.span[1]
        if end == len(self.specs) or self.specs[end].num_given == 0:
            return x
        assert graph is not None
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if x.requires_grad:
            # The gradient that cat returns is a slice, which layers would sum in another order.
            x.register_hook(Tensor.contiguous)
        return torch.cat((x, graph.unflatten(1, x.shape[1:3]).to(x.dtype)), dim=-1)

    def slicing(self, partition_input: bool = False, divided: Divided = "inner") -> Slicing:
        """Make the table of `StagedModel.slicing`.

        Every Grapher has two groups, `x` and `out`, what its graph convolution takes and gives; and
        every FFN one, `hidden`. With `tied` there are also `trunk.0`, the channels between the
        blocks of the pyramid's first stage, and so on; `stem.1`, those after the stem's first
        convolution, and so on up to the last, which gives the trunk; and the readout's `hidden`.

        Tables of relative positions stay whole. They are added to distances between features of
        unit length, so they weigh the same for any number of channels. But a sub-network chooses
        neighbours by its own channels, so its graphs are not the merged model's.
        """
        if partition_input:
            raise ValueError("the channels of images are not divided among sub-networks")
        trunks = [
            Side(f"trunk.{stage}") if divided == "tied" else None
            for stage in range(len(self.shape.blocks))
        ]
        sides: dict[str, Sides] = {}
        if self.has_stem:
            last = str(len(self.strides))
            inner = map(str, range(1, len(self.strides)))
            channels = {name: Side(f"stem.{name}") if divided == "tied" else None for name in inner}
            channels |= {"0": None, last: trunks[0]}
            sides |= bound(self.stem, "stem.", self.stem.roles, channels)
            sides["pos_embed"] = (None, trunks[0], None, None)
        for name, block in self.backbone.items():
            stage = self.specs[int(name)].stage
            if isinstance(block, Downsample):
                channels = {"in": trunks[stage - 1], "out": trunks[stage]}
                sides |= bound(block, f"backbone.{name}.", block.roles, channels)
                continue
            for half in ("0", "1"):
                module: Any = block.get_submodule(half)  # Grapher, FFN
                sides |= module.sides(f"backbone.{name}.{half}.", trunks[stage])
        if self.has_readout:
            hidden = Side("prediction.hidden") if divided == "tied" else None
            channels = {"trunk": trunks[-1], "hidden": hidden, "classes": None}
            sides |= bound(self.prediction, "prediction.", self.prediction.roles, channels)
        return Slicing.of(self.state_dict(), sides)

    def _graphers(self) -> Iterator[tuple[str, Grapher]]:
        for name, module in self.named_modules():
            if isinstance(module, Grapher):
                yield name.split(".")[1], module  # backbone.3.0

    def forward(
        self, x: Tensor, keys: Tensor | Draws | None = None, return_graph: bool = False
    ) -> Any:
        """Run stem, blocks and readout, as far as they are present; see StagedModel.

        Args:
            x: images, (B, C_in, H, W), or the output of the previous stage.
            keys: sample keys of the random masks, (B,) int64; by default drawn at random.
            return_graph: also return the graphs; only for the unsplit model.

        Returns:
            The output; or with `return_graph` the logits, and each block's BlockGraph by the
            block's index in `backbone`.

        Raises:
            ValueError: `return_graph` is set, but this is a stage of a model.
        """
        if return_graph is not True:  # torch.fx passes a symbol, which has no truth value
            return super().forward(x, keys)
        if not (self.has_stem and self.has_readout):
            raise ValueError("return_graph is for the unsplit model; this is a stage of it")
        graphs: dict[int, BlockGraph] = {}
        draws = self.draws_for(x, keys)
        return self.read_out(self.run_blocks(self.embed(x), draws, graphs), draws), graphs

    def share_tokens(self, tokens: Tokens) -> None:
        """Divide the rows of every image among ranks, whose nodes `tokens` gives access to.

        Stem and downsamplings run on the whole image on every rank; after each, a rank keeps its
        rows only. Images must have the model's own size.
        """
        for module in self.modules():
            if isinstance(module, VisionGnn | Grapher | Layer | Readout):
                module.tokens = tokens

    def set_input_size(self, img_size: int | Grid) -> None:
        """Resize the positional tables for images of another size, in pixels."""
        super().set_input_size(img_size)
        self.specs = self._specs_on(self.grid)
        table = resized_embedding(self.pos_embed.detach(), self.grid)
        self.pos_embed = nn.Parameter(table, requires_grad=self.pos_embed.requires_grad)
        for name, grapher in self._graphers():
            grapher.set_grid(self.specs[int(name)].grid)
        warn_of_few_nodes(self.specs, self.img_size)

    def no_weight_decay(self) -> set[str]:
        """Return the positional embedding's name; the published code does decay it."""
        return {"pos_embed"}


def _conv_width(channels: int, num: int, aggregator: str, block: int) -> int:
    """Return the channels that a sub-network's graph convolution takes: so many of each part."""
    parts = AGGREGATORS[aggregator].channels["x"].repeats
    where = f"each of the {parts} parts that the graph convolution of block {block} takes"
    divided_width(channels // parts, num, where)
    return channels // num


def _feature_info(specs: Sequence[BlockSpec], strides: Sequence[int]) -> list[dict[str, Any]]:
    """Describe timm's feature levels: every block, or the last of each stage of a pyramid."""
    is_pyramid = specs[-1].stage > 0
    following = [*specs[1:], None]
    return [
        {
            "num_chs": spec.channels,
            "reduction": 2 ** (strides.count(2) + spec.stage),
            "module": f"backbone.{i}",
        }
        for i, (spec, after) in enumerate(zip(specs, following, strict=True))
        if spec.rule and not (is_pyramid and after and after.rule)
    ]
