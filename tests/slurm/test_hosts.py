"""Ranks on hosts that have an address and a name each: those of slurm/hosts.sh, and its Slurm."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file

from tests.hosts import (
    HOSTS,
    PORT,
    TORCHRUN,
    change,
    on_host,
    ranks_by_hand,
    skip_without_nft,
    some_hosts,
)
from tests.slurm.conftest import started_cluster
from tests.small_digits import SMALL_DIGITS
from tests.world import PROMPT, Command, run_command, start_command, wait_until
from vigpipe.files.untrusted import read_json

pytestmark = [pytest.mark.slurm, pytest.mark.multiprocess]

OPTIONS = [*SMALL_DIGITS, "--batch-size", "36", "--threads", "1"]
STEPS = ["--steps", "2", "--timeout", "20"]
SHORT = ["--steps", "2", "--timeout", "5"]  # of what ends when ranks have waited so long
TWO_RANKS = ["--dp", "2"]
FOUR_RANKS = [*TWO_RANKS, "--stages", "2", "--microbatches", "2"]
PORTS = "30000-30015"
LATE_SECONDS = 3


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, str]]:
    """The variables of four hosts, and of a Slurm whose nodes they are; host5 has slurmctld."""
    with started_cluster(4, "--hosts", "4") as environment:
        folder = Path(environment["SLURM_LOCAL_DIR"]) / "hosts"
        yield environment | {"VIGPIPE_HOSTS_DIR": str(folder)}


def start_ranks(
    stack: ExitStack,
    hosts: dict[str, str],
    out: Path,
    ranks_a_host: Sequence[int],
    *options: str,
    **more: str,
) -> list[Command]:
    """Start the ranks of a run by hand, so many on each host; they meet on the first."""
    layout = FOUR_RANKS if sum(ranks_a_host) == 4 else TWO_RANKS
    words = ["-m", "vigpipe.train", *OPTIONS, *(options or (*layout, *STEPS)), "--out", str(out)]
    return [
        stack.enter_context(start_command([*on_host(host), *words], place | hosts | more))
        for host, place in ranks_by_hand(ranks_a_host)
    ]


def end(commands: Sequence[Command]) -> list["subprocess.CompletedProcess[str]"]:
    return [command.wait() for command in commands]


def run_ranks(
    hosts: dict[str, str], out: Path, ranks_a_host: Sequence[int], *options: str, **more: str
) -> list["subprocess.CompletedProcess[str]"]:
    """Start the ranks of a run by hand, and wait for their ends."""
    with ExitStack() as stack:
        return end(start_ranks(stack, hosts, out, ranks_a_host, *options, **more))


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory) -> dict[int, Path]:
    """The weights of runs whose ranks are on this machine itself, by their number."""
    found = {}
    for layout, num_ranks in ((TWO_RANKS, 2), (FOUR_RANKS, 4)):
        out = tmp_path_factory.mktemp("one") / "out"
        line = [sys.executable, "-m", "vigpipe.train", *OPTIONS, *layout, *STEPS]
        done = run_command([*line, "--out", str(out)])
        assert done.returncode == 0, done.stderr
        found[num_ranks] = out / "model.safetensors"
    return found


def check_equal(
    expected_weights: Path, out: Path, ended: Sequence["subprocess.CompletedProcess[str]"]
) -> None:
    """Compare the weights of a run that has ended bit by bit."""
    for done in ended:
        assert done.returncode == 0, done.stderr
    expected, found = load_file(expected_weights), load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.numpy().tobytes() == found[name].numpy().tobytes(), name


@pytest.mark.parametrize("num_hosts", [2, 4])
def test_srun_needs_no_variables(hosts, on_one_host, tmp_path, num_hosts):
    out = tmp_path / "out"
    line = [HOSTS, "run", "host5", "srun", f"-N{num_hosts}", "-n4", "--overlap"]
    line += [f"--ntasks-per-node={4 // num_hosts}", "-t", "5", sys.executable]
    line += ["-m", "vigpipe.train", *OPTIONS, *FOUR_RANKS, *STEPS, "--out", str(out)]
    check_equal(on_one_host[4], out, [run_command(line, hosts)])


def test_torchrun_needs_no_variables_on_two_hosts(hosts, on_one_host, tmp_path):
    """gloo offered 127.0.1.1, which is what a host's own name means on every Debian."""
    words = [*TORCHRUN, "--nproc-per-node", "2", "-m", "vigpipe.train", *OPTIONS, *FOUR_RANKS]
    words += [*STEPS, "--out", str(tmp_path / "out")]
    with ExitStack() as stack:
        agents = [
            stack.enter_context(start_command([*on_host(host), *words], hosts)) for host in (1, 2)
        ]
        check_equal(on_one_host[4], tmp_path / "out", end(agents))


def test_torchrun_without_a_rendezvous_needs_no_variables_on_four_hosts(
    hosts, on_one_host, tmp_path
):
    words = ["--nproc-per-node", "1", "-m", "vigpipe.train", *OPTIONS, *FOUR_RANKS, *STEPS]
    words += ["--out", str(tmp_path / "out")]
    with ExitStack() as stack:
        agents = []
        for host in (1, 2, 3, 4):
            line = [*on_host(host), "-m", "torch.distributed.run", "--nnodes", "4"]
            line += ["--master-addr", "host1", "--master-port", PORT, "--node-rank", str(host - 1)]
            agents.append(stack.enter_context(start_command([*line, *words], hosts)))
        check_equal(on_one_host[4], tmp_path / "out", end(agents))


@pytest.mark.parametrize(
    ("options", "address"), [(["--ipv6"], "host1"), (["--no-names"], "10.213.0.1")]
)
def test_hosts_may_have_no_ipv4_or_no_names(hosts, on_one_host, tmp_path, options, address):
    with some_hosts(tmp_path, *options) as other:
        ended = run_ranks(other, tmp_path / "out", [1, 1], MASTER_ADDR=address)
    check_equal(on_one_host[2], tmp_path / "out", ended)


def test_a_name_that_leads_to_the_host_itself_is_refused(hosts, tmp_path):
    """Its ranks waited ten minutes for an answer from their own host."""
    options = [*TWO_RANKS, *SHORT]
    first, second = run_ranks(hosts, tmp_path / "out", [1, 1], *options, MASTER_ADDR="localhost")
    assert (first.returncode, second.returncode) == (70, 2)
    assert "the name 'localhost' of rank 0's node means 127.0.0.1 on host2, which" in second.stderr
    assert "rank 1 of 2 did not come to localhost port" in first.stderr


def test_a_firewall_is_named_and_ports_keep_within_it(hosts, on_one_host, tmp_path):
    """Without a word, gloo tried to connect for five times --timeout."""
    skip_without_nft()
    short = [*TWO_RANKS, *SHORT]
    with some_hosts(tmp_path) as walled:
        for host in ("host1", "host2"):
            change(walled, "allow", host, "22")
        for done in run_ranks(walled, tmp_path / "none", [1, 1], *short):
            assert done.returncode == 70
            assert f"host1 port {PORT}" in done.stderr
            assert "firewalls between the hosts pass TCP to that port" in done.stderr
        change(walled, "allow", "host1", PORT)
        first, _ = run_ranks(walled, tmp_path / "one", [1, 1])
        assert first.returncode == 70
        assert "host1 cannot reach host2 at 10.213.0.2 port" in first.stderr
        assert "let their firewalls pass TCP to the ports of --ports" in first.stderr
        change(walled, "allow", "host1", f"{PORT},{PORTS}")
        change(walled, "allow", "host2", PORTS)
        options = [*TWO_RANKS, *STEPS, "--ports", PORTS]
        ended = run_ranks(walled, tmp_path / "all", [1, 1], *options)
        check_equal(on_one_host[2], tmp_path / "all", ended)
        for done in run_ranks(walled, tmp_path / "few", [1, 1], *options[:-1], "30000-30000"):
            assert done.returncode == 2
            assert "--ports 30000-30000: none of the 1 of a rank on host" in done.stderr


def test_files_of_other_hosts_may_be_seen_seconds_later(on_one_host, tmp_path):
    """Each host sees the folder through a mount of its own; the stages end it in turn."""
    if not (importlib.util.find_spec("mfusepy") and shutil.which("fusermount3")):
        pytest.skip("needs mfusepy, and Debian's fuse3")
    backing, mount = tmp_path / "backing", tmp_path / "mount"
    for folder in (backing, mount):
        folder.mkdir()
    options = ["--stages", "2", "--microbatches", "2", "--checkpoint-every", "1", *STEPS]
    with some_hosts(tmp_path) as late, ExitStack() as stack:
        for host in (1, 2):
            words = ["-m", "tests.late_folder", str(backing), str(mount), str(LATE_SECONDS)]
            folder = stack.enter_context(start_command([*on_host(host), *words], late))
            line = [HOSTS, "run", f"host{host}", "mountpoint", "-q", str(mount)]
            wait_until(
                lambda line=line: not subprocess.run(line, env=os.environ | late).returncode,
                "the folder is there",
                running=folder,
            )
        change(late, "run", "host1", "touch", str(mount / "new"))
        assert change(late, "run", "host1", "ls", str(mount)) == "new\n"
        assert not change(late, "run", "host2", "ls", str(mount))
        first, second = run_ranks(late, mount / "out", [1, 1], *options)
        assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
        for name in ("model.safetensors", "summary.json"):
            (backing / "out" / name).unlink()
        shutil.rmtree(backing / "out" / "checkpoints" / "step-00000002")
        resumed = run_ranks(late, mount / "out", [1, 1], *options, "--resume", "auto")
        assert "going on after step 1" in resumed[1].stdout, resumed[1].stderr
    check_equal(on_one_host[2], backing / "out", resumed)


def test_a_folder_that_hosts_do_not_share_is_refused(tmp_path):
    """The checkpoints of a run were never whole, and its files on whichever host wrote them."""
    out = tmp_path / "mine" / "out"
    out.parent.mkdir()
    with some_hosts(tmp_path) as apart:
        change(apart, "run", "host2", "mount", "-t", "tmpfs", "tmpfs", str(out.parent))
        ended = run_ranks(apart, out, [1, 1])
    assert [done.returncode for done in ended] == [2, 2]
    assert f"--out {out}: is not there on host2; choose" in ended[0].stderr


NUM_BYTES = 4 * 197_770  # of the weights of vig_digits
BOUNDARY_BYTES = 36 * 16 * 192 * 4  # of the nodes of a batch, or of their gradients


class Traffic(NamedTuple):
    """What a layout of two ranks sends over the link between their hosts."""

    options: tuple[str, ...]
    steps: int
    bytes_a_step: float | None = None  # None: summary.json says how many in all


@pytest.mark.parametrize(
    "traffic",
    [
        # A ring: every rank sends half of the sums, and half of the results, in float64.
        Traffic(("--dp", "2"), 40, 2 * NUM_BYTES),
        Traffic(("--stages", "2", "--microbatches", "2"), 80, BOUNDARY_BYTES),
        Traffic(("--dp", "2", "--strategy", "periodic", "--average-every", "2"), 80),
        Traffic(("--dp", "2", "--strategy", "gossip"), 160),
    ],
    ids=["synchronous", "stages", "periodic", "gossip"],
)
def test_links_carry_the_bytes_that_are_accounted_for(hosts, tmp_path, traffic):
    """And at most a tenth and 2 MB more, of protocols and of the start and the end of a run."""

    def sent(host: str) -> int:
        line = change(hosts, "run", host, "grep", "eth0", "/proc/net/dev")
        return int(line.partition(":")[2].split()[8])

    before = [sent(host) for host in ("host1", "host2")]
    options = [*traffic.options, "--steps", str(traffic.steps), "--evaluate-every", "999"]
    for done in run_ranks(hosts, tmp_path / "out", [1, 1], *options):
        assert done.returncode == 0, done.stderr
    carried = [sent(host) - was for host, was in zip(("host1", "host2"), before, strict=True)]
    if traffic.bytes_a_step is None:
        summary = read_json(tmp_path / "out" / "summary.json", 1 << 20)
        accounts = [each["bytes_sent"] for each in summary["replicas"]["each"]]
    else:
        accounts = [traffic.bytes_a_step * traffic.steps] * 2
    for account, bytes_carried in zip(accounts, carried, strict=True):
        print(f"accounted {account:,.0f}, carried {bytes_carried:,}")  # for docs/clusters.md
        assert account <= bytes_carried <= 1.1 * account + 2e6


def start_stranger(stack: ExitStack, hosts: dict[str, str], what: str) -> Command:
    """Let another user be on the first host, before the ranks come."""
    line = [*on_host(1), "-m", "tests.slurm.stranger", what, "10.213.0.1", PORT]
    command = stack.enter_context(start_command(line, hosts))
    wait_until(lambda: "here" in (command.folder / "stdout").read_text(), "a stranger has come")
    return command


def test_another_user_may_look_and_connect_and_disturbs_nothing(hosts, on_one_host, tmp_path):
    with ExitStack() as stack:
        looker = start_stranger(stack, hosts, "read")
        ended = end(start_ranks(stack, hosts, tmp_path / "out", [1, 1, 1, 1]))
        looked = looker.wait()
    assert "knows/3': b'file " in looked.stdout, looked.stderr  # and not what is in the file
    check_equal(on_one_host[4], tmp_path / "out", ended)


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


def test_an_interface_that_leads_nowhere_is_named(hosts, tmp_path):
    """One host ended after half a minute, without saying what to do; the other one waited on."""
    first, second = run_ranks(hosts, tmp_path / "out", [1, 1], GLOO_SOCKET_IFNAME="lo")
    assert (first.returncode, second.returncode) == (70, 70)
    assert "host2 cannot reach host1 at 127.0.0.1 port" in first.stderr
    assert "lo (connection refused): set GLOO_SOCKET_IFNAME on every host to the" in first.stderr
