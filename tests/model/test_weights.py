"""Files of weights: every layout and wrapping loads, everything else is one sentence."""

import argparse
import io
import pickle
import re
import zipfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from torch import nn

from tests.reference import randomize
from tests.refusals import check_refusals
from vigpipe.errors import InputError
from vigpipe.model.fit import convert, load_weights, match_state
from vigpipe.model.identify import identify
from vigpipe.model.published import to_own_names
from vigpipe.model.variants import create_model
from vigpipe.model.vig import VisionGnn
from vigpipe.model.weights import (
    read_weights,
)

SIZES = {"vig_digits": (8, 8), "pvig_cifar_ti": (32, 32)}  # of the smallest model of either kind
pytestmark = pytest.mark.filterwarnings("ignore:images of .* give too few nodes")


def built(name: str = "vig_digits", **options: Any):
    options = {"num_classes": 10, "in_chans": 1, "img_size": SIZES[name], **options}
    return create_model(name, **options)


@cache
def made(name: str) -> dict[str, torch.Tensor]:
    model = built(name)
    randomize(model)
    return model.state_dict()


def state_of(name: str = "vig_digits") -> dict[str, torch.Tensor]:
    """A state dict as the authors' code has it, with random weights."""
    return {key: tensor.clone() for key, tensor in made(name).items()}


def ported(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The names of mmpretrain's port, as its converter makes them, and a 2-D readout."""
    downsamples = [int(n.split(".")[1]) for n in state if re.match(r"backbone\.\d+\.conv\.0\.w", n)]
    renamed = {}
    for name, tensor in state.items():
        first, *rest = name.split(".")
        if first == "pos_embed":
            name = "backbone.pos_embed"
        elif first == "stem":
            name = ".".join(["backbone.stem", *rest[1:]])
        elif first == "prediction":
            layer = {"0": "fc1", "1": "bn", "4": "fc2"}[rest[0]]
            name = ".".join(["head", layer, *rest[1:]])
            tensor = tensor[..., 0, 0] if tensor.dim() == 4 else tensor
        elif downsamples:
            begins = [0, *downsamples]
            stage = max(s for s, begin in enumerate(begins) if begin <= int(rest[0]))
            spec = str(int(rest[0]) - begins[stage])
            rest = [r for r in rest[1:] if r != "conv"]
            name = ".".join(["backbone.stages", str(stage), spec, *rest])
        else:
            name = ".".join(["backbone.blocks", *rest])
        renamed[name] = tensor
    return renamed


LAYOUTS = {"published": dict, "ported": ported}
PREFIXES = {
    "bare": "",
    "parallel": "module.",
    "compiled": "module._orig_mod.",
    "held": "model.module.encoder._orig_mod.",
    "a backbone": "backbone.",
}
WRAPPINGS = {
    "bare": lambda state: state,
    "state_dict": lambda state: {"state_dict": state, "epoch": 3, "arch": "vig"},
    "model": lambda state: {"model": state, "optimizer": {"state": {0: state}}},
    "timm": lambda state: {
        "state_dict": state,
        "state_dict_ema": {name: torch.zeros_like(tensor) for name, tensor in state.items()},
        "args": argparse.Namespace(lr=1e-3),
    },
    "NumPy's": lambda state: {"model": state, "best": np.float64(0.5), "last": np.arange(3)},
    "ema only": lambda state: {"model_ema": state},
}


def save_legacy(state, path):
    torch.save(state, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize(
    ("wrapping", "prefix", "layout", "name", "save_as"),
    [
        ("bare", "bare", "published", "pvig_cifar_ti", save_file),  # whatever the file is called
        ("bare", "compiled", "ported", "vig_digits", save_legacy),
        ("state_dict", "parallel", "published", "vig_digits", torch.save),
        ("model", "bare", "ported", "pvig_cifar_ti", save_legacy),
        ("timm", "parallel", "published", "pvig_cifar_ti", torch.save),
        ("ema only", "compiled", "ported", "vig_digits", torch.save),
        ("NumPy's", "held", "ported", "vig_digits", torch.save),
        ("NumPy's", "a backbone", "published", "pvig_cifar_ti", save_legacy),
    ],
)
def test_every_layout_wrapping_and_prefix_loads(wrapping, prefix, layout, name, save_as, tmp_path):
    state = state_of(name)
    path = tmp_path / "weights.pth.tar"
    renamed = {PREFIXES[prefix] + key: t for key, t in LAYOUTS[layout](state).items()}
    first = next(iter(renamed))  # as where a module was compiled by itself
    renamed = {k.replace(".", "._orig_mod.", k == first): t for k, t in renamed.items()}
    save_as(WRAPPINGS[wrapping](renamed), path)
    model = built(name)
    load_weights(model, path)
    assert_holds(model, state)


def assert_holds(model, state):
    assert model.state_dict().keys() == state.keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[key]), key


def test_the_running_average_is_taken_only_if_asked_for(tmp_path):
    path = tmp_path / "w.pth"
    weights, average = {"w": torch.ones(2)}, {"w": torch.full((2,), 0.5)}
    torch.save({"state_dict_ema": average, "state_dict": weights}, path)
    assert read_weights(path)["w"].tolist() == [1, 1]
    assert read_weights(path, ema=True)["w"].tolist() == [0.5, 0.5]
    torch.save({"state_dict": weights}, path)
    with pytest.raises(InputError, match="no running average"):
        read_weights(path, ema=True)


# ---- what is refused --------------------------------------------------------------------------


def saved(content) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def zipped(pickled: bytes, name: str = "data.pkl", **more: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(f"w/{name}", pickled)
        archive.writestr("w/version", b"3\n")
        for other, content in more.items():
            archive.writestr(f"w/{other}.pkl", content)
    return buffer.getvalue()


def saved_as_before(pickled: bytes) -> bytes:
    """As torch wrote files before they were zip files: a magic number, a version, the system."""
    head = (0x1950A86A20F9469CFC6C, 1001, {})
    return b"".join(pickle.dumps(part, protocol=2) for part in head) + pickled


# A table with a key of tuples in one another, of which Python computes a hash.
DEEP_KEY = b"\x80\x02})" + 200_000 * b"\x85" + b"K\x01s."


NO_WEIGHTS = [
    (b"", "its 0 bytes are neither"),
    (b"\x89PNG\r\n\x1a\n and so on", "are neither a safetensors nor a torch file"),
    (b"\x10\0\0\0\0\0\0\0{", "are neither"),
    (b"\x02\0\0\0\0\0\0\0{]", "cannot be read as a safetensors file .*SafetensorError"),
    (b"PK\x03\x04 and no more", "cannot be read as a torch file"),
    (save({}), "holds no tensors"),
    (saved({}), "holds no tensors"),
    (saved([torch.ones(2)]), "holds a list where a state dict"),
    (saved({"epoch": 3, "net": {}}), "'epoch' is a int where a state dict"),
    (saved({3: torch.ones(2)}), "3 is a Tensor where .* tensors by name"),
    (saved({"w": torch.eye(2).to_sparse()}), r"w is not a plain tensor \(torch.sparse_coo"),
    (saved({"w": torch.ones(2, device="meta")}), r"w is not a plain tensor \(.*meta"),
    (saved({"w": torch.ones(1), "module.w": torch.ones(1)}), "w is there twice"),
    (saved({"best": np.float64(1), "w": torch.ones(1)}), "'best' is a NumpyValue where a state"),
    (saved(nn.Linear(2, 2)), r"needs torch\.nn\.modules\.linear\.Linear"),
    (zipped(b"\x80\x02).", constants=b"\x80\x02)."), "cannot be read as a torch file.*TorchScript"),
    (zipped(DEEP_KEY), "cannot be read as a torch file.*nests more than 1000 objects"),
    (zipped(DEEP_KEY, "DATA.PKL"), "nests more than 1000 objects"),  # torch reads it all the same
    (saved_as_before(DEEP_KEY), "cannot be read as a torch file.*nests more than 1000 objects"),
]


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_what_is_no_file_of_weights_is_one_sentence(tmp_path):
    names = {"": "is a folder", "nothing.pth": "No such file", "w" * 300: "cannot be read"}
    rows = [(partial(read_weights, tmp_path / name), words) for name, words in names.items()]
    for i, (content, words) in enumerate(NO_WEIGHTS):
        path = tmp_path / f"{i}.bin"
        path.write_bytes(content)
        rows.append((partial(read_weights, path), f"^{path}: .*{words}"))
    check_refusals(rows)


def equal(state, other):
    return state.keys() == other.keys() and all(torch.equal(state[k], other[k]) for k in state)


# ---- fitting ----------------------------------------------------------------------------------


def test_everything_that_does_not_fit_is_in_one_error():
    state, model = state_of(), built()
    state["backbone.9.0.fc1.0.weight"] = torch.ones(1)
    del state["stem.convs.0.bias"], state["prediction.1.weight"]
    state["stem.convs.0.weight"] = torch.ones(24, 3, 3, 3)
    state["prediction.1.bias"] = torch.ones(1024, dtype=torch.int64)
    with pytest.raises(InputError) as caught:
        match_state(state, model, "w.pth")
    message = str(caught.value)
    assert message.startswith("w.pth: does not fit the model: 2 missing: stem.convs.0.bias, predic")
    assert "1 unexpected: backbone.9.0.fc1.0.weight;" in message
    assert "2 of another shape: stem.convs.0.weight (24x3x3x3 in the file, 24x1x3x3 in" in message
    assert "prediction.1.bias (1024 int64 in the file, 1024 in the model)" in message


def test_long_lists_are_cut_and_counted_and_complex_numbers_do_not_become_real_ones():
    whole = state_of()
    state = {name: t for name, t in whole.items() if "backbone" not in name}
    count = len(whole) - len(state)
    with pytest.raises(InputError, match=rf"{count} missing: .* and {count - 10} more;"):
        match_state(state, built(), "w.pth")
    whole["prediction.4.bias"] = torch.ones(10, dtype=torch.complex64)
    with pytest.raises(InputError, match=r"1 of another shape: prediction\.4\.bias \(10 complex64"):
        match_state(whole, built(), "w.pth")


def test_numbers_that_are_not_finite_are_named_unless_they_are_left_out():
    state = state_of()
    state["prediction.4.bias"][[2, 5]] = torch.tensor([torch.nan, -torch.inf])
    state["pos_embed"] = state["pos_embed"].double()
    with torch.device("meta"):  # as where a run is prepared
        model = built()
    words = (
        r"w\.pth: 2 of the 10 numbers of prediction\.4\.bias are NaN or infinite in float32; give"
    )
    with pytest.raises(InputError, match=words):
        match_state(state, model, "w.pth")
    match_state(state, model, "w.pth", new_classifier=True)
    state["pos_embed"][0, 0, 0, 0] = 1e39  # float64 can hold it
    with pytest.raises(InputError, match=r"1 of .* numbers of pos_embed are NaN .* in float32"):
        match_state(state, model, "w.pth", new_classifier=True)


def test_another_number_of_classes_says_what_to_do_and_that_works():
    state = state_of()
    expected = r"has 10 classes and the model 3: .* --new-classifier, .* num_classes=10"
    model = built(num_classes=3)
    with pytest.raises(InputError, match=expected):
        match_state(state, model, "w.pth")
    found = match_state(state, model, "w.pth", new_classifier=True)
    last = {name for name in found if name.startswith("prediction.4.")}
    assert len(last) == 2
    own = model.state_dict()
    assert all(torch.equal(found[n], own[n] if n in last else state[n]) for n in own)


TABLE = "backbone.0.0.relative_pos"  # of neighbours that are averages of 4 x 4 nodes
ANOTHER_SIZE = [
    ((8, 8), (12, 12), torch.float32, None),
    ((8, 8), (6, 10), torch.float32, "reference"),
    ((12, 8), (8, 8), torch.float16, "reference"),
    ((4, 16), (8, 8), torch.float32, None),  # tables of the same shape but of other positions
]


def resizable(name="vig_digits", **options):
    model = built(name, **options)
    assert isinstance(model, VisionGnn)
    return model


def file_for(size, path, dtype=torch.float32, **options):
    """A file of weights for images of this size; no number of its tables is that of the formula."""
    state = built("pvig_cifar_ti", img_size=size, **options).state_dict()
    for name, tensor in state.items():
        if name.endswith("relative_pos") or name == "pos_embed":
            tensor += torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0))
    save_file({n: t.to(dtype) if t.is_floating_point() else t for n, t in state.items()}, path)


@pytest.mark.parametrize(("its_size", "size", "dtype", "compat"), ANOTHER_SIZE)
def test_a_file_for_another_size_is_as_if_the_size_was_set_afterwards(
    its_size, size, dtype, compat, tmp_path
):
    """A file's table of another shape was replaced by a new one for the model's own grid."""
    path = tmp_path / "w.safetensors"
    file_for(its_size, path, dtype, compat=compat)
    expected = resizable("pvig_cifar_ti", img_size=its_size, compat=compat)
    load_weights(expected, path)
    expected.set_input_size(size)
    model = built("pvig_cifar_ti", img_size=size, compat=compat, checkpoint_path=path)
    assert_holds(model, expected.state_dict())


def test_the_published_code_interpolates_the_files_relative_positions():
    """The formula of its `_get_relative_pos`: N nodes, N // r**2 candidates, bicubic."""
    state = state_of("pvig_cifar_ti")
    state[TABLE] += torch.rand(state[TABLE].shape)
    model = built("pvig_cifar_ti", img_size=(16, 24), compat="reference")
    expected = nn.functional.interpolate(
        state[TABLE].unsqueeze(0), size=(16 * 24, 16 * 24 // 4**2), mode="bicubic"
    ).squeeze(0)
    assert torch.equal(match_state(state, model, "w")[TABLE], expected)


def test_relative_positions_for_the_models_size_are_the_files_or_computed_if_it_has_none():
    state, without = state_of("pvig_cifar_ti"), state_of("pvig_cifar_ti")
    state[TABLE] += 1.0
    del without[TABLE]
    for compat in (None, "reference"):
        model = built("pvig_cifar_ti", compat=compat)
        assert torch.equal(match_state(state, model, "w")[TABLE], state[TABLE])
        assert torch.equal(match_state(without, model, "w")[TABLE], model.state_dict()[TABLE])
    set_afterwards = resizable("pvig_cifar_ti")
    set_afterwards.set_input_size((12, 20))
    larger = built("pvig_cifar_ti", img_size=(12, 20))
    found = match_state(without, larger, "w")[TABLE]
    assert torch.equal(found, set_afterwards.state_dict()[TABLE])


@pytest.mark.parametrize("compat", [None, "reference"])
def test_what_cannot_be_relative_positions_is_refused(compat):
    state = state_of("pvig_cifar_ti")
    model = built("pvig_cifar_ti", img_size=(12, 12), compat=compat)
    table = torch.ones(1, 64, 4)
    for state[TABLE] in (table[0], table[:, :0], table.long()):
        with pytest.raises(InputError, match=r"1 of another shape: backbone\.0\.0\.relative_pos"):
            match_state(state, model, "w")


def test_relative_positions_are_left_out_only_where_a_pyramid_makes_no_knn_graph():
    state = state_of("pvig_cifar_ti")
    model = built("pvig_cifar_ti", graph="knn,grid")
    model.load_state_dict(match_state(state, model, "w"))
    assert "backbone.1.0.relative_pos" not in model.state_dict()
    state = state_of()
    state["backbone.0.0.relative_pos"] = torch.ones(1, 64, 64)
    with pytest.raises(InputError, match=r"1 unexpected: backbone\.0\.0\.rel"):
        match_state(state, built(), "w")


def test_numbers_get_the_models_type():
    state, model = state_of(), built().double()
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        cast = {n: t.to(dtype) if t.is_floating_point() else t for n, t in state.items()}
        found = match_state(cast, model, "w")
        assert all(found[name].dtype == t.dtype for name, t in model.state_dict().items())
        assert torch.equal(found["pos_embed"], cast["pos_embed"].double())


def test_a_failed_load_changes_nothing(tmp_path):
    state = state_of()
    del state["prediction.4.bias"]
    torch.save(state, tmp_path / "w.pth")
    model = built()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(InputError):
        load_weights(model, tmp_path / "w.pth")
    assert_holds(model, before)


# ---- which variant ----------------------------------------------------------------------------


# The first ones of either kind, and the last; `match_state` compares all shapes.
KNOWN = {"vig_digits": 8, "vig_ti_224": 224, "pvig_cifar_ti": 32, "pvig_s_224": (64, 96)}


@pytest.mark.parametrize(("name", "size"), KNOWN.items())
def test_a_variant_is_known_by_its_shapes(name, size):
    with torch.device("meta"):
        state = create_model(name, num_classes=7, in_chans=2, img_size=size).state_dict()
    assert identify(to_own_names(ported(state))).name == name


def test_of_no_variant_the_closest_is_named():
    with torch.device("meta"):
        state = create_model("vig_s_224", num_classes=7).state_dict()
    state["extra"] = torch.ones(1)
    with pytest.raises(InputError, match=r"closest is vig_s_224 for 7 classes, .* 1 unexp.*extra"):
        identify(state)
    with pytest.raises(
        InputError, match=r"not the whole of a model: it has no prediction\.4\.weight of"
    ):
        identify({"stem.convs.0.weight": torch.ones(8, 3, 3, 3)})
    without = {name: tensor for name, tensor in state.items() if name != "pos_embed"}
    with pytest.raises(InputError, match="not the whole of a model: it has no pos_embed of"):
        identify(without)
    state["pos_embed"] = torch.ones(1, 320, 0, 14)
    with pytest.raises(InputError, match="not the whole of a model: it has no pos_embed of"):
        identify(state)


# ---- converting -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIZES)
def test_a_converted_file_holds_the_same_and_says_what_it_is(name, tmp_path):
    state = state_of(name)
    source, target = tmp_path / "w.pth", tmp_path / "w.safetensors"
    torch.save({"state_dict": ported(state)}, source)
    target.write_bytes(b"older")
    assert convert(source, target, overwrite=True) == name
    assert equal(load_file(target), state)
    with safe_open(target, "pt") as file:
        assert file.metadata() == {
            "format": "pt",
            "model": name,
            "num_classes": "10",
            "in_chans": "1",
            "img_size": "x".join(map(str, SIZES[name])),
        }
    assert {path.name for path in tmp_path.iterdir()} == {"w.pth", "w.safetensors"}
    model = built(name)
    load_weights(model, target)
    assert_holds(model, state)


def test_a_converted_file_has_every_digit_of_float64(tmp_path):
    state = {n: t.double() if t.is_floating_point() else t for n, t in state_of().items()}
    state["stem.convs.0.weight"] /= 3
    save_file(state, tmp_path / "w.safetensors")
    convert(tmp_path / "w.safetensors", tmp_path / "new.safetensors")
    assert equal(load_file(tmp_path / "new.safetensors"), state)


def test_what_may_not_be_written_over_is_left_alone(tmp_path):
    source, link, old = (tmp_path / f"{name}.safetensors" for name in ("w", "link", "old"))
    save_file(state_of(), source)
    link.hardlink_to(source)
    old.touch()
    before, itself = source.read_bytes(), "is the file to convert itself"
    rows = [
        (source, itself),
        (link, itself),
        (old, "is there already; choose another name or add --overwrite"),
        (tmp_path / "w.pth", r"must end in \.safetensors, but ends in '\.pth'"),
    ]
    check_refusals(rows, partial(convert, source))
    assert source.read_bytes() == before


def test_a_full_disk_leaves_the_older_target(tmp_path, monkeypatch):
    target = tmp_path / "new.safetensors"
    target.write_bytes(b"older")
    save_file(state_of(), tmp_path / "w.safetensors")

    def fails(weights, path, metadata):
        Path(path).write_bytes(b"half of")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vigpipe.model.fit.save_file", fails)
    with pytest.raises(InputError, match="No space left"):
        convert(tmp_path / "w.safetensors", target, overwrite=True)
    assert target.read_bytes() == b"older"
    assert {path.name for path in tmp_path.iterdir()} == {"w.safetensors", "new.safetensors"}
