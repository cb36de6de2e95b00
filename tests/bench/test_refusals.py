"""Options of benchmarks that make no sense: one sentence each, before anything runs."""

import pytest

from tests.bench.test_emulate import PROFILE
from tests.commands.refusals import check_commands
from vigpipe.planning.profile import write_profile

pytestmark = pytest.mark.heavy

GRAPH = "--data sbm:200,4"
IMAGES = "--model vig_digits: is a model of images"
ROWS = {
    "vig": [
        ("--models vig_study", "--models vig_study: 'vig_study' is not one of vig_digits"),
        ("--dtypes float16", "--dtypes float16: 'float16' is not one of float32, bfloat16"),
        ("--modes both", "--modes both: 'both' is not one of training, inference"),
    ],
    "study": [
        ("--batch-sizes ten", "--batch-sizes ten: must be numbers of images"),
        ("--batch-sizes 0", "--batch-sizes 0: must be numbers of images"),
    ],
    "ops": [
        ("--repeats 0", "--repeats 0: must be at least 1"),
        ("--threads 0", "--threads 0: expected a whole number from 1 to"),
        ("--device cuda", "--device cuda: torch sees no GPU here"),
    ],
    "emulate": [("--profile nowhere.json", "--profile nowhere.json: cannot be read")],
    "emulate --profile profile.json --microbatches 2,4 --stages": [
        ("1,8", "8 stages for 4 blocks"),
        ("1,x", "--stages 1,x: must be whole numbers above 0"),
        ("4 --schedule 1f1b", "at least as many micro-batches as stages"),
    ],
    "emulate --profile profile.json --stages 1,2 --microbatches 2,4": [
        ("--dp 0", "--dp 0: must be whole numbers above 0"),
        ("--repeats 0", "--repeats 0: must be at least 1"),
        ("--batch-size 6", "--batch-size 6: 1 replicas x 4 micro-batches do not share it evenly"),
        ("--batch-size -1", "--batch-size -1: must be at least 1"),
        ("--scale 0", "--scale 0.0: must be a number above 0"),
        ("--scale nan", "--scale nan: must be a number above 0"),
        ("--scale 1e9", "choose another --scale"),
    ],
    "feed": [
        ("--images 10 --batch-size 4", "--images 10: must be at least"),
        ("--workers 0", "--workers 0: must be a number from 1 to 256"),
    ],
    "halos --data sbm:300,4,12,6": [
        ("--model vig_digits", "is a model of images"),
        ("--shards 1", "--shards 1: ranks with parts need 2 or more"),
        ("--halos exact,late", "--halo late: must be exact, stale, or sampled:P"),
        ("--halo stale", "--halo stale: differs from run to run here"),
        ("--seeds 0", "--seeds 0: must be at least 1"),
    ],
    f"intervals {GRAPH}": [
        ("--model vig_digits", IMAGES),
        ("--seeds 0", "--seeds 0: must be at least 1"),
        ("--dp 3", "--dp 3: differs from run to run here; leave it out"),
        ("--partitions metis,louvain", "--partitions metis,louvain: 'louvain' is not"),
        ("--intervals 1,x", "--intervals 1,x: must be numbers from 1"),
        ("--replicas 0", "--replicas 0: must be numbers from 1"),
    ],
    "learning": [
        ("--seeds 0", "--seeds 0: must be at least 1"),
        ("--ways server,nobody", "--ways server,nobody: 'nobody' is part of no name: synchr"),
        ("--strategy gossip", "--strategy gossip: every strategy is run here"),
        ("--sleep 61", "--sleep 61 --slow 1: must be from 0 to 60, and from 1 to 1000"),
        ("--slow 4", "--slow 4: is a multiple of --sleep, which is not given"),
        ("--sleep 0.1 --stages 2", "--sleep 0.1: is for --stages 1, not 2"),
    ],
    "plan-graph": [
        ("--cases gcn", "--cases gcn: must be MODEL:WIDTHxLAYERS"),
        ("--cases gcn:8x2+some*2", "must be MODEL:WIDTHxLAYERS"),
        ("--cases vig_digits:8x2", IMAGES),
        ("--cases ';'", "--cases ;: names none"),
        ("--ranks 1", "--ranks 1: must be at least 2"),
        ("--shards 2", "--shards 2: is chosen here; leave it out"),
    ],
    f"samplers {GRAPH}": [
        ("--model vig_digits", IMAGES),
        ("--parts 3", "--parts 3: is what --ways is for"),
    ],
    "soak": [  # --steps 0 was blamed on --epochs, and --faults-every -1 chose faults for ever
        ("--steps 0", "--steps 0: must be a number"),
        ("--faults-every -1", "--faults-every -1: must be a number"),
        ("--checkpoint-every 0", "--checkpoint-every 0: must be a number"),
        ("--timeout nan", "--timeout nan: must be a number"),
    ],
    "split --data sbm:800,4,16,6 --model sage": [
        ("--shards 2", "--shards 2: is chosen here; leave it out"),
        ("--sampler parts", "--sampler parts: the whole graph is shared"),
        ("--numbers 2,x", "--numbers 2,x: must be numbers"),
        ("--numbers 900", "--shards 900: a sub-graph has 800 nodes at most"),
    ],
    "strategies": [
        ("--dp 1", "--dp 1: must be from 2 to 64"),
        ("--items 401", "--items 401: must be a multiple of --dp 4, such as 400"),
        ("--average-every 1,x", "--average-every 1,x: must be whole numbers above 0"),
        ("--repeats 0", "--repeats 0: must be from 1"),
        ("--seconds nan", "--seconds nan: must be from 0.001 to 60"),
    ],
    f"subnetworks {GRAPH}": [
        ("--sampler full", "--sampler full: is what --samplers is for"),
        ("--samplers louvain", "--samplers louvain: 'louvain' is not full, another sampler"),
        ("--divided tied", "--divided tied: differs from run to run here; leave it out"),
        ("--variants plain,shallow", "--variants plain,shallow: 'shallow' is not plain, carry"),
        ("--variants plain,carry-moments+inner", "inner is for images, and --model is sage; leav"),
        ("--depths x", "--depths x: must be numbers from 1 with commas between them"),
        ("--model vig_digits --depths 2", "--depths 2: is for graph models"),
        ("--model vig_digits", "--validation 0: validation images choose the epoch"),
    ],
    f"widths {GRAPH}": [
        ("--width 8", "--width 8: is chosen for every run here; leave it out"),
        ("--widths 8,x", "--widths 8,x: must be numbers from 1"),
        ("--repeats 0", "--alone-width 4096 --repeats 0: must be at least 0 and 1"),
        ("--alone-width 9", "--alone-width 9: must be a multiple of every number in"),
    ],
}


def test_wrong_use_is_one_sentence(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_profile(PROFILE, tmp_path / "profile.json")
    for verb, rows in ROWS.items():
        check_commands(capsys, f"bench {verb}", rows)
