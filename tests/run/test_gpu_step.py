"""What a step on a GPU asks of the host, without a GPU: fake CUDA tensors have no numbers."""

import warnings
from dataclasses import replace

import pytest
import torch.distributed as dist

from tests.fake_gpu import FakeGpu, Seen, is_on_gpu
from tests.world import run_ranks
from vigpipe.config.options import TrainConfig
from vigpipe.model.shapes import VIG_SHAPES
from vigpipe.run.evaluation import evaluate
from vigpipe.run.step import train_step

pytestmark = pytest.mark.multiprocess

PLAIN = TrainConfig(
    data="fake", image_size=8, batch_size=16, microbatches=2, steps=3, opt="adamw", sync="drain"
)
EVERYTHING = replace(
    PLAIN,
    model="vig_cifar_ti",
    image_size=32,
    drop_path=0.2,
    dropout=0.1,
    stochastic_dilation=0.2,
    mixup=0.8,
    cutmix=1.0,
    smoothing=0.1,
    clip=1.0,
    ema=0.99,
)
# What one rank of one stage sends: random masks, images and labels.
SENT = 3


def begin() -> None:
    """Leave the test's world, and let the model have fewer blocks in this rank's process."""
    dist.destroy_process_group()
    warnings.simplefilter("ignore")  # of fake tensors
    VIG_SHAPES["vig_cifar_ti"] = replace(VIG_SHAPES["vig_cifar_ti"], blocks=(3,))


def step_on_gpu(_rank: int, _world: int, config: TrainConfig, rank: int) -> Seen:
    """Read and take two steps as a rank, and return what happened in the second."""
    begin()
    gpu = FakeGpu(config, rank)
    first, _ = gpu.batch(0)
    with gpu.running():
        train_step(gpu.rank_state, first)
    second, read = gpu.batch(1)
    with gpu.running() as seen:
        train_step(gpu.rank_state, second)
    assert gpu.rank_state.open_step is not None, "the host has waited for the step"
    return replace(seen, sent=seen.sent + read.sent, waited=seen.waited + read.waited)


def of_step(config: TrainConfig, rank: int = 0) -> Seen:
    (seen,) = run_ranks(step_on_gpu, 1, config, rank)
    return seen


@pytest.mark.parametrize(
    "config",
    [
        EVERYTHING,
        replace(EVERYTHING, dtype="bfloat16", recompute="except-last"),
        replace(PLAIN, model="vig_study", opt="adam", norm="layer", sync="double"),
    ],
    ids=["everything", "bfloat16", "study"],
)
def test_a_step_sends_three_tensors_and_waits_for_nothing(config):
    seen = of_step(config)
    assert seen.waited == []
    assert (seen.sent, seen.fetched) == (SENT, 1)
    assert len(seen.operators) > 100
    if config.model == "vig_cifar_ti":
        assert {"vigpipe.knn", "vigpipe.aggregate"} <= set(seen.operators)


# The first stage has no labels, and the last no images. (DDP's C++ cannot be faked.)
@pytest.mark.parametrize(("rank", "sync"), [(0, "drain"), (3, "double")])
def test_two_stages_of_two_replicas_exchange_on_the_gpu_and_agree_on_the_host(rank, sync):
    """Losses and moments of BatchNorm went to the host, and from there into NCCL's collectives."""
    seen = of_step(replace(EVERYTHING, stages=2, dp=2, sync=sync), rank)
    assert seen.waited == []
    assert (seen.sent, seen.fetched) == (SENT - 1, 1)
    assert seen.on_host == ["agree"]
    assert {"allreduce_", "_allgather_base_", "send", "recv_"} <= set(seen.on_gpu)


def read_on_gpu(_rank: int, _world: int, config: TrainConfig) -> Seen:
    begin()
    batch, seen = FakeGpu(config).batch(0)
    assert batch.inputs is not None
    assert is_on_gpu(batch.inputs)
    return seen


def test_pixels_are_normalised_erased_and_mixed_on_the_gpu_without_waiting():
    erasing = replace(EVERYTHING, random_crop="box", erasing=1.0)
    (seen,) = run_ranks(read_on_gpu, 1, erasing)
    assert seen.waited == []
    assert seen.sent == 1 + (PLAIN.batch_size or 0)  # the pixels, and a box of each image
    assert {"aten.index_select", "aten.flip"} <= set(seen.operators)


def evaluate_on_gpu(_rank: int, _world: int, config: TrainConfig) -> Seen:
    """Evaluate three batches, the last of them smaller."""
    begin()
    gpu = FakeGpu(config)
    assert config.batch_size is not None
    num_images = 2 * config.batch_size + 3
    batches, read = gpu.test_batches(num_images)
    with gpu.running() as seen, pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu.rank_state.feed, "test_batches", lambda *_: iter(batches))
        evaluate(gpu.rank_state, ("test",), num_images)
    return replace(seen, sent=seen.sent + read.sent, waited=seen.waited + read.waited)


def test_an_evaluation_reads_its_sums_once_and_waits_for_nothing_else():
    """It left out the padding by a mask, for whose numbers the host had to wait."""
    (seen,) = run_ranks(evaluate_on_gpu, 1, EVERYTHING)
    # Of each batch the images, and the labels for the schedule (which wants some) and the score.
    # How many images are done is asked for every batch, so that few are under way at a time.
    assert (seen.waited, seen.sent, seen.fetched) == ([], 3 * 3, 3 + 1)
    assert seen.on_host == ["agree"]
