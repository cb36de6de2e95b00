"""The FFN half of a ViG block: a two-layer perceptron on every node by itself."""

from torch import Tensor, nn

from vigpipe.choices import Norm
from vigpipe.model.noise import KeyedDropout
from vigpipe.model.norm import make_norm
from vigpipe.model.pointwise import Pointwise


class FFN(nn.Module):
    """Pointwise, GELU, pointwise, residual: Han et al. 2022 (arXiv:2206.00272), equation 5.

    Args:
        channels: C; the hidden layer is 4C wide.
        norm: batch, layer or group.
        drop_path: probability that a sample skips this half.
        stream: number of the drop-path mask.
    """

    def __init__(self, channels: int, norm: Norm, drop_path: float, stream: int) -> None:
        super().__init__()
        hidden = 4 * channels
        self.fc1 = nn.Sequential(Pointwise(channels, hidden), make_norm(norm, hidden))
        self.act = nn.GELU()
        self.fc2 = nn.Sequential(Pointwise(hidden, channels), make_norm(norm, channels))
        self.drop_path = KeyedDropout(drop_path, stream, whole_sample=True)

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        return x + self.drop_path(self.fc2(self.act(self.fc1(x))), keys)
