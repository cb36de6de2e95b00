"""A wide model is put together from stored rows and slices, and never whole in memory."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.test_manifest import PLAIN
from tests.hidden_sides import NoHiddenSides
from tests.refusals import check_refusals
from vigpipe.checkpoint import wide
from vigpipe.checkpoint.manifest import list_checkpoints, verify
from vigpipe.checkpoint.saver import Saver, rank_file_name
from vigpipe.checkpoint.state import replica_prefix
from vigpipe.checkpoint.wide import WideModel, assemble, check_wide, export_wide, wide_shapes
from vigpipe.files.weights_metadata import read_metadata
from vigpipe.model import mapped
from vigpipe.model.slicing import Side, Slicing

A, B, N_A, N_B = Side("a"), Side("b"), 88, 136
SHAPES = {  # shape and sides of a wide tensor
    "first.weight": ((N_A, 5), (A, None)),
    "first.bias": ((N_A,), (A,)),
    "concat.weight": ((N_B, 2 * N_A), (B, Side("a", repeats=2))),
    "interleaved.weight": ((N_B, 2 * N_A, 1, 1), (B, Side("a", run=2), None, None)),
    "twice.weight": ((2 * N_A, N_A, 3), (Side("a", repeats=2), A, None)),
    "attention": ((1, 3, N_B), (None, None, B)),
    "far.apart": ((N_A, 3, N_B), (A, None, B)),
    "last.weight": ((3, N_B), (None, B)),
    "last.bias": ((3,), (None,)),
    "scale": ((), ()),
    "count": ((), ()),
}
LIKE = {
    name: torch.empty(shape, dtype=torch.int64 if name == "count" else None, device="meta")
    for name, (shape, _) in SHAPES.items()
}
SLICING = Slicing({"a": N_A, "b": N_B}, {name: sides for name, (_, sides) in SHAPES.items()})


def model(num, chosen=None):
    return WideModel(SLICING, LIKE, num, chosen)


def entries_of(name, channels):
    """The entries of some channels in every dimension of a tensor, as np.ix_ wants them."""
    shape, sides = SHAPES[name]
    return tuple(
        (torch.arange(n) if side is None else side.entries(channels[side.group], size(side))).view(
            -1, *[1] * (len(shape) - 1 - i)
        )
        for i, (n, side) in enumerate(zip(shape, sides, strict=True))
    )


def size(side):
    return SLICING.sizes[side.group]


def world(num, dtype=torch.float32):
    """Wide tensors, their rows, index sets, trained slices, and what must come of it."""
    generator = torch.Generator().manual_seed(num)
    start = {
        name: torch.tensor(7) if name == "count" else torch.randn(shape, generator=generator)
        for name, (shape, _) in SHAPES.items()
    }
    start = {k: t.to(dtype) if t.is_floating_point() else t for k, t in start.items()}
    chosen = {
        group: torch.randperm(n, generator=generator).view(num, -1).sort(1).values
        for group, n in SLICING.sizes.items()
    }
    rows = [{} for _ in range(num)]
    parts = [{} for _ in range(num)]
    expected = {name: tensor.clone() for name, tensor in start.items()}
    for name, tensor in start.items():
        dim = SLICING.owned(name)
        for j in range(num):
            if dim is not None:
                side = SHAPES[name][1][dim]
                assert side is not None
                block = torch.arange(j * size(side) // num, (j + 1) * size(side) // num)
                rows[j][name] = tensor.index_select(dim, side.entries(block, size(side)))
                index = entries_of(name, {group: sets[j] for group, sets in chosen.items()})
                parts[j][name] = tensor[index] + j + 1
                expected[name][index] = parts[j][name]
            else:
                parts[j][name] = tensor + (j + 1)
        if dim is None:
            all_of_them = torch.stack([part[name] for part in parts])
            expected[name] = (
                all_of_them.double().mean(0).to(dtype)
                if tensor.is_floating_point()
                else all_of_them[0]
            )
    return start, rows, parts, lambda group, j: chosen[group][j], expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("num", [1, 2, 4, 8])
def test_slices_lie_over_the_rows_and_what_is_whole_is_averaged(num, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(wide, "_NUMBERS_AT_ONCE", 30)
    monkeypatch.setattr(mapped, "_NUMBERS_AT_ONCE", 30)
    _, rows, parts, chosen, expected = world(num, dtype)
    targets = mapped.create(tmp_path / "w", wide_shapes(model(num), parts, rows, "here"))
    assemble(targets, SLICING, parts, rows, chosen)
    assert targets.keys() == expected.keys()
    assert all(torch.equal(targets[name], expected[name]) for name in expected)


def saved(folder, rows, parts):
    """A checkpoint of some replicas, one rank each."""
    files = [rank_file_name(0, j) for j in range(len(parts))]
    savers = [Saver(folder, files, name, j == 0, 2, "aa", print) for j, name in enumerate(files)]
    for j, saver in enumerate(savers):
        prefix = replica_prefix(j)
        state = {f"{prefix}model/{name}": tensor for name, tensor in parts[j].items()}
        stored = {f"{prefix}rows/{name}": tensor for name, tensor in rows[j].items()}
        saver.save(replace(PLAIN, weights={"model": "sage"}), state, stored)
    for saver in savers:
        saver.finish()
    (checkpoint,) = list_checkpoints(folder)
    return checkpoint, verify(checkpoint)


def test_a_checkpoint_is_exported_without_memory_for_a_whole_side(tmp_path):
    _, rows, parts, chosen, expected = world(4)
    checkpoint, manifest = saved(tmp_path, rows, parts)
    path = tmp_path / "model.safetensors"
    with NoHiddenSides(N_A, N_B, 2 * N_A):
        export_wide(checkpoint, manifest, path, model(4, chosen))
    loaded = load_file(path)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert read_metadata(path) == {"format": "pt", "model": "sage"}


OTHERS = [  # replicas, kind, name, what is there instead, and the problem
    ([2], "rows", "first.bias", None, "replica2/rows/first.bias is missing, expected float32 of"),
    ([2], "model", "first.bias", None, "replica2/model/first.bias is missing"),
    (
        [2],
        "rows",
        "concat.weight",
        torch.zeros(1, 2),
        r"is float32 of shape \(1, 2\), .* \(34, 176\)",
    ),
    ([2], "model", "concat.weight", torch.zeros(34, 176), r"\(34, 176\), expected .* \(34, 44\)"),
    ([2], "model", "last.bias", torch.zeros(4), r"is .* \(4,\), expected .* \(3,\)"),
    (
        range(4),
        "model",
        "last.bias",
        torch.zeros(4),
        r" model/last.bias is .* \(4,\), expected .* \(3,\)",
    ),
    (range(4), "rows", "first.weight", torch.zeros(22, 6), r"rows/first.* \(22, 6\), expected"),
    (
        [3],
        "rows",
        "first.bias",
        torch.zeros(22).double(),
        "replica3/.* is float64 .*expected float32",
    ),
    (range(4), "model", "count", torch.zeros(()), " model/count is float32 .*int64"),
    (
        [1],
        "rows",
        "optimizer/exp_avg/last.weight",
        torch.zeros(3, 34),
        " rows/opt.* is mis",
    ),
]


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    def attempt(number, replicas, kind, name, other):
        _, rows, parts, chosen, _ = world(4)
        for replica in replicas:
            tensors = {"rows": rows, "model": parts}[kind][replica]
            tensors[name] = other
            if other is None:
                del tensors[name]
        folder = tmp_path / str(number)
        checkpoint, manifest = saved(folder, rows, parts)
        if number < 2:
            export_wide(checkpoint, manifest, tmp_path / "model.safetensors", model(4, chosen))
        check_wide(checkpoint, manifest, model(4))

    rows = [(number, *row) for number, row in enumerate(OTHERS)]
    check_refusals(rows, attempt, r"/checkpoints/[^ ]+:.*", where=tmp_path)
    assert not list(tmp_path.glob("*.partial"))
    assert not list(tmp_path.glob("model*"))
