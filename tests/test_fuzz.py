"""Wrong files at random: each is read as something sensible, or refused in one sentence.

VIGPIPE_FILES=20000 draws so many of each kind.
"""

import io
import json
import math
import os
import struct
import unicodedata
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save
from torch import nn

from tests.data.formats.small_sets import (
    keras_arrays,
    write_idx,
    write_npz,
    write_parquet,
    write_saved,
)
from tests.planning.profiles import make_piece, make_profile
from tests.refusals import check_refusals
from vigpipe.cli import main
from vigpipe.config.files import as_toml, read_config_file
from vigpipe.config.of_weights import follow_weights
from vigpipe.config.options import TrainConfig, check_numbers, with_model_defaults
from vigpipe.config.recipes import MODEL_DEFAULTS
from vigpipe.data import formats, images
from vigpipe.data.picture import to_array
from vigpipe.errors import InputError
from vigpipe.files.names import is_plain
from vigpipe.graphs.sources import open_graph
from vigpipe.model.fit import load_weights
from vigpipe.model.weights import read_weights
from vigpipe.parallel.plan import read_plan
from vigpipe.planning.profile import read_profile

# Outside of tests what Pillow and torch warn of is no error.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
NUM_FILES = int(os.environ.get("VIGPIPE_FILES", "0"))  # of each kind


def search(files: st.SearchStrategy, read: Callable[[Any], None], usual: int = 200) -> None:
    """Let a test read many files, always the same."""
    options: Any = {
        "max_examples": NUM_FILES or usual,
        "deadline": None,
        "derandomize": True,
        "suppress_health_check": [HealthCheck.too_slow],
    }
    settings(**options)(given(files)(read))()


# ---- how files go wrong -----------------------------------------------------------------------


@st.composite
def damaged(draw, content: bytes) -> bytes:
    """The file with bits flipped, and pieces cut out, put in, doubled or cut off."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        if not data:
            break
        at = draw(st.integers(0, len(data) - 1))
        end = min(len(data), at + draw(st.integers(1, 16)))
        change = draw(st.sampled_from(["flip", "cut", "insert", "double", "truncate"]))
        if change == "flip":
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif change == "cut":
            del data[at:end]
        elif change == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=16))
        elif change == "double":
            data[at:at] = data[at:end]
        else:
            del data[at:]
    return bytes(data)


numbers = (
    st.integers(-3, 40)
    | st.integers()
    | st.floats()
    | st.sampled_from([1 << 31, 1 << 63, 1 << 64, 10**400, -(10**400), 1e308, -0.0])
)
scalars = numbers | st.booleans() | st.text(max_size=8) | st.sampled_from(["nan", "inf", "1e400"])
values = st.recursive(
    scalars | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
monsters = st.sampled_from(
    [
        b"\xff\xfe\x00",
        b"model = " + b"[" * 3000,
        b"steps = " + b"9" * 5000,
        b"steps = 0x" + b"f" * 5000,
        b"stages = [[0x" + b"f" * 5000 + b"]]\nmodel = 'm'",
        b".".join([b"a"] * 3000) + b" = 1",
        b"dp = 1" + b"0" * 400,
        b"#" * (17 << 20),
        b"{" * 3000,
        b'{"a":' * 3000,
    ]
)


def refusal(read, content: bytes, path) -> str | None:
    """What a reader says to a file, if it refuses it; any other exception fails the test."""
    path.unlink(missing_ok=True)  # not written over: tensors read before may still map it
    path.write_bytes(content)
    try:
        read(path)
        return None
    except InputError as error:
        said = str(error)
    assert str(path) in said
    assert is_plain(said)  # one line, and nothing that moves the cursor
    return said


def judge(read, path) -> Callable[[bytes], None]:
    """What fails where a reader neither reads a file nor refuses it in one line."""

    def check(content):
        refusal(read, content, path)

    return check


# ---- options ----------------------------------------------------------------------------------

CONFIG = tomli_w.dumps(as_toml(with_model_defaults(TrainConfig(seed=7)))).encode()
OPTIONS = [field.name for field in fields(TrainConfig)]
tables = st.dictionaries(
    st.sampled_from(OPTIONS) | st.text(max_size=4), scalars | values, max_size=4
).map(lambda table: tomli_w.dumps(table).encode())


def test_config_files(tmp_path, monkeypatch):
    resolved, path = [], tmp_path / "config.toml"

    def run(config, *_, **__):
        check_numbers(config)
        resolved.append(with_model_defaults(config))
        return 0

    def read(content):
        path.write_bytes(content)
        resolved.clear()
        with redirect_stderr(io.StringIO()) as stderr:
            code = main(["train", "--config", str(path)])
        if code == 0:
            (config,) = resolved
            assert stderr.getvalue() == ""
            numbers = [v for v in vars(config).values() if isinstance(v, int | float)]
            assert all(map(math.isfinite, numbers))
        else:
            assert code == 2
            (line,) = stderr.getvalue().splitlines()
            assert not any(unicodedata.category(letter) == "Cc" for letter in line)

    monkeypatch.setattr("vigpipe.cli.run_on_ranks", run)
    search(damaged(CONFIG) | tables | monsters, read, 40)


# ---- plans and profiles -----------------------------------------------------------------------

PLAN = b'# a comment\nmodel = "m"\nstages = [[0, 1], [2], [3, 4, 5]]\n'
plan_tables = st.fixed_dictionaries(
    {"model": st.just("m") | scalars},
    optional={"stages": values | st.lists(values | st.lists(st.integers(0, 6))), "note": values},
).map(lambda table: tomli_w.dumps(table).encode())


def test_plan_files(tmp_path):
    def read(path):
        plan = read_plan(path, "m", 6)
        assert [block for stage in plan.stages for block in stage] == list(range(6))

    files = damaged(PLAN) | plan_tables | monsters
    search(files, judge(read, tmp_path / "plan.toml"))


PROFILE = asdict(make_profile([make_piece("block 0", 1.0), 2.0], make_piece("stem")))


@st.composite
def wrong_profiles(draw) -> bytes:
    """One place of a profile, however deep, holds something else."""
    table = json.loads(json.dumps(PROFILE))
    at, key = table, draw(st.sampled_from(sorted(table)))
    while isinstance(at[key], dict | list) and at[key] and draw(st.integers(0, 3)):
        at = at[key]
        key = draw(st.sampled_from(sorted(at) if isinstance(at, dict) else [0, -1]))
    at[key] = draw(scalars | values.filter(lambda value: "date" not in repr(value)))
    return json.dumps(table).encode()


def test_profile_files(tmp_path):
    def read(path):
        profile = read_profile(path)
        assert profile.trained_bytes >= 0
        pieces = (profile.stem, *profile.blocks, profile.readout)
        for piece in pieces:
            cost = profile.at(piece.forward, 3) + profile.at(piece.backward, 1000)
            assert 0 <= cost * profile.slowdown[-1] / profile.bandwidth < math.inf

    files = damaged(json.dumps(PROFILE).encode()) | wrong_profiles() | monsters
    search(files, judge(read, tmp_path / "profile.json"))


# ---- images -----------------------------------------------------------------------------------


def pictures() -> dict[str, bytes]:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    colours, found = Image.fromarray(pixels), {}
    modes = {"png": "P", "gif": "P", "tiff": "I;16", "jpeg": "CMYK", "bmp": "L", "ppm": "I;16"}
    for format in ("png", "jpeg", "gif", "bmp", "tiff", "webp", "ppm"):
        for image in (colours, colours.convert("L").convert(modes.get(format, "RGBA"))):
            file = io.BytesIO()
            image.save(file, format)
            found[f"{format} {image.mode}"] = file.getvalue()
    return found


PICTURES = pictures()


def test_image_files(tmp_path):
    path = tmp_path / "x.png"

    def read(path):
        pixels = to_array(images.read_image(path))
        assert pixels.shape[2:] == (3,)
        assert pixels.dtype == np.uint8

    def read_twice(content):
        said = refusal(read, content, path)
        assert list(images.find_bad_images(images.read_image, [path])) == ([path] if said else [])

    files = st.sampled_from(list(PICTURES.values())).flatmap(damaged) | st.binary(max_size=64)
    search(files, read_twice)


def test_pictures_themselves_are_read(tmp_path):
    for content in PICTURES.values():
        assert refusal(images.read_image, content, tmp_path / "x.png") is None


# ---- data sets --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data_sets(tmp_path_factory):
    """For each format the path that is read, a file to damage, and its whole content."""
    root = tmp_path_factory.mktemp("sets")
    found = {}
    for kind, name in (("idx", "train-images-idx3-ubyte"), ("idx.gz", "t10k-labels-idx1-ubyte.gz")):
        folder = write_idx(root / kind, packed=kind == "idx.gz")
        found[kind] = (folder, folder / name)
    for kind in ("npz", "packed npz"):
        path = write_npz(root / f"{kind}.npz", keras_arrays(3), packed=kind != "npz")
        found[kind] = (path, path)
    folder = write_saved(root / "arrow", files=1)
    found["arrow"] = (folder, folder / "train/data-00000-of-00001.arrow")
    found["state"] = (folder, folder / "test/state.json")
    folder = write_parquet(root / "parquet")
    found["parquet"] = (folder, folder / "data/train-00000-of-00001.parquet")
    return {kind: (path, file, file.read_bytes()) for kind, (path, file) in found.items()}


def test_files_of_data_sets(data_sets):
    """Open the data set, and load all that it says are images."""

    def read(kind_and_content):
        kind, changed = kind_and_content
        path, file, content = data_sets[kind]
        said = []
        try:
            file.unlink()  # not written over: images read before may still map it
            file.write_bytes(changed)
            stored = formats.read(path)
            for images_ in stored.splits.values():
                assert set(images_.labels) <= set(range(len(stored.class_names)))
                for index in range(len(images_)):
                    try:
                        pixels = to_array(images_.load(index))
                        channels = (stored.look.channels,)
                        assert (pixels.dtype, pixels.shape[2:]) == (np.uint8, channels)
                    except InputError as error:
                        said.append(str(error))
        except InputError as error:
            said.append(str(error))
        finally:
            file.unlink()
            file.write_bytes(content)
        assert all(str(path) in text and is_plain(text) for text in said)

    pairs = [st.tuples(st.just(kind), damaged(whole)) for kind, (*_, whole) in data_sets.items()]
    search(st.one_of(pairs), read)


def test_whole_data_sets_are_read(data_sets):
    for path, _, _ in data_sets.values():
        stored = formats.read(path)
        assert all(to_array(stored.load(image)).any() for image in stored.image_ids())


# ---- weights ----------------------------------------------------------------------------------

STATE = {"weight": torch.arange(12.0).view(3, 4), "bias": torch.ones(3)}
sizes = st.integers(0, 4) | st.integers(-1, 1 << 70)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F64", "BF16", "F8_E4M3", "F4", "I8", "BOOL", "C64", "?"]),
        "shape": st.just([3, 4]) | st.just([3]) | st.lists(sizes, max_size=3),
        "data_offsets": st.tuples(sizes, sizes) | st.sampled_from([(0, 48), (48, 60), (0, 60)]),
    },
    optional={"dtype ": scalars},
)
names = st.sampled_from(["weight", "bias", "module.bias", "a\n\x1b[2J", "__metadata__"])


@st.composite
def wrong_safetensors(draw) -> bytes:
    """A header made of plausible parts, with keys twice, and sometimes a false length."""
    pairs = draw(st.lists(st.tuples(names, entries | scalars), max_size=3))
    text = "{" + ",".join(f"{json.dumps(k)}:{json.dumps(v)}" for k, v in pairs) + "}"
    length = draw(st.just(len(text)) | st.integers(0, 2**64 - 1))
    return struct.pack("<Q", length) + text.encode() + bytes(draw(st.sampled_from([0, 48, 60])))


def torch_file(pickled: bytes | None = None, **options) -> bytes:
    """What torch.save writes, with another pickle in it."""
    saved = io.BytesIO()
    torch.save(STATE, saved, **options)
    if pickled is None:
        return saved.getvalue()
    changed = io.BytesIO()
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            new.writestr(name, pickled if name.endswith("data.pkl") else old.read(name))
    return changed.getvalue()


OPCODES = [
    b"}", b")", b"]", b"(", b"K\x01", b"X\x01\0\0\0w", b"X\x07\0\0\0storage", b"X\x03\0\0\0cpu",
    b"s",
    b"u", b"a", b"e", b"t", b"\x85", b"\x86", b"\x87", b"R", b"b", b"Q", b"q\0", b"h\0", b"N", b"0",
    b"\x81", b"cos\nsystem\n", b"cbuiltins\neval\n", b"c__builtin__\nbytearray\n",
    b"ccollections\nOrderedDict\n", b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch\nFloatStorage\n", b"cargparse\nNamespace\n", b"ctorch\nSize\n",
    b"\x8a\x05\0\0\0\0\x04", b"\x8a\x02\xff\xff",
]  # fmt: skip
pickles = st.lists(st.sampled_from(OPCODES), max_size=12).map(
    lambda ops: b"\x80\x02" + b"".join(ops) + b"."
)
WHOLE = [save(STATE), torch_file(), torch_file(_use_new_zipfile_serialization=False)]
weights_files = (
    st.sampled_from(WHOLE).flatmap(damaged)
    | wrong_safetensors()
    | pickles
    | pickles.map(torch_file)
)


def test_weights_files(tmp_path):
    """Read, then put into a model of these two tensors."""

    def read(path):
        loaded = read_weights(path)
        assert all(tensor.nbytes <= path.stat().st_size for tensor in loaded.values())
        load_weights(nn.Linear(4, 3), path)

    search(weights_files, judge(read, tmp_path / "weights"))


def test_whole_weights_are_read(tmp_path):
    for content in WHOLE:
        path = tmp_path / "weights"
        assert refusal(lambda path: load_weights(nn.Linear(4, 3), path), content, path) is None


# ---- graphs, and what weights say of their model ----------------------------------------------

GRAPH: dict[str, np.ndarray] = {
    "edge_src": np.array([0, 1, 2, 3, 4]),
    "edge_dst": np.array([1, 2, 3, 4, 0]),
    "x": np.arange(18.0).reshape(6, 3),
    "y": np.array([0, 1, 0, 1, 0, 1]),
    "split": np.array([0, 0, 1, 1, 2, 2]),
    "classes": np.array(["a", "b"]),
}
OTHER_NAMES = ("x_indptr", "x_indices", "x_data", "x_shape", "num_features", "names", "edge_weight")
graph_numbers = st.integers(-2, 7) | st.sampled_from([-(2**31), 2**62, 1 << 40, 255])


@st.composite
def any_array(draw) -> np.ndarray:
    """Numbers, truth or texts of a plausible shape, with values that may be none."""
    kind = draw(st.sampled_from(["<i8", "<u8", "i1", "u1", "<f4", "<f8", "?", "<U3", "S2", "<c16"]))
    shape = draw(
        st.sampled_from([(6,), (5,), (6, 1), (6, 2), (6, 3), (7,), (2,), (0,), (), (1, 6)])
    )
    values = draw(st.lists(graph_numbers, min_size=1, max_size=4))
    with np.errstate(all="ignore"):
        array = np.resize(np.array(values), shape).astype(kind)
    if array.dtype.kind == "f" and array.size and draw(st.booleans()):
        array.flat[0] = draw(st.sampled_from([np.nan, np.inf, -np.inf, 1e38, 0.5]))
    return array


changed_graphs = st.dictionaries(
    st.sampled_from([*GRAPH, *OTHER_NAMES]), any_array() | st.none(), max_size=3
)


def test_graph_files(tmp_path):
    """Read as a graph of which every number can be believed, or refused."""

    def read(path):
        options: dict[str, Any] = {"features": None, "symmetric": None, "seed": 0}
        graph = open_graph(str(path), data_dir=tmp_path, download=False, **options)
        num_nodes, ends = graph.num_nodes, graph.sources()
        assert not len(ends) or 0 <= ends.min() <= ends.max() < num_nodes
        features: Any = graph.features  # scipy says that its shape can be None
        assert np.isfinite(features[:].sum())
        assert {0, 2} <= set(graph.split.tolist()) <= {-1, 0, 1, 2}
        assert graph.is_multi_label or -1 <= graph.labels.min() <= graph.labels.max()
        assert len(graph.labels) == len(graph.split) == features.shape[0] == num_nodes

    def as_file(changes):
        arrays: dict[str, Any] = GRAPH | changes
        content = io.BytesIO()
        np.savez(content, **{k: v for k, v in arrays.items() if v is not None})
        return content.getvalue()

    whole = as_file({})
    files = changed_graphs.map(as_file) | damaged(whole)
    search(files, judge(read, tmp_path / "graph.npz"))
    assert refusal(read, whole, tmp_path / "graph.npz") is None


SAID = (
    *("model", "norm", "graph", "aggregator", "stem_stride", "compat", "layers", "width", "heads"),
    *("features", "symmetric", "img_size", "crop_pct", "mean", "std", "class_names"),
    "multi_label",
)
words = st.text(max_size=5) | st.sampled_from(
    [
        *("sage", "gat", "vig_digits", "mean", "max", "knn", "grid", "batch", "none", "raw"),
        *("tfidf", "True", "", "1", "2", "-1", "8x8", "0.5", "nan", "1e999", "9" * 400),
        *("[]", '["a"', "[" * 5000, "\x1b[2J"),
    ]
)


def test_what_weights_say_of_their_model(tmp_path):
    """Followed as options that fit their model, or refused."""

    def read(path):
        config = follow_weights(TrainConfig(weights=path))
        check_numbers(config)
        assert config.model in MODEL_DEFAULTS

    metadata = st.dictionaries(st.sampled_from(SAID), words, max_size=6)
    files = metadata.map(lambda said: save({"w": torch.ones(1)}, said))
    search(files, judge(read, tmp_path / "w.safetensors"))


# ---- what luck would hardly find --------------------------------------------------------------

READERS = [
    lambda path: read_config_file(["train", "--config", str(path)]),
    lambda path: read_plan(path, "m", 6),
    read_profile,
    read_weights,
]


def test_a_pipe_is_refused_and_nobody_waits_for_its_writer(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    rows = [(read, "is not a regular file|is a pipe") for read in READERS]
    check_refusals(rows, lambda read: read(tmp_path / "pipe"))


def recompressed() -> bytes:
    """Symptom: torch mapped the compressed bytes, and small tensors held them as numbers."""
    changed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(torch_file())) as old,
        zipfile.ZipFile(changed, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return changed.getvalue()


def greedy(kind: bytes) -> bytes:
    """A pickle of 40 bytes. Symptom: it took as many bytes of memory as it says, here 2**33."""
    return b"\x80\x02c" + kind + b"\nbytearray\n\x8a\x05\0\0\0\0\x02\x85R."


def expanded() -> bytes:
    """A number that says it is 10**15 of them."""
    saved = io.BytesIO()
    torch.save({"w": torch.ones(1).expand(10**9, 10**6)}, saved)
    return saved.getvalue()


def one_tensor(name: str, dtype: str) -> bytes:
    entry = {"dtype": dtype, "shape": [2], "data_offsets": [0, 1]}
    text = json.dumps({name: entry}).encode()
    return struct.pack("<Q", len(text)) + text + b"\0"


WEIGHTS = [
    (recompressed(), "it is compressed"),
    (greedy(b"builtins"), "it holds a bytearray"),
    (torch_file(greedy(b"__builtin__")), "it holds a bytearray"),
    (expanded(), "shape 1000000000x1000000"),
    # Nothing converts it, and old safetensors do not know it.
    (one_tensor("w", "F4"), "float4|InvalidHeader"),
    (save({"a\x1b[2J": torch.ones(1)}), r"'a.x1b\[2J' is not a name"),
]


def test_weights_that_would_be_read_wrongly_or_without_end(tmp_path):
    path = tmp_path / "weights"
    check_refusals(WEIGHTS, lambda content: (path.write_bytes(content), read_weights(path)))


PROFILES = [
    (PROFILE | {"slowdown": "12"}, "slowdown is"),  # was read as 1 and 2
    (PROFILE | {"slowdown": [10**400]}, "slowdown is"),  # was an OverflowError
    (PROFILE | {"base_bytes": 10**400}, "base_bytes is"),
    (PROFILE | {"rows": [1, 2, 10**400]}, "rows are"),
    (PROFILE | {"bandwidth": 1e-300}, "bandwidth is"),
    (PROFILE | {"model": ["m"]}, "model is"),
]


def test_profiles_of_numbers_that_no_machine_has(tmp_path):
    path = tmp_path / "profile.json"
    twice = json.dumps(PROFILE).replace("{", '{"model": "other", ', 1)
    rows = [(json.dumps(table), words) for table, words in PROFILES]
    rows.append((twice, "'model' is there twice"))
    check_refusals(rows, lambda text: (path.write_text(text), read_profile(path)))
