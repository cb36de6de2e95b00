"""From nodes to logits."""

from typing import Literal

from torch import Tensor, nn

from vigpipe.config.choices import Norm
from vigpipe.model.keyed_dropout import KeyedDropout
from vigpipe.model.norm import fold_for_good, make_norm
from vigpipe.model.pointwise import Pointwise

WIDTH = 1024  # of the hidden layer


class Readout(nn.Sequential):
    """Average over the nodes, pointwise to 1024, norm, GELU, dropout, pointwise to the classes.

    Args:
        channels: C of the nodes.
        num_classes: width of the logits; 0 leaves the last layer out.
        norm: batch, layer or group.
        dropout: rate before the last layer.
        stream: number of the dropout mask.
        pool: `avg`, or nothing: then every node has logits of its own.
    """

    def __init__(
        self,
        channels: int,
        num_classes: int,
        norm: Norm,
        dropout: float,
        stream: int,
        pool: Literal["avg", ""] = "avg",
    ) -> None:
        super().__init__(
            Pointwise(channels, WIDTH),
            make_norm(norm, WIDTH),
            nn.GELU(),
            KeyedDropout(dropout, stream),
            nn.Identity(),
        )
        self.reset(num_classes, pool)

    def reset(self, num_classes: int, pool: Literal["avg", ""]) -> None:
        """A new last layer, and another way to pool."""
        if pool not in ("avg", ""):
            raise ValueError(f"global_pool is 'avg' or '' (got {pool!r})")
        widen = self[0]
        assert isinstance(widen, Pointwise)
        self.pool = pool
        classify = Pointwise(WIDTH, num_classes) if num_classes else nn.Identity()
        self[4] = classify.to(widen.weight.device, widen.weight.dtype).train(self.training)

    def fuse(self) -> "Readout":
        """Fold the norm for good: what `timm.utils.reparameterize_model` asks for."""
        fold_for_good(self)
        return self

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, keys: Tensor | None, pre_logits: bool = False
    ) -> Tensor:
        """(B, H, W, C) -> (B, num_classes), or (B, 1024) before the last layer."""
        widen, norm, act, dropout, classify = self
        if self.pool:
            x = x.flatten(1, 2).mean(1)
        x = dropout(act(norm(widen(x))), keys)
        return x if pre_logits else classify(x)
