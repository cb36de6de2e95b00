"""What every model has in common: stem, numbered blocks, readout, a walk over what is present."""

from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from vigpipe.config.choices import Impl
from vigpipe.model.keyed_dropout import fresh_keys
from vigpipe.model.recompute import run_and_forget
from vigpipe.model.regions import region


class StagedModel(nn.Module):
    """A model that can be cut between blocks.

    Subclasses name their parts as published state dicts do and say which attributes are which.
    Blocks sit in a ModuleDict, so a block keeps its parameter names when its neighbours are
    deleted, and `forward` walks past whatever is missing: a stage is the same class as the model.

    Attributes:
        num_classes: width of the logits.
        span: first of the blocks that are present, and the one after the last.
        recompute: forget the activations inside blocks, and compute them again in the backward.
    """

    stem_names: ClassVar[tuple[str, ...]] = ()
    blocks_name: ClassVar[str] = "blocks"
    readout_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, num_blocks: int, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.span = (0, num_blocks)
        self.has_stem, self.has_readout = True, True
        self.recompute = False

    def boundary_shape(self, block: int) -> tuple[int, ...]:
        """Shape of what one sample hands to a block, or to the readout."""
        raise NotImplementedError

    def embed(self, images: Tensor) -> Tensor:
        """(B, C_in, H, W) -> node features."""
        raise NotImplementedError

    def run_blocks(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """What is present of the blocks, from boundary to boundary."""
        for name, block in self.numbered_blocks.items():
            x = self.run(name, block, x, keys)
        return x

    def read_out(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """Node features -> (B, num_classes)."""
        raise NotImplementedError

    def set_detect_anomaly(self, enable: bool) -> None:
        """Raise FloatingPointError where a kNN graph would be made of NaN or infinite features."""
        raise NotImplementedError

    def set_impl(self, impl: Impl) -> None:
        """Take the fused operators where there are any, or the plain ones everywhere."""
        for module in self.modules():
            if hasattr(type(module), "fused"):
                module.fused = impl == "fused"  # pyright: ignore[reportArgumentType]

    def no_weight_decay(self) -> set[str]:
        """Parameters that are not decayed, beside biases and norms."""
        return set()

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Which parameters belong to which layer, for layer-wise learning rates; as timm asks."""
        blocks = rf"^{self.blocks_name}\.(\d+)"
        groups: dict[str, Any] = {"blocks": blocks if coarse else [(blocks, None)]}
        if self.stem_names:
            groups = {"stem": "|".join(f"^{name}" for name in self.stem_names), **groups}
        return groups

    @property
    def numbered_blocks(self) -> nn.ModuleDict:
        """The blocks by their number in the unsplit model, as text."""
        return getattr(self, self.blocks_name)

    def run(self, name: str, block: nn.Module, *inputs: Any) -> Any:  # noqa: ANN401
        """Call a block, and keep its activations or not."""
        call = partial(region, f"block {name}", block)
        if self.recompute and self.training:
            return run_and_forget(call, *inputs)
        return call(*inputs)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Run what is present of stem, blocks and readout.

        Args:
            x: images (B, C_in, H, W) where the stem is present, else what crosses the boundary,
                (B, *boundary_shape(span[0])).
            keys: (B,) int64, what random masks are keyed by (`model.keyed_dropout`); drawn from
                torch's own generator if a model in training mode is called without.

        Returns:
            Logits (B, num_classes) where the readout is present, else (B,
            *boundary_shape(span[1])).
        """
        if self.training and keys is None:
            keys = fresh_keys(x)
        if self.has_stem:
            x = region("stem", self.embed, x)
        x = self.run_blocks(x, keys)
        return region("readout", self.read_out, x, keys) if self.has_readout else x

    def keep(self, blocks: Iterable[int], stem: bool, readout: bool) -> None:
        """Delete every other block, and the stem and the readout unless they are to stay."""
        numbers = sorted(blocks)
        self.span = (numbers[0], numbers[-1] + 1)
        kept = {str(index) for index in numbers}
        for name in list(self.numbered_blocks):
            if name not in kept:
                del self.numbered_blocks[name]
        for name in (() if stem else self.stem_names) + (() if readout else self.readout_names):
            delattr(self, name)
        self.has_stem, self.has_readout = stem, readout
