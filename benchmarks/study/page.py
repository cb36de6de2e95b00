"""Write the page of the experiment: README.md with tables beside the published figures."""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from benchmarks.study.claims import two_paragraphs
from benchmarks.study.configs import BATCH
from benchmarks.study.outcome import Outcome
from benchmarks.study.tables import (
    block_table,
    bubble_table,
    inference_table,
    speedup_table,
    step_table,
)
from vigpipe.run.provenance import format_versions


def write_page(
    outcome: Outcome, folder: Path, arguments: Sequence[str], run_command: str, data: str
) -> None:
    """Write README.md.

    Args:
        outcome: the runs and predictions.
        folder: folder of the results.
        arguments: the command line after `python -m benchmarks`.
        run_command: the command that starts a run, with placeholders for its layout.
        data: description of the images.
    """
    sections = [
        f"# The study's experiment: vig_study on {data}, {outcome.num_cores} cores",
        "How much faster is a mini-batch of the study model (J. Raffi, *Distributed Graph Neural "
        "Network*, Pisa 2024) when its blocks are cut into pipeline stages, and which of the "
        "study's claims can be seen again: 1.96× with two stages, a loss that micro-batches leave "
        "unaffected, gradient synchronisation that is negligible?",
        two_paragraphs(outcome),
        *_section("Seconds of a training mini-batch", step_table(outcome), _about_steps(outcome)),
        *_section("Speed-ups", speedup_table(outcome), _ABOUT_SPEEDUPS),
        *_section("Bubble, prediction and memory", bubble_table(outcome), _ABOUT_BUBBLE),
        *_section("One block and the readout", block_table(outcome), _about_blocks(outcome)),
        *_section("Inference", inference_table(outcome), _ABOUT_INFERENCE),
        "## Loss\n\n![losses](loss.png)",
        _origin(outcome, arguments, run_command),
    ]
    (folder / "README.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")


_ABOUT_SPEEDUPS = (
    "Medians of a layout against those of a baseline in the same round; then the median over the "
    "rounds, least and most in brackets. The baselines are one stage with the whole mini-batch, "
    "and one stage with the same D·M micro-batches, gradients accumulated; only the second shows "
    "what pipelining does. Its ceiling is D·S·M / (M + S − 1), for equal stages and as many cores. "
    "Published: 37.44 s of one stage over the layout's. In the study each of two copies had its "
    "own half of the data, and a mini-batch took as long as with one copy, so it was probably that "
    "of each copy; here B is cut over the copies, and the published ratios would count double."
)


_ABOUT_BUBBLE = (
    "Bubble: the share of a step in which ranks wait for input or gradients, mean over ranks and "
    "median over rounds; formula: (S − 1) / (M + S − 1). Predicted here: simulated from the cost "
    "of every block, with the slow-down that was measured when several ranks compute at once; "
    "simulated, own cores: without it. The peak is all memory of a process, Python and torch "
    "included; without srun the ranks of a layout are forked from one process and share its "
    "libraries, which a lone rank counts too, some 0.3 GB."
)


_ABOUT_INFERENCE = (
    "Forward only, in evaluation mode; test batches follow one another without a pause, and a "
    "first stage may begin the next one before the last stage is done. Mini-batch: what the "
    "slowest rank takes for one; images/s: by its median, reading images and scoring left out. "
    "Latency: from a batch's first forward on the first stage to the end of its last on the last."
)


def _about_blocks(outcome: Outcome) -> str:
    return (
        "Seconds of the forward on a whole mini-batch, all its micro-batches together, of "
        f"{outcome.batch_size} images here and {BATCH} in the study; with copies, of one copy's "
        "share."
    )


def _about_steps(outcome: Outcome) -> str:
    text = (
        "Of all timed steps of all rounds; a step lasts as long as its slowest rank, reading "
        "images left out. A layout is sequential, accumulated-M, stages×M or copies×stages×M; B is "
        f"{outcome.batch_size} here. Simulated, own cores: from the cost of the blocks on one rank "
        "alone, as if every rank had cores of its own."
    )
    crowded = [name for name in outcome.layouts if outcome.is_crowded(name)]
    if crowded:
        text += (
            f" **The ranks of {', '.join(crowded)} outnumber the {outcome.num_cores} cores** and "
            "take turns on them: their measured times say nothing about a machine that has enough; "
            "the simulated ones do."
        )
    return text


def _section(title: str, table: str, about: str) -> tuple[str, str, str]:
    return f"## {title}", table, about


def _origin(outcome: Outcome, arguments: Sequence[str], run_command: str) -> str:
    facts = [run.facts for runs in outcome.runs.values() for run in runs]
    versions = _distinct(format_versions(fact["versions"] or {}) for fact in facts)
    spreads = {
        name: max(medians) / min(medians) - 1
        for name, runs in outcome.runs.items()
        if len(medians := [median(run.step_seconds["train"].values()) for run in runs]) > 1
    }
    spread = (
        f"; a layout's medians differ by up to {max(spreads.values()):.1%} between rounds"
        if spreads
        else ""
    )
    rounds = f"{outcome.num_rounds} round{'s' if outcome.num_rounds > 1 else ''}"
    command = shlex.join(["python", "-m", "benchmarks", *arguments])
    return (
        f"## How\n\n- this page: `{command}`\n- a run: `{run_command}`\n"
        f"- commit: {_distinct(str(fact['commit']) for fact in facts)}\n"
        f"- hardware: {_distinct(str(fact['hardware']) for fact in facts)}; "
        f"{outcome.num_threads} thread(s) a rank in every run\n- versions: {versions}\n"
        f"- warm-up: {outcome.num_warmup} steps, and test batches, of every run are left out; "
        "after that every other step is timed\n"
        f"- {rounds}: all layouts run in turn in each, so that drift of the machine hits all "
        f"alike{spread}\n"
        "- rows.csv: every step of every run; profile.json: the cost of the blocks behind the "
        "simulated times\n"
    ).rstrip()


def _distinct(values: Iterable[str]) -> str:
    return " | ".join(dict.fromkeys(values))
