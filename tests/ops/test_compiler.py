"""Compiling at first use: once, by one process, and without a compiler not at all."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.world import run_command, start_command
from vigpipe.ops import compiler

# What is made is as good without optimisation, and made in a third of the time.
UNOPTIMISED = """
from vigpipe.ops import compiler
compiler._FLAGS = (*compiler._FLAGS, "-O0")
"""
REPORT = """
from vigpipe import ops
print(ops.versions("cpu")["knn"])
"""
USE = """
import torch
from vigpipe import ops
print(ops.knn(torch.eye(3).unsqueeze(0), None, None, 1).flatten().tolist())
"""


def run(code, **environment):
    done = run_command([sys.executable, "-c", code], environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.strip()


def compile_in_two_processes(prelude, **environment):
    with (
        start_command([sys.executable, "-c", prelude + REPORT], environment) as one,
        start_command([sys.executable, "-c", prelude + REPORT], environment) as other,
    ):
        ended = [process.wait() for process in (one, other)]
    assert all(done.stdout.startswith("C++ (compiled by ") for done in ended)
    told = "".join(done.stderr for done in ended)
    assert told.count("compiling the C++ operators") == 1
    assert len(list(Path(environment["VIGPIPE_CACHE"]).glob("*.so"))) == 1
    assert run(prelude + USE, **environment) == ("[0, 1, 2]", "")  # silent from then on


def fake_compiler(tmp_path, script):
    """A program that knows its version, and does what a script says otherwise."""
    path = tmp_path / "some-c++"
    path.write_text(f"#!/bin/sh\n[ $1 = --version ] && exit 0\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_two_processes_compile_once_and_both_use_it(tmp_path):
    """By a compiler that has the library already; it refuses the first flags for a machine."""
    made = compiler.library().functions
    assert made is not None
    calls = tmp_path / "calls"
    told = f'echo "$@" >> {calls}\ncase "$*" in *vector-width*) exit 1; esac\n'
    some = fake_compiler(tmp_path, f'{told}for last; do :; done\ncp {made._name} "$last"')
    compile_in_two_processes("", VIGPIPE_CACHE=str(tmp_path / "cache"), CXX=some)
    with_width, without = calls.read_text().splitlines()
    assert "-mprefer-vector-width=512 -fopenmp" in with_width
    assert "-march=native -fopenmp" in without
    assert all("-O3 -fPIC -shared" in flags for flags in (with_width, without))


@pytest.mark.heavy
def test_two_processes_compile_once_what_is_in_c(tmp_path):
    compile_in_two_processes(UNOPTIMISED, VIGPIPE_CACHE=str(tmp_path))


def test_without_a_compiler_the_plain_version_serves_and_says_so_once(tmp_path):
    output, errors = run(USE, CXX="no-such-compiler", VIGPIPE_CACHE=str(tmp_path))
    assert output == "[0, 1, 2]"
    assert errors == (
        "vigpipe: no C++ compiler among no-such-compiler; install g++, or name one in CXX; the "
        "plain operators serve, which are slower"
    )


def test_a_compiler_that_fails_is_told_with_its_first_error(tmp_path):
    broken = fake_compiler(tmp_path, "echo 'x: error: no' >&2\nexit 1")
    output, errors = run(USE, CXX=broken, VIGPIPE_CACHE=str(tmp_path / "cache"))
    assert output == "[0, 1, 2]"
    assert f"could not be made: {broken} ended with code 1: x: error: no;" in errors
    assert not list((tmp_path / "cache").glob("*.so"))


def test_a_cache_that_others_may_write_to_is_not_trusted(tmp_path):
    tmp_path.chmod(0o777)
    output, errors = run(USE, VIGPIPE_CACHE=str(tmp_path))
    assert output == "[0, 1, 2]"
    assert "others may write there, so nothing is loaded from it" in errors


def test_other_sources_flags_or_processors_have_another_name(monkeypatch):
    path = shutil.which("g++")
    assert path is not None
    names = {compiler._key(path)}
    monkeypatch.setattr(compiler, "processor", lambda: b"another")
    names.add(compiler._key(path))
    monkeypatch.setattr(compiler, "_FLAGS", ("-O0",))
    names.add(compiler._key(path))
    assert len(names) == 3


@pytest.mark.heavy
def test_sanitizers_find_nothing(tmp_path):
    """Every operator over odd sizes, in buffers that end where the tensors do."""
    program = tmp_path / "sanitized"
    source = Path(__file__).parent / "sanitized.cpp"
    flags = ["-std=c++17", "-O0", "-g", "-march=native", "-fopenmp"]
    # A warning, too, if what a file declares of another is not what that one defines.
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Werror"]
    command = ["g++", *flags, "-I", str(compiler.SOURCES), str(source), "-o", str(program)]
    linked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert linked.returncode == 0, linked.stderr[-4000:]
    done = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("calls: ")
