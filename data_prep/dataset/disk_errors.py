"""Full disks, read-only folders and missing permissions, in plain words."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import UserError

_ADVICE = {
    errno.ENOSPC: "Free some space and run the same command again: it continues.",
    errno.EDQUOT: "Free some space within the quota and run the same command again: it continues.",
    errno.EROFS: "The file system is read-only: use another folder, or mount it for writing.",
    errno.EACCES: "Use another folder, or change its permissions.",
    errno.EPERM: "Use another folder, or change its permissions.",
    errno.EIO: "The disk reports a fault: look into the system's log.",
    errno.ENOENT: "There is no such file or folder, and it cannot be created.",
    errno.ENOTDIR: "A file is where a folder is needed: use another folder, or move the file away.",
    errno.EISDIR: "A folder is where a file is needed: move it away.",
    errno.EMFILE: "Too many open files: raise `ulimit -n`, or lower fetch.threads.",
}


@contextmanager
def disk_errors_explained(root: str | Path) -> Iterator[None]:
    """Convert file system errors inside the block to a UserError that says where, why and what to do."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        if error.errno not in _ADVICE:
            raise
        where = error.filename or root
        raise UserError(f"Cannot write or read {where}: {error.strerror}. {_ADVICE[error.errno]}") from error
