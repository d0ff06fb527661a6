"""Errors that the user can fix, whose messages are written for the terminal."""

import errno
import mmap
import os
import re
import resource

EXIT_USER_ERROR, EXIT_BUG, EXIT_INTERRUPTED = 2, 70, 130
SPARE_FILES = 16
"""A process that cannot open this many more files has too many open."""
SPARE_ADDRESSES = 64 << 20
"""Bytes of addresses that reading or writing a file of tensors may need beside the file's own size."""
_FILE_ADVICE = {
    errno.ENOSPC: "Free some space, or use another folder, and start again; downloads and conversions continue.",
    errno.EDQUOT: "Free some space within the quota and start again; downloads and conversions continue.",
    errno.EFBIG: "`ulimit -f` or the file system allows no larger file: raise the limit, or use another folder.",
    errno.EROFS: "The file system is read-only: use another folder, or mount it for writing.",
    errno.EACCES: "Use another folder, or change its permissions.",
    errno.EPERM: "Use another folder, or change its permissions.",
    errno.EIO: "The disk reports a fault: look into the system's log.",
    errno.ENOENT: "There is no such file or folder, and it cannot be created.",
    errno.ENOTDIR: "A file is where a folder is needed: use another folder, or move the file away.",
    errno.EEXIST: "There is such a file or folder already: use another name, or move it away.",
    errno.EISDIR: "A folder is where a file is needed: use another name, or move it away.",
    errno.ENAMETOOLONG: "Use a shorter name.",
    errno.EMFILE: "Too many files are open: raise `ulimit -n`, or lower fetch.threads or data.streams.",
}


class UserError(ValueError):
    """An error that the user can fix. The message says what was given, what is allowed and what to do.

    The command line prints it as one paragraph, without a traceback, and exits with `exit_code`.
    """

    exit_code = EXIT_USER_ERROR


def in_a_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def explain(error: BaseException) -> str | None:
    """What an error means and what to do, if the user can do something, else None."""
    if isinstance(error, UserError):
        return str(error)
    if is_out_of_memory(error):
        return (
            f"{error} Lower engine.micro_batch (auto tries what fits), or set model.grad_checkpointing=true: "
            "docs/cluster.md, 'A large batch on few GPUs'; `neuclip plan` estimates what each saves."
        )
    return explain_file_error(error) or explain_memory_error(error)


def exit_code_of(error: BaseException) -> int:
    """The exit code of a program that an error ends."""
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return getattr(error, "exit_code", EXIT_USER_ERROR) if explain(error) is not None else EXIT_BUG


def explain_file_error(error: BaseException) -> str | None:
    """What an error of the file system means and what to do, or None for other errors."""
    if not isinstance(error, OSError) and (number := re.search(r"\(os error (\d+)\)", str(error))):
        error = OSError(int(number[1]), os.strerror(int(number[1])))  # of a library in Rust
    if not isinstance(error, OSError) or error.errno is None:
        return None
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if error.filename is None and not full:
        return None  # a socket's, for example
    name = (full and error.filename2) or error.filename or "a file"  # the second is where a copy goes
    return f"Cannot write or read {name}: {error.strerror}. {_FILE_ADVICE.get(error.errno, '')}".rstrip()


def explain_memory_error(error: BaseException) -> str | None:
    """What to do if this process gets no more memory of the machine, or None for other errors."""
    words = ("cannot allocate memory", "can't allocate memory", "failed to map segment", "can't start new thread")
    if not isinstance(error, MemoryError) and not any(word in str(error).lower() for word in words):
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    said = f" ({error})" if str(error) else ""
    if limit != resource.RLIM_INFINITY:
        return f"`ulimit -v` allows this process {limit / 2**30:.1f} GiB of addresses, all in use{said}: raise it."
    return f"This process got no more memory{said}: use a machine with more, or end other programs."


def need_addresses(size: int = 0) -> None:
    """Take addresses for a file of this size for a moment: a library in Rust aborts the process when it gets none.

    Raises:
        MemoryError: `ulimit -v` does not leave as many.
    """
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    try:
        mmap.mmap(-1, size + SPARE_ADDRESSES).close()
    except OSError as error:
        raise MemoryError(f"{(size + SPARE_ADDRESSES) / 2**20:.0f} MiB more are needed") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU ran out of memory: in torch's allocator, or in CUDA, cuBLAS, cuDNN or NCCL, which have their own.

    Names and messages are compared, so that torch is not imported.
    """
    words = ("cuda error: out of memory", "status_alloc_failed", "cuda failure 2 ")
    raised = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    return raised or type(error).__name__ == "OutOfMemoryError"


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
