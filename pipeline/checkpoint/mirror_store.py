"""The checkpoints of a run in an object store, or in any other storage that fsspec supports.

A checkpoint's files are uploaded first, each read back and compared with its SHA-256, then `checkpoint.json`, which
makes it a checkpoint, and `latest` last. A killed upload has no `checkpoint.json` and is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from pipeline.checkpoint.layout import FOLDER_NAME, LATEST_NAME, META_NAME, PREFIX, is_name
from pipeline.checkpoint.reader import damage
from pipeline.errors import UserError
from pipeline.files import flush, write_text

BLOCK = 1 << 20
CHECK_NAME = "write-test"
WITHOUT_FOLDERS = frozenset({"abfs", "abfss", "adl", "az", "gcs", "gs", "oci", "oss", "s3", "s3a"})
"""Protocols of object stores. Asked for a folder, their clients would create a bucket whose name is misspelt."""


class MirrorStore:
    """The checkpoints of one run in any storage that fsspec supports.

    Args:
        url: The setting `checkpoint.mirror`. The run's checkpoints are in URL/NAME-OF-RUN/checkpoints/.
        run: The run's folder.

    Raises:
        UserError: There is no such kind of storage, or the package for it is not installed.
    """

    def __init__(self, url: str, run: Path) -> None:
        import fsspec

        self.url = f"{url.rstrip('/')}/{run.name}/{FOLDER_NAME}"
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"checkpoint.mirror = {url!r} cannot be used ({error}). For s3://, pip install 'neuclip[s3]'."
            ) from error

    def check(self) -> None:
        """Write a small file and remove it.

        Raises:
            Exception: Of the client library: the address, the credentials or the access rights are wrong.
        """
        self._make_folder(self._root)
        self._files.pipe_file(f"{self._root}/{CHECK_NAME}", b"")
        self._files.rm_file(f"{self._root}/{CHECK_NAME}")

    def names(self) -> list[str]:
        """The finished checkpoints, oldest first."""
        self._files.invalidate_cache()
        try:
            found = self._files.glob(f"{self._root}/{PREFIX}*/{META_NAME}")
        except FileNotFoundError:
            return []
        return sorted(filter(is_name, (str(path).rstrip("/").split("/")[-2] for path in found)))

    def read(self, name: str) -> str:
        """A small file's contents; empty if there is none."""
        self._files.invalidate_cache()
        try:
            return bytes(self._files.cat_file(f"{self._root}/{name}")).decode().strip()
        except FileNotFoundError:
            return ""

    def upload(self, path: Path) -> None:
        """Copy a finished checkpoint, verified.

        Raises:
            OSError: It could not be copied, or the copy differs.
        """
        self.remove(path.name)
        meta = (path / META_NAME).read_bytes()
        for name, entry in json.loads(meta)["files"].items():
            target = f"{self._root}/{path.name}/{name}"
            self._make_folder(target.rpartition("/")[0])
            self._files.put_file(str(path / name), target)
            if self._sha256(f"{path.name}/{name}") != entry["sha256"]:
                raise OSError(f"{name} arrived with other contents")
        self._files.pipe_file(f"{self._root}/{path.name}/{META_NAME}", meta)
        self.point(LATEST_NAME, path.name)

    def point(self, file: str, name: str) -> None:
        """Write the name of a checkpoint into `latest` or `best`."""
        self._files.pipe_file(f"{self._root}/{file}", f"{name}\n".encode())

    def remove(self, name: str) -> None:
        """Remove a checkpoint, `checkpoint.json` first, so that no part of it looks complete."""
        self._files.invalidate_cache()
        for path in (f"{self._root}/{name}/{META_NAME}", f"{self._root}/{name}"):
            if self._files.exists(path):
                self._files.rm(path, recursive=True)

    def download(self, name: str, folder: Path) -> str:
        """Copy a checkpoint to `folder`/`name`, and return what is wrong with it, or an empty string."""
        temporary, final = folder / f".{name}", folder / name
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            meta = json.loads(self.read(f"{name}/{META_NAME}"))
            for file in meta["files"]:
                (temporary / file).parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(f"{self._root}/{name}/{file}", str(temporary / file))
                flush(temporary / file)
            write_text(temporary / META_NAME, json.dumps(meta, indent=1) + "\n", durable=True)
            if problem := damage(temporary):
                return problem
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
            flush(folder)
        except (OSError, ValueError, KeyError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return ""

    def _make_folder(self, path: str) -> None:
        protocol = self._files.protocol
        if WITHOUT_FOLDERS.isdisjoint([protocol] if isinstance(protocol, str) else protocol):
            self._files.makedirs(path, exist_ok=True)

    def _sha256(self, name: str) -> str:
        digest = hashlib.sha256()
        with self._files.open(f"{self._root}/{name}", "rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
        return digest.hexdigest()
