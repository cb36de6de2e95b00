"""The facts of a run follow from its options."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.optim import create_optimizer_v2

from vigpipe.config.options import MODEL_DEFAULTS, TrainConfig
from vigpipe.errors import InputError
from vigpipe.model.variants import create_model
from vigpipe.run.facts import Run, prepare
from vigpipe.run.rank import make_rank_state


def run(**options) -> Run:
    return prepare(TrainConfig(**options), torch.float32)


def test_an_epoch_has_a_last_small_step_and_steps_win_over_epochs():
    assert run(batch_size=100, epochs=2).num_steps == 2 * 15  # 1,437 digits
    assert run(epochs=2, steps=7).num_steps == 7


def test_the_published_learning_rate_goes_with_the_batch_and_a_given_one_does_not():
    published = MODEL_DEFAULTS["vig_ti_224"]
    assert published.batch_size is not None
    big = {"model": "vig_ti_224", "data": "fake", "batch_size": 2 * published.batch_size}
    assert run(**big).config.lr == pytest.approx(2 * published.lr)
    assert run(**big, lr=0.125).config.lr == 0.125
    assert run(batch_size=50).config.lr == MODEL_DEFAULTS["vig_digits"].lr


def test_weights_depend_on_the_seed_only():
    torch.manual_seed(1)
    first = run(seed=3).build().state_dict()
    torch.rand(17)
    again = run(seed=3, stages=2, dp=2, microbatches=4).build().state_dict()
    other = run(seed=4).build().state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_a_run_starts_from_the_weights_of_a_file(tmp_path):
    file = tmp_path / "old.pth"
    old = run(seed=4).build()
    torch.save({"state_dict": {f"module.{n}": t for n, t in old.state_dict().items()}}, file)
    new = run(seed=5, weights=file).build()
    for name, tensor in old.state_dict().items():
        assert torch.equal(new.state_dict()[name], tensor), name


@pytest.mark.parametrize("strategy", ["synchronous", "subnetworks"])
def test_a_run_in_float64_has_every_digit_of_the_weights_of_a_file(strategy, tmp_path):
    config = TrainConfig(model="sage", data="sbm:60,3,5", layers=2, width=4, dtype="float64")
    file = tmp_path / "old.safetensors"
    old = prepare(config, torch.float64).build()
    for parameter in old.parameters():
        torch.nn.init.uniform_(parameter)
    save_file(old.state_dict(), file)
    config = replace(config, weights=file, strategy=strategy, steps=1)
    rank_state = make_rank_state(prepare(config, torch.float64), 0, torch.device("cpu"))
    for name, tensor in rank_state.trained.state().items():
        assert torch.equal(tensor, old.state_dict()[name]), name


def test_weights_for_other_classes_need_a_new_classifier(tmp_path):
    file = tmp_path / "old.pth"
    torch.save(create_model("vig_digits", num_classes=3, in_chans=1).state_dict(), file)
    with pytest.raises(InputError, match=r"the file has 3 classes and the model 10: .*--new-cl"):
        run(weights=file)
    first, again = (run(seed=s, weights=file, new_classifier=True).build() for s in (1, 2))
    for name, tensor in first.state_dict().items():
        same = torch.equal(again.state_dict()[name], tensor)
        assert same != (name == "prediction.4.weight"), name


@pytest.mark.parametrize(("recompute", "count"), [("never", 0), ("except-last", 4), ("always", 5)])
def test_recomputation_is_counted_in_micro_batches(recompute, count):
    assert run(microbatches=5, recompute=recompute).num_recomputed == count


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
@pytest.mark.parametrize("model", ["vig_digits", "vig_study"])
def test_rates_are_those_of_timms_groups(model, layer_decay):
    ours = run(model=model, weight_decay=0.1, layer_decay=layer_decay)
    net, rates = ours.build(), ours.rates()
    optimizer = create_optimizer_v2(
        net, opt="sgd", lr=1.0, weight_decay=0.1, layer_decay=None if layer_decay == 1 else 0.5
    )
    expected = {
        id(p): (group.get("lr_scale", 1.0), group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert rates == {name: expected[id(p)] for name, p in net.named_parameters()}
    first, *_, last = rates.values()
    assert (first[0] < 0.1 and last[0] == 1) == (layer_decay == 0.5)


def test_too_few_nodes_are_among_the_notes():
    ours = run(model="vig_ti_224", data="fake", image_size=32)
    (note,) = ours.notes
    assert note.startswith("images of 32x32 give too few nodes")
    ours.build()  # says it no second time: warnings are errors here


def test_a_plan_file_decides_the_number_of_ranks(tmp_path):
    plan = Path(tmp_path, "plan.toml")
    plan.write_text('model = "vig_digits"\nstages = [[0], [1, 2], [3]]\n')
    ours = run(stages=plan, microbatches=3)
    assert ours.layout.world_size == 3
    assert ours.plan.stages == ((0,), (1, 2), (3,))
    with pytest.raises(InputError, match=r"3 stages cannot be shared.*--virtual-stages 2"):
        run(stages=plan, microbatches=3, virtual_stages=2, schedule="loopedbfs")


def test_a_batch_larger_than_the_data_has_as_many_samples_as_there_are():
    with pytest.raises(InputError, match="a batch has 1437 samples"):
        run(batch_size=5000, microbatches=1438)


def test_held_out_images_are_not_trained_on_and_the_user_is_told():
    ours = run(validation=0.2, batch_size=100)
    assert ours.steps_per_epoch == 12  # 1,150 of 1,437 digits
    assert ours.job.description.startswith("1,150 training and 360 test images in 10 classes")
    assert ours.notes == ("287 of 1437 training images are held out for validation",)
    assert ours.fingerprint["validation images"] == 287
    again = run(validation=0.2, stages=2, dp=2, microbatches=3, schedule="1f1b")
    assert again.fingerprint == ours.fingerprint
    assert run(validation=0.2, seed=1).fingerprint["training images"] == 1150


def test_what_enters_a_batch_tells_data_from_others(tmp_path, monkeypatch):
    draws = np.random.default_rng(0)
    graph: dict[str, Any] = {
        "edge_src": draws.integers(0, 20, 60),
        "edge_dst": draws.integers(0, 20, 60),
        "x": draws.random((20, 4)),
        "y": np.arange(20) % 2,
        "split": np.arange(20) // 4 % 3,
    }
    changes = [
        ("x", graph["x"] + np.eye(20, 4) * 1e-6, "SHA-256 of the features"),
        ("edge_dst", graph["edge_dst"][::-1], "edges"),
        ("split", 2 - graph["split"], "SHA-256 of edges and labels"),
    ]
    path = tmp_path / "g.npz"
    np.savez(path, **graph)
    before = run(model="sage", data=str(path)).fingerprint
    (tmp_path / "elsewhere").mkdir()
    same = shutil.copy(path, tmp_path / "elsewhere" / "h.npz")
    assert run(model="sage", data=str(same)).differs_in_data(before) is None
    for name, values, differs in changes:
        np.savez(path, **graph | {name: values})
        assert run(model="sage", data=str(path)).differs_in_data(before) == differs
    np.savez(path, **graph)
    scaled = run(model="sage", data=str(path), features="row")
    assert scaled.differs_in_data(before) == "SHA-256 of the features"
    monkeypatch.setattr("vigpipe.graphs.graph._NUMBERS_AT_ONCE", 11)  # two rows of 4, and one
    assert run(model="sage", data=str(path)).differs_in_data(before) is None
    older = {n: v for n, v in before.items() if n != "SHA-256 of the features"}
    assert scaled.differs_in_data(older) is None
    assert scaled.unknown_of_data(older) == ["SHA-256 of the features"]

    first = tmp_path / "first"
    for part in ("train/a", "train/b", "test/a", "test/b"):
        (first / part).mkdir(parents=True)
        for number in range(2):
            Image.new("L", (8, 8), number).save(first / part / f"{number}.png")

    def images(folder: Path) -> Run:
        return run(data=str(folder), batch_size=2, model="vig_cifar_ti", image_size=16)

    before, named = images(first).fingerprint, "SHA-256 of the images' names and sizes"
    second = tmp_path / "second"
    shutil.copytree(first, second)
    assert images(second).differs_in_data(before) is None
    Image.new("L", (80, 80)).save(second / "train/a/0.png")
    assert images(second).differs_in_data(before) == named
    shutil.copy(first / "train/a/0.png", second / "train/a/0.png")
    (second / "test/b/1.png").rename(second / "test/b/2.png")
    assert images(second).differs_in_data(before) == named
    for here, spelled in ((first, "."), (tmp_path, "first")):
        monkeypatch.chdir(here)
        assert images(Path(spelled)).differs_in_data(before) is None


def test_without_validation_images_there_is_no_best_replica():
    with pytest.raises(InputError, match="--final best: the validation images choose"):
        run(strategy="periodic", dp=2, final="best")


def test_a_graph_may_not_be_rounded_on_its_way():
    config = TrainConfig(
        model="vig_cifar_ti", data="fake", stages=2, microbatches=2, boundary="bfloat16",
        graph="knn,reuse", image_size=32,
    )  # fmt: skip
    cut_between = replace(config, graph="reuse,reuse,reuse,reuse,knn,reuse,reuse,reuse")
    with pytest.raises(InputError, match=r"--boundary bfloat16: block 4 takes the graph"):
        prepare(replace(config, graph="knn,reuse,reuse"), torch.float32)
    assert prepare(cut_between, torch.float32).boundary_dtype == torch.bfloat16
    assert prepare(replace(config, boundary="full"), torch.float32).boundary_dtype == torch.float32


def test_compiled_blocks_are_not_recomputed():
    config = TrainConfig(compile=True, recompute="always")
    with pytest.raises(InputError, match=r"--compile with --recompute always: "):
        prepare(config, torch.float32)
