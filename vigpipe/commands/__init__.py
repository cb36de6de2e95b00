"""The verbs of the command line, one file each; `train` is vigpipe/train.py."""
