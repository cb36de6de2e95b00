"""`vigpipe check` finds what is equal and, above all, what is not."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import vigpipe.commands.check
import vigpipe.commands.check_replicas
from tests.world import run_command, run_ranks
from vigpipe.cli import main
from vigpipe.commands.check import check
from vigpipe.commands.differences import Trace, differences
from vigpipe.config.options import TrainConfig
from vigpipe.launch.device import weight_dtype
from vigpipe.run.facts import prepare
from vigpipe.run.rank import make_rank_state

CPU = torch.device("cpu")
CONFIG = TrainConfig(batch_size=24, stages=2, dp=2, microbatches=2, dtype="float64", opt="sgd")
KINDS = ["loss", "gradients", "weights", "running statistics"]


def example() -> Trace:
    return Trace(
        losses=[2.0, 1.0],
        gradients=[{"a": torch.tensor([0.5, -4.0]), "b": torch.tensor([1.0])}] * 2,
        weights={"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])},
        statistics={"mean": torch.tensor([0.25])},
    )


def test_equal_traces_have_no_difference():
    found = differences(example(), example())
    assert [row.kind for row in found] == KINDS
    assert all(row.identical and row.absolute == row.relative == 0 for row in found)


def test_a_difference_is_measured_and_located():
    other = example()
    other.gradients = [other.gradients[0], {"a": torch.tensor([0.5, -3.0]), "b": torch.ones(1)}]
    _, row, weights, _ = differences(other, example())
    assert (row.absolute, row.relative, row.where) == (1.0, 0.25, "a (step 2)")
    assert not row.identical
    assert weights.identical


def test_a_bit_is_a_difference_but_within_the_bounds():
    other = example()
    other.weights["b"] = torch.nextafter(other.weights["b"], torch.tensor(4.0))
    row = differences(other, example())[2]
    assert not row.identical
    assert row.within(torch.float32)


def test_the_bounds_are_absolute_in_float64_and_relative_in_float32():
    other = example()
    other.weights["b"] = torch.tensor([3.0 + 1e-5])
    row = differences(other, example())[2]
    assert row.within(torch.float32)
    assert not row.within(torch.float64)
    other.weights["b"] = torch.tensor([3.0 + 1e-4])
    assert not differences(other, example())[2].within(torch.float32)


def test_a_lost_tensor_is_no_equality():
    other = example()
    del other.weights["b"]
    with pytest.raises(AssertionError, match="weights: only one of the two has b"):
        differences(other, example())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_not_a_number_is_within_no_bound(dtype):
    other = example()
    other.weights["a"] = torch.full_like(other.weights["a"], math.nan)
    row = differences(other, example())[2]
    assert not row.identical
    assert not row.within(dtype)


def test_one_process_is_equal_to_itself_bit_for_bit(tmp_path, capsys):
    threads = torch.get_num_threads()
    line = ["check", "--microbatches", "2", "--batch-size", "8", "--compare-steps", "2"]
    code = main([*line, "--threads", "1", "--out", str(tmp_path)])
    torch.set_num_threads(threads)
    told = capsys.readouterr().out
    assert code == 0
    assert "wanted: bit for bit" in told
    assert told.endswith("\nequal\n")
    assert (tmp_path / "check.txt").read_text() == told


@pytest.mark.multiprocess
def test_the_command_proves_two_stages_equal_bit_for_bit(tmp_path):
    line = [sys.executable, "-m", "vigpipe", "check", "--stages", "2", "--microbatches", "3"]
    done = run_command([*line, "--batch-size", "20", "--out", str(tmp_path)])
    assert (done.returncode, done.stderr) == (0, "")
    assert "wanted: bit for bit" in done.stdout
    for kind in KINDS:
        (row,) = [line for line in done.stdout.splitlines() if line.startswith(f"{kind}  ")]
        assert " yes" in row


@pytest.mark.multiprocess
def test_the_command_proves_a_server_of_two_stages_equal_bit_for_bit(tmp_path):
    line = [sys.executable, "-m", "vigpipe", "check", "--strategy", "server", "--stages", "2"]
    line += ["--dp", "2", "--items", "pool", "--batch-size", "12", "--compare-steps", "3"]
    done = run_command([*line, "--out", str(tmp_path)])
    assert (done.returncode, done.stderr) == (0, "")
    assert "took the same gradients in the same order: 6 items" in done.stdout
    assert "wanted: bit for bit" in done.stdout
    for kind in ("loss", "weights", "running statistics"):
        (row,) = [line for line in done.stdout.splitlines() if line.startswith(f"{kind}  ")]
        assert " yes" in row


def scaled_gradient(rank_state):
    """The second replica's first stage takes its gradients a little too large."""
    if (rank_state.replica_index, rank_state.pipeline_rank) == (1, 0):
        for parameter in rank_state.parameters().values():
            parameter.register_hook(lambda grad: grad * (1 + 1e-6))


def unpooled_statistics(rank_state):
    """The last stage takes its running statistics from its own replica alone."""
    if rank_state.pipeline_rank == 1:
        pooled, count = rank_state.statistics.update, rank_state.run.layout.num_microbatches
        rank_state.statistics.update = lambda moments: pooled(moments[:count])


def own_weights(rank_state):
    """One rank begins with weights of its own."""
    if (rank_state.replica_index, rank_state.pipeline_rank) == (0, 1):
        with torch.no_grad():
            next(iter(rank_state.parameters().values())).mul_(1 + 1e-6)


def checked(rank, world_size, spoil, config, folder):
    """Run the check on a layout that `spoil` has broken."""

    def make(run, rank, device):
        rank_state = make_rank_state(run, rank, device)
        if spoil is not None and run.layout.world_size > 1:  # the reference stays whole
            spoil(rank_state)
        return rank_state

    vigpipe.commands.check.make_rank_state = make
    torch.set_num_threads(1)
    return check(prepare(config, weight_dtype(config.dtype)), rank, CPU, folder, num_steps=2)


def table(folder: Path) -> str:
    return (folder / "check.txt").read_text()


@pytest.mark.multiprocess
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_two_stages_of_two_replicas_are_equal_on_every_rank(dtype, tmp_path):
    codes = run_ranks(checked, 4, None, replace(CONFIG, dtype=dtype), tmp_path)
    assert codes == [0] * 4
    assert table(tmp_path).endswith("\nequal\n")


@pytest.mark.multiprocess
@pytest.mark.parametrize("spoil", [scaled_gradient, unpooled_statistics, own_weights])
def test_a_broken_layout_is_found_and_every_rank_says_so(spoil, tmp_path):
    assert run_ranks(checked, 4, spoil, CONFIG, tmp_path) == [1] * 4
    assert table(tmp_path).endswith("\nDIFFERENT\n")
    if spoil is unpooled_statistics:  # nothing else is
        rows = [line.split("  ")[0] for line in table(tmp_path).splitlines() if "  no  " in line]
        assert rows == ["running statistics"]


# ---- replicas that take steps of their own ----------------------------------------------------

GOSSIP = replace(
    CONFIG, strategy="gossip", average_every=1, items="pool", dtype="float32", opt="adamw", ema=0.5
)


def doubled_share(rank_state):
    """The second replica's weights count twice as much as they should."""
    strategy = rank_state.strategy
    mean = strategy._exchange.mean
    factor = 1 + rank_state.replica_index

    def weighted(tensors, weight, partner):
        return mean(tensors, factor * weight, partner)

    strategy._exchange.mean = weighted


def checked_replicas(rank, world_size, config, folder):
    """Run the check on a layout that is whole, and on some that are broken; return the codes."""
    torch.set_num_threads(1)
    codes = []
    for spoil in (None, scaled_gradient, own_weights, doubled_share):

        def make(run, rank, device, strategy=None, spoil=spoil):
            rank_state = make_rank_state(run, rank, device, strategy=strategy)
            if spoil is not None and strategy is None:  # the reference stays whole
                spoil(rank_state)
            return rank_state

        vigpipe.commands.check_replicas.make_rank_state = make
        run = prepare(config, weight_dtype(config.dtype))
        (folder / str(len(codes))).mkdir(exist_ok=True)
        codes.append(check(run, rank, CPU, folder / str(len(codes)), num_steps=4))
    return codes


@pytest.mark.multiprocess
def test_gossip_is_compared_with_models_that_do_the_same_in_turn(tmp_path):
    assert run_ranks(checked_replicas, 4, GOSSIP, tmp_path) == [[0, 1, 1, 1]] * 4
    whole = table(tmp_path / "0")
    assert "against 2 unsplit models in one process" in whole
    assert "8 items, " in whole
    assert " 0 averages" not in whole
    assert whole.endswith("\nequal\n")
    for kind in ("loss", "weights", "running statistics", "moving averages"):
        (row,) = [line for line in whole.splitlines() if line.startswith(f"{kind}  ")]
        assert " yes" in row


def test_a_check_without_an_average_is_refused(capsys):
    line = ["check", "--strategy", "gossip", "--compare-steps", "19", "--threads", "1"]
    assert main(line) == 2
    assert "--compare-steps 19: expected at least one average" in capsys.readouterr().err


def test_a_model_without_norms_is_said_to_have_none(capsys, tmp_path):
    graph = ["--model", "gcn", "--data", "sbm:200,4", "--threads", "1", "--compare-steps", "1"]
    assert main(["check", *graph, "--out", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("float32, no norm")
