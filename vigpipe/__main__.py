"""`python -m vigpipe VERB`."""

import sys

from vigpipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
