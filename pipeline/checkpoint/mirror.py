"""A copy of a run's finished checkpoints in any storage that fsspec supports, for machines that lose their disks.

They are uploaded in the background to URL/NAME-OF-RUN/checkpoints/; a run on a fresh machine downloads the newest one.
`checkpoint.json`, which makes a folder a checkpoint and has the run's id, is uploaded after the files that it lists.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.checkpoint.layout import BEST_NAME, LATEST_NAME, best_checkpoint, id_in, publish, run_id_of, wrong_meta
from pipeline.checkpoint.reader import damage, taken_by
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.files import MOST_TEXT, parse_mapping, write_json, write_text
from pipeline.run_files import (
    FOLDER_NAME,
    META_NAME,
    finished_checkpoints,
    is_name,
    read_meta,
    step_of,
    valid_run_id,
)


class Mirror:
    """The checkpoints of one run in URL/NAME-OF-RUN/checkpoints/. Methods raise what the client library raises.

    `progress` is called now and then during a download. A `UserError` says what is wrong with the address.
    """

    def __init__(self, url: str, run: Path, *, progress: Callable[[], None] = lambda: None) -> None:
        import fsspec
        from fsspec.implementations.dirfs import DirFileSystem
        from fsspec.implementations.local import LocalFileSystem

        place, name = url.rstrip("/") or "/", run.resolve().name
        self.run, self.url = run, f"{place}/{name}/{FOLDER_NAME}"
        try:
            storage, root = fsspec.core.url_to_fs(place)
        except (ImportError, ValueError) as error:
            hint = "For s3://, pip install 'neuclip[s3]'."
            raise UserError(f"checkpoint.mirror = {url!r} cannot be used ({error}). {hint}") from error
        misspelt = ":" in place.partition("/")[0] and not place.startswith(("file:///", "local:///"))
        is_bad = isinstance(storage, LocalFileSystem) and (misspelt or Path(root, name).resolve() == run.resolve())
        if is_bad or any(sign in self.url for sign in "*?["):  # with which clients would remove other folders, too
            raise UserError(
                f"checkpoint.mirror = {self.url} must be a URL, such as s3://BUCKET/FOLDER, or a folder other than the "
                "run's own. Neither it nor the run may have one of *, ? and [ in its name."
            )
        self._files = DirFileSystem(f"{root.rstrip('/')}/{name}/{FOLDER_NAME}", storage)
        self._downloaded = fsspec.Callback(hooks={"progress": lambda *_, **__: progress()})

    def at_start(self, work: Callable[[], None], *, world: World) -> None:
        """Do on rank 0 what needs the mirror, and raise a `UserError` on every rank if that fails. Collective."""

        def checked() -> None:
            name = f"write-test-{uuid.uuid4().hex}"
            try:
                self._make_folder("")
                self._files.pipe_file(name, b"x")  # a listing shows neither a missing bucket nor the right to write
                self._files.rm_file(name)
                work()
            except UserError:
                raise
            except Exception as error:  # of any client library
                raise UserError(
                    f"checkpoint.mirror {self.url} cannot be used ({type(error).__name__}: {error}): check the "
                    "address, the credentials and the right to write, or start with checkpoint.mirror=null."
                ) from error

        world.work_on_main(checked)

    def checkpoints(self, run_id: str | None) -> dict[str, dict[str, Any]]:
        """The contents of every `checkpoint.json` by the checkpoint's name, oldest first; empty where damaged.

        A `UserError` if one was written by another run than `run_id`; None: than the newest; empty: the run is new.
        """
        self._files.invalidate_cache()
        names, metas = list[str](), dict[str, dict[str, Any]]()
        with suppress(FileNotFoundError):
            names = [name for path in self._files.ls("", detail=False) if is_name(name := Path(path).name)]
        for name in sorted(names, key=lambda name: step_of(Path(name))):
            if text := self.read(f"{name}/{META_NAME}"):  # otherwise, its upload was interrupted
                metas[name] = {}
                with suppress(ValueError):
                    metas[name] = parse_mapping(text)
        ids = [other_id for meta in reversed(metas.values()) if (other_id := valid_run_id(meta.get("run_id")))]
        own = ids[0] if run_id is None and ids else run_id
        if other := next((other_id for other_id in ids if other_id != own), ""):
            which = f"is run {own}" if own else "is a new one; --resume latest continues that run"
            raise UserError(
                f"The mirror {self.url} belongs to run {other}, and {self.run} {which}. "
                "Choose another name for the folder `output`, or another checkpoint.mirror."
            )
        return metas

    def refuse_taken(self, *, resume: str | None, step: int) -> None:
        """Raise a `UserError` if the mirror has later steps than `step`, where the run starts (-1: a new run)."""
        names = self.checkpoints(run_id_of(self.run) if resume else None)
        if later := [name for name in names if step_of(Path(name)) > step]:
            raise UserError(taken_by(f"The mirror {self.url}", later, resume))

    def fetch_newest(self, on_event: Callable[[str], None]) -> None:
        """Download the newest intact checkpoint and the best one, unless the run's folder has one that is as new.

        A folder without a run continues the mirror's. `on_event` gets a message for every checkpoint.
        """
        run_id, folder = run_id_of(self.run), self.run / FOLDER_NAME
        metas, finished = self.checkpoints(run_id or None), reversed(finished_checkpoints(self.run))
        here = next((step_of(path) for path in finished if id_in(path) == run_id and not damage(path)), -1)
        for name in [name for name in reversed(metas) if step_of(Path(name)) > here]:
            if problem := self._download(name, metas[name], on_event):
                on_event(f"Checkpoint {name} of the mirror is damaged and was skipped: {problem}")
                continue
            write_text(folder / LATEST_NAME, f"{name}\n", durable=True)
            on_event(f"Checkpoint {name} was downloaded from the mirror {self.url}.")
            best = self.read(BEST_NAME)
            if best == name or (best in metas and not self._download(best, metas[best], on_event)):
                write_text(folder / BEST_NAME, f"{best}\n", durable=True)
            return

    def read(self, file: str) -> str:
        """A small file's contents, of which a bounded part is read; empty if there is none."""
        with suppress(FileNotFoundError):
            return bytes(self._files.cat_file(file, end=MOST_TEXT)).decode(errors="replace").strip()
        return ""

    def upload(self, path: Path) -> None:
        """Copy a finished checkpoint. Sizes are compared here, and contents when it is downloaded."""
        files = (*read_meta(path)["files"], META_NAME)
        if self.url.startswith("hf://") and not self.url.startswith("hf://buckets/"):
            from huggingface_hub import HfApi  # in one commit: the hub limits them per hour
            from huggingface_hub.utils import disable_progress_bars

            disable_progress_bars()
            place = self._files.fs.resolve_path(f"{self._files.path}/{path.name}")
            HfApi().upload_folder(
                repo_id=place.repo_id,
                folder_path=path,
                path_in_repo=place.path_in_repo,
                commit_message=f"Checkpoint {self.run.name}/{path.name}",
                repo_type=place.repo_type,
                revision=place.revision,
                allow_patterns=list(files),
            )
            self._files.invalidate_cache()
        else:
            for file in files:
                copy = f"{path.name}/{file}"
                self._make_folder(copy.rpartition("/")[0])
                self._files.put_file(str(path / file), copy)
                if self._files.size(copy) != (path / file).stat().st_size:
                    raise OSError(f"{file} arrived with another size")
        if best_checkpoint(path.parents[1]) == path:
            self._files.pipe_file(BEST_NAME, f"{path.name}\n".encode())

    def update(self, path: Path, *, run_id: str, resumed_from: str, outdated: Callable[..., list[str]]) -> str:
        """Upload a checkpoint of the run `run_id`, and remove outdated ones, but neither the best one nor that from
        which the run was resumed, and later ones before which it has rolled back.

        Returns what to report: an error of the client library, which has tried again, must not end the training.
        """
        try:
            metas = self.checkpoints(run_id)
            self.upload(path)
            good = {name for name, meta in metas.items() if not wrong_meta(meta, name)}
            later = [name for name in good if step_of(Path(name)) > step_of(path)]
            names, held = {*metas, path.name}, {resumed_from, self.read(BEST_NAME)}
            for name in (*later, *outdated(names, written=path.name, is_good=good.__contains__, held=held)):
                self.remove(name)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            return f"Checkpoint {path.name} is NOT in the mirror {self.url} ({why}). Training continues."
        return f"Checkpoint {path.name} is in the mirror."

    def remove(self, name: str) -> None:
        """Remove a checkpoint, `checkpoint.json` first, so that no part of it looks complete."""
        self._files.invalidate_cache()
        self._files.rm_file(f"{name}/{META_NAME}")
        with suppress(FileNotFoundError):  # there was nothing else
            self._files.rm(name, recursive=True)

    def _download(self, name: str, meta: dict[str, Any], on_event: Callable[[str], None]) -> str:
        """Copy a checkpoint to the run's folder and verify it. Returns what is wrong with it, or an empty string."""
        if wrong := wrong_meta(meta, name):
            return wrong
        path = self.run / FOLDER_NAME / name
        temporary = path.with_name(f".{name}")
        shutil.rmtree(temporary, ignore_errors=True)
        for file in meta["files"]:
            (temporary / file).parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # `damage` says which is missing
                self._files.get_file(f"{name}/{file}", str(temporary / file), callback=self._downloaded)
            self._downloaded.call()
        write_json(temporary / META_NAME, meta)
        if problem := damage(temporary):
            shutil.rmtree(temporary)
            return problem
        publish(temporary, path, meta["run_id"], on_event)
        return ""

    def _make_folder(self, path: str) -> None:
        if not self._files.fs.async_impl:  # object stores have none: their clients would create a misspelt bucket
            self._files.makedirs(path, exist_ok=True)
