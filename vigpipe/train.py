"""`python -m vigpipe.train` is `vigpipe train`; from Python, `vigpipe.train` is a function."""

if __name__ == "vigpipe.train":
    # An imported module would take the place of the package's function of the same name.
    raise ImportError("vigpipe.train is a function, not a module; the loop is in vigpipe.training")

from vigpipe.__main__ import run

if __name__ == "__main__":
    run("train")
