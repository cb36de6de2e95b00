"""The links between the hosts of slurm/hosts.sh: how they fail, and that nothing is left."""

import os
import signal
import subprocess
import sys

import pytest

from tests.faults.links import LAYOUTS, LINKS, expected_codes, suffer
from tests.hosts import HOSTS, change, on_host, skip_without_nft, some_hosts
from tests.refusals import check_refusals
from tests.small_digits import among_small_digits
from tests.world import start_command, wait_until
from vigpipe.errors import InputError

pytestmark = [pytest.mark.slurm, pytest.mark.multiprocess]

MEETS = """
import socket, sys, time
if sys.argv[1] == "listen":
    with socket.create_server(("", 7000)) as server:
        print("here", flush=True)
        with server.accept()[0] as peer:
            peer.sendall(peer.recv(1))
            while peer.recv(1 << 20):
                pass
else:
    with socket.create_connection(("host2", 7000)) as peer:
        began = time.monotonic()
        peer.sendall(b"x")
        peer.recv(1)
        print(time.monotonic() - began)
        began = time.monotonic()
        peer.sendall(bytes(5_000_000))
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)
        print(time.monotonic() - began)
"""


def test_what_is_sent_comes_later_and_not_faster_than_the_link(tmp_path):
    options = ["--delay", "20ms", "--rate", "80mbit"]
    with (
        some_hosts(tmp_path, *options) as hosts,
        start_command([*on_host(2), "-c", MEETS, "listen"], hosts) as listener,
    ):
        said = listener.folder / "stdout"
        wait_until(lambda: "here" in said.read_text(), "it listens", running=listener)
        told = change(hosts, "run", "host1", sys.executable, "-c", MEETS, "send")
    there_and_back, seconds = map(float, told.split())
    assert there_and_back >= 0.04
    assert seconds >= 5_000_000 * 8 / 80e6


@pytest.mark.parametrize("who", ["keeper", "until"])
def test_all_ends_with_the_first_process_and_with_that_of_until(tmp_path, who):
    with subprocess.Popen(["sleep", "1000"]) as until:
        try:
            with some_hosts(tmp_path, "--until", str(until.pid)) as hosts:
                line = [*on_host(1), "-c", "print(1, flush=True); import time; time.sleep(1000)"]
                with start_command(line, hosts) as command:
                    said = command.folder / "stdout"
                    wait_until(lambda: bool(said.read_text()), "it runs", running=command)
                    keeper = int((tmp_path / "hosts" / "keeper").read_text().split()[0])
                    if who == "keeper":
                        os.kill(keeper, signal.SIGKILL)
                    else:
                        until.kill()
                        until.wait()  # else there is still a process with its id
                    assert command.wait().returncode
                refused = subprocess.run([HOSTS, "run", "host1", "true"], env=os.environ | hosts)
                assert refused.returncode == 2
        finally:
            until.kill()
    assert not (tmp_path / "hosts").exists()


def test_wrong_words_are_told(tmp_path):
    with some_hosts(tmp_path) as hosts:

        def call(words: str) -> None:
            line, variables = [HOSTS, *words.split()], os.environ | hosts
            done = subprocess.run(line, env=variables, capture_output=True, text=True)
            assert done.returncode == 2
            raise InputError(done.stderr.removesuffix("\n"))

        rows = [
            ("start", "start: expected a number of hosts from 1 to 99, got ''"),
            ("start 2 --rate", "start: expected --rate such as 100mbit, .*, got '--rate'"),
            ("start 2 --delay 1s", "start: expected --rate .*, got '--delay 1s'"),
            ("start 2", "hosts run already: slurm/hosts.sh stop"),
            ("run host1", "run: expected a host and a command"),
            ("run host9 true", r"no such host: 'host9' \(have: host1 host2\)"),
            ("run switch true", r"no such host: 'switch'"),
            ("cut host1", "cut: expected two hosts"),
            ("cut host1 host9", "no such host: 'host9'"),
            ("mend host9 host1", "no such host: 'host9'"),
            ("allow host1 1;2", "allow: expected ports such as 22,29500-29510, or all, got '1;2'"),
            ("allow host1 99999", "allow: expected ports from 1 to 65535, got '99999'"),
            ("start 2 --until 999999999", "start --until 999999999: there is no such process"),
            ("freeze", "freeze: expected a host"),
        ]
        check_refusals(rows, call, where="slurm/hosts.sh: ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for runs on two hosts, which are those of slurm/hosts.sh by default meanwhile."""
    folder = tmp_path_factory.mktemp("links")
    with (
        some_hosts(folder) as hosts,
        among_small_digits(folder),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("VIGPIPE_HOSTS_DIR", hosts["VIGPIPE_HOSTS_DIR"])
        yield folder


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("down for 2 s", "synchronous"),
        ("half open", "pipeline"),
        ("one direction dead", "gossip"),
    ],
)
def test_a_link_that_fails_ends_a_run_as_promised(folder, what, name):
    """All thirty: python -m tests.faults.links."""
    skip_without_nft()
    seen = suffer(LINKS[what], name, folder / name)
    codes = expected_codes(what, LAYOUTS[name])
    assert seen.codes == codes, seen
    assert not seen.left
    assert seen.goes_on == ("equal" if LAYOUTS[name].repeats else "yes")
    if what == "one direction dead":
        assert "host1 (10.213.0.1) does not answer" in seen.told[1] or 75 in codes
