"""FLOPs of the fused operators for torch's counter, which counts matrix products only.

`vigpipe.model.import_hooks` imports this after torch's counter, which takes 70 MB of memory.
"""

from collections.abc import Sequence

import torch
from torch.utils.flop_counter import register_flop_formula

from vigpipe.ops import registered  # noqa: F401  defines the operators


def _knn_flops(x: Sequence[int], y: Sequence[int] | None, *_: object, **__: object) -> int:
    num_images, num_nodes, num_channels = x
    return 2 * num_images * num_nodes * (num_nodes if y is None else y[1]) * num_channels


def _grouped_flops(x: Sequence[int], weight: Sequence[int], *_: object, **__: object) -> int:
    return 2 * x[0] * weight[0] * weight[1]


def _grouped_backward_flops(
    grad: object, x: Sequence[int], weight: Sequence[int], *_: object, **__: object
) -> int:
    return 2 * _grouped_flops(x, weight)


def _hidden_flops(
    x: Sequence[int], first: Sequence[int], bias: object, second: Sequence[int], **_: object
) -> int:
    return 2 * x[0] * first[1] * (first[0] + second[0])


def _hidden_backward_flops(
    grad: object,
    x: Sequence[int],
    first: Sequence[int],
    bias: object,
    second: Sequence[int],
    **_: object,
) -> int:
    # The backward computes the hidden layer again.
    return 2 * x[0] * first[1] * (3 * first[0] + 2 * second[0])


def _folded_flops(
    x: Sequence[int], total: Sequence[int] | None, weight: Sequence[int], *_: object, **__: object
) -> int:
    features = 3 if total is None else 7
    return _hidden_flops((x[0] * x[1], features), (features, weight[0]), None, (3, weight[0]))


def _folded_backward_flops(
    grad: object,
    x: Sequence[int],
    total: Sequence[int] | None,
    weight: Sequence[int],
    *_: object,
    **__: object,
) -> int:
    features = 3 if total is None else 7
    rows = (x[0] * x[1], features)
    return _hidden_backward_flops(None, rows, (features, weight[0]), None, (3, weight[0]))


register_flop_formula(torch.ops.vigpipe.knn)(_knn_flops)
register_flop_formula(torch.ops.vigpipe.grouped)(_grouped_flops)
register_flop_formula(torch.ops.vigpipe.grouped_backward)(_grouped_backward_flops)
register_flop_formula(torch.ops.vigpipe.hidden)(_hidden_flops)
register_flop_formula(torch.ops.vigpipe.hidden_backward)(_hidden_backward_flops)
register_flop_formula(torch.ops.vigpipe.folded)(_folded_flops)
register_flop_formula(torch.ops.vigpipe.folded_backward)(_folded_backward_flops)
