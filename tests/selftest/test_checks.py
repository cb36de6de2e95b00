"""Which layouts are checked, and what is read from the output of `vigpipe check`."""

from tests.selftest.made_up import CHECKED, CPU, machine
from vigpipe.cli import make_app
from vigpipe.selftest import checks
from vigpipe.selftest.checks import layouts
from vigpipe.selftest.command import Finished
from vigpipe.selftest.rows import Budget


def test_layouts_are_all_ways_to_arrange_the_ranks():
    assert layouts(8, 8) == [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert layouts(8, 4) == [(4, 2), (2, 4), (1, 8)]
    assert layouts(6, 8) == [(6, 1), (3, 2), (2, 3), (1, 6)]


def worlds(machine):
    """How many ranks the checks have."""
    found = set()
    for _, words in checks.commands(machine):
        options = dict(zip(words[::2], words[1::2], strict=True))
        found.add(int(options.get("--stages", 1)) * int(options.get("--dp", 1)))
    return found


def test_every_number_of_ranks_that_this_machine_has_is_checked():
    assert worlds(CPU) == {1, 2, 4}
    assert worlds(machine(1)) == {1}
    assert worlds(machine(3)) == {1, 2, 3}
    assert worlds(machine(8)) == {1, 2, 4, 8}


def test_every_check_is_a_command_that_there_is():
    app = make_app([])
    for _, words in (*checks.commands(CPU), *checks.commands(machine(8))):
        app.parse_args(["check", *words], exit_on_error=False, print_error=False)


def read(code, stdout, stderr="", words=()):
    return checks.read("what", words, Finished(code, stdout, stderr, 14.0))


def test_differences_are_read():
    row = read(0, CHECKED.format(gradients="2e-16"), words=["--dp", "2"])
    assert row.outcome == "passed"
    assert row.values == {
        "command": "vigpipe check --dp 2",
        "seconds": 14.0,
        "loss": 0.0,
        "gradients": 2e-16,
        "weights": 4e-16,
        "running statistics": 0.0,
        "identical": False,
    }


def test_a_difference_and_a_crash_fail():
    row = read(1, CHECKED.format(gradients="inf"))
    assert (row.outcome, row.values["gradients"]) == ("failed", float("inf"))
    assert "by more than is allowed" in row.note
    told = "Traceback\nRuntimeError: CUDA error: an illegal memory access was encountered\n"
    row = read(1, "", told)
    assert row.note == (
        "exit code 1: RuntimeError: CUDA error: an illegal memory access was encountered"
    )
    assert row.outcome == "failed"


def test_one_gpu_says_what_it_leaves_out():
    rows = list(checks.measure(machine(1), Budget(0)))
    assert {row.outcome for row in rows} == {"skipped"}
    assert rows[-1].note == "they need a second GPU"
    assert "they need a second GPU" not in {r.note for r in checks.measure(machine(2), Budget(0))}
