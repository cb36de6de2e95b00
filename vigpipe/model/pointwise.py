"""The 1x1 convolution as a matrix product on channels-last features."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Pointwise(nn.Module):
    """A 1x1 convolution on (B, ..., C_in), with the parameters of `torch.nn.Conv2d`.

    With channels last, a node's features are contiguous, so neighbours are gathered quickly and the
    convolution is one matrix product.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the result.
        groups: number of groups that input and output channels are divided into; each group of
            outputs depends on its group of inputs only.
        factor: what the product is multiplied by before the bias is added.
    """

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
        """What features are multiplied by, (C_out, C_in / groups)."""
        matrix = self.weight.flatten(1)
        return matrix if self.factor == 1.0 else matrix * self.factor

    def apply_weight(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Convolve with given parameters in place of the module's own.

        Args:
            x: features, (B, ..., C_in).
            weight: (C_out, C_in / groups).
            bias: (C_out,).

        Returns:
            (B, ..., C_out).
        """
        if self.groups == 1:
            return F.linear(x, weight, bias)
        rows = x.reshape(-1, self.groups, weight.shape[1]).transpose(0, 1)  # (G, rows, C_in / G)
        weight = weight.unflatten(0, (self.groups, -1)).transpose(1, 2)  # (G, C_in / G, C_out / G)
        y = torch.bmm(rows, weight).transpose(0, 1).reshape(*x.shape[:-1], -1)
        return (
            y.add_(bias) if y.dtype == bias.dtype else y + bias
        )  # under autocast y is bfloat16 and the sum float32

    def extra_repr(self) -> str:
        """Show channels and groups."""
        out_channels, in_channels = self.weight.shape[:2]
        factor = "" if self.factor == 1.0 else f", factor={self.factor:g}"
        return f"{in_channels * self.groups}, {out_channels}, groups={self.groups}{factor}"
