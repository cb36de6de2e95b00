"""The base class of the models: stem, numbered blocks and readout, any of which may be absent."""

from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from vigpipe.config.choices import Impl
from vigpipe.errors import InputError
from vigpipe.model.keyed_dropout import Draws, DropPath, draw, fresh_keys
from vigpipe.model.recompute import run_with_recompute
from vigpipe.model.regions import region
from vigpipe.model.slicing import Slicing

_NO_TORCHSCRIPT = (
    "torch.jit.trace and torch.jit.script do not take the models of vigpipe; use torch.export, or "
    "torch.onnx.export with dynamo=True"
)


class StagedModel(nn.Module):
    """A model that can be cut into stages between its blocks.

    Subclasses name their modules as published state dicts do, and say which attributes are stem,
    blocks and readout. Blocks are kept in a ModuleDict, so a block keeps its parameter names when
    other blocks are deleted. `forward` skips whatever is absent, so a stage is an instance of the
    same class as the model.

    Args:
        num_blocks: number of blocks of the unsplit model.
        num_classes: number of logits.

    Attributes:
        span: index of the first block that is present, and the index after the last.
        has_stem: whether the stem is present.
        has_readout: whether the readout is present.
        recompute: discard the activations inside blocks, and compute them again in the backward.
        frozen: the pieces that are not trained: `stem`, `readout`, and blocks by their index as
            text; see `freeze`.
        input_channels: indices of the input's channels that the model takes, ascending; None for
            all. Models of images always take all.
    """

    # The attributes that make up the stem, hold the blocks, and make up the readout.
    stem_names: ClassVar[tuple[str, ...]] = ()
    blocks_name: ClassVar[str] = "blocks"
    readout_names: ClassVar[tuple[str, ...]] = ()
    # The module of the readout that takes the pooled features of an image's nodes.
    pooled_into: ClassVar[str] = ""

    def __init__(self, num_blocks: int, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.span = (0, num_blocks)
        self.has_stem, self.has_readout = True, True
        self.recompute = False
        self.frozen, self._leading = frozenset[str](), frozenset[str]()
        self.input_channels: Tensor | None = None

    @property
    def num_heads(self) -> int:
        """How many layers give logits; in training, the output of two is a tuple."""
        return 1

    def boundary_shapes(self, block: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of one sample's tensors where they enter a block of the unsplit model.

        Most models have one, the features; others go past the blocks. The number of blocks, which
        is no block's index, means the readout.
        """
        raise NotImplementedError

    def embed(self, images: Tensor) -> Any:
        """Run the stem: (B, C_in, H, W) -> node features, or a tuple of these and others."""
        raise NotImplementedError

    def branched(self, x: Tensor) -> Any:
        """Return what `embed` gives, from its node features."""
        return x

    def run_blocks(self, x: Any, draws: Draws | None) -> Any:
        """Run the blocks that are present, from one stage boundary to the next."""
        for name, block in self.numbered_blocks.items():
            x = self.run(name, block, x, draws)
        return x

    def read_out(self, x: Any, draws: Draws | None) -> Any:
        """Run the readout: node features -> (B, num_classes), or a tuple of as many heads."""
        raise NotImplementedError

    def set_detect_anomaly(self, enable: bool) -> None:
        """Make kNN graphs raise FloatingPointError on NaN or infinite features, or stop that."""
        raise NotImplementedError

    def slicing(self, partition_input: bool = False) -> Slicing:
        """Return which sides of the tensors that are present belong to which channels.

        With `partition_input`, the channels of the model's input are divided, too.
        """
        raise NotImplementedError

    def classifier(self) -> tuple[tuple[str, ...], dict[str, int]]:
        """Return what the names of the last layers' tensors begin with, and those by class.

        For each tensor that has an entry by class, it says in which dimension.
        """
        raise NotImplementedError

    def set_impl(self, impl: Impl) -> None:
        """Use the fused operators where there are any, or the plain ones everywhere."""
        for module in self.modules():
            if hasattr(type(module), "fused"):
                module.fused = impl == "fused"  # pyrefly: ignore[bad-argument-type]

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay, besides biases and norms."""
        return set()

    def freeze(self, pieces: Iterable[str]) -> None:
        """Train some pieces no more: they have no gradients, and evaluate also in training.

        The norms of frozen pieces so use their running statistics and do not change them. No
        backward reaches those before the first piece that is trained.
        """
        self.frozen = frozenset(pieces)
        order = ["stem"] * bool(self.stem_names) + [*map(str, range(self.span[1])), "readout"]
        num_leading = next((i for i, piece in enumerate(order) if piece not in self.frozen), None)
        self._leading = frozenset(order[:num_leading])
        for part in self._frozen_parts():
            part.requires_grad_(False)
        self.train(self.training)

    @property
    def is_leading(self) -> bool:
        """Whether no piece that is present, or comes before, is trained."""
        return not self.has_readout and str(self.span[1] - 1) in self._leading

    @property
    def follows_leading(self) -> bool:
        """Whether no piece before those that are present is trained, but for a missing stem."""
        return self.has_stem or str(self.span[0] - 1) in self._leading

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for part in self._frozen_parts():
            if isinstance(part, nn.Module):
                part.eval()
        return self

    def _frozen_parts(self) -> list[nn.Module | nn.Parameter]:
        """Return what the frozen pieces that are present consist of."""
        blocks = self.numbered_blocks
        parts: list[Any] = [block for name, block in blocks.items() if name in self.frozen]
        names = self.stem_names if self.has_stem and "stem" in self.frozen else ()
        names += self.readout_names if self.has_readout and "readout" in self.frozen else ()
        return parts + [part for part in (getattr(self, n) for n in names) if part is not None]

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that assign parameters to layers, as timm needs for layer-wise rates.

        With `coarse`, all blocks are one group.
        """
        blocks = rf"^{self.blocks_name}\.(\d+)"
        groups: dict[str, Any] = {"blocks": blocks if coarse else [(blocks, None)]}
        if self.stem_names:
            groups = {"stem": "|".join(f"^{name}" for name in self.stem_names), **groups}
        return groups

    @property
    def numbered_blocks(self) -> nn.ModuleDict:
        """The blocks that are present, by their index in the unsplit model, as text."""
        return getattr(self, self.blocks_name)

    def run(self, name: str, block: nn.Module, *inputs: Any) -> Any:
        """Call one block as a region; with recomputation on, discard its activations."""
        call = partial(region, f"block {name}", block)
        if name in self._leading:
            with torch.no_grad():
                return call(*inputs)
        if self.recompute and self.training:
            return run_with_recompute(call, *inputs)
        return call(*inputs)

    def run_stem(self, *inputs: Any) -> Any:
        """Call the stem as a region."""
        with torch.no_grad() if "stem" in self._leading else nullcontext():
            return region("stem", self.embed, *inputs)

    def forward(self, x: Any, keys: Tensor | Draws | None = None) -> Any:
        """Run stem, blocks and readout, as far as they are present.

        Args:
            x: images, (B, C_in, H, W), if the stem is present; otherwise the output of the previous
                stage, (B, *shape) of the shape in boundary_shapes(span[0]), or a tuple if there are
                several.
            keys: sample keys of the random masks (`model.keyed_dropout`), (B,) int64, or what
                `draw` made of them; by default drawn from torch's own generator in training mode.

        Returns:
            Logits, (B, num_classes), if the readout is present, in training a tuple of those of two
            heads; otherwise the input of the next stage.

        Raises:
            InputError: there are no images in training mode, or TorchScript traces the model.
        """
        first = x[0] if isinstance(x, tuple) else x
        if not torch.compiler.is_compiling() and not isinstance(x, torch.fx.Proxy):
            if torch.jit.is_tracing():
                raise InputError(_NO_TORCHSCRIPT)
            if len(first) == 0:
                return self._run_empty(x)
        draws = self.draws_for(first, keys)
        if self.has_stem:
            x = self.run_stem(x)
        x = self.run_blocks(x, draws)
        return region("readout", self.read_out, x, draws) if self.has_readout else x

    def _run_empty(self, x: Any) -> Any:
        """Return what `forward` makes of no images: that of one without its row."""
        if self.training:
            raise InputError(
                "a batch without images: BatchNorm has no statistics of it; leave it out, or call "
                "eval() first"
            )
        one = tree_map(lambda t: t.new_zeros(1, *t.shape[1:]), x)
        return tree_map(lambda t: t[:0], self(one))

    def __prepare_scriptable__(self) -> NoReturn:  # torch.jit.script calls it
        raise InputError(_NO_TORCHSCRIPT)

    def draw(self, keys: Tensor, dtype: torch.dtype) -> Draws:
        """Make the random choices of a training step for all blocks that are present.

        `keys` are sample keys, (B,) int64; `dtype` is that of the features, or a wider one.
        """
        drop_paths = [m for m in self.modules() if isinstance(m, DropPath) and m.rate > 0]
        return draw(keys, drop_paths, dtype)

    def draws_for(self, x: Tensor, keys: Tensor | Draws | None) -> Draws | None:
        """Return the random choices for `forward`; None in evaluation mode."""
        if not self.training:
            return None
        if isinstance(keys, Draws):
            return keys
        dtype = torch.promote_types(next(self.parameters()).dtype, torch.float32)
        draws = self.draw(fresh_keys(x) if keys is None else keys, dtype)
        return draws if draws.scales is None else draws.sent(lambda rows: rows.to(x.device))

    def keep(self, blocks: Iterable[int], stem: bool, readout: bool) -> None:
        """Delete everything that does not belong to one stage, which has at least one block."""
        numbers = sorted(blocks)
        self.span = (numbers[0], numbers[-1] + 1)
        kept_names = {str(index) for index in numbers}
        for name in list(self.numbered_blocks):
            if name not in kept_names:
                del self.numbered_blocks[name]
        for name in (() if stem else self.stem_names) + (() if readout else self.readout_names):
            delattr(self, name)
        self.has_stem, self.has_readout = stem, readout
