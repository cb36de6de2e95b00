"""`python -m vigpipe.train` is `vigpipe train`; from Python, `vigpipe.train` is a function."""

import sys

if __name__ == "vigpipe.train":
    # An imported module would take the place of the package's function of the same name.
    raise ImportError("vigpipe.train is a function, not a module; the loop is in vigpipe.training")

from vigpipe.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")  # for the records too, which tell the command
    sys.exit(main())
