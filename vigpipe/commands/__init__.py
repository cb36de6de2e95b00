"""The commands of `vigpipe`, one file each; `train` is in vigpipe/train.py."""
