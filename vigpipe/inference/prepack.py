"""Prepare a ViG for inference on a CPU: few passes over memory for each product.

The norms are folded into the weights for good. The weights are converted once to the type that
products are computed in, and laid out as the kernels of oneDNN read them. A product adds its bias,
and in bfloat16 applies GELU, or adds the residual, before its result leaves the cache. In float32 a
pass of its own is faster for GELU (vigpipe.ops.gelu).
"""

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from vigpipe.config.typed import shown
from vigpipe.errors import InputError
from vigpipe.model.image import ImageModel
from vigpipe.model.layer import Layer
from vigpipe.model.mobile import Depthwise, Merge, PositionEncoding
from vigpipe.model.pointwise import Pointwise
from vigpipe.model.readout import Readout
from vigpipe.model.staged import StagedModel
from vigpipe.model.stem import ConvStem, Downsample
from vigpipe.ops.gelu import gelu_

Sides = tuple[int, ...] | str  # torch.nn.Conv2d has both
Geometry = tuple[Sides, Sides, Sides, int]  # padding, stride, dilation, number of groups


def has_kernels(dtype: torch.dtype) -> bool:
    """Tell whether this torch has oneDNN, and it and the processor compute products of a type."""
    if not torch.backends.mkldnn.is_available():
        return False
    is_narrow = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 or is_narrow


def can_prepack(model: nn.Module, dtype: torch.dtype) -> bool:
    """Tell whether `prepack` takes a model: of images, in float32, on a CPU with kernels."""
    if not isinstance(model, ImageModel) or not has_kernels(dtype):
        return False
    if any(isinstance(module, Prepacked) for module in model.modules()):
        return False
    return all(p.dtype == torch.float32 and p.device.type == "cpu" for p in model.parameters())


@torch.no_grad()
def prepack(model: StagedModel, dtype: torch.dtype = torch.float32) -> StagedModel:
    """Change a model on a CPU so that it computes logits faster, and can do nothing else.

    The weights lie in a form that only oneDNN knows, so the model refuses to be trained, saved and
    moved afterwards. Layers with another norm than BatchNorm stay as they are. Two heads become
    one, and position encodings take the features that they are added to along.

    Args:
        model: a model of images with float32 weights, but vig_study, or a stage of one; it is
            changed.
        dtype: type that products are computed in, float32 or bfloat16. What has another type under
            autocast has it here.

    Returns:
        The model, in evaluation mode. Its logits are those of the model before up to rounding,
        which is that of bfloat16 where products are computed in it.

    Raises:
        InputError: this is no such model on a CPU, it is prepacked already, or there are no kernels
            for the type.
    """
    if not isinstance(dtype, torch.dtype) or not can_prepack(model, dtype):
        dtype_name = dtype if isinstance(dtype, torch.dtype) else shown(dtype)
        raise InputError(
            f"prepack: takes a model of images (but vig_study) with float32 weights on a CPU that "
            f"torch {torch.__version__} has kernels of oneDNN for, once, and float32 or bfloat16 "
            f"as type of the products (got {type(model).__name__}, {dtype_name}); use the model "
            "as it is"
        )
    for module in list(model.eval().modules()):
        for name, child in module.named_children():
            setattr(module, name, _prepacked(child, dtype))
    model.register_forward_pre_hook(_refuse_export)
    return model


def _refuse_export(*_: Any) -> None:
    if torch.compiler.is_exporting():
        raise _refused("exported")


def _prepacked(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return what replaces a module: its prepacked version, or itself."""
    if isinstance(module, Layer):
        pointwise, norm = module.fuse()
        return _product(pointwise, dtype, module.gelu) if isinstance(norm, nn.Identity) else module
    if isinstance(module, ConvStem):
        convs = module.fuse().convs
        return Stem(convs, dtype) if isinstance(convs[1], nn.Identity) else module
    if isinstance(module, Depthwise):
        conv, norm = module.fuse()
        if not isinstance(norm, nn.Identity):
            return module
        assert isinstance(conv, nn.Conv2d)
        return OnNodes(_convolution(conv, dtype, gelu=True))
    if isinstance(module, PositionEncoding):
        return OnNodes(_convolution(module.fuse().conv, dtype))
    if isinstance(module, nn.Linear):
        return Product(module.weight, module.bias, dtype)
    if isinstance(module, Merge) and isinstance(module.adjust, Pointwise):
        module.adjust = _product(module.adjust, dtype)  # pyrefly: ignore[bad-assignment]
    if isinstance(module, Downsample):  # the model looks for one, so what is in it is replaced
        conv = module.fuse().conv[0]
        assert isinstance(conv, nn.Conv2d)  # a model is prepacked once
        module.conv[0] = _convolution(conv, dtype)
    if isinstance(module, Readout):
        module.fuse()
        module.merge_heads()
        for i in (0, 4):
            if isinstance(module[i], Pointwise):
                module[i] = _product(module[i], dtype)
    return module


def _product(pointwise: nn.Module, dtype: torch.dtype, gelu: bool = False) -> nn.Module:
    assert isinstance(pointwise, Pointwise)
    if pointwise.groups == 1:
        return Product(pointwise.matrix, pointwise.bias, dtype, gelu)
    return GroupedProduct(pointwise, dtype, gelu)


def _convolution(conv: nn.Conv2d, dtype: torch.dtype, gelu: bool = False) -> "Convolution":
    assert conv.bias is not None
    geometry = conv.padding, conv.stride, conv.dilation, conv.groups
    return Convolution(conv.weight, conv.bias, geometry, dtype, gelu)


class Prepacked(nn.Module):
    """What computes products of a dtype, and GELU of them; it refuses all else that modules do."""

    def __init__(self, dtype: torch.dtype, gelu: bool) -> None:
        super().__init__()
        self.training = False
        self.dtype = dtype
        self.has_own_pass = gelu and dtype == torch.float32
        # What torch's operators of oneDNN take as the function that follows a product.
        self.after: tuple[str, list[float], str] = (
            ("gelu", [], "none") if gelu and not self.has_own_pass else ("none", [], "")
        )

    def finished(self, y: Tensor) -> Tensor:
        """Do with a product what its kernel has not done."""
        return gelu_(y) if self.has_own_pass else y

    def train(self, mode: bool = True) -> "Prepacked":
        """Raise InputError unless evaluation is asked for."""
        if mode:
            raise _refused("trained")
        return self

    def _apply(self, *arguments: Any, **options: Any) -> NoReturn:
        raise _refused("moved or converted")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise _refused("copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _refused("pickled")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> NoReturn:
        raise _refused("saved")


def _refused(what: str) -> InputError:
    return InputError(f"prepack: a prepacked model cannot be {what}; load the weights once more")


class Product(Prepacked):
    """A `Layer` in evaluation mode, with its norm folded: a product, then GELU and a residual."""

    def __init__(
        self, matrix: Tensor, bias: Tensor | None, dtype: torch.dtype, gelu: bool = False
    ) -> None:
        super().__init__(dtype, gelu)
        matrix = matrix.detach().to(dtype).contiguous()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(matrix)
        self.bias = None if bias is None else bias.detach().to(dtype)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, sample_scale: Tensor | None = None
    ) -> Tensor:
        """Run the layer: (B, ..., C_in) -> (B, ..., C_out), the shape of the residual too.

        The residual is added last; `sample_scale` is None, as always in evaluation mode. The result
        has the type of the product, or of the residual if that is wider.
        """
        x, multiply = x.to(self.dtype), torch.ops.mkldnn._linear_pointwise
        if residual is not None and residual.dtype == self.dtype:
            return multiply(x, residual, self.weight, self.bias, "add")
        y = self.finished(multiply(x, self.weight, self.bias, *self.after))
        return y if residual is None else residual + y


class Convolution(Prepacked):
    """A convolution, then GELU, on features with channels last in memory."""

    def __init__(
        self, weight: Tensor, bias: Tensor, geometry: Geometry, dtype: torch.dtype, gelu: bool
    ) -> None:
        super().__init__(dtype, gelu)
        self.geometry = geometry
        # Which layout is the fastest depends on the size of the images; oneDNN makes it quickly.
        self.weight = weight.detach().to(dtype, memory_format=torch.channels_last)
        self.bias = bias.detach().to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve: (B, C_in, H, W) -> (B, C_out, H', W')."""
        x = x.to(self.dtype, memory_format=torch.channels_last)
        convolve = torch.ops.mkldnn._convolution_pointwise
        return self.finished(convolve(x, self.weight, self.bias, *self.geometry, *self.after))


class GroupedProduct(Convolution):
    """A `Layer` with groups in evaluation mode, with its norm folded: a product, then GELU."""

    def __init__(self, pointwise: Pointwise, dtype: torch.dtype, gelu: bool) -> None:
        weight, geometry = pointwise.matrix[:, :, None, None], ((0, 0), (1, 1), (1, 1))
        super().__init__(weight, pointwise.bias, (*geometry, pointwise.groups), dtype, gelu)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer: (B, ..., C_in) -> (B, ..., C_out)."""
        rows = x.reshape(1, -1, 1, x.shape[-1])  # a picture of R x 1 pixels
        return super().forward(rows.movedim(-1, 1)).movedim(1, -1).reshape(*x.shape[:-1], -1)


class OnNodes(nn.Module):
    """A convolution of nodes, (B, H, W, C)."""

    def __init__(self, conv: Convolution) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        """Convolve: (B, H, W, C) -> (B, H, W, C)."""
        return self.conv(x.movedim(-1, 1)).movedim(1, -1).contiguous()


class Stem(nn.Sequential):
    """A `ConvStem` in evaluation mode, from its convolutions with the norms folded into them."""

    def __init__(self, convs: nn.Sequential, dtype: torch.dtype) -> None:
        places = [i for i, conv in enumerate(convs) if isinstance(conv, nn.Conv2d)]
        packed: list[nn.Module] = []
        for i in places:
            conv = convs[i]
            assert isinstance(conv, nn.Conv2d)
            packed.append(_convolution(conv, dtype, gelu=i + 2 < len(convs)))
        super().__init__(*packed)

    def forward(self, images: Tensor) -> Tensor:  # pyrefly: ignore[bad-override-param-name]
        """Turn images into nodes: (B, C_in, H, W) -> (B, H', W', C)."""
        return super().forward(images).movedim(1, -1).contiguous()
