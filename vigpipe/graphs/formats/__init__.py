"""The files that graphs come in, one format each; none of them is ever executed."""
