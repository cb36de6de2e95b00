"""The same bits, whatever the number of threads."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def assert_threads_change_nothing(
    outcome: Callable[[], Iterable[Tensor]], numbers: tuple[int, ...] = (1, 2, 5)
) -> None:
    """Compare what `outcome` returns on some numbers of threads."""
    results = []
    for number in numbers:
        torch.set_num_threads(number)
        results.append([*outcome()])
    torch.set_num_threads(1)  # as tests/conftest.py has it
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
