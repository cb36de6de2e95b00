"""What the models of images have in common, and the methods that timm expects of them."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from vigpipe.model.blocks import check_image_size, check_sizes, reduced
from vigpipe.model.keyed_dropout import Draws
from vigpipe.model.position import Grid
from vigpipe.model.readout import Readout
from vigpipe.model.staged import StagedModel

Pool = Literal["avg", ""]


class ImageModel(StagedModel):
    """A model from images to logits, whose features are (B, H, W, C) between its blocks.

    Subclasses make the stem, the blocks (`backbone`) and the readout (`prediction`).

    Args:
        num_blocks: number of blocks of the unsplit model.
        num_classes: number of logits; with 0 the model returns the readout's hidden layer.
        in_chans: channels of the images.
        img_size: height and width of the images in pixels.
        strides: of the convolutions of the stem.
        channels: C of each resolution.
        hidden: channels of the readout's hidden layer.
        global_pool: `avg` averages the nodes; an empty string gives every node its own logits.
        drop_path_rate: drop-path rate of the last block.
        drop_rate: dropout rate in the readout.
        most_heads: number of layers that give logits where there are classes.

    Raises:
        InputError: a size or rate that no model has.
    """

    stem_names = ("stem",)
    blocks_name = "backbone"
    readout_names = ("prediction",)
    pooled_into = "prediction.0"
    output_fmt = "NHWC"
    shape: Any  # the sizes of the variant, of a type of the subclass
    prediction: Readout
    backbone: nn.ModuleDict

    def __init__(
        self,
        num_blocks: int,
        num_classes: int,
        in_chans: int,
        img_size: Grid,
        strides: tuple[int, ...],
        channels: Sequence[int],
        hidden: int,
        global_pool: Pool,
        drop_path_rate: float,
        drop_rate: float,
        most_heads: int = 1,
    ) -> None:
        rates = {"drop_path_rate": drop_path_rate, "drop_rate": drop_rate}
        check_sizes(num_classes, in_chans, img_size, **rates)
        super().__init__(num_blocks, num_classes)
        self.in_chans, self.img_size, self.strides = in_chans, img_size, strides
        self.grid = reduced(img_size, strides)
        self.num_features, self.head_hidden_size = channels[-1], hidden
        self.global_pool: Pool = global_pool
        self.drop_rate, self.most_heads = drop_rate, most_heads
        self.pretrained_cfg: dict[str, Any] = {}
        self.feature_info: list[dict[str, Any]] = []

    @property
    def num_heads(self) -> int:
        return len(self.prediction.heads) if self.has_readout else 1

    @property
    def pool_size(self) -> Grid:
        """The grid of nodes that the readout averages."""
        return reduced(self.grid, (2,) * self.shape.halvings)

    def read_out(self, x: Any, draws: Draws | None) -> Any:
        return self.prediction(self.merged(x), draws)

    def classifier(self) -> tuple[tuple[str, ...], dict[str, int]]:
        heads = tuple(f"prediction.{4 + i}." for i in range(self.most_heads))
        return heads, {head + name: 0 for head in heads for name in ("weight", "bias")}

    def set_detect_anomaly(self, enable: bool) -> None:
        for name, module in self.named_modules():
            if hasattr(module, "detect_anomaly"):
                block = name.split(".")[1]  # backbone.3.0
                module.detect_anomaly = f"block {block}" if enable else ""  # pyrefly: ignore

    def run_each(self, x: Any) -> Iterator[tuple[str, Any]]:
        """Run block after block on what `embed` gives; yield the name and the result of each."""
        for name, block in self.backbone.items():
            x = self.run(name, block, x, None)
            yield name, x

    def forward_features(self, x: Tensor) -> Tensor:
        """Run stem and blocks: (B, C_in, H, W) -> (B, H', W', C), before pooling."""
        return self.merged(self.run_blocks(self.embed(x), None))

    def merged(self, x: Any) -> Tensor:
        """Make of what the blocks give, (B, H, W, C), the features that the readout pools."""
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Any:
        """Run the readout: (B, H', W', C) -> logits, or its hidden layer with `pre_logits`."""
        return self.prediction(x, None, pre_logits) if self.has_readout else x

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Return feature maps after some blocks or resolutions: the levels of `feature_info`.

        Args:
            x: images, (B, C_in, H, W).
            indices: indices of levels; a single number n means the last n levels, None means all.
            norm: has no effect, because there is no norm to apply; timm passes it.
            stop_early: do not run the blocks after the last requested level.
            output_fmt: layout of the maps, NCHW or NHWC.
            intermediates_only: return the maps alone.

        Returns:
            The maps; or the final features before pooling, (B, H', W', C), and the maps.

        Raises:
            ValueError: the layout is neither NCHW nor NHWC.
        """
        if output_fmt not in ("NCHW", "NHWC"):
            raise ValueError(f"output_fmt is 'NCHW' or 'NHWC' (got {output_fmt!r})")
        _, blocks = self._levels(indices)
        maps: list[Tensor] = []
        x = nodes = self.embed(x)
        for name, features in self.run_each(x):
            x, nodes = features, features[0] if isinstance(features, tuple) else features
            if int(name) in blocks:
                maps.append(nodes.movedim(-1, 1) if output_fmt == "NCHW" else nodes)
            if stop_early and int(name) == max(blocks):
                break
        else:  # what comes after the last block
            nodes = None if intermediates_only else self.merged(x)
        return maps if intermediates_only else (nodes, maps)

    def _levels(self, indices: int | Sequence[int] | None) -> tuple[list[int], list[int]]:
        """Return the indices of some levels, as positive numbers, and of their last blocks."""
        from timm.models._features import feature_take_indices

        blocks = [int(level["module"].split(".")[1]) for level in self.feature_info]
        taken, _ = feature_take_indices(len(blocks), indices)  # pyrefly: ignore[bad-argument-type]
        return taken, [blocks[i] for i in taken]

    def prune_intermediate_layers(
        self,
        indices: int | Sequence[int] = 1,
        prune_norm: bool = False,  # timm passes it; there is no norm to delete
        prune_head: bool = True,
    ) -> list[int]:
        """Delete the blocks after the last of some levels, and return these as positive numbers."""
        taken, blocks = self._levels(indices)
        for name in list(self.backbone):
            if int(name) > max(blocks):
                del self.backbone[name]
        if prune_head and self.has_readout:
            del self.prediction
            self.has_readout, self.num_classes, self.global_pool = False, 0, ""
        return taken

    def get_classifier(self) -> nn.Module | tuple[nn.Module, ...]:
        """Return the last layer, two if there are two heads, or an Identity without a readout."""
        if not self.has_readout:
            return nn.Identity()
        heads = self.prediction.heads
        return heads[0] if len(heads) == 1 else heads

    def reset_classifier(self, num_classes: int, global_pool: Pool | None = None) -> None:
        """Replace the last layer by a new one with random weights; with 0 classes there is none."""
        if not self.has_readout:
            if num_classes:
                raise ValueError("the readout was pruned; make the model anew for another one")
            return
        check_sizes(num_classes, self.in_chans, self.img_size)
        self.num_classes = num_classes
        self.global_pool = self.global_pool if global_pool is None else global_pool
        self.prediction.reset(num_classes, self.global_pool)

    def set_input_size(self, img_size: int | Grid) -> None:
        """Prepare for images of another size, in pixels."""
        size = as_pair(img_size)
        check_image_size(size)
        self.img_size = size
        self.grid = reduced(self.img_size, self.strides)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute activations in the backward instead of keeping them, or keep them again."""
        self.recompute = enable


def as_pair(size: int | Sequence[int]) -> Grid:
    """Return height and width, from both or from one number for both."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])
