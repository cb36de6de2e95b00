"""Run a command line: read --config, print help or parse, and turn errors into exit codes."""

import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence

from cyclopts import App, CycloptsError
from cyclopts.config import Dict

from vigpipe.commands.arguments import check_values, with_negative_values, wrong_use
from vigpipe.commands.help import help_text, wants_help
from vigpipe.config.files import read_config_file
from vigpipe.errors import WRONG_INPUT, InputError, found_by
from vigpipe.launch.environment import threads_per_rank
from vigpipe.launch.failures import (
    UNEXPECTED,
    has_no_room,
    no_room,
    tell_interrupted,
    tell_wrong_input,
)
from vigpipe.launch.second_signal import SecondSignal
from vigpipe.launch.signals import handled_signals, interrupt_once
from vigpipe.messages import name_program, safe_streams, tell


def run_program(
    make_app: Callable[[list[str]], App], configured: Collection[str], arguments: Sequence[str]
) -> int:
    """Run one command line without its program; wrong use is one sentence and exit code 2.

    `make_app` makes the parser of these arguments; `configured` are the commands with --config.
    """
    # A rank that has the default action dies of Ctrl-C, and its launcher tells.
    numbers = [signal.SIGINT] * (signal.getsignal(signal.SIGINT) != signal.SIG_DFL)
    with (
        safe_streams() as stdout,
        SecondSignal(numbers),
        handled_signals(numbers, interrupt_once),
    ):
        code = _run(make_app, configured, list(arguments))
        sys.stdout.flush()
        return stdout.exit_code() if code is None else code


def _run(
    make_app: Callable[[list[str]], App], configured: Collection[str], arguments: list[str]
) -> int | None:
    """Return the exit code, or None if the command has printed its result, and that was all."""
    try:
        with found_by("host"):
            options, path = read_config_file(arguments)
        app = make_app(arguments)
        name_program(app.name[0])
        app.suppress_keyboard_interrupt = False  # it would end the process without a word
        if wants_help(app, arguments):
            print(help_text(app, arguments))
            return None
        threads_per_rank(None, 1, os.environ)  # refuses what OpenMP would end torch for
        app.config = (Dict(dict.fromkeys(configured, options), source=path), check_values)
        words = with_negative_values(arguments)
        return app(words, exit_on_error=False, print_error=False, result_action="return_value")
    except (CycloptsError, InputError) as error:
        if isinstance(error, CycloptsError):
            error = InputError(wrong_use(error))
            error.found_by = "job"
        tell_wrong_input(error)
        return WRONG_INPUT
    except KeyboardInterrupt as interrupt:
        return tell_interrupted(interrupt)
    except (MemoryError, ImportError, OSError, RuntimeError) as error:
        if not has_no_room(error) and not isinstance(error, MemoryError):
            raise
        tell(no_room(error) if has_no_room(error) else "the memory is full; leave more of it free")
        return UNEXPECTED
