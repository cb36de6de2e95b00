"""Where the numbers of a page come from: the lines that every page of results has."""

import shlex
import sys
from collections.abc import Mapping

import torch

from vigpipe.device import hardware
from vigpipe.timing.record import provenance


def origin(device: torch.device, ranks: str | None = None) -> str:
    """Command, commit, hardware and versions, as lines of Markdown.

    Args:
        device: where it was measured.
        ranks: what the ranks had; by default this one's threads.
    """
    facts = provenance()
    ranks = ranks or f"{torch.get_num_threads()} thread(s) a rank"
    return (
        f"- command: `{this_command()}`\n- commit: {facts['commit']}\n"
        f"- hardware: {hardware(device)}; {ranks}\n- versions: {told(facts['versions'])}\n"
    )


def this_command() -> str:
    """The command line of this process."""
    return shlex.join(["vigpipe", *sys.argv[1:]])


def told(versions: Mapping[str, str]) -> str:
    """Versions by package, in words."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())
