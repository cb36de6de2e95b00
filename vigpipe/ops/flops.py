"""FLOPs of the fused operators for torch's counter, which counts matrix products only.

`vigpipe.model.import_hooks` imports this after torch's counter, which takes 70 MB of memory.
"""

from collections.abc import Sequence

import torch
from torch.utils.flop_counter import register_flop_formula

from vigpipe.ops import registered  # noqa: F401  defines the operators

Shape = Sequence[int]


@register_flop_formula(torch.ops.vigpipe.knn)
def _knn(x: Shape, y: Shape | None, *_: object, **__: object) -> int:
    num_images, num_nodes, num_channels = x
    return 2 * num_images * num_nodes * (num_nodes if y is None else y[1]) * num_channels


@register_flop_formula(torch.ops.vigpipe.grouped)
def _grouped(x: Shape, weight: Shape, *_: object, **__: object) -> int:
    return 2 * x[0] * weight[0] * weight[1]


@register_flop_formula(torch.ops.vigpipe.grouped_backward)
def _grouped_backward(grad: Shape, x: Shape, weight: Shape, *_: object, **__: object) -> int:
    return 4 * x[0] * weight[0] * weight[1]


@register_flop_formula(torch.ops.vigpipe.hidden)
def _hidden(x: Shape, first: Shape, bias: Shape, second: Shape, **_: object) -> int:
    return 2 * x[0] * first[1] * (first[0] + second[0])


# Both backwards compute the hidden layer again.
@register_flop_formula(torch.ops.vigpipe.hidden_backward)
def _hidden_backward(
    grad: Shape, x: Shape, first: Shape, bias: Shape, second: Shape, **_: object
) -> int:
    return 2 * x[0] * first[1] * (3 * first[0] + 2 * second[0])


@register_flop_formula(torch.ops.vigpipe.folded)
def _folded(x: Shape, total: Shape | None, weight: Shape, *_: object, **__: object) -> int:
    features = 3 if total is None else 7
    return 2 * x[0] * x[1] * weight[0] * (features + 3)


@register_flop_formula(torch.ops.vigpipe.folded_backward)
def _folded_backward(
    grad: Shape, x: Shape, total: Shape | None, weight: Shape, *_: object, **__: object
) -> int:
    features = 3 if total is None else 7
    return 2 * x[0] * x[1] * weight[0] * (3 * features + 2 * 3)
