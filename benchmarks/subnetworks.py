"""What do independent sub-networks learn, and what do they cost? Real training runs, several seeds.

Every run is `vigpipe train`: of a model as a whole, or with `--strategy subnetworks` of as many
sub-networks, with the same epochs for all of them together. What differs from run to run is a
`Case`. Its first fields choose what is trained, and a model that is trained as a whole is the
baseline of each; the others choose how it is divided, and such a model has none of them.
"""

import re
from itertools import product

from benchmarks.options import SubnetworksBench
from benchmarks.subnetworks_outcome import VARIANTS, Case, read_outcome
from benchmarks.subnetworks_page import page_of
from benchmarks.trained import Question, TrainedRun, check_left_out, check_seeds, parse_numbers
from benchmarks.ways import OF_WAYS, parse_ways
from vigpipe.config.options import OPTIONS, flag
from vigpipe.config.recipes import MODEL_DEFAULTS
from vigpipe.errors import InputError

_OF_VARIANTS = tuple(dict.fromkeys(name for options in VARIANTS.values() for name in options))
_OF_RUNS = ("seed", "layers", "dp", "strategy", "average_every", *_OF_VARIANTS)
_LISTS = ("depths", "samplers", "replicas", "variants", "intervals", "seeds")


def _plan(options: SubnetworksBench) -> list[TrainedRun]:
    check_seeds(options.seeds)
    check_left_out(options, SubnetworksBench(model=options.model), _OF_RUNS)
    is_graph = MODEL_DEFAULTS[options.model].job == "graph"
    depths, ways = [], {}
    if is_graph:
        assert options.depths is not None
        depths = parse_numbers("depths", options.depths)
        ways = {way.name: way.options for way in parse_ways("samplers", options)}
    else:
        _check_images(options)
    replicas, intervals = (parse_numbers(n, getattr(options, n)) for n in ("replicas", "intervals"))
    assert options.variants is not None
    variants = [_parse_variant(word.strip(), options) for word in options.variants.split(",")]
    divided = product((m for m in replicas if m > 1), variants, intervals)
    layouts = [(1, "", 0), *divided]
    trained = [*product(depths, ways)] if is_graph else [(None, "")]
    cases = [
        Case(*what, *layout, seed)
        for seed in range(options.seeds)
        for what in trained
        for layout in layouts
    ]
    return [
        TrainedRun(
            str(case),
            re.sub("[^a-z0-9]+", "-", "-".join(str(w) for w in case if w is not None)).strip("-"),
            {**ways.get(case.sampler, {}), **case.options()},
            case,
        )
        for case in cases
    ]


def _parse_variant(word: str, options: SubnetworksBench) -> str:
    if not all(part in VARIANTS for part in word.split("+")):
        raise InputError(
            f"--variants {options.variants}: {word!r} is not {', '.join(VARIANTS)}, or several of "
            "them with + between them"
        )
    is_graph = MODEL_DEFAULTS[options.model].job == "graph"
    of_others, others = ("images", "images") if is_graph else ("graph", "graphs")
    for part in word.split("+"):
        if any(OPTIONS[name].job == of_others for name in VARIANTS[part]):
            raise InputError(
                f"--variants {options.variants}: {part} is for {others}, and --model is "
                f"{options.model}; leave it out"
            )
    return word


def _check_images(options: SubnetworksBench) -> None:
    for name in ("depths", "samplers"):
        if getattr(options, name) is not None:
            raise InputError(
                f"{flag(name)} {getattr(options, name)}: is for graph models, and --model is "
                f"{options.model}; leave it out"
            )
    if not options.validation:
        raise InputError(
            f"--validation {options.validation:g}: validation images choose the epoch; take a "
            "share such as 0.1"
        )


QUESTION = Question(
    title="What sub-networks learn, and what they cost",
    not_shared=(*_OF_RUNS, *OF_WAYS, *_LISTS),
    plan=_plan,
    read=read_outcome,
    told=lambda found: (
        f"test accuracy {found.accuracy:.2%} after epoch {found.epoch}, which has the best "
        f"validation accuracy; {found.seconds:.1f} s"
    ),
    page=page_of,
)
