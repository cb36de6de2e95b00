"""The FFN half of a ViG block: a two-layer perceptron on every node separately."""

from torch import Tensor, nn

from vigpipe.config.choices import Norm
from vigpipe.model.keyed_dropout import Draws, DropPath
from vigpipe.model.layer import Layer


class FFN(nn.Module):
    """Pointwise, GELU, pointwise, residual: Han et al. 2022 (arXiv:2206.00272), equation 5.

    Args:
        channels: C; the hidden layer is 4C wide.
        norm: normalisation after each layer: batch, layer or group.
        drop_path: probability that a sample skips this half of the block.
        stream: stream number of the drop-path mask.
    """

    def __init__(self, channels: int, norm: Norm, drop_path: float, stream: int) -> None:
        super().__init__()
        hidden = 4 * channels
        self.fc1 = Layer(channels, hidden, norm, gelu=True)
        self.fc2 = Layer(hidden, channels, norm)
        self.drop_path = DropPath(drop_path, stream)

    def forward(self, x: Tensor, draws: Draws | None) -> Tensor:
        """Run this half of the block: (B, N, C) -> (B, N, C)."""
        return self.fc2(self.fc1(x), x, self.drop_path(x, draws))
