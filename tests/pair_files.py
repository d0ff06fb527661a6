"""Small sources of pairs for `neuclip pairs`, and what it makes of them."""

import csv
import hashlib
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from PIL import Image

from data_prep.dataset import canonical_tar
from data_prep.pairs.make_shards import DROPPED_NAME, make_shards
from data_prep.pairs.pair import PairOptions
from jobs.pairs import command
from pipeline.data.shards.manifest_format import load_manifest
from tests.images import encoded
from tests.shards import write_members


def picture(number, *, size=(40, 30), kind="JPEG", **options):
    pixels = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels), kind, **options)


NAMES = [f"{k:03d}.jpg" for k in range(4)]
PICTURES = {name: picture(k) for k, name in enumerate(NAMES)}


def tree(value):
    return json.dumps(value).encode()


def parquet(table=None, *, options=None, **columns):
    file = io.BytesIO()
    pq.write_table(table or pa.table(columns), file, **(options or {}))
    return file.getvalue()


def tar(members, **options):
    write_members(file := io.BytesIO(), members, **options)
    return file.getvalue()


def write_images(folder, count):
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{number:03d}.jpg" for number in range(count)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(picture(number))
    return names


def write_files(folder, files):
    for name, body in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(body)


def write_csv(path, rows, *, delimiter=","):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return path


def make(source, output, *, notes=None, **options):
    """Convert in shards of four rows; a list as `notes` gets the notes."""
    caption = options.pop("caption", ())
    caption = (caption,) if isinstance(caption, str) else caption
    named = PairOptions(caption=caption, **{"shard_size": 4, **options})
    return make_shards(str(source), output, named, on_note=[].append if notes is None else notes.append)


def run(source, output, *options):
    """What the command prints, in this process."""
    arguments = [str(source), "--output", str(output), "--processes", "1", *options]
    done = CliRunner().invoke(command, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def stored(output):
    """Return image, caption and JSON of every sample, in manifest order."""
    manifest = load_manifest(output)
    parts = [p for shard in manifest.shards for _, p in canonical_tar.samples(manifest.url(shard))]
    return [(canonical_tar.picture(p), p["txt"].decode(), json.loads(p["json"])) for p in parts]


def texts(output):
    """The captions of each sample."""
    return [about["captions"] for _, _, about in stored(output)]


def dropped(output):
    return [line.split("\t") for line in (output / DROPPED_NAME).read_text().splitlines()[1:]]


def digests(output):
    names = [*output.rglob("*.tar"), *output.glob("meta/*"), output / "manifest.json", output / DROPPED_NAME]
    return {str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest() for path in names}


@pytest.fixture
def table(tmp_path):
    names = write_images(tmp_path / "mine" / "images", 10)
    rows = [(f"images/{name}", f"picture {number}") for number, name in enumerate(names)]
    return write_csv(tmp_path / "mine" / "pairs.csv", [("file_name", "text"), *rows])
