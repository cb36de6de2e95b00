"""`python -m vigpipe VERB`, and the program `vigpipe`."""

import os
import signal
import sys
from typing import NoReturn


def run(*verb: str) -> NoReturn:
    """Run the command line behind the verb as this process, to its end."""
    try:
        from vigpipe.launch.safe_path import protect_children

        protect_children()
        # Else torch shows its C++ frames on stderr whenever a host is lost.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from vigpipe.cli import main  # takes a while, in which Ctrl-C may come

        sys.argv[1:1] = verb  # for the records too, which tell the command
        code = main()
    except KeyboardInterrupt as interrupt:  # amid the import
        from vigpipe.launch.failures import tell_interrupted

        code = tell_interrupted(interrupt)
    for number in (signal.SIGINT, signal.SIGTERM):  # all is done, and Python only clears up
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


if __name__ == "__main__":
    run()
