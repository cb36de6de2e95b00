"""Weights come together under the unsplit model's names, and come back from the file."""

import pytest
import torch
from safetensors.torch import load_file

from tests.full_disk import files_of_at_most
from tests.refusals import check_refusals
from vigpipe.checkpoint.weights_file import gather_named, save_rows, save_weights
from vigpipe.errors import InputError
from vigpipe.files.weights_metadata import read_metadata
from vigpipe.model import mapped


def test_what_was_gathered_no_longer_changes_with_training():
    weight = torch.nn.Parameter(torch.ones(3))
    copy = gather_named({"w": weight}, None, 0)
    with torch.no_grad():
        weight.zero_()
    assert copy is not None
    assert copy["w"].tolist() == [1, 1, 1]
    assert not copy["w"].requires_grad


def test_saved_weights_come_back_in_every_dtype_and_stride(tmp_path):
    path = tmp_path / "model.safetensors"
    state = {
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "double": torch.tensor([1 / 3], dtype=torch.float64),
        "counter": torch.tensor(7),
    }
    save_weights(path, state)
    loaded = load_file(path)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert all(loaded[name].dtype == tensor.dtype for name, tensor in state.items())


def test_equal_weights_make_equal_files(tmp_path):
    """safetensors wrote metadata in another order every time, so that equal runs looked unequal."""
    metadata = {f"key {i}": "\n“é”\x01" * i for i in range(12)}
    for name in ("a", "b"):
        save_weights(tmp_path / name, {"w": torch.arange(3.0)}, metadata)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert read_metadata(tmp_path / "a") == {"format": "pt", **metadata}
    assert load_file(tmp_path / "a")["w"].tolist() == [0, 1, 2]
    save_weights(tmp_path / "a", {"w": torch.zeros(1)})
    assert read_metadata(tmp_path / "a") == {"format": "pt"}


def test_rows_that_are_filled_make_the_file_that_the_whole_would(tmp_path):
    metadata = {"b": "2", "a": "1"}
    state = {"w": torch.arange(12.0).view(4, 3), "n": torch.tensor(7), "d": torch.ones(3).double()}
    save_weights(tmp_path / "whole", state, metadata)
    with save_rows(tmp_path / "rows", mapped.shapes_of(state), metadata) as tensors:
        for name, tensor in state.items():
            tensors[name].copy_(tensor)
        assert not (tmp_path / "rows").exists()
    assert (tmp_path / "rows").read_bytes() == (tmp_path / "whole").read_bytes()
    assert (tmp_path / "rows").stat().st_mode == (tmp_path / "whole").stat().st_mode


def test_rows_that_cannot_be_written_leave_the_old_file_alone(tmp_path):
    path = tmp_path / "model.safetensors"
    save_weights(path, {"w": torch.ones(3)})
    shapes = {"w": (torch.float32, (1 << 16,))}
    with (
        files_of_at_most(1 << 12),
        pytest.raises(InputError, match="cannot be written"),
        save_rows(path, shapes),
    ):
        pass
    with pytest.raises(ZeroDivisionError), save_rows(path, shapes):
        raise ZeroDivisionError
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert load_file(path)["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("content", [None, b"no tensors at all"])
def test_what_is_no_file_of_weights_is_named(content, tmp_path):
    path = tmp_path / "model.pth"
    if content is not None:
        path.write_bytes(content)
    check_refusals([(path, "")], read_metadata, where=path)
