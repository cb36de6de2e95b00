"""From nodes to logits."""

from torch import Tensor, nn

from vigpipe.choices import Norm
from vigpipe.model.noise import KeyedDropout
from vigpipe.model.norm import make_norm
from vigpipe.model.pointwise import Pointwise


class Readout(nn.Sequential):
    """Average over the nodes, pointwise to 1024, norm, GELU, dropout, pointwise to the classes.

    Args:
        channels: C of the nodes.
        num_classes: width of the logits.
        norm: batch, layer or group.
        dropout: rate before the last layer.
        stream: number of the dropout mask.
    """

    def __init__(
        self, channels: int, num_classes: int, norm: Norm, dropout: float, stream: int
    ) -> None:
        super().__init__(
            Pointwise(channels, 1024),
            make_norm(norm, 1024),
            nn.GELU(),
            KeyedDropout(dropout, stream),
            Pointwise(1024, num_classes),
        )

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """(B, N, C) -> (B, num_classes)."""
        widen, norm, act, dropout, classify = self
        return classify(dropout(act(norm(widen(x.mean(1)))), keys))
