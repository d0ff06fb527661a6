"""Tasks of a user's own, as files: class folders, CSVs, parquet, and the tasks.yaml that describes them."""

import numpy as np

from pipeline.evaluation.datasets.suite import open_suite, open_task
from tests.evaluation_suite import image_bytes

CLASSES = ("mug", "t_shirt", "plate")


def bodies(count):
    rng = np.random.default_rng(7)
    return [image_bytes(rng, number) for number in range(count)]


def write_class_folders(root):
    for number, (suffix, body) in enumerate(bodies(12)):
        folder = root / "photos" / CLASSES[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.{suffix}").write_bytes(body)


def write_csv(root, column):
    lines = [f"file,{column}"]
    (root / "pictures").mkdir(parents=True)
    for number, (suffix, body) in enumerate(bodies(9)):
        (root / f"pictures/{number}.{suffix}").write_bytes(body)
        value = CLASSES[number % 3] if column == "kind" else f"caption {number}"
        lines.append(f"{number}.{suffix},{value}")
    if column == "text":
        lines.append(lines[1].replace("caption 0", "another of the first"))
    (root / "items.csv").write_text("\n".join(lines) + "\n")


def one_task(root, text):
    (root / "tasks.yaml").write_text(text)
    return open_suite(root).entries[0]


def opened(root, text):
    return open_task(one_task(root, text))


def write_parquet(path, **columns):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": [body for _, body in bodies(2)]} | columns), path)
