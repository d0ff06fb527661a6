"""Detect the kind of a SOURCE and open it as rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from data_prep.pairs import image_files, parquet_source, tar_rows
from data_prep.pairs.listing import Listed, ListedSource, Listing, write_listing
from data_prep.pairs.pair import PairSource, SourceOptions
from pipeline.data.shards.manifest_format import JOURNAL
from pipeline.errors import UserError

_KNOWN = (
    "a CSV, TSV or JSONL table of image files, a folder with such a table, a folder of images with .txt files beside "
    "them, COCO's captions_*.json, parquet files, a folder of datasets.save_to_disk, webdataset tars, or the name of a "
    "data set on the Hugging Face hub (owner/name)"
)


_MOST_TABLES = 5


def kind_of(source: str) -> str:
    """The kind of a source: table, coco, parquet, datasets, tars, images or hub.

    Raises:
        UserError: The source is none of these.
    """
    path = Path(source)
    suffix = path.suffix.lower()
    tables = dict.fromkeys((*image_files.TABLE_SUFFIXES, ".txt"), "table")
    known = {".json": "coco", ".parquet": "parquet", ".tar": "tars", **tables}
    if path.is_file():
        if suffix in known:
            return known[suffix]
        raise UserError(f"{source} is not a supported kind of file. A source is {_KNOWN}.")
    if path.is_dir():
        return _kind_of_folder(path)
    if source.count("/") == 1 and path.parent.is_dir():
        raise UserError(
            f"There is no {path.name} in the folder {path.parent}, which exists here. A source is {_KNOWN}; for the "
            f"data set {source} of the hub, run this in a folder without {path.parent}/."
        )
    if source.count("/") == 1 and not source.startswith((".", "/", "~")) and suffix not in known:
        return "hub"
    raise UserError(f"There is no file or folder {source}. A source is {_KNOWN}.")


def _kind_of_folder(path: Path) -> str:
    if any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json", "state.json")):
        return "datasets"
    if _tables(path):
        return "table"
    if next(path.rglob("*.parquet"), None):
        return "parquet"
    if next(path.rglob("*.tar"), None):
        return "tars"
    if any(next(path.rglob(f"*{suffix}"), None) for suffix in image_files.CAPTION_SUFFIXES) and next(
        image_files.image_names(path), None
    ):
        return "images"
    if annotations := sorted(path.glob("captions*.json")) + sorted(path.glob("annotations/captions*.json")):
        raise UserError(f"{path} looks like COCO: name the annotations, such as {annotations[0]}.")
    if next(image_files.image_names(path), None):
        raise UserError(
            f"{path} has images, but no captions: neither a CSV, TSV or JSONL table in it, nor .txt files beside them."
        )
    raise UserError(f"{path} holds no supported kind of source. A source is {_KNOWN}.")


def _tables(folder: Path) -> list[Path]:
    """Tables in a folder; without any, .txt files that belong to no image and have usual names of columns."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != JOURNAL)
    if tables := [path for path in files if path.suffix.lower() in image_files.TABLE_SUFFIXES]:
        return tables
    pictures = {path.stem for path in files if path.suffix.lower() != ".txt"}
    alone = [path for path in files if path.suffix.lower() == ".txt" and path.stem not in pictures]
    return [path for path in alone if _has_columns(path)] if len(alone) <= _MOST_TABLES else []


def _has_columns(path: Path) -> bool:
    try:
        image_files.find_columns(path, SourceOptions())
    except UserError:
        return False
    return True


def open_source(source: str, options: SourceOptions, *, listing: Path, stored: Listing | None = None) -> PairSource:
    """Open a file, a folder or a name on the hub; the list of a source without random access is written to `listing`.

    Of an interrupted run, this list may be `stored` already.

    Raises:
        UserError: It cannot be read, or an option does not apply to its kind.
    """
    kind = kind_of(source)
    _refuse_options(kind, options)
    path = Path(source).absolute()  # a run that continues with the list may have been started in another folder

    def listed(rows: Iterator[Listed], *, root: Path, group: bool = True) -> Listing:
        return stored if stored is not None else write_listing(listing, rows, root=root, group_images=group)

    if kind == "table":
        table = image_files.open_table(_only_table(path), options)
        about = {"kind": "table", "image": table.image, "caption": table.caption}
        return ListedSource(listed(table.rows(), root=table.images), about)
    if kind == "coco":
        tree = image_files.read_coco(path)
        images = image_files.find_coco_images(path, tree, named=options.images)
        rows = image_files.coco_rows(path, tree, images)
        return ListedSource(listed(rows, root=images), {"kind": "COCO captions"})
    if kind == "images":
        rows = image_files.folder_rows(path, one_caption=options.captions == "one")
        return ListedSource(listed(rows, root=path), {"kind": "folder with text files"})
    if kind == "tars":
        tars = sorted(path.rglob("*.tar")) if path.is_dir() else [path]
        about = {"kind": "webdataset tars", "caption": tar_rows.find_caption(tars, wanted=options.caption)}
        root = path if path.is_dir() else path.parent
        return tar_rows.TarSource(listed(tar_rows.tar_rows(path, tars), root=root, group=False), about)
    if kind == "parquet":
        return parquet_source.open_parquet(path, options)
    return parquet_source.open_dataset(source, options)


def _only_table(path: Path) -> Path:
    if path.is_file():
        return path
    tables = _tables(path)
    if len(tables) > 1:
        raise UserError(
            f"{path} has several tables ({', '.join(table.name for table in tables[:5])}): name one of them."
        )
    return tables[0]


_APPLIES = {
    "image": ("table", "parquet", "datasets", "hub"),
    "caption": ("table", "tars", "parquet", "datasets", "hub"),
    "images": ("table", "coco"),
    "header": ("table",),
    "split": ("datasets", "hub"),
    "subset": ("hub",),
    "revision": ("hub",),
}


def _refuse_options(kind: str, options: SourceOptions) -> None:
    for name, kinds in _APPLIES.items():
        if getattr(options, name) and kind not in kinds:
            raise UserError(
                f"--{name} does not apply to this source, which is of kind {kind}, but to {', '.join(kinds)}."
            )
