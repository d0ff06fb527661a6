"""The first commands of docs/own-data.md, run unchanged, on 64 images and a tiny model."""

import csv

import open_clip
import pytest

from tests.documents import ROOT, lines
from tests.launch import run
from tests.shards import jpeg
from tests.towers import write_tiny

PAGE = ROOT / "docs" / "own-data.md"


@pytest.mark.slow
def test_the_commands_of_the_page_lead_from_images_to_an_exported_model(tmp_path):
    (tmp_path / "photos").mkdir()
    rows = [(f"{number:02d}.jpg", f"picture number {number}") for number in range(65)]
    for number, (name, _) in enumerate(rows[:64]):
        (tmp_path / "photos" / name).write_bytes(jpeg(number))
    with (tmp_path / "photos" / "captions.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file_name", "text"), *rows])
    arch = write_tiny(tmp_path)
    small = [f"model.arch={arch}", "batch_size=16", "data.streams=4", "data.workers=0", "epochs=2", "engine.device=cpu",
             "telemetry.tensorboard=false"]  # fmt: skip
    printed = {}
    commands = [line.words for line in lines([PAGE])][:5]
    assert [words[1] for words in commands] == ["pairs", "verify", "plan", "train", "export"]
    for words in commands:
        more = small if words[1] in ("plan", "train") else []
        printed[words[1]] = run("jobs.cli", *words[1:], *more, folder=tmp_path).stdout
    assert "64 of 65 rows gave a sample" in printed["pairs"]
    assert "image file missing: captions.csv:66" in printed["pairs"]
    assert "64 samples" in printed["verify"]
    assert "8 steps, 128 pairs (2.00 times the data)" in printed["plan"]
    assert (tmp_path / "runs/mine/checkpoints/step-00000008").is_dir()
    assert open_clip.create_model(f"local-dir:{tmp_path / 'hub' / 'mine'}") is not None
