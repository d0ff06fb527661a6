"""Errors that the user can fix, whose messages are written for the terminal."""


class UserError(ValueError):
    """An error that the user can fix. The message says what was given, what is allowed and what to do.

    The command line prints it as one paragraph, without a traceback, and exits with `exit_code`.
    """

    exit_code = 2


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU ran out of memory; compares the name of torch's exception, so that torch is not imported."""
    return type(error).__name__ == "OutOfMemoryError"
