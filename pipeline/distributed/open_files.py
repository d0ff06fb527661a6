"""Recognizing that a process has too many files open, which libraries report in many ways."""

from __future__ import annotations

import errno
import os
import resource

SPARE_FILES = 16
"""A process that cannot open this many more files has too many open."""


def too_many_files(error: BaseException) -> bool:
    """Whether an error arose because this process may not open more files; gloo reports that in several ways."""
    descriptors: list[int] = []
    try:
        descriptors.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(SPARE_FILES))
    except OSError as refused:
        return refused.errno in (errno.EMFILE, errno.ENFILE)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return os.strerror(errno.EMFILE).lower() in str(error).lower()


def too_many_files_message(error: BaseException) -> str:
    """What to do about it."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"This process has too many open files ({limit} are allowed; {error}): raise `ulimit -n`, in the job's script, "
        "too."
    )
