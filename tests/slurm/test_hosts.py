"""Ranks on hosts that have an address and a name each: those of slurm/hosts.sh."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.hosts import HOSTS, PORT, TORCHRUN, on_host, ranks_by_hand
from tests.small_digits import SMALL_DIGITS
from tests.world import PROMPT, Command, run_command, start_command, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.multiprocess]

OPTIONS = [*SMALL_DIGITS, "--batch-size", "36", "--steps", "2", "--threads", "1", "--dp", "2"]
OPTIONS += ["--timeout", "20"]
FOUR_RANKS = ["--stages", "2", "--microbatches", "2"]  # else there are two


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[dict[str, str]]:
    """The variables with which slurm/hosts.sh knows four hosts."""
    variables = {"VIGPIPE_HOSTS_DIR": str(tmp_path_factory.mktemp("hosts"))}
    environment = {**os.environ, **variables}
    started = subprocess.run([HOSTS, "start", "4"], env=environment, capture_output=True, text=True)
    if started.returncode:
        pytest.skip(started.stderr.strip())
    yield variables
    subprocess.run([HOSTS, "stop"], env=environment, check=True)


def start_ranks(
    stack: ExitStack,
    hosts: dict[str, str],
    out: Path,
    ranks_a_host: Sequence[int],
    **more: str,
) -> list[Command]:
    """Start the ranks of a run by hand, so many on each host; they meet on the first."""
    layout = FOUR_RANKS if sum(ranks_a_host) == 4 else []
    words = ["-m", "vigpipe.train", *OPTIONS, *layout, "--out", str(out)]
    return [
        stack.enter_context(start_command([*on_host(host), *words], place | hosts | more))
        for host, place in ranks_by_hand(ranks_a_host)
    ]


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory) -> Path:
    """The weights of a run whose ranks are on this machine itself."""
    out = tmp_path_factory.mktemp("one") / "out"
    line = [sys.executable, "-m", "vigpipe.train", *OPTIONS, *FOUR_RANKS, "--out", str(out)]
    done = run_command(line)
    assert done.returncode == 0, done.stderr
    return out / "model.safetensors"


def check_equal(weights: Path, others: Path) -> None:
    """Compare two files of weights bit by bit."""
    expected, found = load_file(weights), load_file(others)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.numpy().tobytes() == found[name].numpy().tobytes(), name


def test_torchrun_needs_no_variables_on_two_hosts(hosts, on_one_host, tmp_path):
    """gloo offered 127.0.1.1, which is what a host's own name means on every Debian."""
    words = [*TORCHRUN, "--nproc-per-node", "2", "-m", "vigpipe.train", *OPTIONS, *FOUR_RANKS]
    words += ["--out", str(tmp_path / "out")]
    with ExitStack() as stack:
        agents = [
            stack.enter_context(start_command([*on_host(host), *words], hosts)) for host in (1, 2)
        ]
        for agent in agents:
            done = agent.wait()
            assert done.returncode == 0, done.stderr
    check_equal(on_one_host, tmp_path / "out" / "model.safetensors")


def start_stranger(stack: ExitStack, hosts: dict[str, str], what: str) -> Command:
    """Let another user be on the first host, before the ranks come."""
    line = [*on_host(1), "-m", "tests.slurm.stranger", what, "10.213.0.1", PORT]
    command = stack.enter_context(start_command(line, hosts))
    wait_until(lambda: "here" in (command.folder / "stdout").read_text(), "a stranger has come")
    return command


def test_another_user_may_look_and_connect_and_disturbs_nothing(hosts, on_one_host, tmp_path):
    with ExitStack() as stack:
        looker = start_stranger(stack, hosts, "read")
        for rank in start_ranks(stack, hosts, tmp_path / "out", [1, 1, 1, 1]):
            done = rank.wait()
            assert done.returncode == 0, done.stderr
        looked = looker.wait()
    assert "knows/3': b'file " in looked.stdout, looked.stderr  # and not what is in the file
    check_equal(on_one_host, tmp_path / "out" / "model.safetensors")


def test_another_user_who_writes_or_takes_a_place_ends_the_run_at_most(hosts, tmp_path):
    with ExitStack() as stack:
        start_stranger(stack, hosts, "write")
        ranks = start_ranks(stack, hosts, tmp_path / "out", [1, 1])
        with contextlib.suppress(subprocess.TimeoutExpired):
            for rank in ranks:
                wait_until(lambda: any(has_ended(rank) for rank in ranks), "a rank has ended")
                rank.popen.wait(PROMPT)
        # One that waits for a rank that has given up is ended here, as by a launcher.
        ended = [rank.wait() for rank in ranks if has_ended(rank)]
    assert {done.returncode for done in ended} <= {0, 70}, [done.stderr for done in ended]
    assert not any("Traceback" in done.stderr for done in ended)


def has_ended(command: Command) -> bool:
    return command.popen.poll() is not None


def test_an_interface_that_leads_nowhere_is_named_on_every_host(hosts, tmp_path):
    """One host ended after half a minute, without saying what to do; the other one waited on."""
    with ExitStack() as stack:
        out = tmp_path / "out"
        ranks = start_ranks(stack, hosts, out, [1, 1], GLOO_SOCKET_IFNAME="lo")
        ended = [rank.wait() for rank in ranks]
    assert {done.returncode for done in ended} == {70}
    for host, done in zip(("host1", "host2"), ended, strict=True):
        said = f"{host} has offered interface lo: set GLOO_SOCKET_IFNAME on every host to the"
        assert said in done.stderr
