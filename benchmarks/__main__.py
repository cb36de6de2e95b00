"""`python -m benchmarks NAME`."""

import sys
from pathlib import Path

from benchmarks.cli import main
from vigpipe.launch.safe_path import protect_children

if __name__ == "__main__":
    protect_children(str(Path(__file__).parent.parent))
    sys.exit(main())
