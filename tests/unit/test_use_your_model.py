"""The Python of docs/use-your-model.md runs on an exported model, and finds what it should."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from jobs.export import command
from tests.documents import ROOT, blocks
from tests.unit.test_export import write_run


def test_the_code_of_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    run = write_run(tmp_path / "run", bias=None)
    for name, form in (("mine", "open_clip"), ("mine-transformers", "transformers")):
        command.main([str(run), "--output", str(tmp_path / "hub" / name), "--format", form], standalone_mode=False)
    (tmp_path / "photos").mkdir()
    for name, colour in (("red", "#c02020"), ("green", "#20a040"), ("blue", "#2040c0")):
        Image.new("RGB", (40, 30), colour).save(tmp_path / "photos" / f"{name}.jpg")
    capsys.readouterr()
    scope: dict[str, Any] = {}
    with contextlib.chdir(tmp_path):
        for block in blocks("python", ROOT / "docs" / "use-your-model.md"):
            exec(block, scope)
    printed = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[1] for line in printed) == ["blue.jpg", "green.jpg", "red.jpg"]
    values = [float(line.split()[0]) for line in printed]
    assert values == sorted(values, reverse=True)
    torch.testing.assert_close(scope["probabilities"].sum(1), torch.ones(3))
    texts = scope["encode_texts"](["a dog on a beach", "a cat"])
    expected = scope["model"].logit_scale.exp() * scope["images"][:1] @ texts.T
    torch.testing.assert_close(scope["logits"], expected, rtol=1e-3, atol=1e-3)
