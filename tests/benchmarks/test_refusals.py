"""Options of benchmarks that make no sense: one sentence each, before anything runs."""

import pytest

from benchmarks.cli import main
from tests.benchmarks.test_emulate import PROFILE
from tests.commands.refusals import check_commands
from vigpipe.planning.profile import write_profile

pytestmark = pytest.mark.heavy

EMULATE = "emulate --profile profile.json --stages 1,2 --microbatches 2,4"
HALOS = "halos --data sbm:300,4,12,6"
SPLIT = "split --data sbm:800,4,16,6 --model sage"
GRAPH = "--data sbm:200,4"
ROWS = [
    ("vig --models vig_study", "--models vig_study: 'vig_study' is not one of vig_digits"),
    ("vig-study --batch-sizes ten", "--batch-sizes ten: must be numbers of images"),
    ("ops --repeats 0", "--repeats 0: must be at least 1"),
    ("ops --threads 0", "--threads 0: expected a whole number from 1 to"),
    ("ops --device cuda", "--device cuda: torch sees no GPU here"),
    ("emulate --profile nowhere.json", "--profile nowhere.json: cannot be read"),
    ("emulate --profile profile.json --microbatches 2 --stages 1,8", "8 stages for 4 blocks"),
    (f"{EMULATE} --dp 0", "--dp 0: must be whole numbers above 0"),
    (f"{EMULATE} --batch-size 6", "1 replicas x 4 micro-batches do not share it evenly"),
    (f"{EMULATE} --scale 0", "--scale 0.0: must be a number above 0"),
    ("feed --images 10 --batch-size 4", "--images 10: must be at least"),
    (f"{HALOS} --model vig_digits", "is a model of images"),
    (f"{HALOS} --shards 1", "--shards 1: ranks with parts need 2 or more"),
    (f"{HALOS} --halos exact,late", "--halo late: must be exact, stale, or sampled:P"),
    (f"{HALOS} --halo stale", "--halo stale: differs from run to run here"),
    (f"intervals {GRAPH} --seeds 0", "--seeds 0: must be at least 1"),
    (f"intervals {GRAPH} --partitions metis,louvain", "'louvain' is not"),
    (f"intervals {GRAPH} --intervals 1,x", "--intervals 1,x: must be numbers from 1"),
    ("learning --ways server,nobody", "--ways server,nobody: 'nobody' is part of no name: synchr"),
    ("learning --strategy gossip", "--strategy gossip: every strategy is run here"),
    ("learning --sleep 61", "--sleep 61 --slow 1: must be from 0 to 60, and from 1 to 1000"),
    ("learning --slow 4", "--slow 4: is a multiple of --sleep, which is not given"),
    ("learning --sleep 0.1 --stages 2", "--sleep 0.1: is for --stages 1, not 2"),
    ("plan-graph --cases gcn", "--cases gcn: must be MODEL:WIDTHxLAYERS"),
    ("plan-graph --cases ';'", "--cases ;: names none"),
    ("plan-graph --ranks 1", "--ranks 1: must be at least 2"),
    ("plan-graph --shards 2", "--shards 2: is chosen here; leave it out"),
    (f"samplers {GRAPH} --parts 3", "--parts 3: is what --ways is for"),
    ("soak --steps 0", "--steps 0: must be a number"),  # it was blamed on --epochs
    (f"{SPLIT} --sampler parts", "--sampler parts: the whole graph is shared"),
    (f"{SPLIT} --numbers 900", "--shards 900: a sub-graph has 800 nodes at most"),
    ("strategies --dp 1", "--dp 1: must be from 2 to 64"),
    ("strategies --items 401", "--items 401: must be a multiple of --dp 4, such as 400"),
    (f"subnetworks {GRAPH} --sampler full", "--sampler full: is what --samplers is for"),
    (f"subnetworks {GRAPH} --variants plain,shallow", "'shallow' is not plain, carry"),
    (f"subnetworks {GRAPH} --variants carry-moments+inner", "inner is for images"),
    (f"subnetworks {GRAPH} --model vig_digits", "--validation 0: validation images choose"),
    (f"widths {GRAPH} --width 8", "--width 8: is chosen for every run here; leave it out"),
    (f"widths {GRAPH} --alone-width 9", "--alone-width 9: must be a multiple of every number in"),
]


def test_wrong_use_is_one_sentence(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_profile(PROFILE, tmp_path / "profile.json")
    check_commands(capsys, "", ROWS, main=main)
