"""The guard on allocations sees what is made, and lets pass what is not."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.hidden_sides import NoHiddenSides


@pytest.mark.parametrize(
    "make",
    [
        lambda wide, x: torch.empty(3, 32),
        lambda wide, x: x @ wide.T,
        lambda wide, x: wide.clone(),
        lambda wide, x: wide[:, :2].contiguous(),
        lambda wide, x: torch.empty(0).resize_(32),
    ],
)
def test_a_tensor_with_a_hidden_side_is_refused(make):
    wide, x = torch.randn(32, 8), torch.randn(5, 8)
    with (
        pytest.raises(AssertionError, match="makes a tensor with a hidden side"),
        NoHiddenSides(32),
    ):
        make(wide, x)


def test_views_files_and_meta_pass(tmp_path):
    wide, x = torch.randn(32, 8), torch.randn(5, 8)
    file = tmp_path / "rows"
    file.write_bytes(bytes(4 * 32 * 8))
    with NoHiddenSides(32):
        assert (x @ wide[8:16].T).shape == (5, 8)
        wide.T[:, 3].mul_(2)
        mapped = torch.from_file(str(file), shared=True, size=256).view(32, 8)
        mapped[0] = 1
        storage: Any = torch.UntypedStorage.from_file(str(file), True, 1024)
        torch.empty(0).set_(storage, 0, (32, 8), (8, 1))[1] = 1
        nn.Linear(8, 32, device="meta")
    assert mapped[:2].sum() == 16
