"""Small versions of all 38 tasks in the layouts of the real ones, determined by a seed."""

import csv
import io
import json
import tarfile
import zipfile
from typing import Any

import numpy as np
from PIL import Image

from pipeline.evaluation.datasets.datacomp import TASKS
from tests.images import encoded
from tests.shards import write_members

SAMPLES, SHARDS = 22, 2
MODES = ("RGB", "RGBA", "L", "P", "RGB", "CMYK")
TEMPLATES = ("a photo of a {c}.", "a blurry {c}.", "the {c}, in a photo.")
WORDS = ("red fox", "tabby cat", "crane", "old bridge", "ice cream", "maillot", "green field", "night sky")
CLEVR = ("very nearby", "near", "a bit far", "", "far", "very far")
GROUPS = {"region": 3, "income_ds": 4, "hospital": 2, "slide": 3, "location": 4, "year": 2}


def generator(seed, name):
    return np.random.default_rng([seed, *name.encode()])


def image_bytes(rng, number):
    """Return suffix and bytes of a small image of varying mode, format and size, sometimes with an EXIF rotation."""
    mode = MODES[number % len(MODES)]
    height, width = (int(size) for size in rng.integers(20, 60, 2))
    coarse = rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).convert("RGB")
    if mode == "RGBA":
        image.putalpha(Image.fromarray(rng.integers(0, 256, (height, width), dtype=np.uint8)))
    image = image.convert(mode)
    suffix = {"RGBA": "png", "P": "png", "CMYK": "jpg"}.get(mode, ("webp", "jpg", "jpeg", "png")[number % 4])
    exif = Image.Exif()
    exif[0x0112] = 6 if number % 5 == 0 else 1
    return suffix, encoded(image, "JPEG" if suffix == "jpg" else suffix.upper(), exif=exif)


def classnames(task):
    if task.key.endswith("closest_object_distance"):
        return list(CLEVR)
    count = min(task.classes or 2, 7 if "top5" in task.main_metric else 6)
    return [WORDS[k] for k in range(count)] if count < 6 else [*WORDS[: count - 1], WORDS[2]]


def write_tars(folder, samples, shards=SHARDS):
    """Write samples, given as lists of (suffix, bytes), to tars in order."""
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob("*.tar"):
        earlier.unlink()
    per_shard = -(-len(samples) // shards)
    for shard in range(shards):
        part = list(enumerate(samples))[shard * per_shard : (shard + 1) * per_shard]
        members = [(f"s{number:07d}.{suffix}", body) for number, sample in part for suffix, body in sample]
        write_members(folder / f"{shard}.tar", members, format=tarfile.PAX_FORMAT)
    (folder / "nshards.txt").write_text(f"{shards}\n")


def write_classification(root, task, *, seed=0, samples=SAMPLES):
    rng, names = generator(seed, task.key), classnames(task)
    folder = root / f"wds_{task.key.removeprefix('fairness/').replace('/', '-')}_test"
    rows = []
    for number in range(samples):
        suffix, body = image_bytes(rng, number)
        label = int(rng.integers(max(2, len(names) - 1)))  # the last class never occurs: absent classes must be ignored
        members = [("cls", str(label).encode()), (suffix, body)]
        if task.fields:
            row = [label if f == "y" else int(rng.integers(GROUPS.get(f, 5))) for f in task.fields]
            buffer = io.BytesIO()
            further = [9] if task.key == "wilds/fmow" else []  # an additional column may follow
            np.save(buffer, np.array(row + further, dtype=np.int64))
            members.append(("npy", buffer.getvalue()))
        rows.append(members)
    write_tars(folder / "test", rows)
    (folder / "classnames.txt").write_text("\n".join(names) + "\n")
    (folder / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES) + "\n")
    return folder


def retrieval_rows(task, *, seed=0, samples=SAMPLES):
    rng = generator(seed, task.key)
    rows = []
    for number in range(samples):
        suffix, body = image_bytes(rng, number)
        count = 5 + (number % 7 == 0) * ("coco" in task.key)
        captions = [f"{WORDS[rng.integers(8)]} {number} beside {WORDS[rng.integers(8)]}, {k}" for k in range(count)]
        rows.append({"image": body, "filename": f"{number:04d}.{suffix}", "caption": captions})
    return rows


def write_retrieval(root, task, *, layout, seed=0, samples=SAMPLES):
    rows = retrieval_rows(task, seed=seed, samples=samples)
    folder = root / task.key.split("/")[1]
    if layout == "webdataset":
        folder = root / f"wds_{task.stem}_test"
        bodies = [[(r["filename"].split(".")[1], r["image"]), ("txt", "\n".join(r["caption"]).encode())] for r in rows]
        write_tars(folder / "test", bodies)
        (folder / "dataset_type.txt").write_text("retrieval\n")
    else:
        stored = [{"image": {"bytes": r["image"], "path": r["filename"]}, "caption": r["caption"]} for r in rows]
        _write_table(folder, stored, layout, images="image")
    return folder


def association_rows(*, seed=0):
    rng = generator(seed, "misc/winogavil")
    pool = {f"thing{k}": image_bytes(rng, 4 * k + 1) for k in range(16)}  # 4k + 1 has no alpha, so JPEG is possible
    cues = ("Orchard", "null", "uncle", "Zebra", "ice", "Echo", "bank", "Apple", "yard")
    rows = []
    for number, cue in enumerate(cues):
        size = (5, 6, 10, 12)[number % 4]
        names = [str(name) for name in rng.permutation(sorted(pool))[:size]]
        truth = sorted(names[: 2 + number % 3])
        images = [pool[name] for name in names]
        rows.append({"candidates": names, "cue": cue, "associations": truth, "candidate_images": images})
    return rows


def write_association(root, *, layout, seed=0):
    rows, folder = association_rows(seed=seed), root / "winogavil"
    if layout == "csv+zip":
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "test.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("cue", "candidates", "associations"))
            writer.writerows([r["cue"], json.dumps(r["candidates"]), json.dumps(r["associations"])] for r in rows)
        images = {name: image for r in rows for name, image in zip(r["candidates"], r["candidate_images"], strict=True)}
        with zipfile.ZipFile(folder / "images.zip", "w") as archive:
            for name, (suffix, body) in images.items():
                archive.writestr(f"images/{name}.{suffix}", body)
    else:
        bodies = [[{"bytes": body, "path": None} for _, body in r["candidate_images"]] for r in rows]
        stored = [{**r, "candidate_images": some} for r, some in zip(rows, bodies, strict=True)]
        _write_table(folder, stored, layout, images="candidate_images")
    return folder


def write_cache(root, *, samples=9, embedded=False, digest="ab12"):
    """Write WinoGAViL as cached by `datasets.load_dataset(..., cache_dir=ROOT/hf_cache)`.

    Its images are below downloads/ or, as of newer versions of the dataset, `embedded` in the arrow file; `digest` is
    the name of the dataset's version in the cache.
    """
    from datasets import Features, Image, Sequence, Value
    from datasets.arrow_writer import ArrowWriter

    downloads = root / "hf_cache/downloads/extracted" / ("f" * 12)
    downloads.mkdir(parents=True, exist_ok=True)
    version = root / "hf_cache/nlphuji___winogavil/default/0.0.0" / digest
    version.mkdir(parents=True)
    text = Sequence(Value("string"))
    features = Features(
        {"candidates": text, "cue": Value("string"), "associations": text, "candidate_images": Sequence(Image())}
    )
    with ArrowWriter(path=str(version / "winogavil-test.arrow"), features=features) as writer:
        for row in association_rows()[:samples]:
            images: list[Any] = []
            for name, (suffix, body) in zip(row["candidates"], row["candidate_images"], strict=True):
                path = downloads / f"{name}.jpg"
                path.write_bytes(body)
                images.append({"bytes": body, "path": f"{name}.{suffix}"} if embedded else str(path))
            writer.write(features.encode_example({**row, "candidate_images": images}))
        writer.finalize()
    info = {"features": features.to_dict(), "splits": {"test": {"name": "test", "num_examples": samples}}}
    (version / "dataset_info.json").write_text(json.dumps(info))
    return version


def _write_table(folder, rows, layout, *, images):
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    if layout == "parquet":
        (folder / "data").mkdir(parents=True, exist_ok=True)
        half = len(rows) // 2
        for part, piece in enumerate((rows[:half], rows[half:])):
            table = pa.Table.from_pylist(piece)
            pq.write_table(table, folder / "data" / f"test-{part:05d}-of-00002.parquet", row_group_size=4)
        return
    kind = datasets.Image() if images == "image" else datasets.Sequence(datasets.Image())
    text = datasets.Sequence(datasets.Value("string"))
    features = {"candidates": text, "associations": text, "caption": text, "cue": datasets.Value("string")}
    chosen = {name: features.get(name, kind) for name in rows[0]}
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    datasets.Dataset.from_dict(columns, features=datasets.Features(chosen)).save_to_disk(str(folder))


def write_one_of_each(root, *keys, flickr, winogavil):
    """Write the classification tasks `keys` with 37 samples, which fill no batch evenly, and Flickr and WinoGAViL."""
    for key in keys:
        write_classification(root, TASKS[key], samples=37)
    write_retrieval(root, TASKS["retrieval/flickr_1k_test_image_text_retrieval"], layout=flickr)
    write_association(root, layout=winogavil)
    return root


def write_suite(root, *, seed=0):
    """Write all 38 tasks below `root`."""
    for task in TASKS.values():
        if task.protocol == "classification":
            write_classification(root, task, seed=seed)
        elif task.protocol == "retrieval":
            write_retrieval(root, task, layout="save_to_disk" if "flickr" in task.key else "parquet", seed=seed)
        else:
            write_association(root, layout="csv+zip", seed=seed)
    return root
