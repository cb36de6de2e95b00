"""What timm's models offer, on ours: by timm's own tests, and by more where those ask little."""

import os
import re
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import timm
import torch
from timm.optim import (
    create_optimizer_v2,
    param_groups_layer_decay,
)

import vigpipe.model.registry  # noqa: F401
from tests.timm_plugin import LEFT_OUT, why_left_out
from tests.world import ROOT, run_command
from vigpipe.errors import InputError
from vigpipe.model import import_hooks
from vigpipe.model.shapes import SHAPES

pytestmark = pytest.mark.oldest

few_nodes = pytest.mark.filterwarnings("ignore:images of .* give too few nodes")


def images(model, num=2, seed=0, size=None):
    channels, *native = model.pretrained_cfg["input_size"]
    generator = torch.Generator().manual_seed(seed)
    return torch.rand((num, channels, *(size or native)), generator=generator)


def create(name, **options) -> Any:
    torch.manual_seed(0)
    model = timm.create_model(name, **options)
    with torch.no_grad():  # an embedding of zeros would hide what is done to it
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("pos_embed"):
                parameter.normal_(std=0.1)
    return model


# ---- timm's own tests --------------------------------------------------------------------------


def pinned(package: str) -> str:
    """The line of the lock that this environment is made from: a version and its hashes."""
    for name in ("requirements.lock", "requirements-oldest.lock"):
        text = (ROOT / name).read_text(encoding="utf-8")
        line = rf"^{package}=={re.escape(version(package))} (\\\n +--hash=\S+ ?)+"
        found = re.search(line, text, re.M)
        if found:
            return found[0]
    raise AssertionError(f"{package} {version(package)} is in neither lock")


def fetched(folder: Path) -> Path:
    """timm's tests/test_models.py, from its source distribution, which the lock's hash vouches for.

    The environment has no pip; the Python that it was made with has.
    """
    (folder / "timm.txt").write_text(f"{pinned('timm')}\n", encoding="utf-8")
    options = ["--no-deps", "--no-binary", "timm", "--require-hashes", "-r", "timm.txt"]
    python = Path(sys.base_prefix) / "bin" / "python3"
    done = subprocess.run(
        [python, "-m", "pip", "download", "-q", "--disable-pip-version-check", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    is_offline = done.returncode and "DO NOT MATCH THE HASHES" not in done.stderr
    if is_offline and not os.environ.get("CI"):
        pytest.skip("timm's sources cannot be downloaded; with CI=true that is a failure")
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("timm-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extract(f"{archive.name.removesuffix('.tar.gz')}/tests/test_models.py", filter="data")
    return folder / archive.name.removesuffix(".tar.gz") / "tests" / "test_models.py"


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory):
    """What came of each of timm's tests: {(function, model): passed, failed or skipped}."""
    folder = tmp_path_factory.mktemp("timm")
    before = Path.cwd()
    os.chdir(folder)
    try:
        tests = fetched(folder)
    finally:
        os.chdir(before)
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = --strict-markers\njunit_family=xunit1\n"
    )
    options = ["-q", "-p", "tests.timm_plugin", "-p", "no:cacheprovider", "--tb=short"]
    options += ["-c", str(folder / "pytest.ini"), f"--junitxml={folder / 'out.xml'}"]
    done = run_command(
        [sys.executable, "-m", "pytest", *options, str(tests)],
        {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=1800,
        fresh=True,  # its plugin comes before pytest imports anything of ours
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = {}
    for case in ElementTree.parse(folder / "out.xml").iter("testcase"):
        facts = {p.get("name"): p.get("value") for p in case.iter("property")}
        bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
        found[facts["function"], facts["model"]] = (
            "passed" if not bad else f"{bad[0].tag}: {bad[0].get('message')}\n{bad[0].text}"
        )
    return found


@pytest.mark.timm
@pytest.mark.heavy
@pytest.mark.parametrize("name", SHAPES)
def test_timms_own_tests_pass(outcomes, name):
    own = {function: outcome for (function, model), outcome in outcomes.items() if model == name}
    left_out = {function for function in own if why_left_out(function, name)}
    assert {function for function in own if own[function].startswith("skipped")} == left_out
    bad = {function: text for function, text in own.items() if text != "passed"}
    assert set(bad) == left_out, "\n".join(bad.values())


@pytest.mark.timm
@pytest.mark.heavy
def test_timms_own_tests_are_the_ones_meant(outcomes):
    functions = {function for function, _ in outcomes}
    assert {model for _, model in outcomes} == set(SHAPES)
    assert len(outcomes) == len(functions) * len(SHAPES)
    assert functions >= {
        "test_model_forward",
        "test_model_backward",
        "test_model_default_cfgs",
        "test_model_forward_features",
        "test_model_forward_intermediates",
        "test_model_forward_intermediates_features",
        "test_model_forward_fx",
        "test_model_backward_fx",
    }
    # timm 1.0.27 has fewer tests, so not every exception needs to occur.
    unused = {f for f, _ in LEFT_OUT} - functions
    assert unused <= {"test_prune_intermediate_layers_contract"}


# ---- the registry ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "imports",
    [
        pytest.param("import timm, vigpipe", marks=pytest.mark.heavy),
        # Only timm's registry, as some programs do.
        "import vigpipe; from timm.models import create_model; import timm",
    ],
)
def test_timm_knows_the_models_in_either_order(imports):
    code = f"{imports}; print(type(timm.create_model('vig_digits')).__name__, "
    code += "timm.list_models('*vig*'), type(timm.models.__spec__.loader).__name__)"
    done = run_command(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", code]
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("VisionGnn ")
    assert done.stdout.endswith(" SourceFileLoader\n")  # the hook leaves nothing behind
    assert sorted(re.findall(r"'(\w+)'", done.stdout)) == sorted(SHAPES)


def test_where_timm_is_there_already_the_models_are_registered_at_once(monkeypatch):
    imported: list[str] = []
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.setattr(import_hooks.importlib, "import_module", imported.append)
    import_hooks.register()
    assert "vigpipe.model.registry" in imported
    assert all(getattr(finder, "awaited", None) != "timm.models" for finder in sys.meta_path)


def test_importing_vigpipe_imports_neither_torch_nor_timm():
    code = "import sys, vigpipe; print({'torch', 'timm', 'numpy'} & set(sys.modules))"
    assert run_command([sys.executable, "-c", code], fresh=True).stdout == "set()\n"


def test_create_model_of_the_package_is_the_one_by_name():
    import vigpipe
    from vigpipe.model.variants import create_model

    assert vigpipe.create_model is create_model
    with pytest.raises(AttributeError, match="no attribute 'create_models'"):
        _ = vigpipe.create_models


# ---- features ----------------------------------------------------------------------------------


@few_nodes
@pytest.mark.parametrize(
    ("name", "channels", "reductions"),
    [
        ("pvig_ti_224", [48, 96, 240, 384], [4, 8, 16, 32]),
        ("vig_cifar_ti", [128] * 4, [4] * 4),
        ("vig_digits", [48] * 4, [1] * 4),
        ("mobilevigv2_ti", [32, 64, 128, 256], [4, 8, 16, 32]),
        ("greedyvig_cifar_ti", [48, 96, 192], [2, 4, 8]),
        ("logvig_ti", [32, 64, 128, 224], [4, 8, 16, 32]),
    ],
)
def test_features_only(name, channels, reductions):
    features = create(name, features_only=True).eval()
    assert features.feature_info.channels() == channels
    assert features.feature_info.reduction() == reductions
    whole = create(name).eval()
    size = (64, 96) if reductions[-1] == 32 else None  # height is not width
    x = images(whole, size=size)
    levels = features.feature_info.out_indices
    with torch.no_grad():
        maps = features(x)
        last, expected = whole.forward_intermediates(x, indices=list(levels))
        assert torch.equal(last, whole.forward_features(x))
    assert len(maps) == len(expected) == len(channels)
    for one, other, width, reduction in zip(maps, expected, channels, reductions, strict=True):
        assert one.shape == (2, width, x.shape[2] // reduction, x.shape[3] // reduction)
        assert torch.equal(one, other)
    if not name.startswith("logvig"):  # which merges a branch with the last map
        assert torch.equal(maps[-1], last.movedim(-1, 1))
    with torch.no_grad():
        first, _ = whole.forward_intermediates(x, indices=[0], stop_early=True)
        assert torch.equal(first.movedim(-1, 1), whole.forward_intermediates(x)[1][0])
        whole.prune_intermediate_layers(1)
        assert torch.equal(whole(x).movedim(-1, 1), maps[-1])


def test_intermediates_in_either_layout():
    model = create("pvig_cifar_ti").eval()
    x, options = images(model), {"indices": 2, "intermediates_only": True}
    with torch.no_grad():
        first = model.forward_intermediates(x, **options)
        last = model.forward_intermediates(x, output_fmt="NHWC", stop_early=True, **options)
    assert len(first) == len(last) == 2
    assert all(torch.equal(a, b.movedim(-1, 1)) for a, b in zip(first, last, strict=True))
    with pytest.raises(ValueError, match="NCHW"):
        model.forward_intermediates(x, output_fmt="NLC")


# ---- head --------------------------------------------------------------------------------------


def test_the_head_in_parts():
    model = create("vig_digits").eval()
    x = images(model)
    with torch.no_grad():
        hidden = model.forward_head(model.forward_features(x), pre_logits=True)
        assert hidden.shape == (2, model.head_hidden_size) == (2, 1024)
        assert torch.equal(model.get_classifier()(hidden), model(x))
        assert torch.equal(model.forward_head(model.forward_features(x)), model(x))
        model.reset_classifier(0)
        assert torch.equal(model(x), hidden)


def test_reset_classifier():
    model = create("vig_digits").eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = images(model)
    model.reset_classifier(5)
    assert model.num_classes == 5
    assert model(x).shape == (2, 5)
    after = model.state_dict()
    changed = {n for n in before if before[n].shape != after[n].shape}
    assert changed == {"prediction.4.weight", "prediction.4.bias"}
    assert all(torch.equal(before[n], after[n]) for n in before if n not in changed)
    model.reset_classifier(5, "")
    assert model(x).shape == (2, 8, 8, 5)
    model.reset_classifier(3)
    assert model(x).shape == (2, 8, 8, 3)  # keeps the pooling it has


def test_a_pruned_readout_is_gone_for_good():
    model = create("vig_digits").eval()
    x = images(model)
    expected = model.forward_intermediates(x, [1], intermediates_only=True)[0].movedim(1, -1)
    assert model.prune_intermediate_layers(2) == [2, 3]
    assert model.prune_intermediate_layers([1]) == [1]
    assert list(model.backbone) == ["0", "1"]
    assert not [name for name, _ in model.named_parameters() if name.startswith("prediction")]
    assert torch.equal(model(x), expected)
    assert torch.equal(model.forward_head(model.forward_features(x)), expected)
    model.reset_classifier(0)
    with pytest.raises(ValueError, match="pruned"):
        model.reset_classifier(10)


# ---- training ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vig_digits", "pvig_cifar_ti", "greedyvig_cifar_ti"])
def test_layer_decay_knows_every_parameter(name):
    with torch.device("meta"):
        model = create(name)
    groups = param_groups_layer_decay(model, layer_decay=0.5)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    scales = {
        names[id(parameter)]: group["lr_scale"] for group in groups for parameter in group["params"]
    }
    assert set(scales) == set(names.values())
    number = len(model.backbone)
    for parameter, scale in scales.items():
        part, layer, *_ = (*parameter.split("."), "")
        expected = {"stem": number + 1, "pos_embed": number + 1, "prediction": 0}
        distance = number - int(layer) if part == "backbone" else expected[part]
        assert scale == 0.5**distance, parameter


def test_the_positional_embedding_is_not_decayed():
    model = create("vig_digits")
    assert model.no_weight_decay() == {"pos_embed"}
    groups = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05).param_groups
    (decayed,) = (group["params"] for group in groups if group["weight_decay"])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    expected = {name for name in names.values() if name.endswith("weight")}
    norms = {name for name, p in model.named_parameters() if p.dim() == 1}
    assert {names[id(parameter)] for parameter in decayed} == expected - norms


# ---- weights and sizes -------------------------------------------------------------------------


def test_there_are_no_weights_to_download_and_that_is_said():
    with pytest.raises((RuntimeError, InputError), match=r"[Nn]o pretrained weights"):
        timm.create_model("vig_digits", pretrained=True)


def test_a_file_in_the_published_layout_as_pretrained_weights(tmp_path):
    name = "pvig_cifar_ti"
    published = create(name).eval()
    file = tmp_path / "published.pth"
    state = {f"module.{key}": value for key, value in published.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 3}, file)
    model: Any = timm.create_model(
        name, pretrained=True, pretrained_cfg_overlay={"file": str(file)}
    )
    x = images(published)
    with torch.no_grad():
        assert torch.equal(model.eval()(x), published(x))

    # Another number of classes: timm keeps the last layer out, and takes all else.
    tuned: Any = timm.create_model(
        name, pretrained=True, num_classes=4, pretrained_cfg_overlay={"file": str(file)}
    ).eval()
    with torch.no_grad():
        assert tuned(x).shape == (2, 4)
        assert torch.equal(tuned.forward_features(x), published.forward_features(x))

    # Grey images: timm sums the first layer's weights over colours. The logits may differ, and did
    # with torch 2.11 on some CPUs: sums of weights round, and of two nodes that are equally near
    # the other one was chosen.
    grey: Any = timm.create_model(
        name, pretrained=True, in_chans=1, pretrained_cfg_overlay={"file": str(file)}
    ).eval()
    with torch.no_grad():
        expected = published.stem(x[:, :1].expand(-1, 3, -1, -1))
        torch.testing.assert_close(grey.stem(x[:, :1]), expected, rtol=1e-4, atol=1e-4)
    found = grey.state_dict()
    changed = [key for key in found if not torch.equal(found[key], published.state_dict()[key])]
    assert changed == ["stem.convs.0.weight"]


def test_a_file_that_does_not_fit_is_refused(tmp_path):
    file = tmp_path / "other.pth"
    torch.save(create("vig_cifar_ti", graph="knn").state_dict(), file)
    with pytest.raises((InputError, RuntimeError), match="161 missing: backbone"):
        timm.create_model(
            "pvig_cifar_ti", pretrained=True, pretrained_cfg_overlay={"file": str(file)}
        )
