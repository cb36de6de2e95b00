"""The commands of `vigpipe`, one file each; `train` is in vigpipe/training.py."""
