"""What an installed wheel has without a checkout around it."""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.world import ROOT
from vigpipe.cli import main
from vigpipe.errors import InputError
from vigpipe.files.shipped import shipped
from vigpipe.parallel.plan import read_plan

pytestmark = pytest.mark.oldest


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The content of the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    build = "from hatchling.build import build_wheel; import sys; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=ROOT, check=True)
    (wheel,) = folder.glob("*.whl")
    ZipFile(wheel).extractall(folder / "content")
    return folder / "content"


def test_a_wheel_has_the_package_and_every_plan_and_batch_file(installed):
    assert {path.name for path in installed.iterdir() if "dist-info" not in path.name} == {
        "vigpipe"
    }
    for folder, pattern in (("stages", "*.toml"), ("slurm", "*.sbatch")):
        sources = {path.name: path.read_bytes() for path in (ROOT / folder).glob(pattern)}
        inside = (installed / "vigpipe" / "shipped" / folder).glob(pattern)
        assert {path.name: path.read_bytes() for path in inside} == sources != {}


def test_an_installed_vigpipe_knows_its_plans_and_writes_its_batch_files(installed, tmp_path):
    code = """
        import vigpipe
        from pathlib import Path
        from vigpipe.cli import main
        from vigpipe.parallel.plan import read_plan
        print(Path(vigpipe.__file__).parent, read_plan(Path("vig-ti-2"), "vig_ti_224", 12).stages)
        raise SystemExit(main(["slurm", "write", "jobs"]))
    """
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(line.strip() for line in code.splitlines())],
        **{"cwd": tmp_path, "capture_output": True, "text": True},
        env=os.environ | {"PYTHONPATH": str(installed)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{installed}/vigpipe ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9, 10, 11))")
    written = (tmp_path / "jobs" / "train.sbatch").read_bytes()
    assert written == (ROOT / "slurm" / "train.sbatch").read_bytes()


def test_a_plan_of_the_user_s_of_the_same_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("vig-ti-2").write_text('model = "m"\nstages = [[0], [1]]\n')
    assert read_plan(Path("vig-ti-2"), "m", 2).stages == ((0,), (1,))


def test_a_name_that_no_plan_has_is_refused_with_those_there_are():
    names = ", ".join(sorted(path.stem for path in shipped("stages").glob("*.toml")))
    with pytest.raises(InputError, match=rf"--stages vig-ti-9: .*a plan of vigpipe's \({names}\)"):
        read_plan(Path("vig-ti-9"), "vig_ti_224", 12)


def test_batch_files_are_not_replaced_unless_the_user_says_so(tmp_path, capsys):
    (tmp_path / "train.sbatch").write_text("mine\n")
    assert main(["slurm", "write", str(tmp_path)]) == 2
    assert "train.sbatch: is there already" in capsys.readouterr().err
    assert (tmp_path / "train.sbatch").read_text() == "mine\n"
    assert main(["slurm", "write", str(tmp_path), "--overwrite"]) == 0
    assert (tmp_path / "train.sbatch").read_text().startswith("#!/bin/bash\n")
