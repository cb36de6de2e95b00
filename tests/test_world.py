"""run_ranks and run_command keep their promises, above all when something goes wrong."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.world import RankFailed, run_command, run_ranks, start_command

pytestmark = pytest.mark.multiprocess


def add_up(rank: int, world_size: int, factor: torch.Tensor) -> torch.Tensor:
    total = torch.tensor([float(rank), world_size])
    dist.all_reduce(total)
    return total * factor


def raise_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("nope")
    dist.barrier()


def die_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on_rank_1(rank: int, world_size: int) -> int:
    if rank == 1:
        time.sleep(1000)
    return os.getpid()


def load_data(rank: int, world_size: int) -> list[int]:
    numbers = torch.utils.data.TensorDataset(torch.arange(4))
    return [int(x) for (x,) in torch.utils.data.DataLoader(numbers, num_workers=1)]


def test_results_come_back_by_rank():
    for result in run_ranks(add_up, 3, torch.tensor(2.0)):
        assert result.tolist() == [6.0, 18.0]


def test_a_rank_may_start_a_data_loader():
    assert run_ranks(load_data, 2) == [[0, 1, 2, 3]] * 2


def test_a_failing_rank_raises_its_own_traceback():
    with pytest.raises(RankFailed, match="rank 1: KeyError: 'nope'") as caught:
        run_ranks(raise_on_rank_1, 3)
    assert "in raise_on_rank_1" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_killed_rank_is_named():
    with pytest.raises(RankFailed, match="rank 1: ended without a word"):
        run_ranks(die_on_rank_1, 3)


def test_a_hanging_rank_is_named():
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 still ran after 1 s"):
        run_ranks(hang_on_rank_1, 2, timeout=1)


def test_run_command_returns_output_and_code():
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    done = run_command([sys.executable, "-c", code])
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")


def test_run_command_notices_what_is_left_behind():
    code = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    with start_command([sys.executable, "-c", code]) as command:
        with pytest.raises(AssertionError, match="no process of the command is left"):
            command.wait(10)
        assert len(command.processes()) == 1
    assert command.processes() == []
