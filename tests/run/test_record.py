"""The files of a run."""

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import vigpipe
from vigpipe.errors import InputError
from vigpipe.run.folder import make_output_folder
from vigpipe.run.provenance import commit, provenance
from vigpipe.run.record import RunRecord

NAMES = ("config.toml", "metrics.jsonl", "checkpoints")


def test_a_run_goes_to_runs_and_the_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = make_output_folder(None, NAMES)
    assert folder.is_dir()
    assert re.fullmatch(r"runs/[0-9]{8}-[0-9]{6}(-[0-9]+)?", str(folder))


def test_a_folder_may_hold_other_things_but_no_run(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    assert make_output_folder(tmp_path / "a" / "b", NAMES).is_dir()
    assert make_output_folder(tmp_path, NAMES) == tmp_path
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(InputError, match=r"holds metrics\.jsonl already; choose another folder$"):
        make_output_folder(tmp_path, NAMES)
    assert make_output_folder(tmp_path, NAMES, goes_on=True) == tmp_path


def test_what_goes_on_replaces_files_only(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(InputError, match=r"metrics\.jsonl: is a pipe, where a file"):
        make_output_folder(tmp_path, NAMES, goes_on=True)


def test_a_folder_where_a_file_is_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be written \(.+\); choose another folder"):
        make_output_folder(tmp_path / "file", NAMES)


@pytest.mark.parametrize("takes_over", [False, True])
def test_rows_after_the_checkpoint_stay_for_one_that_takes_over_in_the_same_run(
    takes_over, tmp_path
):
    record = RunRecord(tmp_path, {})
    for step in (1, 2, 3):
        record.add(step=step, loss=1.0 / step)
    RunRecord(tmp_path, {}, steps_done=2, takes_over=takes_over).add(step=4, loss=0.25)
    rows = [json.loads(row) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == ([1, 2, 3, 4] if takes_over else [1, 2, 4])


def test_config_and_summary_are_written(tmp_path):
    record = RunRecord(tmp_path, {"lr": 0.5, "out": "läufe"})
    assert tomllib.loads((tmp_path / "config.toml").read_text()) == {"lr": 0.5, "out": "läufe"}
    assert not (tmp_path / "summary.json").exists()  # it says that the run came to its end
    record.finish({"top1": 0.75})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"top1": 0.75}


def test_a_number_comes_with_versions_commit_and_host():
    facts = provenance()
    assert facts["versions"]["vigpipe"] == vigpipe.__version__
    assert {"torch", "torchvision", "timm", "python"} < facts["versions"].keys()
    assert "absent" not in facts["versions"].values()
    assert facts["host"]


def test_an_installed_package_has_no_commit(tmp_path, monkeypatch):
    module = tmp_path / "vigpipe" / "run" / "provenance.py"
    monkeypatch.setattr("vigpipe.run.provenance.__file__", str(module))
    assert commit.__wrapped__() is None


def test_the_commit_says_whether_files_differ(tmp_path, monkeypatch):
    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        line = ["git", *identity, "-C", str(tmp_path), *words]
        return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()

    module = Path(tmp_path, "vigpipe", "run", "provenance.py")
    module.parent.mkdir(parents=True)
    module.write_text("one")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    monkeypatch.setattr("vigpipe.run.provenance.__file__", str(module))
    head = git("rev-parse", "HEAD")
    assert commit.__wrapped__() == head
    module.write_text("two")
    assert commit.__wrapped__() == head + "+"
