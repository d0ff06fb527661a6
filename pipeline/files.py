"""Files that are written whole or not at all: under a temporary name first, then renamed into place. Locks on files."""

from __future__ import annotations

import codecs
import errno
import fcntl
import hashlib
import itertools
import json
import math
import os
import shutil
import socket
import stat
import tempfile
import time
import unicodedata
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipeline.errors import UserError

LONGEST_NAME = 255
"""Bytes; what file systems allow."""
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
"""What `file_lock` fails with on file systems that have no locks."""
MOST_TEXT = 2**28
"""Bytes of a description that is read at once: a checkpoint of 1,024 ranks lists some hundred thousand files."""
UMASK = os.umask(0)  # it can only be read by setting it
os.umask(UMASK)


class NotAFile(OSError):
    """A folder, a pipe or a device is where a file is needed: no fault of the disk, but damage."""


LEFTOVERS = ".*." + "[0-9a-f]" * 32 + ".tmp"
"""Glob pattern of what `replacing` leaves behind when its process is killed; others hardly give such names."""


@contextmanager
def replacing(path: str | Path, *, durable: bool = False) -> Iterator[Path]:
    """A temporary path beside `path`, in whose place it is put in one step at the end, unless the block raises.

    Its name cannot be guessed, and no other process on any machine uses it: if several replace a file at once, the
    last one wins. The folder is made if needed. `durable` flushes the contents to the disk before renaming, so that a
    power failure cannot leave an empty file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        if durable:
            flush(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):  # the error of the block says more
            temporary.unlink()
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)  # a write to a full disk raises an error without a name
        raise


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`, which becomes `path` in one step at the end, or is removed if the block raises.

    Its name cannot be guessed; a killed process leaves it behind. An `OSError` if another process has put a folder with
    contents at `path` meanwhile.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        temporary.chmod(0o777 & ~UMASK)  # it is made for its owner alone
        yield temporary
        if temporary.exists():
            os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def file_lock(path: Path, *, shared: bool = False, seconds: float = math.inf) -> Iterator[None]:
    """Hold a lock; it is released when this process and its forks have ended, however they end.

    Args:
        path: The file, created if needed; who holds its exclusive lock is written there.
        shared: Several may hold a shared lock at once, but not beside an exclusive one.
        seconds: How long to wait for it; 0: not at all.

    Raises:
        BlockingIOError: Another process holds the lock.
        OSError: The file cannot be made, is a link, or its file system has no locks.
    """
    kind, deadline = fcntl.LOCK_SH if shared else fcntl.LOCK_EX, time.monotonic() + seconds
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
    with open(descriptor, "a+", encoding="utf-8") as file:
        while True:
            try:
                fcntl.flock(file, kind | (0 if seconds == math.inf else fcntl.LOCK_NB))
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.05)
        if not shared:
            with suppress(OSError):  # a full disk
                file.truncate(0)
                os.write(file.fileno(), f"{socket.gethostname()}, process {os.getpid()}\n".encode())
        yield


def lock_holder(path: Path) -> str:
    """Who holds the exclusive lock of a file; empty if nobody does."""
    with suppress(OSError), path.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip() or "another process"
    return ""


def write_text(path: str | Path, text: str, *, durable: bool = False) -> Path:
    """Create or replace a UTF-8 text file in one step (see `replacing`), and return its path."""
    path = Path(path)
    with replacing(path, durable=durable) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def write_json(path: str | Path, tree: Any, *, durable: bool = False) -> Path:
    """Create or replace an indented JSON file in one step (see `replacing`), and return its path."""
    return write_text(path, json.dumps(tree, indent=1) + "\n", durable=durable)


def read_tree(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file; empty when it is missing, damaged or something else."""
    with suppress(OSError, ValueError):
        return parse_mapping(read_bounded(path))  # opening, not stat: NFS revalidates what is opened
    return {}


def parse_mapping(text: str | bytes) -> dict[str, Any]:
    """The mapping in a text in JSON; a ValueError if it has none."""
    try:
        tree = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(tree, dict):
        raise ValueError("not a mapping")
    return tree


def existing_folder(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


def check_writable(path: str | Path) -> Path:
    """Check the path of a result, before the hour-long work that produces it.

    Raises:
        UserError: Its folder does not exist or cannot be written to, or it is a folder.
    """
    path = Path(path)
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        why = "it is a folder, its folder does not exist, or you may not write there"
        raise UserError(f"Cannot write {path}: {why}. Name another file.")
    return path


def check_new_folder(path: Path) -> None:
    """Check the folder of a result, before the work that produces it.

    Raises:
        UserError: It is a file, or not empty.
    """
    if path.is_file() or (path.exists() and any(path.iterdir())):
        raise UserError(f"{path} {'is a file' if path.is_file() else 'is not empty'}: choose another output folder.")


def text_lines(text: str) -> list[str]:
    """The lines of a text: `str.splitlines` would also split at U+2028 and others, which occur inside names."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


def distinct_names(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """The `object_pairs_hook` with which `json` refuses an object that has a name twice, by a `ValueError`."""
    tree = dict(fields)
    if len(tree) < len(fields):
        names = [name for name, _ in fields]
        raise ValueError(f"an object has the name {next(n for n in tree if names.count(n) > 1)!r:.80} twice")
    return tree


def as_text(name: str) -> str:
    """A name of any bytes, as Python has it (with surrogates), in characters that UTF-8 has."""
    return name.encode("utf-8", "backslashreplace").decode()


def other_encoding(head: bytes) -> str:
    """What is wrong with a text file of which these are the first four bytes, if it is UTF-16 or UTF-32; else empty."""
    if not (head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in head[:4]):
        return ""
    return "is not UTF-8, which it must be, but looks like UTF-16 or UTF-32. Convert it: iconv -f UTF-16 -t UTF-8"


def regular(path: str, flags: int) -> int:
    """The `opener` of `open` for files that strangers may have made: no pipe is waited for, nor a device read.

    Raises:
        NotAFile: It is no regular file, nor a link to one.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise NotAFile(errno.EINVAL, "not a regular file", str(path))


def unlisted(error: OSError) -> None:
    """The `onerror` of `os.walk`, which by itself passes over folders that it cannot list; those that are gone are."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def walk(folder: Path) -> Iterator[list[Path]]:
    """The files of all kinds of each folder below a folder, links followed; without hidden folders, such as
    `.ipynb_checkpoints`, and links to a folder that they are in. OSError as for `unlisted`."""
    for root, below, files in os.walk(folder, followlinks=True, onerror=unlisted):
        here = Path(root).resolve()
        visible = (name for name in below if not name.startswith("."))
        below[:] = sorted(name for name in visible if not here.is_relative_to((here / name).resolve()))
        yield [Path(root, name) for name in sorted(files)]


def files_below(folder: Path) -> Iterator[Path]:
    """The same as one list."""
    return itertools.chain.from_iterable(walk(folder))


def regular_files(folder: Path, wanted: Callable[[str], bool]) -> list[Path]:
    """The files with wanted names below a folder. Refuses a link to nothing, a pipe or a device."""
    files = [path for path in files_below(folder) if wanted(path.name)]
    if odd := [path for path in files if not path.is_file()]:
        raise UserError(f"{odd[0]} is not a file, nor a link to one: fix it, or move it away.")
    return files


def sha256_of(path: str | Path) -> str:
    """The SHA-256 of a file's contents, as hex; errors as for `regular`."""
    with open(path, "rb", opener=regular) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_bounded(path: Path, *, most: int = MOST_TEXT) -> bytes:
    """The contents of a regular file, or of a link to one.

    Raises:
        OSError: It cannot be read, or is no regular file.
        ValueError: It is larger than `most` bytes.
    """
    with open(path, "rb", opener=regular) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise ValueError(f"larger than {most / 2**20:.0f} MiB")
        return file.read(size)


def flush(path: str | Path) -> None:
    """Wait until a file's contents, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def plain_name(name: object, *, what: str) -> str:
    """Check that a name which was read from a file, a mirror or a server names something directly in a folder.

    Every such name passes here, or through `path_below`, before it is joined to a path: otherwise `../../x` or an
    absolute path would be read, written or deleted outside the folder. `what` says in the message whose name it is.

    Raises:
        UserError: It is not text, is empty, `.` or `..`, has a separator, a control character or a drive, or is longer
            than file systems allow.
    """
    if isinstance(name, str) and name not in ("", ".", "..") and name[1:2] != ":":
        strange = any(c in "/\\" or unicodedata.category(c) in ("Cc", "Cs") for c in name)
        if not strange and len(name.encode()) <= LONGEST_NAME:
            return name
    shown = repr(name) if len(repr(name)) <= 80 else repr(name)[:80] + "..."
    raise UserError(
        f"{what} is named {shown}: only plain names within the folder are allowed, without '..', a leading '/', "
        "backslashes or control characters. Its source is damaged or not to be trusted."
    )


def path_below(folder: Path, name: object, *, what: str) -> Path:
    """`folder`/`name`, where `name` may have subfolders, each a `plain_name`.

    Raises:
        UserError: As for `plain_name`.
    """
    for part in name.split("/") if isinstance(name, str) else [name]:
        plain_name(part, what=f"{what} {name!r:.80}" if part != name else what)
    return folder / str(name)
