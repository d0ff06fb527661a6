"""The checkpoints of a run in an object store, or in any other storage that fsspec supports.

A checkpoint's files are uploaded first, each read back and compared with its SHA-256, then `checkpoint.json`, which
makes it a checkpoint, and `latest` last. A killed upload has no `checkpoint.json` and is ignored.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from pipeline.checkpoint.layout import LATEST_NAME, publish, wrong_meta
from pipeline.checkpoint.reader import damage
from pipeline.config import Tree, flatten
from pipeline.errors import UserError
from pipeline.files import flush, plain_name, write_json, write_text
from pipeline.run_files import FOLDER_NAME, META_NAME, PREFIX, is_name, parse_meta, valid_run_id

CHECK_NAME, OWNER_NAME = "write-test", "owner.json"
ADVICE = "Choose another name for the folder `output`, or another checkpoint.mirror."
RECIPE = ("seed", "model.arch", "objective.", "optimizer.", "schedule.", "ema.")
"""Settings by which a new machine recognizes its run."""
WITHOUT_FOLDERS = frozenset({"abfs", "abfss", "adl", "az", "gcs", "gs", "oci", "oss", "s3", "s3a"})
"""Protocols of object stores. Asked for a folder, their clients would create a bucket whose name is misspelt."""


@dataclass(frozen=True)
class Owner:
    """Who writes to a run's folder in the mirror; `owner.json` there."""

    run_id: str
    holder: str
    """Machine and process; empty after its orderly end."""
    beat: str
    """Changes every few seconds while the process lives."""


class MirrorStore:
    """The checkpoints of one run in any storage that fsspec supports: in URL/NAME-OF-RUN/checkpoints/.

    `progress` is called now and then while a checkpoint is downloaded.

    Raises:
        UserError: There is no such kind of storage, the package for it is not installed, the mirror is the run's own
            folder, or its name is a pattern or no URL.
    """

    def __init__(self, url: str, run: Path, *, progress: Callable[[], None] = lambda: None) -> None:
        import fsspec

        self._downloaded = fsspec.Callback(hooks={"progress": lambda *_, **__: progress()})
        name = plain_name(run.resolve().name, what="The run's folder")
        place = url.rstrip("/") or "/"
        self.url = f"{place.rstrip('/')}/{name}/{FOLDER_NAME}"
        if magic := next((c for c in self.url if c in "*?["), ""):
            raise UserError(
                f"checkpoint.mirror: {self.url} has a {magic!r}, with which clients of storage match other folders, "
                "too: rename the mirror or the run's folder."
            )
        try:
            self._files, root = fsspec.core.url_to_fs(place)
            self._root = f"{root.rstrip('/')}/{name}/{FOLDER_NAME}"
        except (ImportError, ValueError) as error:
            raise UserError(
                f"checkpoint.mirror = {url!r} cannot be used ({error}). For s3://, pip install 'neuclip[s3]'."
            ) from error
        if isinstance(self._files, LocalFileSystem):
            if ":" in place.partition("/")[0] and not place.startswith(("file:///", "local:///")):
                raise UserError(
                    f"checkpoint.mirror = {url!r} is neither a URL, such as s3://BUCKET/FOLDER, nor a folder; a folder "
                    f"of that name is ./{url}"
                )
            if Path(self._root).resolve() == (run / FOLDER_NAME).resolve():
                raise UserError(
                    f"checkpoint.mirror = {url!r} would be the run's own folder, which is {run}: name a folder on "
                    "another disk."
                )

    def check(self) -> None:
        """Write a small file, read it and remove it.

        Raises:
            Exception: Of the client library: the address, the credentials or the access rights are wrong.
        """
        self._make_folder(self._root)
        name = uuid.uuid4().hex  # of another start, which may check at the same time
        path = f"{self._root}/{CHECK_NAME}-{name}"
        self._files.pipe_file(path, name.encode())
        if self._files.cat_file(path) != name.encode():
            raise OSError("what answers there is no storage: it returned other bytes than were written")
        self._files.rm_file(path)

    def names(self) -> list[str]:
        """The finished checkpoints, oldest first."""
        self._files.invalidate_cache()
        try:
            found = self._files.glob(f"{self._root}/{PREFIX}*/{META_NAME}")
        except FileNotFoundError:
            return []
        return sorted(filter(is_name, (str(path).rstrip("/").split("/")[-2] for path in found)))

    def owner(self) -> Owner | None:
        """Who writes here; None if nobody has, or only a version that recorded no ids."""
        try:
            tree = json.loads(self.read(OWNER_NAME) or "null")
            owner = Owner(**{key: str(tree[key]) for key in ("run_id", "holder", "beat")})
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return owner if valid_run_id(owner.run_id) else None

    def claim(self, owner: Owner) -> None:
        """Record who writes here."""
        self._make_folder(self._root)
        self._write(OWNER_NAME, json.dumps(asdict(owner)).encode())

    def _write(self, file: str, body: bytes) -> None:
        """Write a small file at once, as object stores do: a folder's readers must not find it empty."""
        path = f"{self._root}/{file}"
        if isinstance(self._files, LocalFileSystem):
            write_text(path, body.decode())
        else:
            self._files.pipe_file(path, body)

    def meta(self, name: str) -> dict[str, Any]:
        """The contents of a checkpoint's `checkpoint.json`; empty if they cannot be read."""
        try:
            return parse_meta(self.read(f"{name}/{META_NAME}").encode())
        except ValueError:
            return {}

    def problem(self, name: str) -> str:
        """What is wrong with a checkpoint by its `checkpoint.json` and the sizes of its files; empty: nothing."""
        meta = self.meta(name)
        if problem := wrong_meta(meta, name):
            return problem
        for file, entry in meta["files"].items():
            try:
                if self._files.info(f"{self._root}/{name}/{file}")["size"] != entry["bytes"]:
                    return f"{file} has another size."
            except FileNotFoundError:
                return f"{file} is missing."
        return ""

    def run_id(self, name: str) -> str:
        """The id of the run that wrote a checkpoint; empty if older versions did, or it cannot be read."""
        return valid_run_id(self.meta(name).get("run_id"))

    def read(self, name: str) -> str:
        """A small file's contents; empty if there is none."""
        self._files.invalidate_cache()
        try:
            return bytes(self._files.cat_file(f"{self._root}/{name}")).decode(errors="replace").strip()
        except FileNotFoundError:
            return ""

    def upload(self, path: Path) -> None:
        """Copy a finished checkpoint, verified.

        Raises:
            OSError: It could not be copied, or the copy differs.
        """
        meta = (path / META_NAME).read_bytes()
        files = json.loads(meta)["files"]
        if not self._has(path.name, files):  # else it is written again, with the validation that had been prevented
            self.remove(path.name)
            try:
                for name, entry in files.items():
                    target = f"{self._root}/{path.name}/{name}"
                    self._make_folder(target.rpartition("/")[0])
                    self._files.put_file(str(path / name), target)
                    if self._sha256(f"{path.name}/{name}") != entry["sha256"]:
                        raise OSError(f"{name} arrived with other contents")
            except Exception:
                with suppress(Exception):  # the first error says more
                    self.remove(path.name)  # it would fill the mirror, and nobody lists it
                raise
        self._files.pipe_file(f"{self._root}/{path.name}/{META_NAME}", meta)
        self.point(LATEST_NAME, path.name)

    def _has(self, name: str, files: dict[str, dict[str, Any]]) -> bool:
        """Whether a checkpoint is there with these files; their bytes are read and compared."""
        if self.meta(name).get("files") != files or self.problem(name):
            return False
        return all(self._sha256(f"{name}/{file}") == entry["sha256"] for file, entry in files.items())

    def point(self, file: str, name: str) -> None:
        """Write the name of a checkpoint into `latest` or `best`."""
        self._write(file, f"{name}\n".encode())

    def remove(self, name: str) -> None:
        """Remove a checkpoint, `checkpoint.json` first, so that no part of it looks complete."""
        self._files.invalidate_cache()
        for path in (f"{self._root}/{name}/{META_NAME}", f"{self._root}/{name}"):
            if self._files.exists(path):
                self._files.rm(path, recursive=True)

    def download(self, name: str, folder: Path, on_event: Callable[[str], None]) -> str:
        """Copy a checkpoint to `folder`/`name`, and return what is wrong with it, or an empty string."""
        temporary, final = folder / f".{name}", folder / name
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            meta = self.meta(name)
            if wrong := wrong_meta(meta, name):
                return wrong
            for file in meta["files"]:
                target = temporary / file
                target.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(f"{self._root}/{name}/{file}", str(target), callback=self._downloaded)
                flush(target)
                self._downloaded.call()
            write_json(temporary / META_NAME, meta, durable=True)
            if problem := damage(temporary):
                return problem
            publish(temporary, final, valid_run_id(meta.get("run_id")), on_event)
            flush(folder)
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return ""

    def _make_folder(self, path: str) -> None:
        protocol = self._files.protocol
        if WITHOUT_FOLDERS.isdisjoint([protocol] if isinstance(protocol, str) else protocol):
            self._files.makedirs(path, exist_ok=True)

    def _sha256(self, name: str) -> str:
        with self._files.open(f"{self._root}/{name}", "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def check_recipe(store: MirrorStore, name: str, settings: Tree) -> None:
    """Check that a run whose folder is empty has the recipe of the checkpoint that it would continue.

    Raises:
        UserError: It has not: it is another run, in a folder with the same name.
    """
    meta = store.meta(name)
    if wrong_meta(meta, name):  # it is not continued from
        return
    stored, own = flatten(meta["config"]), flatten(settings)
    changed = [
        f"{key} {stored[key]} -> {own[key]}"
        for key in sorted(stored.keys() & own.keys())
        if key.startswith(RECIPE) and stored[key] != own[key]
    ]
    if changed:
        raise UserError(
            f"The mirror {store.url} has {name} of another run in a folder with the same name: {'; '.join(changed)}. "
            f"{ADVICE} If it is the same run, continue it with the settings it had; they can be changed by the start "
            "after that."
        )
