"""What commit 378e66b has left goes on, and can be done again: of_378e66b/, two replicas that gossip.

vigpipe train --model sage --data sbm:60,3,5 --layers 2 --width 4 --sampler parts --partition random --parts 6
    --dropout 0.2 --norm batch --ema 0.5 --threads 1 --seed 3 --strategy gossip --items pool --average-every 2
    --dp 2 --opt adamw --lr 0.01 --dtype float64 --steps 6 --checkpoint-every 3 --evaluate-every 2
"""  # noqa: E501

import json
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from tests.faults.test_faults import ENV
from tests.world import run_command

pytestmark = pytest.mark.multiprocess

EARLIER = Path(__file__).with_name("of_378e66b")


def train(*options: str) -> None:
    given = ["--config", str(EARLIER / "config.toml"), *options]
    done = run_command([sys.executable, "-m", "vigpipe", "train", *given], ENV)
    assert done.returncode == 0, done.stderr


def test_a_run_of_an_earlier_version_goes_on(tmp_path):
    folder = Path(shutil.copytree(EARLIER, tmp_path / "run"))
    for name in ("model.safetensors", "model-ema.safetensors"):
        (folder / name).unlink()
    train("--resume", "auto", "--out", str(folder))
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["resumed_at_step"], summary["steps"]) == (4, 6)


def test_the_record_of_an_earlier_version_is_done_again(tmp_path):
    train("--replay", str(EARLIER), "--out", str(tmp_path / "again"))
    for name in ("model.safetensors", "model-ema.safetensors"):
        assert_close(
            load_file(tmp_path / "again" / name), load_file(EARLIER / name), rtol=1e-9, atol=1e-12
        )
