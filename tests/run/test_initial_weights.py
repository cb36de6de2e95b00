"""What a file of --weights says of itself is followed or refused; its classes become the data's."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.refusals import check_refusals
from vigpipe.checkpoint.weights_file import save_weights
from vigpipe.config.of_weights import IN_WEIGHTS, follow_weights
from vigpipe.config.options import TrainConfig
from vigpipe.config.verbs import PlanConfig
from vigpipe.run.facts import Run, prepare
from vigpipe.run.rank import make_rank_state

NAMES, TURNED = ("a", "b", "c"), ("c", "a", "b")
SMALL: dict[str, Any] = {"layers": 2, "width": 8, "seed": 3}


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    """Write the same graph and the same images with their classes in two orders, and others."""
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(0)
    y = np.arange(30) % 3
    graph: dict[str, Any] = {
        "edge_src": draws.integers(0, 30, 90),
        "edge_dst": draws.integers(0, 30, 90),
        "x": draws.random((30, 4), np.float32),
        "split": np.array([0, 0, 0, 1, 2])[np.arange(30) // 3 % 5],
    }
    pictures = draws.integers(0, 255, (30, 8, 8), np.uint8)
    for name, names in (("a", NAMES), ("turned", TURNED), ("other", ("a", "b", "d"))):
        labels = np.array([names.index("d" if n == "c" and "d" in names else n) for n in NAMES])[y]
        np.savez(f"{name}.npz", **graph, y=labels, classes=np.array(names))
        images: dict[str, Any] = {
            "x_train": pictures,
            "x_test": pictures[:9],
            "class_names": np.array(names),
        }
        np.savez(f"{name}-images.npz", **images, y_train=labels, y_test=labels[:9])
    np.savez("unnamed.npz", **graph, y=y)
    np.savez("several.npz", **graph, y=np.eye(3, dtype=int)[y] | 1, classes=np.array(NAMES))
    np.savez("wide.npz", **graph | {"x": np.zeros((30, 5))}, y=y, classes=np.array(NAMES))


def run(data: str = "a.npz", **options: Any) -> Run:
    return prepare(TrainConfig(data=data, **options), torch.float32)


def saved(of: Run, changes: dict[str, str | None] | None = None) -> Path:
    """Write the weights of a new run, whose metadata may be changed."""
    metadata = of.weights_metadata() | (changes or {})
    model = of.build()
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.1, 1)
    path = Path(f"{of.config.model}.safetensors")
    save_weights(path, model.state_dict(), {k: v for k, v in metadata.items() if v is not None})
    return path


def logits_of(of: Run) -> torch.Tensor:
    state = make_rank_state(of, 0, torch.device("cpu"))
    (batch,) = state.feed.test_batches(("test",), 1, 0)
    result = state.pipeline.logits(batch)
    assert result is not None
    return result


def test_the_last_layer_follows_the_names_of_the_classes():
    graphs = ("gcn", None), ("sage", "mean"), ("sage", "pool"), ("gat", "v1"), ("gat", "v2")
    models = [(model, {**SMALL, "aggregator": a}) for model, a in (*graphs, ("gin", None))]
    models += [("gcn2", SMALL), ("vig_digits", {"image_size": 8})]
    order = [NAMES.index(name) for name in TURNED]
    for model, options in models:
        batch = {"batch_size": 9} if model == "vig_digits" else {}
        end = "-images" * model.startswith("vig") + ".npz"
        weights = saved(run(f"a{end}", model=model, **options))
        own, turned = (run(f"{name}{end}", weights=weights, **batch) for name in ("a", "turned"))
        assert own.config.model == turned.config.model == model
        assert all(getattr(turned.config, n) == v for n, v in options.items() if n in IN_WEIGHTS)
        assert not any("another order" in note for note in own.notes)
        assert any("in another order, a, b, c: the last layer" in note for note in turned.notes)
        # The attention of gat is summed over the classes.
        torch.testing.assert_close(logits_of(turned), logits_of(own)[:, order])


def test_sub_networks_begin_with_the_same_wide_model():
    weights = saved(run(model="sage", **SMALL))
    turned = run("turned.npz", weights=weights, strategy="subnetworks", steps=1)
    state = make_rank_state(turned, 0, torch.device("cpu")).trained.state()
    whole = run("turned.npz", weights=weights).build().state_dict()
    assert state.keys() == whole.keys()
    assert all(torch.equal(state[name], whole[name]) for name in whole)


def test_other_classes_take_a_new_last_layer_of_any_model():
    for model in ("gcn", "sage", "gat", "gin", "gcn2", "vig_digits"):
        is_image = model.startswith("vig")
        end, small = ("-images.npz", {"image_size": 8}) if is_image else (".npz", SMALL)
        weights = saved(run(f"a{end}", model=model, **small))
        first, again = (
            run(f"other{end}", weights=weights, new_classifier=True, seed=seed) for seed in (1, 2)
        )
        before, after = first.build().state_dict(), again.build().state_dict()
        last, _ = first.build().classifier()
        differ = {name for name in before if not torch.equal(before[name], after[name])}
        assert differ
        assert all(name.startswith(last) for name in differ), model
    drawn = run("other.npz", weights=Path("sage.safetensors"), new_classifier=True, seed=1)
    narrow = run(
        "other.npz",
        weights=Path("sage.safetensors"),
        new_classifier=True,
        strategy="subnetworks",
        steps=1,
    )
    state = make_rank_state(narrow, 0, torch.device("cpu")).trained.state()
    kept = drawn.build().state_dict()["convs.0.lin_l.weight"]
    assert torch.equal(state["convs.0.lin_l.weight"], kept)
    assert state["convs.1.lin_l.weight"].std() > 0


def test_names_that_are_not_there_are_said_to_be_taken_in_order():
    weights = saved(run(model="gcn", **SMALL))
    assert any(
        "unnamed.npz does not name its classes: they are taken to be a, b, c" in note
        for note in run("unnamed.npz", weights=weights).notes
    )
    torch.save(run(model="gcn", **SMALL).build().state_dict(), "published.pth")
    published = run("turned.npz", model="gcn", **SMALL, weights=Path("published.pth"))
    assert any("published.pth does not name its classes" in note for note in published.notes)


def test_what_contradicts_the_file_is_refused():
    sage, digits = saved(run(model="sage", **SMALL)), saved(run("a-images.npz", image_size=8))
    given = [
        ({"model": "gcn"}, "--model gcn: .* holds a sage; leave --model out"),
        ({"aggregator": "max"}, "--aggregator max: .* with --aggregator mean; leave it out"),
        ({"features": "tfidf"}, "--features tfidf: .* with --features raw"),
        ({"symmetric": False}, "--no-symmetric: .* with --symmetric"),
        ({"norm": "layer"}, "--norm layer: .* with --norm none"),
        ({"width": 16}, "--width 16: .* with --width 8"),
        ({"layers": 3}, "--layers 3: .* with --layers 2"),
        ({"weights": Path("typo.safetensors"), "sampler": "parts"}, "typo.safetensors: cannot be"),
        ({"data": "other.npz"}, "classes are a, b, c, and those of .* a, b, d; .* --new-class"),
        ({"data": "several.npz"}, "several classes of a node: False, and .*several.npz has True"),
        ({"data": "wide.npz"}, "features of a node: 4, and --data wide.npz has 5; give data like"),
    ]
    rows: list[tuple[Any, str]] = [({"weights": sage, **row}, words) for row, words in given]
    images = {"weights": digits, "data": "a-images.npz"}
    rows += [
        ({**images, "graph": "grid"}, "--graph grid: .* with the model's own; leave it out"),
        ({**images, "stem_stride": 2}, "--stem-stride 2: .* with the model's own"),
        ({**images, "norm": "layer"}, "--norm layer: .* with --norm batch"),
        ({**images, "data": "fake"}, "channels of an image: 1, and --data fake has 3"),
    ]
    check_refusals(rows, lambda row: run(**row))
    assert follow_weights(PlanConfig(weights=digits)).model == "vig_digits"  # not plan's default


def test_what_a_file_cannot_say_is_refused():
    of = run(model="gat", **SMALL)
    claims: list[tuple[dict[str, str | None], str]] = [
        ({"model": "gpt\x1b"}, r"is of a model 'gpt\\x1b', which this version does not have"),
        ({"width": "-1"}, "give width as -1, expected a number from 1"),
        ({"width": "9" * 400}, "give width as 9+…9+, expected"),
        ({"norm": "group"}, "cannot be used .*--norm group"),
        ({"aggregator": "v3"}, "v3"),
        ({"symmetric": "yes"}, "give symmetric as yes, expected True or False"),
        ({"class_names": "[1]"}, "give class_names as"),
    ]
    check_refusals(claims, lambda claim: run(weights=saved(of, claim)))
    images = run("a-images.npz", image_size=8)
    claims = [
        ({"mean": "0.25"}, "pixels whose mean is 0.25, and a run prepares them with 0.0 for vig_d"),
        ({"std": "2"}, "pixels whose std is 2"),
        ({"img_size": "0x0"}, "give img_size as 0x0, expected HEIGHTxWIDTH"),
        ({"crop_pct": "7"}, "give crop_pct as 7"),
    ]
    check_refusals(claims, lambda claim: run("a-images.npz", weights=saved(images, claim)))


def test_size_and_crop_are_the_files_unless_a_size_is_given():
    weights = saved(run("a-images.npz", image_size=16, crop_pct=0.5))
    config = run("a-images.npz", weights=weights).config
    assert (config.image_size, config.crop_pct) == ("16x16", 0.5)
    config = run("a-images.npz", weights=weights, image_size=24).config
    assert (config.image_size, config.crop_pct) == (24, 1.0)
    facts = run("a-images.npz", weights=weights).weights_metadata()
    assert (facts["img_size"], json.loads(facts["class_names"])) == ("16x16", list(NAMES))
