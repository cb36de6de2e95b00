"""Pointwise, norm, GELU or not, residual or not: what ViG is made of beside its graphs."""

from torch import Tensor, nn

from vigpipe.config.choices import Norm
from vigpipe.model.norm import BatchNorm, fold_for_good, folded_into, make_norm, normed
from vigpipe.model.pointwise import Pointwise
from vigpipe.ops.plain import finished


class Layer(nn.Sequential):
    """A 1x1 convolution and a norm, with the names `0` and `1` as published.

    What follows them is done in the same pass over memory where the norm is a BatchNorm; in
    evaluation mode the norm itself is folded into the weights.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the result.
        norm: batch, layer or group.
        groups: of the convolution.
        gelu: apply GELU after the norm.
    """

    fused = True

    def __init__(
        self, in_channels: int, out_channels: int, norm: Norm, groups: int = 1, gelu: bool = False
    ) -> None:
        super().__init__(
            Pointwise(in_channels, out_channels, groups), make_norm(norm, out_channels)
        )
        self.gelu = gelu

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, residual: Tensor | None = None, sample_scale: Tensor | None = None
    ) -> Tensor:
        """(B, ..., C_in) -> (B, ..., C_out).

        Args:
            x: features.
            residual: is added last.
            sample_scale: (B,), what a sample is multiplied by before that; None for 1.
        """
        pointwise, norm = self
        assert isinstance(pointwise, Pointwise)
        if self.training or not self.fused or not isinstance(norm, BatchNorm):
            return normed(norm, pointwise(x), residual, sample_scale, self.gelu)
        weight, bias = folded_into(pointwise.weight.flatten(1), pointwise.bias, norm)
        return finished(pointwise.apply_weight(x, weight, bias), residual, sample_scale, self.gelu)

    def fuse(self) -> "Layer":
        """Fold the norm for good: what `timm.utils.reparameterize_model` asks for."""
        fold_for_good(self)
        return self

    def extra_repr(self) -> str:
        """What follows the norm."""
        return "gelu" if self.gelu else ""
