"""The pairs of the study `tuned`: icons with their names as stored features of both sides, so that a run takes seconds.

    python -m jobs.studies.tuned_pairs render iconify-json-2.2.535.tgz FOLDER      # `npm pack @iconify/json@2.2.535`
    python -m jobs.studies.tuned_pairs features FOLDER

`render` draws every icon at 32 x 32 pixels, grey. `features` trains a small convolutional network on one half of the
training icons to predict the words of their captions, locks it, and stores its features of all other icons: the other
half (what the runs of the study train on) and the held-out ones. Texts are stored as sums of fixed random vectors of
their words and letter trigrams. Neither side has seen a contrastive loss.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import tempfile
import zlib
from collections import Counter
from pathlib import Path

import click
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from data_prep.icons.icon_list import IconOptions, list_icons, share_of
from data_prep.icons.icon_package import HeldOutConfig, IconSourceConfig, package_folder, read_sets
from pipeline.pixels import open_image

SIDE, DIM = 32, 256
"""Pixels of a side of an image; numbers of a stored feature."""
WORDS, EPOCHS, BATCH, RATE = 1500, 4, 128, 2e-3
"""The locked network: most frequent words that it predicts, passes, batch and learning rate."""
TASKS = ("", "retrieval", "unseen-sets-retrieval")
"""The groups of icons: for training, and the two held-out retrieval tasks of `neuclip download --recipe icons`."""


def draw(svg: str) -> bytes | None:
    """An icon on white as SIDE x SIDE grey bytes; None if it cannot be drawn or has one colour only."""
    import resvg_py

    try:
        png = resvg_py.svg_to_bytes(svg_string=svg, width=SIDE, height=SIDE, background="white", skip_system_fonts=True)
    except ValueError:
        return None
    with open_image(png) as image:
        grey = np.asarray(image.convert("L"))
    return grey.tobytes() if np.ptp(grey) else None


def render_all(package: Path, folder: Path) -> None:
    """Write `pixels.npy`, [N, SIDE, SIDE] uint8, and `icons.json` with place, caption and task of each."""
    source = IconSourceConfig()
    options = IconOptions(source.version, source.licences, 1.0, HeldOutConfig(), SIDE)
    scratch = tempfile.TemporaryDirectory(dir=folder)
    with scratch, package_folder(str(package), source.version, scratch=Path(scratch.name)) as unpacked:
        rows = list_icons(unpacked, read_sets(unpacked), options)
    rows = [row for row in rows if row.image and row.captions and (not row.problem or row.detail in TASKS[1:])]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        drawn = pool.map(draw, [row.image for row in rows], chunksize=500)
    kept = [(row, pixels) for row, pixels in zip(rows, drawn, strict=True) if pixels is not None]
    np.save(folder / "pixels.npy", np.frombuffer(b"".join(p for _, p in kept), np.uint8).reshape(-1, SIDE, SIDE))
    facts = [[row.place, row.captions[0], row.detail if row.problem else ""] for row, _ in kept]
    (folder / "icons.json").write_text(json.dumps(facts), encoding="utf-8")
    click.echo(f"{len(rows):,} icons, {len(kept):,} drawn: {dict(Counter(task for _, _, task in facts))}")


class WordNetwork(nn.Module):
    """[b, 1, 32, 32] in [-1, 1] -> [b, DIM] features -> logits of the words."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 5, stride=2, padding=2), nn.GELU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.GELU(),
            nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.GELU(),
            nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.BatchNorm2d(128), nn.GELU(),
            nn.Flatten(), nn.Linear(128 * 16, DIM), nn.BatchNorm1d(DIM), nn.GELU(),
        )  # fmt: skip
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        """The features."""
        found: Tensor = self.body(x)
        return found


def images(pixels: NDArray[np.uint8]) -> Tensor:
    """[b, SIDE, SIDE] bytes -> the network's input."""
    return torch.from_numpy(pixels.astype(np.float32))[:, None] / 127.5 - 1


def train_network(pixels: NDArray[np.uint8], captions: list[str]) -> WordNetwork:
    """Train on the words of the captions; reports the loss of every 200 steps."""
    counts = Counter(word for caption in captions for word in set(caption.split()))
    place = {word: number for number, (word, _) in enumerate(counts.most_common(WORDS))}
    labels = [[place[word] for word in set(caption.split()) if word in place] for caption in captions]
    torch.manual_seed(0)
    network, order, steps = WordNetwork(), np.random.default_rng(0), EPOCHS * (len(pixels) // BATCH)
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min(1, (t + 1) / 200) * 0.5 * (1 + math.cos(math.pi * t / steps))
    )
    step, total = 0, 0.0
    for _ in range(EPOCHS):
        permutation = order.permutation(len(pixels))
        for start in range(0, len(pixels) - BATCH + 1, BATCH):
            rows = permutation[start : start + BATCH]
            target = torch.zeros(BATCH, WORDS)
            for number, row in enumerate(rows):
                target[number, labels[row]] = 1.0
            loss = F.binary_cross_entropy_with_logits(network.head(network(images(pixels[rows]))), target) * 100
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step, total = step + 1, total + float(loss.detach())
            if step % 200 == 0:
                click.echo(f"{step}/{steps} loss {total / 200:.4f}")
                total = 0.0
    return network.eval()


def text_feature(caption: str, known: dict[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    """The sum of fixed random unit vectors of the words and, with weight 0.5, of their letter trigrams, [DIM]."""
    words = caption.split()
    found = np.zeros(DIM, np.float32)
    for word in words:
        found += vector(word, known)
        marked = f"#{word}#"
        grams = [marked[i : i + 3] for i in range(len(marked) - 2)]
        found += 0.5 / math.sqrt(max(1, len(grams))) * np.sum([vector(f"3 {gram}", known) for gram in grams], axis=0)
    return found


def vector(token: str, known: dict[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    """A token's random unit vector, from a hash of it."""
    if token not in known:
        drawn = np.random.default_rng(zlib.crc32(token.encode())).standard_normal(DIM).astype(np.float32)
        known[token] = drawn / np.linalg.norm(drawn)
    return known[token]


@torch.no_grad()
def write_features(folder: Path) -> None:
    """Write `features.pt`: standardized image and text features of the icons that the network was not trained on."""
    pixels = np.load(folder / "pixels.npy")
    icons = json.loads((folder / "icons.json").read_text(encoding="utf-8"))
    first = np.array([not task and share_of(f"network {place}") < 0.5 for place, _, task in icons])
    with torch.enable_grad():
        network = train_network(pixels[first], [icon[1] for icon, one in zip(icons, first, strict=True) if one])
    rest = [icon for icon, one in zip(icons, first, strict=True) if not one]
    parts = [network(images(block)) for block in np.array_split(pixels[~first], 400)]
    known: dict[str, NDArray[np.float32]] = {}
    text = torch.from_numpy(np.stack([text_feature(caption, known) for _, caption, _ in rest]))
    group = torch.tensor([TASKS.index(task) for _, _, task in rest])
    training = group == 0
    image = torch.cat(parts)
    sides = {"image": image, "text": text}
    sides = {name: (x - x[training].mean(0)) / (x[training].std(0) + 1e-6) for name, x in sides.items()}
    torch.save(
        {**{k: v.half() for k, v in sides.items()}, "group": group, "captions": [c for _, c, _ in rest]},
        folder / "features.pt",
    )
    click.echo(f"{int(training.sum()):,} pairs to train on, {int((group > 0).sum()):,} held out")


@click.group()
def main() -> None:
    """Pairs of the study `tuned`."""


@main.command()
@click.argument("package", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
def render(package: Path, folder: Path) -> None:
    """Draw every icon of PACKAGE."""
    folder.mkdir(parents=True, exist_ok=True)
    render_all(package, folder)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
def features(folder: Path) -> None:
    """Train the locked network and write the features."""
    torch.set_num_threads(1)
    write_features(folder)


if __name__ == "__main__":
    main()
