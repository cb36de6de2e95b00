"""What every model has in common: stem, numbered blocks, readout, a walk over what is present."""

from collections.abc import Iterable
from typing import ClassVar

from torch import Tensor, nn

from vigpipe.model.noise import fresh_keys


class StagedModel(nn.Module):
    """A model that can be cut between blocks.

    Subclasses name their parts as published state dicts do and say which attributes are which.
    Blocks sit in a ModuleDict, so a block keeps its parameter names when its neighbours are
    deleted, and `forward` walks past whatever is missing: a stage is the same class as the model.
    """

    stem_names: ClassVar[tuple[str, ...]] = ()
    blocks_name: ClassVar[str] = "blocks"
    readout_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, num_nodes: int, channels: int, num_classes: int) -> None:
        super().__init__()
        self.boundary_shape = (num_nodes, channels)  # of a sample, between any two blocks
        self.num_classes = num_classes
        self.has_stem, self.has_readout = True, True

    def embed(self, images: Tensor) -> Tensor:
        """(B, C_in, H, W) -> (B, N, C)."""
        raise NotImplementedError

    def read_out(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """(B, N, C) -> (B, num_classes)."""
        raise NotImplementedError

    @property
    def numbered_blocks(self) -> nn.ModuleDict:
        """The blocks by their number in the unsplit model, as text."""
        return getattr(self, self.blocks_name)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Run what is present of stem, blocks and readout.

        Args:
            x: images (B, C_in, H, W) where the stem is present, else node features (B, N, C).
            keys: (B,) int64, what random masks are keyed by (`vigpipe.model.noise`); drawn from
                torch's own generator if a model in training mode is called without.

        Returns:
            Logits (B, num_classes) where the readout is present, else node features (B, N, C).
        """
        if self.training and keys is None:
            keys = fresh_keys(len(x))
        if self.has_stem:
            x = self.embed(x)
        for block in self.numbered_blocks.values():
            x = block(x, keys)
        return self.read_out(x, keys) if self.has_readout else x

    def keep(self, blocks: Iterable[int], stem: bool, readout: bool) -> None:
        """Delete every other block, and the stem and the readout unless they are to stay."""
        kept = {str(index) for index in blocks}
        for name in list(self.numbered_blocks):
            if name not in kept:
                del self.numbered_blocks[name]
        for name in (() if stem else self.stem_names) + (() if readout else self.readout_names):
            delattr(self, name)
        self.has_stem, self.has_readout = stem, readout
