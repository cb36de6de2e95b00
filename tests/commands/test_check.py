"""`vigpipe check` finds what is equal and, above all, what is not."""

import math
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

import vigpipe.commands.check
import vigpipe.commands.check_replicas
from tests.commands.refusals import refused
from tests.small_model import small_model
from tests.world import run_command, run_each
from vigpipe.cli import main
from vigpipe.commands.check import check
from vigpipe.commands.differences import Kinds, differences
from vigpipe.config.options import TrainConfig
from vigpipe.launch.device import weight_dtype
from vigpipe.run.facts import prepare
from vigpipe.run.rank import make_rank_state

CPU = torch.device("cpu")
CONFIG = TrainConfig(batch_size=12, stages=2, dp=2, microbatches=2, dtype="float64", opt="sgd")
GOSSIP = replace(
    CONFIG, strategy="gossip", average_every=1, items="pool", dtype="float32", opt="adamw", ema=0.5
)
KINDS = ["loss", "gradients", "weights", "running statistics"]


def example(**weights: torch.Tensor) -> Kinds:
    gradients = {"a (step 1)": [0.5, -4.0], "a (step 2)": [0.5, -4.0], "b (step 2)": [1.0]}
    return {
        "loss": {"loss": torch.tensor([2.0, 1.0])},
        "gradients": {name: torch.tensor(gradient) for name, gradient in gradients.items()},
        "weights": {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0]), **weights},
        "running statistics": {"mean": torch.tensor([0.25])},
    }


def row_of_weights(**weights: torch.Tensor):
    return differences(example(**weights), example())[2]


def test_a_difference_is_measured_and_located():
    gradients = {**example()["gradients"], "a (step 2)": torch.tensor([0.5, -3.0])}
    found = differences({**example(), "gradients": gradients}, example())
    assert [row.kind for row in found] == KINDS
    _, row, weights, _ = found
    assert (row.absolute, row.relative, row.where) == (1.0, 0.25, "a (step 2)")
    assert not row.identical
    assert weights.identical


def test_the_bounds_are_absolute_in_float64_and_relative_in_float32():
    for value, within_32, within_64 in (
        (2.4e-7, True, False),  # the last bit
        (2.8e-5, True, False),
        (3.2e-5, False, False),
        (math.nan, False, False),
    ):
        row = row_of_weights(b=torch.tensor([3.0 + value]))
        assert not row.identical
        assert (row.within(torch.float32), row.within(torch.float64)) == (within_32, within_64)


def test_a_lost_tensor_is_no_equality():
    with pytest.raises(AssertionError, match="weights: only one of the two has c"):
        differences(example(c=torch.ones(1)), example())


def assert_equal(table: str, *kinds: str) -> None:
    for kind in kinds:
        (row,) = [line for line in table.splitlines() if line.startswith(f"{kind}  ")]
        assert " yes" in row


@pytest.mark.multiprocess
def test_the_command_proves_two_stages_and_a_server_of_two_equal_bit_for_bit(tmp_path):
    server = ["--strategy", "server", "--dp", "2", "--items", "pool"]
    for options, kinds in ((["--microbatches", "3"], KINDS), (server, ("loss", *KINDS[2:]))):
        line = [sys.executable, "-m", "vigpipe", "check", "--stages", "2", "--batch-size", "12"]
        out = tmp_path / str(len(options))
        done = run_command([*line, *options, "--compare-steps", "2", "--out", str(out)])
        assert (done.returncode, done.stderr) == (0, "")
        assert "wanted: bit for bit" in done.stdout
        assert_equal(done.stdout, *kinds)
        assert done.stdout.endswith("\nequal\n")
        assert (out / "check.txt").read_text() == done.stdout
        if options is server:
            assert "took the same gradients in the same order: 4 items" in done.stdout


def scaled_gradient(rank_state):
    """The second replica's first stage takes its gradients a little too large."""
    if (rank_state.mesh.replica_index, rank_state.mesh.pipeline_rank) == (1, 0):
        for parameter in rank_state.trained.parameters().values():
            parameter.register_hook(lambda grad: grad * (1 + 1e-6))


def unpooled_statistics(rank_state):
    """The last stage takes its running statistics from its own replica alone."""
    if rank_state.mesh.pipeline_rank == 1:
        pooled, count = rank_state.trained.statistics.update, rank_state.run.layout.num_microbatches
        rank_state.trained.statistics.update = lambda moments: pooled(moments[:count])


def own_weights(rank_state):
    """One rank begins with weights of its own."""
    if (rank_state.mesh.replica_index, rank_state.mesh.pipeline_rank) == (0, 1):
        with torch.no_grad():
            next(iter(rank_state.trained.parameters().values())).mul_(1 + 1e-6)


def doubled_share(rank_state):
    """The second replica's weights count twice as much as they should."""
    mean = rank_state.strategy._exchange.mean
    factor = 1 + rank_state.mesh.replica_index
    rank_state.strategy._exchange.mean = lambda tensors, weight, partner: mean(
        tensors, factor * weight, partner
    )


CASES = {  # the layout, and what breaks it
    "float64": (CONFIG, None),
    "scaled gradient": (CONFIG, scaled_gradient),
    "unpooled statistics": (CONFIG, unpooled_statistics),
    "own weights": (CONFIG, own_weights),
    "gossip": (GOSSIP, None),
    "gossip, scaled gradient": (GOSSIP, scaled_gradient),
    "gossip, doubled share": (GOSSIP, doubled_share),
}


def checked(folder, rank, world_size, name):
    """Run the check of a case; return the exit code."""
    torch.set_num_threads(1)
    config, spoil = CASES[name]

    def make(run, rank, device, **strategy):
        rank_state = make_rank_state(run, rank, device, **strategy)
        # The reference stays whole.
        if spoil is not None and not strategy and run.layout.world_size > 1:
            spoil(rank_state)
        return rank_state

    vigpipe.commands.check.make_rank_state = make  # pyrefly: ignore[bad-assignment]
    vigpipe.commands.check_replicas.make_rank_state = make  # pyrefly: ignore[bad-assignment]
    (folder / name).mkdir(exist_ok=True)
    run = prepare(config, weight_dtype(config.dtype))
    return check(run, rank, CPU, folder / name, num_steps=2)


@pytest.mark.multiprocess
def test_a_broken_layout_is_found_and_every_rank_says_so(tmp_path):
    broken = {name: int(spoil is not None) for name, (_, spoil) in CASES.items()}
    with small_model():
        codes = run_each(partial(checked, tmp_path), 4, CASES)
    assert codes == [[code] * 4 for code in broken.values()]
    tables = {name: (tmp_path / name / "check.txt").read_text() for name in CASES}
    for name, table in tables.items():
        assert table.endswith("\nDIFFERENT\n" if broken[name] else "\nequal\n"), name
    rows = tables["unpooled statistics"].splitlines()
    assert [row.split("  ")[0] for row in rows if "  no  " in row] == ["running statistics"]
    whole = tables["gossip"]  # compared with models that do the same in turn
    assert "against 2 unsplit models in one process" in whole
    assert "4 items, " in whole
    assert " 0 averages" not in whole
    assert_equal(whole, "loss", "weights", "running statistics", "moving averages")


def test_a_check_of_no_step_or_no_average_is_refused(capsys):
    assert "--compare-steps 0" in refused(capsys, "check", "--compare-steps", "0")
    line = ["check", "--strategy", "gossip", "--compare-steps", "19", "--threads", "1"]
    assert "--compare-steps 19: expected at least one average" in refused(capsys, *line)


def test_a_model_without_norms_is_said_to_have_none(capsys, tmp_path):
    graph = ["--model", "gcn", "--data", "sbm:200,4", "--threads", "1", "--compare-steps", "1"]
    assert main(["check", *graph, "--out", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("float32, no norm")
