"""What a task is, the 38 tasks of the DataComp benchmark as one table, and the aggregates over them. Imports no torch.

Keys, names, sizes, class counts and metrics are the benchmark's (Gadre et al., 2023, section 3.5 and appendix).
FairFace and UTKFace are in its list but have no score, so they are not here. Every other module takes sizes and class
counts from this table, the download of the evaluation sets included.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One evaluation task."""

    key: str
    """Unique name, for example `vtab/pets`."""
    name: str
    """Name in tables and reports."""
    samples: int | None = None
    """Official number of samples; None when there is no official number."""
    classes: int | None = None
    """Official number of classes."""
    main_metric: str = "acc1"
    """The metric that is the task's score."""
    protocol: str = "classification"
    """The name of a registered protocol."""
    fields: tuple[str, ...] = ()
    """Columns of the `.npy` beside every image; further columns may follow."""
    group: str = ""
    """The column whose worst group is the score."""
    secondary_groups: tuple[str, ...] = ()
    """Further columns whose groups are reported."""
    folders: tuple[str, ...] = ()
    """Further folder names under which the data is found."""

    @property
    def stem(self) -> str:
        """The key as a file name; `/` and `-` stay apart, except in the benchmark's keys, which are distinct."""
        return re.sub(r"[^\w.+-]", "-", self.key.replace("/", "-" if self.samples is not None else "--"))


def official_folder(key: str) -> str:
    """The folder that the benchmark's own download script gives a task: `wds_vtab-pets_test` for `vtab/pets`."""
    return f"wds_{key.removeprefix('fairness/').replace('/', '-')}_test"


PER_CLASS = "mean_per_class_recall"
_WILDCAM = ("location", "sequence", "year", "month", "day", "hour", "minute", "second", "y")

DATACOMP: tuple[Task, ...] = (
    Task("vtab/caltech101", "Caltech-101", 6_085, 102, PER_CLASS),
    Task("cifar10", "CIFAR-10", 10_000, 10),
    Task("vtab/cifar100", "CIFAR-100", 10_000, 100),
    Task("vtab/clevr_count_all", "CLEVR Counts", 15_000, 8),
    Task("vtab/clevr_closest_object_distance", "CLEVR Distance", 15_000, 6),
    Task("country211", "Country211", 21_100, 211),
    Task("vtab/dtd", "Describable Textures", 1_880, 47),
    Task("vtab/eurosat", "EuroSAT", 5_400, 10),
    Task("fgvc_aircraft", "FGVC Aircraft", 3_333, 100, PER_CLASS),
    Task("food101", "Food-101", 25_250, 101),
    Task("gtsrb", "GTSRB", 12_630, 43),
    Task("imagenet1k", "ImageNet 1k", 50_000, 1_000),
    Task("imagenet_sketch", "ImageNet Sketch", 50_889, 1_000),
    Task("imagenetv2", "ImageNet v2", 10_000, 1_000),
    Task("imagenet-a", "ImageNet-A", 7_500, 200),
    Task("imagenet-o", "ImageNet-O", 2_000, 200),
    Task("imagenet-r", "ImageNet-R", 30_000, 200),
    Task("vtab/kitti_closest_vehicle_distance", "KITTI Vehicle Distance", 711, 4),
    Task("mnist", "MNIST", 10_000, 10),
    Task("objectnet", "ObjectNet", 18_574, 113),
    Task("vtab/flowers", "Oxford Flowers-102", 6_149, 102, PER_CLASS),
    Task("vtab/pets", "Oxford-IIIT Pet", 3_669, 37, PER_CLASS),
    Task("voc2007", "Pascal VOC 2007", 14_976, 20),
    Task("vtab/pcam", "PatchCamelyon", 32_768, 2),
    Task("renderedsst2", "Rendered SST2", 1_821, 2),
    Task("vtab/resisc45", "RESISC45", 6_300, 45),
    Task("cars", "Stanford Cars", 8_041, 196),
    Task("stl10", "STL-10", 8_000, 10),
    Task("sun397", "SUN397", 108_754, 397),
    Task("vtab/svhn", "SVHN", 26_032, 10),
    Task(
        "retrieval/flickr_1k_test_image_text_retrieval",
        "Flickr",
        1_000,
        main_metric="mean_recall@1",
        protocol="retrieval",
        folders=("flickr30k", "flickr"),
    ),
    Task(
        "retrieval/mscoco_2014_5k_test_image_text_retrieval",
        "MSCOCO",
        5_000,
        main_metric="mean_recall@1",
        protocol="retrieval",
        folders=("mscoco_captions", "mscoco"),
    ),
    Task("misc/winogavil", "WinoGAViL", 3_563, main_metric="jaccard_score_10-12", protocol="association"),
    Task("wilds/iwildcam", "iWildCam", 42_791, 182, "F1-macro_all", fields=_WILDCAM),
    Task("wilds/camelyon17", "Camelyon17", 85_054, 2, fields=("hospital", "slide", "y"), secondary_groups=("slide",)),
    Task(
        "wilds/fmow",
        "FMoW",
        22_108,
        62,
        "acc_worst_region",
        fields=("region", "year", "y"),
        group="region",
        secondary_groups=("year",),
    ),
    Task(
        "fairness/dollar_street",
        "Dollar Street",
        3_503,
        58,
        "acc_top5_wg",
        fields=("income_ds", "income_meta", "region"),
        group="income_ds",
    ),
    Task("fairness/geode", "GeoDE", 12_488, 40, "acc_wg", fields=("region", "country"), group="region"),
)

TASKS: dict[str, Task] = {task.key: task for task in DATACOMP}
"""The benchmark's tasks by key. Tasks of one's own are described in a `tasks.yaml`, and belong to no aggregate."""

_SHIFTS = ("imagenet_sketch", "imagenetv2", "imagenet-a", "imagenet-o", "imagenet-r", "objectnet")
_FLICKR_AND_COCO = (
    "retrieval/flickr_1k_test_image_text_retrieval",
    "retrieval/mscoco_2014_5k_test_image_text_retrieval",
)

AGGREGATES: dict[str, tuple[str, ...]] = {
    "DataComp Average": tuple(task.key for task in DATACOMP),
    "ImageNet & Variants": ("imagenet1k", *_SHIFTS),
    "Retrieval": _FLICKR_AND_COCO,
    "Retrieval (DataComp)": (*_FLICKR_AND_COCO, "misc/winogavil"),
    "ImageNet dist. shifts": _SHIFTS,
    "VTAB": (*(task.key for task in DATACOMP if task.key.startswith("vtab/")), "sun397"),
}
"""Plain means of main metrics over exactly these keys. `Retrieval` is the NeuCLIP paper's (Flickr30k and MSCOCO); the
benchmark's own adds WinoGAViL."""
