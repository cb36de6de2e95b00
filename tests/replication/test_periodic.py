"""Training with replicas that are averaged now and then: real ranks, and one process beside."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tests.oracle import shortened
from tests.world import GUARD, run_ranks
from vigpipe import training
from vigpipe.config.options import TrainConfig
from vigpipe.data.batches import ReplicaBatch, Share
from vigpipe.data.job import ImageJob
from vigpipe.errors import InputError
from vigpipe.replication.strategy import Outcome
from vigpipe.replication.synchronous import Synchronous
from vigpipe.run.events import read_events
from vigpipe.run.facts import Run, prepare
from vigpipe.run.rank import RankState, make_rank_state
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
GRADIENTS = replace(WEIGHTS, average="gradients")
POOL = replace(WEIGHTS, items="pool", checkpoint_every=2)
# No ties between distances, and no Adam, which makes steps of a size out of gradients that are mere
# rounding noise, such as those of a bias before a BatchNorm.
EXACT = replace(PLAIN, data="fake", image_size=8, dtype="float64", opt="sgd", lr=0.1)
ON_TWO = {
    "weights": WEIGHTS,
    "outer": OUTER,
    "mean": replace(OUTER, outer_lr=1.0, outer_momentum=0.0),
    "gradients": GRADIENTS,
    "pool": POOL,
    "pool of gradients": replace(POOL, average="gradients"),
    "best": replace(GRADIENTS, final="best", validation=0.2),
    "every step": replace(EXACT, strategy="periodic", average="gradients", average_every=1),
    "synchronous": EXACT,
    "not finite": replace(GRADIENTS, average_every=1, on_nan="skip"),
}
ON_FOUR = {name: replace(ON_TWO[name], stages=2) for name in ("weights", "outer", "gradients")}
POOLS = ["pool", "pool of gradients"]
BAD_ITEM = 5


def run_of(config: TrainConfig) -> Run:
    dtype = torch.float64 if config.dtype == "float64" else torch.float32
    run = prepare(config, dtype)
    return replace(run, source=shortened(run.source, NUM_TRAIN, 8))


def train_all(rank: int, world_size: int, folder: Path, configs: dict[str, TrainConfig]) -> None:
    """Train with one configuration after the other, as one rank.

    What stands under `resume` is the name of one that came before, from whose first checkpoint this
    one goes on; with a pool in a copy of its folder.
    """
    torch.set_num_threads(1)

    def poisoned(rank_state: RankState, batch: ReplicaBatch, status: Any):
        # Item 5 is that of replica 1 in step 2.
        is_bad = rank_state.replica_index == BAD_ITEM % 2 and batch.step == BAD_ITEM // 2
        if rank_state.run.config.on_nan == "skip" and is_bad and batch.images is not None:
            batch.images.fill_(torch.nan)
        return train_step(rank_state, batch, status)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "train_step", poisoned)
        for name, config in configs.items():
            dist.barrier()  # the writer may still be busy with the run before
            if config.resume is not None:
                earlier = folder / config.resume
                config = replace(config, resume=str(first_checkpoint(earlier)))
                if config.items == "pool" and rank == 0:  # so that its record is there as well
                    shutil.copytree(earlier, folder / name, dirs_exist_ok=True)
            (folder / name).mkdir(exist_ok=True, parents=True)
            dist.barrier()
            assert training.train(run_of(config), rank, CPU, folder / name) == 0


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """The runs of two replicas."""
    folder = tmp_path_factory.mktemp("two")
    resumed = {f"{name} resumed": replace(ON_TWO[name], resume=name) for name in POOLS}
    run_ranks(train_all, 2, folder, ON_TWO | resumed, timeout=GUARD)
    return folder


@pytest.fixture(scope="module")
def four(two, tmp_path_factory) -> Path:
    """The runs of two replicas of two stages, and runs that go on from a checkpoint of these."""
    folder = tmp_path_factory.mktemp("four")
    resumed = {f"{name} resumed": replace(c, resume=name) for name, c in ON_FOUR.items()}
    again = {
        f"{name}{how}": replace(ON_TWO[name], stages=2, replay=two / f"{name}{how}")
        for name in POOLS
        for how in ("", " resumed")
    }
    run_ranks(train_all, 4, folder, ON_FOUR | resumed | again, timeout=GUARD)
    return folder


def first_checkpoint(folder: Path) -> Path:
    """One in the midst of a run with fixed items. With a pool it is, unless replica 0 was late."""
    return min((folder / "checkpoints").glob("step-*"))


def replicas(folder: Path) -> list[dict[str, Tensor]]:
    """The tensors of each replica after the last step, before one is made of all."""
    found: list[dict[str, Tensor]] = [{}, {}]
    for path in (folder / "checkpoints" / f"step-{NUM_STEPS:08d}").glob("*.safetensors"):
        replica = int(path.stem[-1])
        for name, tensor in load_file(path).items():
            found[replica][name.removeprefix("replica1/")] = tensor
    return found


def kept(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def is_parameter(name: str) -> bool:
    return not any(word in name for word in ("running", "num_batches"))


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []


# ---- one process that carries out the same --------------------------------------------------


class Given(Synchronous):
    """Takes a step with gradients and moments that are given."""

    given: tuple[list[Tensor], Tensor] | None = None

    def combine_gradients(self, gradients, moments, is_finite, num_samples):
        if self.given is None:
            return Outcome(moments)
        for gradient, mean in zip(gradients, self.given[0], strict=True):
            gradient.copy_(mean)
        return Outcome(self.given[1])


def in_turn(config: TrainConfig) -> list[dict[str, Tensor]]:
    """Train two unsplit models in turn, item after item, and average them as the strategy says."""
    torch.set_num_threads(1)
    plain = replace(PLAIN, dp=1, batch_size=5)  # the micro-batches of 10 images on two replicas
    states = [make_rank_state(run_of(plain), 0, CPU) for _ in range(2)]
    source = run_of(config).source
    givens = [Given(state.run.course, 0, state.strategy.peers) for state in states]
    for state, given in zip(states, givens, strict=True):
        state.strategy = given
        share, with_all = Share(10, 2, 2), {"with_images": True, "with_labels": True}
        state.job = ImageJob(source, share, CPU, **with_all, seed=config.seed)  # pyright: ignore[reportArgumentType]
    old = [p.detach().clone() for p in states[0].parameters().values()]
    velocity = [torch.zeros_like(p) for p in old]
    samples = [0, 0]
    for step in range(NUM_STEPS):
        batches = []
        for r, state in enumerate(states):
            batch = state.job.batch(2 * step + r)
            batches.append(replace(batch, num_samples=sum(batch.sizes)))
        is_due = (step + 1) % EVERY == 0
        if is_due and config.average == "gradients":
            mean = mean_gradients(states, batches)
            for given in givens:
                given.given = mean
        for r, (state, batch) in enumerate(zip(states, batches, strict=True)):
            if batch.num_samples or givens[r].given:
                train_step(state, batch)
            samples[r] += batch.num_samples
            givens[r].given = None
        if is_due and config.average != "gradients":
            average_weights(states, samples, config, old, velocity)
            samples = [0, 0]
    return [{f"model/{name}": t for name, t in state.state().items()} for state in states]


def mean_gradients(states, batches) -> tuple[list[Tensor], Tensor]:
    gradients, moments = [], []
    for state, batch in zip(states, batches, strict=True):
        state.replicas.gradients.clear()
        state.pipeline.train_step(batch)
        state.replicas.gradients.reduce()
        moments.append(state.statistics.take())
        gradients.append([p.grad.double().clone() for p in state.parameters().values()])
    first, second = (batch.num_samples for batch in batches)
    sums = [first * a + second * b for a, b in zip(*gradients, strict=True)]
    return [(s / (first + second)).float() for s in sums], torch.cat(moments)


@torch.no_grad()
def average_weights(states, samples, config, old, velocity) -> None:
    first, second = samples
    tensors = [[t for t in state.state().values() if t.is_floating_point()] for state in states]
    names = [n for n, t in states[0].state().items() if t.is_floating_point()]
    means = {
        name: ((first * a.double() + second * b.double()) / (first + second)).float()
        for name, a, b in zip(names, *tensors, strict=True)
    }
    if config.average == "outer":
        for i, name in enumerate(states[0].parameters()):
            velocity[i].mul_(config.outer_momentum).add_(old[i] - means[name])
            new = torch.lerp(old[i], means[name], config.outer_lr)
            old[i] = new.sub(velocity[i], alpha=config.outer_lr * config.outer_momentum)
            means[name] = old[i]
    for own in tensors:
        for tensor, name in zip(own, names, strict=True):
            tensor.copy_(means[name])


@pytest.mark.parametrize("name", ["weights", "outer", "gradients"])
def test_ranks_do_what_one_process_does_with_the_models_in_turn(name, two):
    for actual, expected in zip(replicas(two / name), in_turn(ON_TWO[name]), strict=True):
        assert_equal({n: t for n, t in actual.items() if n.startswith("model/")}, expected)


@pytest.mark.parametrize("name", ON_FOUR)
def test_the_number_of_stages_does_not_show(name, two, four):
    for actual, expected in zip(replicas(four / name), replicas(two / name), strict=True):
        assert_equal(actual, expected)
    assert_equal(kept(four / name), kept(two / name))


@pytest.mark.parametrize("name", ON_FOUR)
def test_a_run_that_goes_on_ends_like_one_that_did_not_stop(name, four):
    assert first_checkpoint(four / name).name < f"step-{NUM_STEPS:08d}"
    again = four / f"{name} resumed"
    for actual, expected in zip(replicas(again), replicas(four / name), strict=True):
        assert_equal(actual, expected)
    assert_equal(kept(again), kept(four / name))


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


def test_rate_1_without_momentum_is_the_mean_of_the_weights_bit_for_bit(two):
    for actual, expected in zip(replicas(two / "mean"), replicas(two / "weights"), strict=True):
        assert_equal({n: t for n, t in actual.items() if n in expected}, expected)
    assert_equal(kept(two / "mean"), kept(two / "weights"))


def test_the_weights_of_one_replica_are_kept_if_the_best_is_wanted(two):
    found = [
        {n.removeprefix("model/"): t for n, t in r.items() if n.startswith("model/")}
        for r in replicas(two / "best")
    ]
    result = kept(two / "best")
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
    assert [(row["step"], row["replica"], row["item"]) for row in steps] == [
        (step + 1, 0, 2 * step) for step in range(NUM_STEPS)
    ]
    assert [row["epoch"] for row in rows if "top1" in row] == [1, 2, 3]
    summary = json.loads((two / "weights" / "summary.json").read_text())
    assert summary["test"]["images"] == 8
    assert summary["test"]["loss"] == rows[-1]["loss"]


@pytest.mark.parametrize("name", ["weights", "gradients"])
def test_bytes_and_items_are_counted(name, two):
    summary = json.loads((two / name / "summary.json").read_text())["replicas"]
    first = replicas(two / name)[0]
    sizes = [t.numel() for n, t in first.items() if n.startswith("model/") and t.dim()]
    parameters = [n.removeprefix("ema/") for n in first if n.startswith("ema/") and is_parameter(n)]
    if name == "gradients":
        sizes = [first[f"model/{n}"].numel() for n in parameters]
    num_bytes = 4 * (sum(sizes) + sum(sizes) % 2)  # 2 (D - 1) / D * 4 P
    for replica in summary["each"]:
        at_the_end = name == "weights"  # of the steps after the last average; gradients: of weights
        assert replica["items"] == NUM_STEPS
        assert replica["averages"] == NUM_STEPS // EVERY + 1
        if at_the_end:
            assert replica["bytes_sent"] == num_bytes * replica["averages"]
        else:
            assert replica["bytes_sent"] > num_bytes * (NUM_STEPS // EVERY)
        assert replica["busy_seconds"] > 0


@pytest.mark.parametrize("name", ["pool", "pool of gradients"])
def test_with_a_pool_every_item_is_done_once(name, two):
    summary = json.loads((two / name / "summary.json").read_text())["replicas"]
    assert sum(replica["items"] for replica in summary["each"]) == 2 * NUM_STEPS


@pytest.mark.parametrize("how", ["", " resumed"])
@pytest.mark.parametrize("name", POOLS)
def test_a_run_that_does_again_what_another_did_ends_in_the_same_weights(name, how, two, four):
    """Which replica takes which item of a pool depends on the time; the record of it does not."""
    name += how
    for actual, expected in zip(replicas(four / name), replicas(two / name), strict=True):
        assert_equal(actual, expected)
    assert_equal(kept(four / name), kept(two / name))
    runs = [read_events(folder / name, run_of(POOL)) for folder in (two, four)]
    assert runs[0] == runs[1]
    done = sorted(item for replica in runs[0] for item in replica.items)
    assert done == list(range(2 * NUM_STEPS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dp": 1}, "its --dp is 2, this run's is 1"),
        ({"microbatches": 1}, "its --microbatches is 2, this run's is 1"),
        ({"steps": 8}, "its --steps is 7, this run's is 8"),
        ({"lr": 0.5}, "its --lr is 0.01, this run's is 0.5; give the same options, as --config"),
        ({"seed": 4}, "its --seed is 3, this run's is 4"),
    ],
)
def test_a_run_with_other_options_is_not_done_again(change, message, two):
    config = replace(POOL, **change, replay=two / "pool")
    with pytest.raises(InputError, match=message):
        training.train(run_of(config), 0, CPU, two)


def test_with_other_threads_it_is_not_done_again_either(two):
    torch.set_num_threads(2)
    with pytest.raises(InputError, match="has 1 threads, and this run 2; the numbers would differ"):
        training.train(run_of(replace(POOL, replay=two / "pool")), 0, CPU, two)
    torch.set_num_threads(1)


# ---- one replica ------------------------------------------------------------------------------


@pytest.mark.parametrize("average", ["weights", "gradients"])
def test_one_replica_is_plain_training(average, tmp_path):
    plain = replace(PLAIN, dp=1)
    options = {"strategy": "periodic", "average_every": 2, "average": average}
    configs = {"plain": plain, "periodic": replace(plain, **options)}
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        assert training.train(run_of(config), 0, CPU, tmp_path / name) == 0
    assert_equal(kept(tmp_path / "periodic"), kept(tmp_path / "plain"))
