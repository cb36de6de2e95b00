"""Whether a run is writing to a folder."""

import fcntl
import os
import signal
import subprocess
import sys

import pytest

from vigpipe.errors import InputError
from vigpipe.run.folder import LOCK, is_locked, lock, make_output_folder


def test_a_folder_is_locked_for_as_long_as_its_process_lives(tmp_path):
    assert not is_locked(tmp_path)  # and asking leaves no file
    assert list(tmp_path.iterdir()) == []
    program = (
        "import sys; from pathlib import Path; from vigpipe.run.folder import lock\n"
        "lock(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "locked\n"
        assert is_locked(tmp_path)
        run.send_signal(signal.SIGKILL)
    assert (tmp_path / LOCK).exists()
    assert not is_locked(tmp_path)


def test_asking_does_not_keep_a_run_out(tmp_path):
    (tmp_path / LOCK).touch()
    assert not is_locked(tmp_path)
    lock(tmp_path)
    assert is_locked(tmp_path)


def test_a_reader_without_the_right_to_write_sees_the_lock_and_a_pipe_is_not_waited_for(tmp_path):
    path = tmp_path / LOCK
    with path.open("w") as file:
        path.chmod(0o444)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_locked(tmp_path)
    path.unlink()
    os.mkfifo(path)
    assert not is_locked(tmp_path)


def test_a_file_of_the_lock_s_name_that_no_run_has_made_stays_as_it_is(tmp_path):
    path, other = tmp_path / LOCK, tmp_path / "other"
    path.write_text("mine")
    with pytest.raises(InputError, match=r"a file \.lock that no run has made"):
        lock(tmp_path)
    assert path.read_text() == "mine"
    path.unlink()
    other.write_text("process 1 on here")
    path.symlink_to(other)
    with pytest.raises(InputError, match=r"\.lock: cannot be written"):
        lock(tmp_path)
    assert other.read_text() == "process 1 on here"


def test_to_try_a_folder_leaves_all_that_is_in_it(tmp_path):
    (tmp_path / ".writable").write_text("mine")
    make_output_folder(tmp_path, ["config.toml"])
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
