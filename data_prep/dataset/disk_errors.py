"""Full disks, read-only folders and missing permissions, in plain words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import UserError, explain_file_error


@contextmanager
def disk_errors_explained(root: str | Path) -> Iterator[None]:
    """Convert file system errors inside the block to a UserError that says where, why and what to do."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        message = explain_file_error(error, root)
        if message is None:
            raise
        raise UserError(message) from error
