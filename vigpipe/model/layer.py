"""The layer that ViG repeats: 1x1 convolution, norm, optional GELU, optional residual."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from vigpipe.config.choices import Norm
from vigpipe.model.norm import NORM_ROLES, BatchNorm, fold_in_place, fold_norm, make_norm
from vigpipe.model.pointwise import Pointwise
from vigpipe.model.slicing import CONV_ROLES, Roles, within
from vigpipe.model.tokens import Tokens
from vigpipe.ops.plain import finished


class Layer(nn.Sequential):
    """A 1x1 convolution and a norm, then GELU and a residual if wanted.

    The published names of convolution and norm are `0` and `1`. A BatchNorm applies GELU and
    residual in its own pass over memory; in evaluation mode it is folded into the weights of the
    convolution, whose product is multiplied by `factor` before its bias is added. With `scale`,
    the norm's result is multiplied by learned factors of the channels, all of that value at first
    (LayerScale, arXiv:2103.17239).
    """

    fused = True
    tokens: Tokens | None = None
    roles: ClassVar[Roles] = {**within("0.", CONV_ROLES), **within("1.", NORM_ROLES)}

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        norm: Norm,
        groups: int = 1,
        gelu: bool = False,
        factor: float = 1.0,
        scale: float | None = None,
    ) -> None:
        super().__init__(
            Pointwise(in_channels, out_channels, groups, factor), make_norm(norm, out_channels)
        )
        self.gelu = gelu
        self.scale = None if scale is None else nn.Parameter(torch.full((out_channels,), scale))

    def forward(  # pyrefly: ignore[bad-override]
        self, x: Tensor, residual: Tensor | None = None, sample_scale: Tensor | None = None
    ) -> Tensor:
        """Run: (B, ..., C_in) -> (B, ..., C_out), times `sample_scale`, (B,), plus `residual`."""
        pointwise, norm, scale = self[0], self[1], self.scale
        assert isinstance(pointwise, Pointwise)
        if not isinstance(norm, BatchNorm) or (self.tokens is not None and self.training):
            y = pointwise(x)
            y = norm(y) if self.tokens is None else self.tokens.normalised(norm, y)
            y = y if scale is None else y * scale
            return finished(y, residual, sample_scale, self.gelu)
        if self.training:  # subtracting the mean cancels the bias, so it is never added
            y = pointwise.apply_weight(x, pointwise.matrix, None)
            return norm(y, residual, sample_scale, self.gelu, pointwise.bias, scale)
        if not self.fused:
            return norm(pointwise(x), residual, sample_scale, self.gelu, None, scale)
        weight, bias = fold_norm(pointwise.matrix, pointwise.bias, norm, scale)
        return finished(pointwise.apply_weight(x, weight, bias), residual, sample_scale, self.gelu)

    def fuse(self) -> "Layer":
        if isinstance(self[1], BatchNorm):
            fold_in_place(self, scale=self.scale)
            self.scale = None
        return self

    def extra_repr(self) -> str:
        return "gelu" if self.gelu else ""
