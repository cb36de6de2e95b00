"""No Python of ours imports a module of the current folder, which may be a strange data set."""

import subprocess
import sys

import pytest

from tests.small_digits import write_small_digits

pytestmark = pytest.mark.multiprocess

# What Python itself imports between adding the folder for -m and our first line.
BY_PYTHON = {"collections", "contextlib", "functools", "keyword", "operator", "reprlib", "types"}
BY_PYTHON |= {"importlib", "runpy", "warnings"}
INSTALLED = {"cyclopts", "numpy", "pynvml", "rich", "safetensors", "sitecustomize", "torch"}


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """The current folder, with images and a module of every name that notes if it is run."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    write_small_digits(folder)
    for name in (sys.stdlib_module_names | INSTALLED) - BY_PYTHON:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'run')!r}, 'a').write('{name} ')")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return folder


@pytest.mark.parametrize(
    "how",
    [
        "-m vigpipe.train --model vig_digits --data digits.npz --threads 1 --steps 1 --batch-size "
        "36 --dp 2 --out run",
        "../script.py",
    ],
    ids=["command", "script"],
)
def test_no_module_of_the_current_folder_is_run(foreign, how):
    (foreign.parent / "script.py").write_text(
        "import vigpipe; vigpipe.train(out='run', model='vig_digits', data='digits.npz', threads=1,"
        "steps=1, batch_size=36)"
    )
    done = subprocess.run([sys.executable, *how.split()], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (foreign / "run" / "model.safetensors").exists()
    ran = foreign.parent / "run"
    assert not ran.exists(), ran.read_text()
