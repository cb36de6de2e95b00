"""Register the fused operators with torch: schemas, devices, shapes, gradients.

This uses `torch.library.Library` instead of `custom_op`, which checks every call for aliases; that
takes longer than a small operator.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from vigpipe.ops import native
from vigpipe.ops.plain import candidates_of

_SCHEMAS = {
    "knn": "(Tensor x, Tensor? y, Tensor? bias, int k, int dilation, bool loop) -> Tensor",
    "aggregate": "(Tensor? x, Tensor? y, Tensor graph, Tensor? weights, str mode, bool interleave, "
    "bool has_backward) -> (Tensor, Tensor)",
    "aggregate_backward": "(Tensor grad, Tensor? x, Tensor? y, Tensor graph, Tensor winners, "
    "Tensor? weights, str mode, bool interleave) -> (Tensor?, Tensor?, Tensor?)",
    "norm": "(Tensor x, Tensor weight, Tensor bias, Tensor? residual, Tensor? sample_scale, "
    "float eps, bool gelu, Tensor? before) -> (Tensor, Tensor, Tensor)",
    "norm_backward": "(Tensor grad, Tensor x, Tensor weight, Tensor bias, Tensor? sample_scale, "
    "Tensor mean, Tensor variance, float eps, bool gelu) -> (Tensor, Tensor, Tensor)",
    "grouped": "(Tensor x, Tensor weight, int groups) -> Tensor",
    "grouped_backward": "(Tensor grad, Tensor x, Tensor weight, int groups) -> (Tensor, Tensor)",
    "hidden": "(Tensor x, Tensor first, Tensor bias, Tensor second) -> Tensor",
    "hidden_backward": "(Tensor grad, Tensor x, Tensor first, Tensor bias, Tensor second) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    "folded": "(Tensor x, Tensor? total, Tensor weight, Tensor bias, Tensor scale, Tensor shift, "
    "float eps, Tensor? rel, Tensor? conv_bias, Tensor? root, Tensor second, int height, int width"
    ") -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "folded_backward": "(Tensor grad, Tensor x, Tensor? total, Tensor weight, Tensor scale, "
    "Tensor shift, float eps, Tensor? rel, Tensor? root, Tensor second, int height, int width, "
    "Tensor moments, Tensor first, Tensor first_bias) -> (Tensor, Tensor?, Tensor, Tensor, Tensor, "
    "Tensor, Tensor?, Tensor?, Tensor?, Tensor)",
    "axial": "(Tensor x, int[] links, int sign, Tensor? limit, Tensor? temperature) -> "
    "(Tensor, Tensor)",
    "axial_backward": "(Tensor grad, Tensor x, int[] links, int sign, Tensor? limit, "
    "Tensor? temperature, Tensor distances) -> (Tensor, Tensor?)",
    "axial_far": "(Tensor x) -> Tensor",
}
_library = Library("vigpipe", "DEF")  # lives as long as the module


def _on_gpu(name: str) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        from vigpipe.ops import gpu  # imports Triton, which takes half a second

        return getattr(gpu, name)(*arguments)

    return run


for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema)
    _library.impl(_name, getattr(native, _name), "CPU")
for _name in ("knn", "aggregate", "aggregate_backward"):
    _library.impl(_name, _on_gpu(_name), "CUDA")


# ---- shapes -------------------------------------------------------------------------------------


def _gradients(*inputs: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if t is None else t.new_empty(t.shape) for t in inputs)


@register_fake("vigpipe::knn")
def _(x: Tensor, y: Tensor | None, bias: Tensor | None, k: int, *_: object) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1], k), dtype=torch.int64)


@register_fake("vigpipe::aggregate")
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    x, y, graph, _weights, *options = inputs
    return native.empty_aggregate(candidates_of(x, y), graph, *options)


@register_fake("vigpipe::aggregate_backward")
def _(grad: Tensor, *inputs: Any) -> tuple[Tensor | None, ...]:
    x, y, _graph, _winners, weights, *_ = inputs
    return _gradients(x, y, weights)


@register_fake("vigpipe::norm")
def _(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.new_empty(weight.shape, dtype=torch.float64)
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    return x.new_empty(x.shape, dtype=dtype), mean, torch.empty_like(mean)


@register_fake("vigpipe::norm_backward")
def _(grad: Tensor, *inputs: Any) -> tuple[Tensor | None, ...]:
    return _gradients(*inputs[:3])


@register_fake("vigpipe::grouped")
def _(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@register_fake("vigpipe::grouped_backward")
def _(grad: Tensor, x: Tensor, weight: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight)


@register_fake("vigpipe::hidden")
def _(x: Tensor, first: Tensor, bias: Tensor, second: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], second.shape[0]))


@register_fake("vigpipe::hidden_backward")
def _(grad: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
    return _gradients(*inputs)


@register_fake("vigpipe::folded")
def _(
    x: Tensor, total: Tensor | None, weight: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_hidden = weight.shape[0]
    first = x.new_empty((3 if total is None else 7, num_hidden))
    counted = x.new_empty((3, num_hidden), dtype=torch.float64)
    moments = x.new_empty((4, 3), dtype=torch.float64)
    return x.new_empty(x.shape), counted, moments, first, x.new_empty(num_hidden)


@register_fake("vigpipe::folded_backward")
def _(grad: Tensor, *inputs: Any) -> tuple[Tensor | None, ...]:
    x, total, weight, scale, shift, _, rel, root, second = inputs[:9]
    bias, conv_bias = scale, None if rel is None else scale  # of the same shape
    return _gradients(x, total, weight, bias, scale, shift, rel, conv_bias, root, second)


@register_fake("vigpipe::axial")
def _(x: Tensor, links: list[int], *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), native.empty_distances(x, links)


@register_fake("vigpipe::axial_backward")
def _(grad: Tensor, *inputs: Any) -> tuple[Tensor | None, ...]:
    x, _links, _sign, _limit, temperature, _distances = inputs
    return _gradients(x, temperature)


@register_fake("vigpipe::axial_far")
def _(x: Tensor) -> Tensor:
    return native.empty_distances(x, [0, 0, 1])[:, 0]


# ---- gradients ----------------------------------------------------------------------------------


def _save_aggregate(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, y, graph, weights, ctx.mode, ctx.interleave, _ = inputs
    ctx.mark_non_differentiable(output[1])
    # Only the sizes of x and y are needed, and with weights the values of y. Saving the tensors
    # costs nothing, because they stay alive anyway.
    ctx.save_for_backward(x, y, graph, output[1], weights)


def _aggregate_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    arguments = (grad, *ctx.saved_tensors, ctx.mode, ctx.interleave)
    d_x, d_y, d_weights = torch.ops.vigpipe.aggregate_backward(*arguments)
    return d_x, d_y, None, d_weights, None, None, None


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, residual, sample_scale, ctx.eps, ctx.gelu, before = inputs
    ctx.has_residual, ctx.has_before = residual is not None, before is not None
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, weight, bias, sample_scale, *output[1:])


def _norm_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    arguments = (grad, *ctx.saved_tensors, ctx.eps, ctx.gelu)
    d_x, d_weight, d_bias = torch.ops.vigpipe.norm_backward(*arguments)
    d_residual = grad if ctx.has_residual else None
    d_before = torch.zeros_like(d_bias) if ctx.has_before else None
    return d_x, d_weight, d_bias, d_residual, None, None, None, d_before


def _save_grouped(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.groups = inputs
    ctx.save_for_backward(x, weight)


def _grouped_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *torch.ops.vigpipe.grouped_backward(grad, *ctx.saved_tensors, ctx.groups), None


def _save_hidden(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _hidden_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    return torch.ops.vigpipe.hidden_backward(grad, *ctx.saved_tensors)


def _save_folded(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, total, weight, _, scale, shift, ctx.eps, rel, _, root, second, *ctx.grid = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, total, weight, scale, shift, rel, root, second, *output[2:])


def _folded_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, total, weight, scale, shift, rel, root, second, *computed = ctx.saved_tensors
    layer = (weight, scale, shift, ctx.eps, rel, root, second, *ctx.grid)
    grads = torch.ops.vigpipe.folded_backward(grad, x, total, *layer, *computed)
    return *grads[:6], None, *grads[6:], None, None


def _save_axial(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.links, ctx.sign, limit, temperature = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, limit, temperature, output[1])


def _axial_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, *gate, distances = ctx.saved_tensors
    arguments = grad, x, ctx.links, ctx.sign, *gate, distances
    d_x, d_temperature = torch.ops.vigpipe.axial_backward(*arguments)
    return d_x, None, None, None, d_temperature


def _differentiable(
    name: str, backward: Callable[..., Any], save: Callable[..., None]
) -> Callable[..., Any]:
    """Register the gradient of an operator, and return a function that calls it with less around.

    What torch does for a registered gradient takes longer than a small operator, because it goes
    through the schema at each call.
    """
    register_autograd(f"vigpipe::{name}", backward, setup_context=save)
    operator = getattr(torch.ops.vigpipe, name).default

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = operator(*inputs)
        save(ctx, inputs, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(name, (torch.autograd.Function,), methods)

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return operator(*inputs)
        return function.apply(*inputs)

    return call


register_autograd("vigpipe::aggregate", _aggregate_backward, setup_context=_save_aggregate)
norm = _differentiable("norm", _norm_backward, _save_norm)
grouped = _differentiable("grouped", _grouped_backward, _save_grouped)
hidden = _differentiable("hidden", _hidden_backward, _save_hidden)
axial = _differentiable("axial", _axial_backward, _save_axial)
folded = _differentiable("folded", _folded_backward, _save_folded)
