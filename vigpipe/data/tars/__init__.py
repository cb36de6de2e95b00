"""Images in tar files, read at their positions: nothing is extracted."""
