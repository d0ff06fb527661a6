"""Towers as programs that need no open_clip: torch.export (.pt2) and ONNX, each checked against the towers."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import UserError
from pipeline.model.towers import Towers

SIDES = ("image", "text")


class Tower(nn.Module):
    """[B, 3, H, W] normalised images, or [B, L] tokens -> [B, d] unit-norm features."""

    def __init__(self, towers: Towers, side: str) -> None:
        super().__init__()
        self.towers, self.side = towers, side

    def forward(self, x: Tensor) -> Tensor:
        return self.towers.encode_image(x) if self.side == "image" else self.towers.encode_text(x)


@contextmanager
def _traceable() -> Iterator[None]:
    """Turn off the fused inference kernel of torch's multi-head attention, which no exporter supports."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def export_torch(folder: Path, side: str, towers: Towers, example: Tensor) -> float:
    """Write `SIDE.pt2`. Returns the largest difference of its features from the tower's."""
    path, tower = folder / f"{side}.pt2", Tower(towers, side).eval()
    with _traceable():
        program = torch.export.export(tower, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        torch.export.save(program, path)
        return _difference(torch.export.load(path).module(), tower, example)


def export_onnx(folder: Path, side: str, towers: Towers, example: Tensor) -> float:
    """Write `SIDE.onnx`. Returns the largest difference of its features, by onnxruntime, from the tower's."""
    import onnxruntime

    logging.getLogger("onnxscript").setLevel(logging.ERROR)  # it logs every constant that it does not fold
    path, tower = folder / f"{side}.onnx", Tower(towers, side).eval()
    shapes: Any = ({0: torch.export.Dim("batch")},)
    with _traceable():
        torch.onnx.export(
            tower,
            (example,),
            path,
            input_names=[side],
            output_names=["features"],
            dynamic_shapes=shapes,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return _difference(lambda x: torch.from_numpy(session.run(None, {side: x.numpy()})[0]), tower, example)


def _difference(program: Callable[[Tensor], Tensor], tower: nn.Module, example: Tensor) -> float:
    """The largest difference of features, of the whole example and of a smaller batch."""
    return float(torch.stack([(program(x) - tower(x)).abs().max() for x in (example, example[:2])]).max())


def require_onnx() -> None:
    """Check that the packages for ONNX are installed.

    Raises:
        UserError: One of them is missing.
    """
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"ONNX export needs {', '.join(missing)}: pip install -c constraints.txt -e '.[onnx]'.")
