"""Training with replicas that take steps of their own: real ranks, and one process beside."""

import json
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tests.oracle import first_of, images_of, shortened, with_images
from tests.replication.refused import assert_refused
from tests.small_model import small_model
from tests.world import run_each
from vigpipe import training
from vigpipe.checkpoint.manifest import read_manifest
from vigpipe.commands.check_replicas import InTurn
from vigpipe.commands.check_server import serve_in_turn
from vigpipe.config.compress import parse_compress
from vigpipe.config.options import TrainConfig
from vigpipe.errors import InputError
from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.replication.decisions import ALL
from vigpipe.replication.diary import DEEDS
from vigpipe.replication.feedback import make_method
from vigpipe.run.events import read_events
from vigpipe.run.facts import Run, prepare
from vigpipe.run.rank import RankState
from vigpipe.run.step import train_step

pytestmark = pytest.mark.multiprocess

CPU = torch.device("cpu")
NUM_TRAIN, NUM_STEPS, EVERY = 21, 7, 3  # steps of 10, 10 and 1 images: of these, an empty item
PLAIN = TrainConfig(
    data="digits",
    batch_size=10,
    microbatches=2,
    dp=2,
    steps=NUM_STEPS,
    lr=1e-2,
    warmup_epochs=0,
    drop_path=0.2,
    dropout=0.1,
    clip=1.0,
    ema=0.5,
    seed=3,
    checkpoint_every=5,
    keep=9,
)
WEIGHTS = replace(PLAIN, strategy="periodic", average_every=EVERY)
OUTER = replace(WEIGHTS, average="outer", outer_lr=0.7, outer_momentum=0.9)
OVERLAPPED = replace(OUTER, average_every=2, overlap=1, checkpoint_every=4)
GRADIENTS = replace(WEIGHTS, average="gradients")
POOL = replace(WEIGHTS, items="pool", checkpoint_every=2)
GOSSIP = replace(POOL, strategy="gossip", average_every=2)
SERVER = replace(PLAIN, dp=2, strategy="server", items="pool", checkpoint_every=2)
ONE_WORKER = replace(SERVER, dp=1)
# No ties between distances, and no Adam, which makes steps of a size out of gradients that are mere
# rounding noise, such as those of a bias before a BatchNorm.
EXACT = replace(PLAIN, data="fake", image_size=8, dtype="float64", opt="sgd", lr=0.1)
COMPRESSED = {
    "top-k in every step": replace(PLAIN, compress="top-k:0.1", on_nan="skip"),
    "powersgd in every step": replace(PLAIN, compress="powersgd:1", on_nan="skip"),
    "bfloat16 in every step": replace(PLAIN, compress="bfloat16"),
    "top-k of gradients": replace(GRADIENTS, compress="top-k:0.1"),
    "powersgd of differences": replace(OVERLAPPED, compress="powersgd:1"),
    "bfloat16 of weights": replace(WEIGHTS, compress="bfloat16", average_every=2, overlap=1),
}
# These send all numbers, or whole matrices, through the code that compresses.
DIFFERENCES = replace(EXACT, strategy="periodic", average="outer", average_every=2)
WHOLE = {
    "full rank": (replace(EXACT, compress="powersgd:9999"), "synchronous"),
    "all of differences": (replace(DIFFERENCES, compress="top-k:1"), "differences"),
}
# Of these each pair of strategy, average, items and overlap; what one process does too.
FIXED = {"weights": WEIGHTS, "differences": DIFFERENCES, "overlapped": OVERLAPPED}
POOLS = {  # what these do depends on the time that things take
    "overlapped pool": replace(POOL, overlap=2),
    "gradients": replace(POOL, average="gradients"),
    "gossip": replace(GOSSIP, pairs="sets", final="best", validation=0.2),
    "gossip of gradients": replace(GOSSIP, average="gradients", items="fixed", norm="layer"),
}
COMPRESSED_POOLS = {
    "powersgd of pairs": replace(GOSSIP, average="gradients", compress="powersgd:2"),
    "bfloat16 of pairs": replace(GOSSIP, compress="bfloat16"),
    "top-k of a pool": replace(POOL, average="outer", average_every=1, compress="top-k:0.1"),
}
ON_TWO = {
    **COMPRESSED,
    **COMPRESSED_POOLS,
    **{name: config for name, (config, _) in WHOLE.items()},
    **FIXED,
    **POOLS,
    "one worker": ONE_WORKER,
    "every step": replace(EXACT, strategy="periodic", average="gradients", average_every=1),
    "synchronous": EXACT,
    "not finite": replace(GRADIENTS, average_every=1, on_nan="skip"),
}
ON_HOSTS = replace(
    EXACT,
    dp=4,
    strategy="gossip",
    gossip_between="hosts",
    average_every=2,
    items="pool",
    checkpoint_every=2,
)
HOSTS = {"hosts": ON_HOSTS, "hosts of gradients": replace(ON_HOSTS, average="gradients")}
# Runs of two stages that go on from a checkpoint of uncut models.
CUT = ["weights", "one worker", "powersgd in every step", "top-k of gradients"]
STAGED = replace(OVERLAPPED, stages=2)
GO_ON = ["overlapped pool", "gossip of gradients"]  # from a checkpoint
AGAIN = ["powersgd of pairs", "top-k of a pool", *(f"{name} resumed" for name in GO_ON)]
ON_THREE = replace(GOSSIP, dp=3, batch_size=12, average_every=1, answer="interval")
SERVED = {
    "served": replace(SERVER, on_nan="skip", keep_best="loss"),
    "bounded": replace(SERVER, staleness=0, items="fixed", norm="layer"),
}
SERVED_AGAIN = {
    "served resumed": replace(SERVED["served"], resume="served"),
    "resumed again": replace(SERVED["served"], replay=Path("served resumed")),
}
BAD_ITEM = 5
BAD_STEP = 3


@pytest.fixture(scope="module", autouse=True)
def _small():
    """All that is kept, sent and averaged is there twice; more would be more of the same."""
    with small_model():
        yield


def run_of(config: TrainConfig) -> Run:
    """Two ranks share a host, where that matters."""
    dtype = torch.float64 if config.dtype == "float64" else torch.float32
    run = prepare(config, dtype, ranks_on_host=2)
    source = shortened(images_of(run), NUM_TRAIN, 8)
    if source.validation is not None:
        source = replace(source, validation=first_of(source.validation, 20))
    return with_images(run, source)


def train_in(folder: Path, rank: int, world_size: int, name: str, config: TrainConfig) -> None:
    """Train, as one rank, in a folder of that name.

    What stands under `resume` is the name of a run that came before, from whose first checkpoint
    this one goes on.
    """
    torch.set_num_threads(1)

    def poisoned(rank_state: RankState, batch: ReplicaBatch, wishes: Any):
        # Item 5 is that of replica 1 in step 2, where it has no images, and item 4 the other one.
        # With a server, anybody may take them.
        bad_item = BAD_ITEM if rank_state.run.config.strategy == "periodic" else BAD_ITEM - 1
        is_bad = rank_state.mesh.replica_index == bad_item % 2 and batch.step == bad_item // 2
        if rank_state.run.layout.has_server:
            is_bad = batch.step == BAD_STEP
        if rank_state.run.config.on_nan == "skip" and is_bad and batch.inputs is not None:
            batch.inputs.fill_(torch.nan)
        step = train_step(rank_state, batch, wishes)
        if rank_state.reducer.compressor is not None:
            assert_replicas_are_equal(rank_state)
        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "train_step", poisoned)
        if config.replay is not None and not config.replay.is_absolute():
            config = replace(config, replay=folder / config.replay)
        if config.resume is not None:
            config = replace(config, resume=str(first_checkpoint(folder / config.resume)))
        (folder / name).mkdir(exist_ok=True, parents=True)
        dist.barrier()
        assert training.train(run_of(config), rank, CPU, folder / name) == 0


def assert_replicas_are_equal(rank_state: RankState) -> None:
    """Each replica makes its gradients out of what all have sent."""
    own = torch.cat([p.detach().flatten() for p in rank_state.trained.parameters().values()])
    of_all = rank_state.reducer.gather(own)
    assert all(torch.equal(of_one, own) for of_one in of_all)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """The runs of two replicas."""
    resumed = {f"{name} resumed": replace(ON_TWO[name], resume=name) for name in GO_ON}
    return run_all(2, tmp_path_factory.mktemp("two"), ON_TWO | resumed)


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> Path:
    """The runs of three replicas, or of two workers and a server."""
    configs = {"gossip": ON_THREE, **SERVED, **SERVED_AGAIN}
    return run_all(3, tmp_path_factory.mktemp("three"), configs)


@pytest.fixture(scope="module")
def four(two, tmp_path_factory) -> Path:
    """The runs of two replicas of two stages, and runs that go on from a checkpoint of these."""
    folder = tmp_path_factory.mktemp("four")
    again = {
        name: replace(ON_TWO[name.removesuffix(" resumed")], stages=2, replay=two / name)
        for name in AGAIN
    }
    cut = {name: replace(ON_TWO[name], stages=2, resume=str(two / name)) for name in CUT}
    others = {
        "staged": STAGED,
        "staged resumed": replace(STAGED, resume="staged"),
        "hosts resumed": replace(ON_HOSTS, resume="hosts"),
        "hosts again": replace(ON_HOSTS, replay=folder / "hosts resumed"),
    }
    return run_all(4, folder, again | cut | HOSTS | others)


def run_all(num_ranks: int, folder: Path, configs: dict[str, TrainConfig]) -> Path:
    run_each(partial(train_in, folder), num_ranks, configs, configs.values())
    return folder


def first_checkpoint(folder: Path) -> Path:
    """One in the midst of a run with fixed items. With a pool it is, unless replica 0 was late."""
    return min((folder / "checkpoints").glob("step-*"))


def replicas(folder: Path) -> list[dict[str, Tensor]]:
    """The tensors of each replica after the last step, before one is made of all."""
    found: dict[int, dict[str, Tensor]] = {}
    for path in (folder / "checkpoints" / f"step-{NUM_STEPS:08d}").glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            prefix = name.partition("/")[0]  # of all but the first replica
            replica = int(prefix[7:]) if prefix.startswith("replica") else 0
            found.setdefault(replica, {})[name.removeprefix(f"replica{replica}/")] = tensor
    return [found[replica] for replica in sorted(found)]


def kept(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def is_parameter(name: str) -> bool:
    return not any(word in name for word in ("running", "num_batches"))


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []


def assert_same_end(folder: Path, expected: Path) -> None:
    """All replicas of two runs end with the same numbers, and the same is kept of them.

    A run that has gone on from its last step saves no checkpoint of its own.
    """
    if found := replicas(expected):
        for actual, replica in zip(replicas(folder), found, strict=True):
            assert_equal(actual, replica)
    assert_equal(kept(folder), kept(expected))


# ---- one process that carries out the same --------------------------------------------------


def in_turn(config: TrainConfig, folder: Path) -> list[dict[str, Tensor]]:
    """Train unsplit models in turn, as the record of a run says."""
    torch.set_num_threads(1)
    run = run_of(config)
    models = InTurn(run, read_events(folder, run), CPU)
    models.carry_out()
    return [{f"model/{n}": t for n, t in m.state.trained.state().items()} for m in models.models]


def assert_done_in_turn(config: TrainConfig, folder: Path, atol: float = 0) -> None:
    for actual, model in zip(replicas(folder), in_turn(config, folder), strict=True):
        assert {name for name in actual if name.startswith("model/")} == model.keys()
        for name, tensor in model.items():
            torch.testing.assert_close(actual[name], tensor, rtol=0, atol=atol)


@pytest.mark.parametrize("name", [*FIXED, *POOLS])
def test_ranks_do_what_one_process_does_with_the_models_in_turn(name, two):
    assert_done_in_turn(ON_TWO[name], two / name)


def test_three_replicas_gossip_as_one_process_does_with_the_models_in_turn(three):
    assert_done_in_turn(ON_THREE, three / "gossip")
    recorded = read_events(three / "gossip", run_of(ON_THREE))
    assert {pair.partner for of in recorded for pair in of.pairs} == {0, 1, 2}


@pytest.mark.parametrize("name", HOSTS)
def test_two_hosts_of_two_replicas_gossip_as_two_models_with_all_their_images_do(name, four):
    """The sums of a host have another order than those of one process."""
    assert_done_in_turn(HOSTS[name], four / name, atol=1e-10)


def test_a_run_of_two_hosts_goes_on_and_is_done_again(four):
    assert_same_end(four / "hosts again", four / "hosts resumed")
    summary = json.loads((four / "hosts" / "summary.json").read_text())["replicas"]
    assert sum(host["items"] for host in summary["each"]) == 2 * NUM_STEPS


def test_the_number_of_stages_does_not_show_and_a_run_goes_on_as_if_it_had_not_stopped(two, four):
    assert first_checkpoint(four / "staged").name < f"step-{NUM_STEPS:08d}"
    assert_same_end(four / "staged", two / "overlapped")
    assert_same_end(four / "staged resumed", two / "overlapped")


@pytest.mark.parametrize("name", CUT)
def test_a_run_goes_on_with_another_number_of_stages_bit_for_bit(name, two, four):
    """With what each replica has left out, and the factors of PowerSGD."""
    assert first_checkpoint(two / name).name < f"step-{NUM_STEPS:08d}"
    assert_same_end(four / name, two / name)
    kinds = {tensor.partition("/")[0] for of_one in replicas(two / name) for tensor in of_one}
    assert ("residual" in kinds) == name.startswith(("powersgd", "top-k"))
    assert ("powersgd_q" in kinds) == name.startswith("powersgd")


@pytest.mark.parametrize("name", WHOLE)
def test_compression_that_leaves_nothing_out_changes_nothing(name, two):
    expected = kept(two / WHOLE[name][1])
    for tensor, actual in kept(two / name).items():
        if is_parameter(tensor):  # synchronous runs do not estimate statistics anew
            torch.testing.assert_close(actual, expected[tensor], rtol=0, atol=1e-10)


def test_a_step_that_is_not_finite_leaves_nothing_behind(two):
    for name in ("top-k in every step", "powersgd in every step"):
        for tensors in replicas(two / name):
            assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_a_checkpoint_holds_an_average_that_is_under_way(two):
    manifest = read_manifest(first_checkpoint(two / "overlapped"))
    assert manifest.replicas["progress"]["given"][0] == 4  # the other may have gone on to step 5


# ---- a server ---------------------------------------------------------------------------------


def test_one_worker_is_plain_training_bit_for_bit(two, tmp_path):
    assert training.train(run_of(replace(PLAIN, dp=1)), 0, CPU, tmp_path) == 0
    assert_equal(kept(two / "one worker"), kept(tmp_path))
    averages = [load_file(f / "model-ema.safetensors") for f in (two / "one worker", tmp_path)]
    assert_equal(*averages)
    steps = [[r for r in rows_of(f) if "lr" in r] for f in (two / "one worker", tmp_path)]
    assert [(r["loss"], r["lr"]) for r in steps[0]] == [(r["loss"], r["lr"]) for r in steps[1]]


@pytest.mark.parametrize("name", SERVED)
def test_a_server_does_what_one_process_does_with_the_gradients_in_their_order(name, three):
    torch.set_num_threads(1)
    run = run_of(SERVED[name])
    recorded = read_events(three / name, run)
    expected = serve_in_turn(run, recorded, CPU)
    result = {n: t for n, t in kept(three / name).items() if t.is_floating_point()}
    assert_equal(result, dict(expected["weights"]) | dict(expected.get("running statistics", {})))
    done = sorted(item for of in recorded for item in of.items)
    assert done == list(range(2 * NUM_STEPS))


def test_the_files_of_a_server_tell_how_late_gradients_were(three):
    rows = rows_of(three / "served")
    steps = [row for row in rows if "item" in row]
    assert [row["step"] for row in steps] == sorted(row["step"] for row in steps)
    evaluations = [row for row in rows if "top1" in row]
    assert [row["epoch"] for row in evaluations] == [1, 2, 3]
    assert {row["images"] for row in evaluations} == {8}
    summary = json.loads((three / "served" / "summary.json").read_text())["replicas"]
    server = summary["server"]
    late = Counter(str(row["staleness"]) for row in steps)
    assert server["staleness"] == late
    # One step is bad, and two have a single image, so no image for one of their items.
    assert server["updates"] == len(steps) == 2 * NUM_STEPS - 4
    skipped = [row["message"] for row in rows if row.get("event") == "skipped"]
    assert len(skipped) == 2
    assert all("the loss or a gradient of worker" in message for message in skipped)
    assert [len(summary["each"]), sum(r["items"] for r in summary["each"])] == [2, 2 * NUM_STEPS]
    num_bytes = 4 * sum(t.numel() for n, t in kept(three / "served").items() if is_parameter(n))
    assert server["bytes_sent"] == num_bytes * 2 * NUM_STEPS  # one pull an item


def test_a_replay_covers_pushes_and_pulls(three):
    again, other = three / "resumed again", three / "served resumed"
    assert_same_end(again, other)
    runs = [read_events(folder, run_of(SERVED["served"])) for folder in (again, other)]
    assert runs[0] == runs[1]
    scores = [[r for r in rows_of(f) if "top1" in r][-1] for f in (again, other)]
    assert scores[0] == scores[1]


def test_a_checkpoint_of_a_server_is_one_of_a_whole_model(three):
    checkpoint = first_checkpoint(three / "served")
    assert read_manifest(checkpoint).replicas["progress"]["updates"] > 0
    (path,) = checkpoint.glob("*.safetensors")  # the workers have nothing to add
    assert path.name == "stage0-replica2.safetensors"
    assert any(name.startswith("optimizer/") for name in load_file(path))


# ---- what each average means ------------------------------------------------------------------


def test_gradients_averaged_in_every_step_are_synchronous_training(two):
    first, second = replicas(two / "every step")
    assert_equal(first, second)
    synchronous = {}
    for replica in replicas(two / "synchronous"):
        synchronous |= replica
    assert first.keys() == synchronous.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, synchronous[name], rtol=0, atol=1e-10)


def test_averaged_gradients_do_not_unite_replicas_that_have_drifted_apart(two):
    first, second = replicas(two / "gradients")
    differing = {n for n, t in first.items() if not torch.equal(t, second[n])}
    assert {n for n in first if n.startswith("model/") and n.endswith("weight")} <= differing


def test_the_weights_of_one_replica_are_kept_if_the_best_is_wanted(two):
    found = [
        {n.removeprefix("model/"): t for n, t in r.items() if n.startswith("model/")}
        for r in replicas(two / "gossip")
    ]
    result = kept(two / "gossip")
    equal = [all(torch.equal(t, r[n]) for n, t in result.items() if is_parameter(n)) for r in found]
    assert sum(equal) == 1


def test_a_gradient_that_is_not_finite_is_not_sent_and_the_average_takes_place(two):
    first, second = replicas(two / "not finite")
    assert all(tensor.isfinite().all() for tensor in first.values())
    assert_equal(first, second)  # averaged in every step, also in the one of the bad item
    summary = json.loads((two / "not finite" / "summary.json").read_text())
    each = summary["replicas"]["each"]
    assert [replica["averages"] for replica in each] == [NUM_STEPS + 1] * 2  # one at the end


# ---- what a run tells -------------------------------------------------------------------------


def test_rows_name_the_replica_and_the_item_and_the_end_scores_what_is_kept(two):
    rows = rows_of(two / "weights")
    steps = [row for row in rows if "item" in row]
    for replica in range(2):
        own = [(row["step"], row["item"]) for row in steps if row["replica"] == replica]
        # Every third step has a single image, which is replica 0's.
        items = [n for n in range(NUM_STEPS) if replica == 0 or n % 3 != 2]
        assert own == [(step + 1, 2 * step + replica) for step in items]
    assert [row["epoch"] for row in rows if "top1" in row] == [1, 2, 3]
    summary = json.loads((two / "weights" / "summary.json").read_text())
    assert summary["test"]["images"] == 8
    assert summary["test"]["loss"] == rows[-1]["loss"]


@pytest.mark.parametrize("name", ["weights", "gradients"])
def test_bytes_and_items_are_counted(name, two):
    each = json.loads((two / name / "summary.json").read_text())["replicas"]["each"]
    first = replicas(two / name)[0]
    sizes = [t.numel() for n, t in first.items() if n.startswith("model/") and t.dim()]
    parameters = [n.removeprefix("ema/") for n in first if n.startswith("ema/") and is_parameter(n)]
    if name == "gradients":
        sizes = [first[f"model/{n}"].numel() for n in parameters]
    num_bytes = 4 * (sum(sizes) + sum(sizes) % 2)  # 2 (D - 1) / D * 4 P
    assert sum(replica["items"] for replica in each) == 2 * NUM_STEPS
    for replica in each:
        assert replica["averages"] == NUM_STEPS // EVERY + 1
        if name == "weights":
            assert replica["items"] == NUM_STEPS
            assert replica["bytes_sent"] == num_bytes * replica["averages"]
        else:  # from a pool; the average at the end is one of weights
            assert replica["bytes_sent"] > num_bytes * (NUM_STEPS // EVERY)
        assert replica["busy_seconds"] > 0


@pytest.mark.parametrize("name", [name for name in COMPRESSED if "every step" in name])
def test_bytes_of_compressed_sums_are_those_of_the_formula(name, two):
    config = COMPRESSED[name]
    shapes = {n: tuple(t.shape) for n, t in kept(two / name).items() if is_parameter(n)}
    sent = make_method(parse_compress(config.compress)).bytes_sent(shapes, 4, 2, ALL)
    found = json.loads((two / name / "summary.json").read_text())["compression"]
    assert (found["method"], found["sums"]) == (config.compress, NUM_STEPS)
    assert found["bytes_sent"] == sent * NUM_STEPS
    num_numbers = sum(map(math.prod, shapes.values()))
    assert found["bytes_of_ring"] == 4 * num_numbers * NUM_STEPS  # 2 (D - 1) / D * 4 P
    assert found["ratio"] == found["bytes_sent"] / found["bytes_of_ring"] < 0.6


def test_bytes_of_compressed_pairs_are_those_of_the_formula(two):
    name = "powersgd of pairs"
    shapes = {n: tuple(t.shape) for n, t in kept(two / name).items() if is_parameter(n)}
    sent = make_method(parse_compress("powersgd:2")).bytes_sent(shapes, 4, 2, 1)
    each = json.loads((two / name / "summary.json").read_text())["replicas"]["each"]
    statistics = [t for n, t in kept(two / name).items() if "running" in n]
    whole = 4 * (sum(map(math.prod, shapes.values())) + sum(t.numel() for t in statistics))
    for replica in each:  # and one average of weights at the end
        num_pairs = replica["averages"] - 1
        assert replica["bytes_sent"] == pytest.approx(num_pairs * sent + whole, abs=4)


@pytest.mark.parametrize("name", ["overlapped", "gossip of gradients"])
def test_the_record_tells_who_did_what_when(name, two):
    lines = (two / name / "events.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "did" in row]
    summary = json.loads((two / name / "summary.json").read_text())["replicas"]
    for replica, account in enumerate(summary["each"]):
        own = [row for row in rows if row["replica"] == replica]
        for earlier, later in pairwise(own):
            assert earlier["from"] <= earlier["to"] <= later["from"]
        seconds = {
            deed: sum(row["to"] - row["from"] for row in own if row["did"] == deed)
            for deed in DEEDS
        }
        for did, name_of in (("worked", "busy_seconds"), ("averaged", "averaging_seconds")):
            assert seconds[did] == pytest.approx(account[name_of], abs=0.05)
        assert own[-1]["did"] == "averaged"  # at the end
        assert seconds["saved"] > 0
        assert (seconds["evaluated"] > 0) == (replica == 0)


@pytest.mark.parametrize("name", ["weights", "overlapped pool", "gossip", "served"])
def test_the_last_checkpoint_knows_that_every_item_is_done(name, two, three):
    """A longer run would otherwise go on with the last weights, and take items once more."""
    folder = (three if name == "served" else two) / name
    manifest = read_manifest(folder / "checkpoints" / f"step-{NUM_STEPS:08d}")
    progress = manifest.replicas["progress"]
    assert progress["drawn"] == sum(progress["taken"]) == 2 * NUM_STEPS
    rows = (folder / "events.jsonl").read_bytes()[: manifest.replicas["events_bytes"]]
    items = [json.loads(row).get("item") for row in rows.splitlines()]
    assert len([item for item in items if item is not None]) == 2 * NUM_STEPS


@pytest.mark.parametrize("name", AGAIN)
def test_a_run_that_does_again_what_another_did_ends_in_the_same_weights(name, two, four):
    """Which replica takes which item of a pool depends on the time; the record of it does not."""
    assert_same_end(four / name, two / name)
    config = ON_TWO[name.removesuffix(" resumed")]
    runs = [read_events(folder / name, run_of(config)) for folder in (two, four)]
    assert runs[0] == runs[1]
    done = sorted(item for replica in runs[0] for item in replica.items)
    assert done == list(range(2 * NUM_STEPS))


@pytest.mark.heavy
def test_items_of_a_pool_that_a_reader_reads_ahead_are_those_of_no_reader(tmp_path):
    ahead = replace(POOLS["overlapped pool"], workers=1)
    again = replace(ahead, workers=0, replay=Path("ahead"))
    run_all(2, tmp_path, {"ahead": ahead, "again": again})
    assert_same_end(tmp_path / "again", tmp_path / "ahead")


def test_a_run_with_other_options_threads_or_images_is_not_done_again(two):
    config = replace(POOLS["gradients"], replay=two / "gradients")
    table = [
        ({"dp": 1}, "its --dp is 2, this run's is 1"),
        ({"microbatches": 1}, "its --microbatches is 2, this run's is 1"),
        ({"steps": 8}, "its --steps is 7, this run's is 8"),
        ({"lr": 0.5}, "its --lr is 0.01, this run's is 0.5; give the same options, as --config"),
        ({"seed": 4}, "its --seed is 3, this run's is 4"),
        ({"impl": "plain"}, "its --impl is fused, this run's is plain"),
    ]
    assert_refused(
        lambda change: training.train(run_of(replace(config, **change)), 0, CPU, two), table
    )
    run = run_of(config)
    other = with_images(run, shortened(images_of(run), NUM_TRAIN, 7))
    with pytest.raises(InputError, match="gradients: has other images: the test images differ;"):
        training.train(other, 0, CPU, two)
    torch.set_num_threads(2)
    message = "has 1 threads, and this run 2; the numbers would differ, so give the same"
    with pytest.raises(InputError, match=message):
        training.train(run, 0, CPU, two)


# ---- one replica ------------------------------------------------------------------------------


def test_one_replica_is_plain_training(tmp_path):
    plain = replace(PLAIN, dp=1)
    periodic = {"strategy": "periodic", "average_every": 2}
    own_steps: dict[str, dict[str, Any]] = {
        "gradients": {**periodic, "average": "gradients"},
        "compressed weights": {**periodic, "compress": "bfloat16"},
        "compressed pairs": {
            "strategy": "gossip",
            "average": "gradients",
            "average_every": 2,
            "compress": "powersgd:1",
        },
        "compressed": {"compress": "top-k:0.1"},
    }
    for name, options in {"plain": {}, **own_steps}.items():
        (tmp_path / name).mkdir()
        run = run_of(replace(plain, **options))
        assert training.train(run, 0, CPU, tmp_path / name) == 0
        assert_equal(kept(tmp_path / name), kept(tmp_path / "plain"))
