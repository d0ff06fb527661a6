"""Errors that the user can fix, whose messages are written for the terminal."""

import errno

EXIT_USER_ERROR, EXIT_BUG, EXIT_INTERRUPTED = 2, 70, 130


class UserError(ValueError):
    """An error that the user can fix. The message says what was given, what is allowed and what to do.

    The command line prints it as one paragraph, without a traceback, and exits with `exit_code`.
    """

    exit_code = EXIT_USER_ERROR


def exit_code_of(error: BaseException) -> int:
    """The exit code of a program that an error ends."""
    if isinstance(error, UserError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return EXIT_USER_ERROR if is_out_of_memory(error) or is_disk_full(error) else EXIT_BUG


def is_disk_full(error: BaseException) -> bool:
    """Whether a file could not be written because its disk or a quota is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU ran out of memory; compares the name of torch's exception, so that torch is not imported."""
    return type(error).__name__ == "OutOfMemoryError"
