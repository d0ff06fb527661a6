"""The 38 evaluation sets of the DataComp benchmark: where each is published, and how much each must hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EvalSet:
    """One set. `folder` is its name below the suite's folder; `samples` and `classes` are the official counts.

    layout: "wds" (tars with classnames.txt), "parquet" (rows of image and captions) or "csv" (a CSV and a zip).
    patterns: the files of the repository that belong to it. revision: the branch to start from when none is pinned.
    """

    key: str
    repo: str
    samples: int
    classes: int | None = None
    layout: str = "wds"
    patterns: tuple[str, ...] = ("*.txt", "*.tar")
    revision: str = "main"

    @property
    def folder(self) -> str:
        return f"wds_{self.key.removeprefix('fairness/').replace('/', '-')}_test"


_CLASSIFICATION = {
    "vtab/caltech101": (6_085, 102),
    "cifar10": (10_000, 10),
    "vtab/cifar100": (10_000, 100),
    "vtab/clevr_count_all": (15_000, 8),
    "vtab/clevr_closest_object_distance": (15_000, 6),
    "country211": (21_100, 211),
    "vtab/dtd": (1_880, 47),
    "vtab/eurosat": (5_400, 10),
    "fgvc_aircraft": (3_333, 100),
    "food101": (25_250, 101),
    "gtsrb": (12_630, 43),
    "imagenet1k": (50_000, 1_000),
    "imagenet_sketch": (50_889, 1_000),
    "imagenetv2": (10_000, 1_000),
    "imagenet-a": (7_500, 200),
    "imagenet-o": (2_000, 200),
    "imagenet-r": (30_000, 200),
    "vtab/kitti_closest_vehicle_distance": (711, 4),
    "mnist": (10_000, 10),
    "objectnet": (18_574, 113),
    "vtab/flowers": (6_149, 102),
    "vtab/pets": (3_669, 37),
    "voc2007": (14_976, 20),
    "vtab/pcam": (32_768, 2),
    "renderedsst2": (1_821, 2),
    "vtab/resisc45": (6_300, 45),
    "cars": (8_041, 196),
    "stl10": (8_000, 10),
    "sun397": (108_754, 397),
    "vtab/svhn": (26_032, 10),
    "wilds/iwildcam": (42_791, 182),
    "wilds/camelyon17": (85_054, 2),
    "wilds/fmow": (22_108, 62),
    "fairness/dollar_street": (3_503, 58),
    "fairness/geode": (12_488, 40),
}


def _of_benchmark(key: str, samples: int, classes: int) -> EvalSet:
    bare = EvalSet(key, "", samples, classes)
    return EvalSet(key, f"djghosh/{bare.folder}", samples, classes)


def _pairs(name: str, samples: int) -> EvalSet:
    # The hub's own conversion: the repository itself holds a loading script, which `datasets` no longer runs.
    return EvalSet(
        f"retrieval/{name}",
        f"nlphuji/{name}",
        samples,
        layout="parquet",
        patterns=("*.parquet",),
        revision="refs/convert/parquet",
    )


EVALSETS: dict[str, EvalSet] = {
    found.key: found
    for found in (
        *(_of_benchmark(key, *counts) for key, counts in _CLASSIFICATION.items()),
        _pairs("flickr_1k_test_image_text_retrieval", 1_000),
        _pairs("mscoco_2014_5k_test_image_text_retrieval", 5_000),
        EvalSet("misc/winogavil", "nlphuji/winogavil", 3_563, layout="csv", patterns=("*.csv", "*.zip")),
    )
}
