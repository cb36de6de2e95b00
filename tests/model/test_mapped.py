"""Tensors that are parts of a file: what is written to them is in the file."""

import errno
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.full_disk import files_of_at_most
from vigpipe.errors import InputError
from vigpipe.files.weights_metadata import read_metadata
from vigpipe.model import mapped

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


def shapes():
    """Of every dtype an odd number of numbers, a single one and none."""
    return {
        f"{dtype}.{shape}": (dtype, shape) for dtype in DTYPES for shape in ((3, 5), (), (0, 4))
    }


def test_what_is_written_to_the_tensors_is_in_the_file(tmp_path):
    path = tmp_path / "rows.safetensors"
    tensors = mapped.create(path, shapes(), {"of": "é"})
    for name, tensor in load_file(path).items():
        assert (tensor.dtype, tuple(tensor.shape)) == shapes()[name]
        assert not tensor.any()
    for i, tensor in enumerate(tensors.values()):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + i)
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys() == shapes().keys()
    for i, (name, tensor) in enumerate(tensors.items()):
        assert torch.equal(loaded[name], tensor)
        assert tensor.flatten().tolist() == [i + n for n in range(tensor.numel())]
    assert read_metadata(path) == {"of": "é"}


def test_the_data_are_aligned_whatever_the_names_are(tmp_path):
    for name in ("w", "weight", "weight of a layer"):
        tensors = mapped.create(
            tmp_path / "a", {name: (torch.bfloat16, (3,)), "n": (torch.float64, (5,))}
        )
        assert all(t.data_ptr() % t.itemsize == 0 for t in tensors.values())
        assert tensors["n"].data_ptr() % 64 == 0


def test_what_only_this_process_sees_leaves_the_file_alone(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.arange(6.0).view(2, 3)}, path)
    path.chmod(0o400)
    tensor = mapped.open(path, writes_file=False)["w"]
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    tensor.zero_()
    assert load_file(path)["w"].sum() == 15


def test_a_file_that_is_replaced_stays_whole_for_those_who_have_mapped_it(tmp_path):
    path = tmp_path / "w.safetensors"
    old = mapped.create(path, {"w": (torch.float32, (1 << 16,))})["w"].fill_(3)
    mapped.create(path, {"w": (torch.float32, (1,))})
    assert old.eq(3).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_all_of_a_tensor(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(mapped, "_BLOCK_BYTES", 32)
    for count in (0, 1, 11, 12, 13):
        source = torch.arange(2 * count).view(2, count).double()
        target = mapped.create(tmp_path / "t", {"w": (dtype, (2, count))})["w"]
        mapped.copy_blocks(target, source)
        assert torch.equal(target, source.to(dtype))
        assert all(block.nbytes <= 32 for block in mapped.blocks(target))


def test_a_full_disk_is_told_before_anything_is_written_to_a_tensor(tmp_path):
    """A map of a file without space ends the process by SIGBUS when it is written to."""
    with files_of_at_most(1 << 12), pytest.raises(OSError, match="too large") as caught:
        mapped.create(tmp_path / "w", {"w": (torch.float32, (1 << 16,))})
    assert caught.value.errno == errno.EFBIG
    assert not list(tmp_path.iterdir())
    path = tmp_path / "w"
    mapped.create(path, {"w": (torch.float32, (1 << 16,))})
    assert path.stat().st_blocks * 512 >= 1 << 18


def test_what_is_no_file_of_tensors_and_a_type_that_no_model_has_are_named(tmp_path):
    path = tmp_path / "rows"
    for content in (None, b"", b"no tensors at all"):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InputError, match=f"{path}: "):
            mapped.open(path)
    text = json.dumps({"w": {"dtype": "U16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0\0")
    with pytest.raises(InputError, match="type U16"):
        mapped.open(path)
