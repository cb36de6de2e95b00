"""Runs of sub-networks: real ranks, and what they must be equal to."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.hidden_sides import NoHiddenSides
from tests.oracle import images_of, shortened, with_images
from tests.replication.refused import assert_refused
from tests.small_model import small_model
from tests.world import run_each, run_ranks
from vigpipe.checkpoint.manifest import list_checkpoints, read_manifest
from vigpipe.checkpoint.resume import load_checkpoint
from vigpipe.commands.check_replicas import Alone, compare_replicas
from vigpipe.commands.check_subnetworks import SubnetworksInTurn
from vigpipe.commands.checkpoint import export
from vigpipe.commands.differences import Compared
from vigpipe.config.options import TrainConfig
from vigpipe.data.job import ImageJob
from vigpipe.errors import DONE, InputError
from vigpipe.graphs.graph import TEST, VALIDATION
from vigpipe.graphs.job import GraphJob
from vigpipe.inference.load import load
from vigpipe.inference.load_graph_model import load_graph_model
from vigpipe.parallel.agreement import Peers
from vigpipe.run.batches import batches
from vigpipe.run.facts import Run, prepare
from vigpipe.run.rank import make_rank_state
from vigpipe.run.step import complete_step, train_step
from vigpipe.training import train

CPU = torch.device("cpu")
NUM_STEPS, EVERY = 9, 4  # the last round is shorter
BASE = TrainConfig(
    model="sage",
    data="sbm:160,4,12,6",
    layers=3,
    width=16,
    strategy="subnetworks",
    dp=2,
    average_every=EVERY,
    steps=NUM_STEPS,
    lr=1e-2,
    dtype="float64",
    checkpoint_every=6,
    keep=9,
)
PARTS = replace(
    BASE, norm="batch", dropout=0.3, sampler="parts", partition="random", parts=6, microbatches=2
)
INPUT = replace(PARTS, partition_input=True)
CARRIED = replace(INPUT, carry_moments=True)
IMAGES = TrainConfig(
    model="vig_digits",
    strategy="subnetworks",
    dp=2,
    average_every=EVERY,
    steps=NUM_STEPS,
    batch_size=8,
    microbatches=2,
    lr=1e-2,
    drop_path=0.1,
    dtype="float64",
    checkpoint_every=6,
    keep=9,
)
TIED = replace(IMAGES, divided="tied", branch_rescale=True)
FOUR = replace(BASE, dp=4, width=56, steps=2, evaluate_every=1)  # no other length is 56
NEIGHBOURS = replace(BASE, sampler="neighbour", batch_nodes=30, fanout="3,2,2")
GAT_V2 = replace(BASE, model="gat", heads=2, aggregator="v2")
DECAYED = replace(PARTS, model="gcn2", weight_decay=0.1, decay="first")
# Every model, and every pair of sampler, optimizer, norm, stages, and whether moments are carried
# and the input is divided.
COMPARED = {
    "gin": replace(BASE, model="gin", dtype="float32", carry_moments=True),
    "gcn": replace(BASE, model="gcn", opt="sgd", norm="batch", partition_input=True),
    "gat v2": replace(GAT_V2, opt="rmsprop", norm="layer", dropout=0.3, stages=2),
    "gcn2": replace(DECAYED, stages=2),
    "gat": replace(PARTS, model="gat", heads=2, opt="sgd", norm="layer", carry_moments=True),
    "input of gcn2": replace(DECAYED, opt="rmsprop", norm="none", partition_input=True),
    "sage": replace(NEIGHBOURS, norm="layer", partition_input=True),
    "pool": replace(NEIGHBOURS, aggregator="pool", opt="sgd", clip=0.5, stages=2),
    "all": replace(
        NEIGHBOURS, opt="rmsprop", norm="batch", carry_moments=True, partition_input=True, stages=2
    ),
    "inner": replace(IMAGES, stages=2),
    "tied": replace(TIED, norm="group", carry_moments=True),
}
STUDY = replace(IMAGES, model="vig_study", data="digits", branch_rescale=True, steps=5)


@pytest.fixture(scope="module", autouse=True)
def _small():
    with small_model():
        yield


def run_of(config: TrainConfig) -> Run:
    """A run, with a few of the images if it is of images."""
    run = prepare(config, torch.float32 if config.dtype == "float32" else torch.float64)
    if not isinstance(run.job, ImageJob):
        return run
    return with_images(run, shortened(images_of(run), 40, 24))


def compare(rank: int, world_size: int, config: TrainConfig) -> Compared | None:
    torch.set_num_threads(1)
    return compare_replicas(run_of(config), rank, CPU, config.steps or 0, SubnetworksInTurn)


def train_in(folder: Path, rank: int, world_size: int, name: str, config: TrainConfig) -> None:
    """Train in a folder of that name; `resume` is the name of one that came before."""
    torch.set_num_threads(1)
    if config.resume is not None:
        config = replace(config, resume=str(list_checkpoints(folder / config.resume)[-1]))
    if config.replay is not None:
        config = replace(config, replay=folder / config.replay)
    (folder / name).mkdir(exist_ok=True)
    assert train(run_of(config), rank, CPU, folder / name) == DONE


def train_guarded(rank: int, world_size: int, config: TrainConfig, folder: Path) -> None:
    """Train, save, evaluate and write the weights, without anything as long as the width."""
    torch.set_num_threads(1)
    with NoHiddenSides(config.width or 0):
        assert train(prepare(config, torch.float64), rank, CPU, folder) == DONE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    on_two = {
        "input": INPUT,
        "input-resumed": replace(INPUT, resume="input"),
        "carried": CARRIED,
        "carried-resumed": replace(CARRIED, resume="carried"),
        "full": BASE,
        "best": replace(PARTS, evaluate_every=1, keep_best="loss", checkpoint_every=100),
        "images": TIED,
        "images-resumed": replace(TIED, resume="images"),
    }
    run_each(partial(train_in, folder), 2, on_two, on_two.values())
    on_four = {
        f"{name}-staged": replace(on_two[name], replay=Path(name), stages=2)
        for name in ("input", "carried", "images")
    }
    run_each(partial(train_in, folder), 4, on_four, on_four.values())
    return folder


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "config",
    [
        *(pytest.param(config, id=name) for name, config in COMPARED.items()),
        pytest.param(STUDY, id="study", marks=pytest.mark.heavy),
    ],
)
def test_sub_networks_do_what_one_process_does(config: TrainConfig) -> None:
    found = run_ranks(compare, 4 if config.stages == 2 else 2, config)
    (compared,) = filter(None, found)
    kinds = {row.kind: row for row in compared.rows}
    assert {"loss", "weights", "wide weights"} <= kinds.keys()
    assert ("wide moments" in kinds) == config.carry_moments
    assert compared.exact
    assert all(row.identical for row in kinds.values())


@pytest.mark.multiprocess
@pytest.mark.parametrize("first", ["input", "carried", "images"])
@pytest.mark.parametrize("again", ["resumed", "staged"])
def test_a_resumed_run_and_a_replay_in_stages_write_the_same_weights(
    first: str, again: str, folder: Path
) -> None:
    steps = [int(path.name[-8:]) for path in list_checkpoints(folder / first)]
    assert any(step % EVERY for step in steps[1:])  # in the midst of a round
    written = [folder / run / "model.safetensors" for run in (first, f"{first}-{again}")]
    assert written[0].read_bytes() == written[1].read_bytes()


@pytest.mark.multiprocess
def test_the_record_ends_when_the_last_slices_are_put_back(folder: Path) -> None:
    lines = (folder / "full" / "events.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "did" in row]
    last = {row["replica"]: row["did"] for row in rows}
    assert last == {0: "averaged", 1: "averaged"}


@pytest.mark.multiprocess
def test_moments_that_are_carried_make_a_difference(folder: Path) -> None:
    sent = {}
    for run in ("input", "carried"):
        summary = json.loads((folder / run / "summary.json").read_text())
        sent[run] = [of_replica["bytes_sent"] for of_replica in summary["replicas"]["each"]]
    plain, carried = (load_file(folder / run / "model.safetensors") for run in sent)
    assert not torch.equal(plain["convs.1.lin_l.weight"], carried["convs.1.lin_l.weight"])
    # Statistics of BatchNorm travel without moments.
    assert all(2 * a < b < 3 * a for a, b in zip(*sent.values(), strict=True))


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["full", "input"])
def test_the_evaluated_model_is_the_written_one(name: str, folder: Path) -> None:
    found = score_of(folder / name / "model.safetensors", TEST)
    summary = json.loads((folder / name / "summary.json").read_text())
    expected = summary["test"]["loss"], summary["test"]["accuracy"]
    assert found == pytest.approx(expected, rel=1e-5)
    assert [sorted(scores) for scores in summary["subnetworks"]] == [["test", "validation"]] * 2
    assert all(0 < scores["test"]["accuracy"] <= 1 for scores in summary["subnetworks"])


def score_of(weights: Path, split: int) -> tuple[float, float]:
    """Loss and accuracy of an ordinary model with these weights."""
    loaded = load_graph_model(weights)
    with torch.inference_mode():
        logits = loaded.model(*loaded.transform(BASE.data))
    job = prepare(BASE, torch.float64).job
    assert isinstance(job, GraphJob)
    nodes = job.graph.nodes_of(split)
    labels = torch.from_numpy(job.graph.labels[nodes])
    is_right = logits[nodes].argmax(1) == labels
    return F.cross_entropy(logits[nodes], labels).item(), is_right.double().mean().item()


@pytest.mark.multiprocess
def test_the_evaluated_model_of_images_is_the_written_one(folder: Path) -> None:
    test = images_of(run_of(IMAGES)).test
    images, labels = test.read(range(len(test))), test.labels
    model, *_ = load(folder / "images" / "model.safetensors")
    with torch.inference_mode():
        logits = model.eval()(images)
    summary = json.loads((folder / "images" / "summary.json").read_text())
    loss = F.cross_entropy(logits, torch.from_numpy(labels)).item()
    assert summary["test"]["loss"] == pytest.approx(loss, rel=1e-4)
    assert [sorted(scores) for scores in summary["subnetworks"]] == [["test"]] * 2


@pytest.mark.multiprocess
@pytest.mark.parametrize("run", ["carried", "images"])
def test_a_checkpoint_is_exported_as_the_wide_model(run: str, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    export(folder / run, target)
    written = load_file(folder / run / "model.safetensors")
    for name, tensor in load_file(target).items():
        if "running" not in name:  # of sub-models, and not estimated
            assert torch.equal(tensor, written[name]), name
    export(folder / "full", target, overwrite=True)
    assert target.read_bytes() == (folder / "full" / "model.safetensors").read_bytes()


@pytest.mark.multiprocess
def test_the_best_checkpoint_is_the_model_that_was_evaluated(folder: Path, tmp_path: Path) -> None:
    best = json.loads((folder / "best" / "summary.json").read_text())["best"]
    export(folder / "best", tmp_path / "best.safetensors", best=True)
    loss, _ = score_of(tmp_path / "best.safetensors", VALIDATION)
    assert (best["images"], best["step"] in (4, 8, 9)) == ("validation", True)
    assert loss == pytest.approx(best["value"], rel=1e-5)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "options",
    [
        {"norm": "batch", "partition_input": True, "carry_moments": True},
        pytest.param({"model": "gat", "heads": 2, "norm": "layer"}, marks=pytest.mark.heavy),
    ],
)
def test_nothing_as_long_as_the_width_is_ever_made(options: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(train_guarded, 4, replace(FOUR, **options), tmp_path)
    shapes = {tuple(t.shape) for t in load_file(tmp_path / "model.safetensors").values()}
    assert (56, 56) in shapes or "model" in options


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (PARTS, {}),
        (PARTS, {"carry_moments": True, "partition_input": True}),
        (TIED, {"carry_moments": True}),
    ],
)
def test_one_sub_network_is_plain_training_with_new_optimizers_or_the_same(
    config: TrainConfig,
    options: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = replace(
        config,
        strategy="synchronous",
        dp=1,
        average_every=None,
        divided=None,
        branch_rescale=False,
    )
    start = run_of(plain).build().state_dict()
    save_file(start, tmp_path / "start.safetensors")
    weights = {"weights": tmp_path / "start.safetensors"}
    of_plain = make_rank_state(run_of(replace(plain, **weights)), 0, CPU)
    losses = []
    for number, batch in enumerate(batches(of_plain)):
        if number % EVERY == 0 and not options:
            of_plain.trained.optimizer.state.clear()
        step = train_step(of_plain, batch)
        complete_step(of_plain)
        losses.append(step.loss)
    of_plain.feed.close()

    run = run_of(replace(config, dp=1, **options, **weights))
    (tmp_path / "one").mkdir()
    assert train(run, 0, CPU, tmp_path / "one") == DONE
    is_estimated = "; BatchNorm's statistics are those of " in capsys.readouterr().out
    assert is_estimated == (run.config.norm == "batch")
    rows = [*map(json.loads, (tmp_path / "one" / "metrics.jsonl").read_text().splitlines())]
    assert [row["loss"] for row in rows if "loss" in row and "step" in row] == losses
    written = load_file(tmp_path / "one" / "model.safetensors")
    for name, tensor in of_plain.trained.state().items():
        if "running" not in name:  # those are estimated anew
            assert torch.equal(written[name], tensor), name


def test_a_checkpoint_without_moments_is_refused(tmp_path: Path) -> None:
    one = replace(BASE, dp=1, checkpoint_every=2, steps=2)
    assert train(prepare(one, torch.float64), 0, CPU, tmp_path) == DONE
    carried = make_rank_state(prepare(replace(one, carry_moments=True), torch.float64), 0, CPU)
    (checkpoint,) = list_checkpoints(tmp_path)
    with pytest.raises(InputError, match=r"has no rows/optimizer/exp_avg/convs"):
        load_checkpoint(carried, checkpoint, read_manifest(checkpoint))
    assert carried.own_steps is not None
    carried.own_steps.membership.close()
    carried.feed.close()


def test_sub_networks_share_the_epochs_and_have_orders_of_their_own() -> None:
    run = prepare(replace(PARTS, steps=None, epochs=5, dp=2), torch.float64)
    assert run.steps_per_epoch == 3
    assert run.num_steps == 9  # three epochs each
    items = [run.in_batches(item)[1] for item in range(run.course.num_items)]
    assert sorted(items) == list(range(18))
    assert [items[2 * step] for step in range(9)] == [0, 1, 2, 6, 7, 8, 12, 13, 14]


def test_warm_up_takes_as_many_batches_of_all_sub_networks_together() -> None:
    rates = {}
    for dp in (1, 2):
        config = replace(PARTS, steps=None, epochs=8, warmup_epochs=2, dp=dp)
        alone = Alone(prepare(config, torch.float64).course, 0, Peers())
        state = make_rank_state(prepare(config, torch.float64), 0, CPU, strategy=alone)
        rates[dp] = []
        for step in range(6 // dp + 1):
            state.trained.follow_schedule(step)
            rates[dp].append(state.trained.lr)
        state.feed.close()
    assert rates[1][-1] == rates[2][-1] == config.lr
    assert rates[2] == pytest.approx(rates[1][::2])


def test_wrong_use_is_one_sentence() -> None:
    of_images = {"model": "vig_digits", "layers": None, "width": None, "data": "digits"}
    odd_input = {"partition_input": True, "data": "sbm:160,4,15,6", "dp": 4, "width": 60}
    table = [
        ({"dp": 3}, "--dp 3: .* divides 16 channels .*; choose another --dp, or --width$"),
        ({"layers": 1}, "--layers 1 has no channels"),
        ({"ema": 0.9}, "--ema 0.9: averages"),
        ({"final": "best"}, "--final best: is for --strategy periodic or gossip"),
        ({"items": "pool"}, "--items pool: is for --strategy periodic, gossip or"),
        (odd_input, "divides 15 features .* which is 4; choose --dp 3 or 5 or 15, or leave it"),
        ({"partition_input": True, "data": "sbm:160,4,13,6"}, "13 .*; no --dp but 1 does that"),
        ({"partition_input": True, "strategy": "gossip"}, "--partition-input: is for --strategy"),
        ({"carry_moments": True, "strategy": "periodic"}, "--carry-moments: is for --strategy sub"),
        ({"compress": "bfloat16"}, "--compress bfloat16: .*no other one has"),
        (of_images | {"partition_input": True}, "--partition-input: is for a graph"),
        ({"divided": "tied"}, "--divided tied: is for images, and sage is a model of a graph"),
    ]
    assert_refused(lambda changes: prepare(replace(BASE, **changes), torch.float64), table)


def test_wrong_use_with_images_is_one_sentence() -> None:
    plain = {"strategy": "synchronous", "average_every": None, "divided": "inner"}
    rescaled = {"strategy": "periodic", "branch_rescale": True}
    table = [
        ({"dp": 5}, "--dp 5: .* divides [0-9]+ channels .*; choose another --dp$"),
        ({"model": "vig_study", "data": "digits", "divided": "tied"}, "vig_study has no such"),
        (rescaled, "--branch-rescale: is for --strategy subnetworks"),
        (plain, "--divided inner"),
    ]
    assert_refused(lambda changes: prepare(replace(IMAGES, **changes), torch.float64), table)
