"""What a user did wrong, told in one sentence, and the exit codes of every command."""

DONE = 0
DIFFERS = (
    1  # `vigpipe check` found a difference; also Python's own code for an unexpected exception
)
WRONG_INPUT = 2
PEER_LOST = 70
SAVED = 75  # stopped before the end with a checkpoint: start again to go on
NOT_FINITE = 76  # the loss is NaN or infinite
INTERRUPTED = 130  # 128 + SIGINT


class InputError(ValueError):
    """Wrong use or wrong input: one sentence with what, where, expected, actual, what to change.

    Commands print the sentence to stderr without a traceback and exit with code 2.
    """
