"""The 1x1 convolution as a matrix product on channels-last features."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vigpipe import ops


class Pointwise(nn.Module):
    """A 1x1 convolution on (B, ..., C_in), with the parameters of `torch.nn.Conv2d`.

    The matrix product is multiplied by `factor` before the bias is added.
    """

    fused = True

    def __init__(
        self, in_channels: int, out_channels: int, groups: int = 1, factor: float = 1.0
    ) -> None:
        super().__init__()
        self.groups, self.factor = groups, factor
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, 1, 1))
        self.bias = nn.Parameter(torch.zeros(out_channels))
        nn.init.kaiming_normal_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve: (B, ..., C_in) -> (B, ..., C_out)."""
        return self.apply_weight(x, self.matrix, self.bias)

    @property
    def matrix(self) -> Tensor:
        """The matrix that features are multiplied by, (C_out, C_in / groups)."""
        matrix = self.weight.flatten(1)
        return matrix if self.factor == 1.0 else matrix * self.factor

    def apply_weight(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve with parameters of the same shapes in place of the module's own."""
        if self.groups == 1:
            return F.linear(x, weight, bias)
        rows = x.reshape(-1, x.shape[-1])
        y = ops.grouped(rows, weight, self.groups, fused=self.fused)
        y = y.view(*x.shape[:-1], -1)
        # Under autocast y is narrower than the bias, and the sum is as narrow as that of F.linear.
        return y if bias is None else y.add_(bias.to(y.dtype))

    def extra_repr(self) -> str:
        out_channels, in_channels = self.weight.shape[:2]
        factor = "" if self.factor == 1.0 else f", factor={self.factor:g}"
        return f"{in_channels * self.groups}, {out_channels}, groups={self.groups}{factor}"
