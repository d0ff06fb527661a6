"""How much better each image-text pair fits than chance over the whole dataset, by a trained model.

    score_i = s_ii / tau - (l_1i + l_2i) / 2,    l_1i = log mean_j exp(s_ij / tau),    l_2i = log mean_j exp(s_ji / tau)

with s_ij the cosine of image i and text j: the mean of both directions' pointwise log-ratio under the model. A caption
that fits everything has a high cosine and a high normalizer, and so a low score. The means are over the pairs of
randomly chosen shards.

Shards are scored one by one, each into a table of its own, so that a stopped job continues and ranks share the work.
The tables become one, of which the names of the worst pairs are taken, and a page to look at them first.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from pipeline.analysis.shard_pairs import PairBatch, PairReader, facts_in, whole
from pipeline.data.order.mixture import draw
from pipeline.data.shards.manifest_format import Manifest
from pipeline.data.shards.storage import open_records
from pipeline.data.shards.tar_reader import CaptionField, CorruptSample, rgb_image, thumbnail_url
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.files import read_tree, replacing, write_json, write_text
from pipeline.model.evaluation_model import EvaluationModel, load_for_evaluation
from pipeline.model.trimming import text_trimming, without_padding
from pipeline.report.page import render
from pipeline.run_files import model_folder_in

NUMBERS = ("cosine", "log_normalizer_image", "log_normalizer_text", "score")
TABLE_NAME, FACTS_NAME = "scores.parquet", "scores.json"
SCHEMA = pa.schema(
    [
        ("sample_id", pa.int64()),
        ("shard", pa.dictionary(pa.int32(), pa.string())),
        ("row", pa.int32()),
        ("key", pa.string()),
        ("uid", pa.string()),
        ("cosine", pa.float32()),
        ("log_normalizer_image", pa.float32()),
        ("log_normalizer_text", pa.float32()),
        ("score", pa.float32()),
        ("problem", pa.string()),
        ("transparent", pa.bool_()),
        ("single_colour", pa.bool_()),
    ]
)
SIDE, SHOWN = 192, 48
"""Most pixels of a thumbnail from top to bottom; number of the worst pairs, and half as many of the others."""


@dataclass(frozen=True)
class Scorer:
    """A model with its temperature, ready to score the pairs of a dataset."""

    model: EvaluationModel
    pairs: PairReader
    reference: tuple[Tensor, Tensor, Tensor]
    """Features of the pairs that the means are over, [m, d] each, and their ids, [m]."""
    tau: float
    facts: dict[str, Any]
    """What scores depend on; stored beside them, so that parts of different jobs are never mixed."""

    def rows(self, batch: PairBatch) -> Iterator[dict[str, Any]]:
        """The table's rows of a batch: the readable pairs, then those with a problem.

        Raises:
            UserError: A score is not finite.
        """
        shard = self.pairs.manifest.shards[batch.shard]
        if batch.captions:
            image, text = encode(self.model, batch)
            cosine = (image * text).sum(1)
            ids = torch.tensor(batch.sample_ids, device=image.device)
            first, second = sampled_normalizers(self.reference, self.tau, image, text, ids)
            score = cosine / self.tau - (first + second) / 2
            values = torch.stack([cosine, first, second, score], 1)
            if not values.isfinite().all():
                raise UserError(
                    f"Scores of {shard.name} are not finite: the weights of {self.model.source} are damaged."
                )
            pixels = batch.image.flatten(-2)
            plain = (pixels.amin(-1) == pixels.amax(-1)).all(1).tolist()
            for row, numbers, single in zip(batch.rows, values.tolist(), plain, strict=True):
                place = {"sample_id": shard.offset + row, "shard": shard.name, "row": row, "single_colour": single}
                yield place | dict(zip(NUMBERS, numbers, strict=True))
        for row, problem in batch.problems:
            yield {"sample_id": shard.offset + row, "shard": shard.name, "row": row, "problem": problem}


def encode(model: EvaluationModel, batch: PairBatch) -> tuple[Tensor, Tensor]:
    """Unit-norm features of the readable pairs of a batch, [b, d] each; of K crops of an image [b K, d]."""
    device = next(model.towers.parameters()).device
    text = without_padding(model.tokenize(batch.captions), text_trimming(model.towers.clip))
    return model.encode_image(batch.image.flatten(0, -4).to(device)), model.encode_text(text.to(device))


def reference_pairs(model: EvaluationModel, pairs: PairReader, *, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features of m = `count` pairs of random shards, [m, d] each, and their ids, [m]; the same in every job.

    Raises:
        UserError: No pair of the dataset can be read.
    """
    order = sorted(range(len(pairs.manifest.shards)), key=lambda index: draw(index, 1))
    references: list[tuple[Tensor, Tensor, Tensor]] = []
    total = 0
    for batch in pairs.read(order):
        if batch.captions:
            image, text = encode(model, batch)
            references.append((image, text, torch.tensor(batch.sample_ids, device=image.device)))
            total += len(image)
        if total >= count:
            break
    if total < 2:
        raise UserError(f"{pairs.manifest.root} holds fewer than two readable pairs: there is nothing to compare with.")
    image, text, ids = (torch.cat(parts)[:count] for parts in zip(*references, strict=True))
    return image, text, ids


def part_of(output: Path, shard: int) -> Path:
    """The table of one shard."""
    return output / "parts" / f"{shard:06d}.parquet"


def score_shards(scorer: Scorer, *, output: Path, world: World, on_shard: Callable[[int, int], None]) -> None:
    """Write the table of every shard that has none in `output` yet; this rank's share of them.

    `on_shard` is called with the number of this rank's finished shards, and of all its shards.
    """
    manifest = scorer.pairs.manifest
    mine = range(world.rank, len(manifest.shards), world.size)
    left = [index for index in mine if not part_of(output, index).is_file()]
    done, rows = len(mine) - len(left), list[dict[str, Any]]()
    on_shard(done, len(mine))
    for batch in scorer.pairs.read(left):
        rows += scorer.rows(batch)
        if batch.ends_shard:
            known = facts_in(manifest.url(manifest.shards[batch.shard]))
            rows = [row | known.get(row["row"], {}) for row in sorted(rows, key=lambda row: int(row["row"]))]
            path = part_of(output, batch.shard)
            with replacing(path) as temporary:
                pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), temporary, write_page_checksum=True)
            rows, done = [], done + 1
            on_shard(done, len(mine))


def start_output(path: Path, facts: dict[str, Any], *, what: str, apart: Collection[str] = ()) -> None:
    """Create a folder for results (`what`) by its file of facts, or check that it holds those of the same facts, of
    which those in `apart` may differ.

    Raises:
        UserError: It holds others, or the file is damaged.
    """
    if not path.is_file():
        write_json(path, {"facts": facts})
        return
    if not isinstance(stored := read_tree(path).get("facts"), dict):
        raise UserError(f"{path} is damaged: give another --output, or delete it.")
    own = {name: value for name, value in json.loads(json.dumps(facts)).items() if name not in apart}
    other = [f"{name} ({stored.get(name)}, now {own[name]})" for name in own if stored.get(name) != own[name]]
    if other:
        raise UserError(
            f"{path.parent} holds {what} with another {', '.join(other)}: give another --output, or delete it."
        )


def sampled_normalizers(
    reference: tuple[Tensor, Tensor, Tensor], tau: float, image: Tensor, text: Tensor, sample_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """log mean_j exp(s_ij / tau) of both sides over the m reference pairs, [b] each, for features, [b, d] each, and
    sample ids, [b]; a pair is left out of its own mean."""
    images, texts, ids = reference
    own = sample_ids[:, None] == ids
    counted = (len(ids) - own.sum(1)).log()
    first, second = (
        (side @ others.T / tau).masked_fill(own, -math.inf).logsumexp(1) - counted
        for side, others in ((image, texts), (text, images))
    )
    return first, second


def make_scorer(
    spec: str,
    manifest: Manifest,
    *,
    caption: CaptionField,
    reference: int,
    batch_size: int,
    workers: int,
    world: World,
) -> Scorer:
    """The scorer of a model; `spec` is what `load_for_evaluation` takes.

    Every rank encodes `reference` pairs for itself. `batch_size` pairs are encoded at a time, and `workers` threads
    decode.

    Raises:
        UserError: There is no model, or it has no temperature.
    """
    # Chosen once, on one rank: a run that is still training may write another checkpoint meanwhile.
    spec = world.gather_objects(str(model_folder_in(Path(spec)) or spec))[0]
    model = load_for_evaluation(spec, device=world.device)
    image_of = whole(model.preprocess, model.architecture.background)
    pairs = PairReader(manifest, caption, image_of, batch_size=batch_size, workers=workers)
    tau = temperature_of(model, spec)
    facts = {"model": model.digest, "data": manifest.digest, "caption": str(caption), "reference": reference}
    return Scorer(model, pairs, reference_pairs(model, pairs, count=reference), tau, facts | {"tau": tau})


def temperature_of(model: EvaluationModel, spec: str) -> float:
    """The temperature that is stored with a model's weights; a UserError if there is none."""
    if model.towers.logit is None:
        raise UserError(f"{spec} has no logit scale, and so no temperature.")
    return math.exp(-model.towers.logit[0])


def join_parts(manifest: Manifest, output: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Write `scores.parquet` from the tables of all shards, and the counts, which are returned, to `scores.json`.

    Raises:
        UserError: Tables are missing.
    """
    paths = [part_of(output, index) for index in range(len(manifest.shards))]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise UserError(f"{len(missing)} tables are missing in {output / 'parts'} ({missing[0]}, ...): run it again.")
    problems, flags = Counter[str](), Counter(transparent=0, single_colour=0)
    with (
        replacing(output / TABLE_NAME) as temporary,
        pq.ParquetWriter(temporary, SCHEMA, write_page_checksum=True) as writer,
    ):
        for path in paths:
            table = read_scores(path, schema=SCHEMA)
            problems.update(table["problem"].drop_null().to_pylist())
            flags.update({name: table[name].to_pylist().count(True) for name in flags})
            writer.write_table(table)
    counts = {"pairs": manifest.n, "scored": manifest.n - problems.total(), "problems": dict(problems), **flags}
    write_json(output / FACTS_NAME, {"facts": facts, **counts})
    return counts


def read_scores(path: Path, **options: Any) -> pa.Table:
    """A table of scores, or some of its columns.

    Raises:
        UserError: It is damaged.
    """
    try:
        return pq.read_table(path, page_checksum_verification=True, **options)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is damaged ({error}): delete it, and run the same command again.") from error


def worst_keys(table: Path, share: float) -> list[str]:
    """Names of the pairs with the lowest scores, worst first; pairs that could not be scored are not among them.

    A name is the sample's key, or SHARD:KEY in a dataset where several shards have the same keys.
    """
    columns = read_scores(table, columns=["shard", "key", "score"])
    order = by_score(columns)
    keys, shards = columns["key"].to_pylist(), columns["shard"].to_pylist()
    known = [key for key in keys if key is not None]
    qualified = len(set(known)) < len(known)
    return [f"{shards[i]}:{keys[i]}" if qualified else keys[i] for i in order[: share_of(len(order), share)]]


def share_of(count: int, share: float) -> int:
    """`share` of a number of pairs, rounded down: 29 for 0.29 of 100, which is 28.999... in floating point."""
    return int(share * count + 1e-6)


def by_score(table: pa.Table) -> np.ndarray:
    """Rows of a table of scores in increasing order of the score, without those that have none."""
    score = table["score"].to_numpy(zero_copy_only=False)
    order = np.argsort(score, kind="stable")  # nan, of pairs without a score, comes last
    return order[: int(np.isfinite(score).sum())]


def write_contact_sheet(path: Path, table: Path, manifest: Manifest, *, caption: CaptionField, share: float) -> None:
    """Write a page with the worst pairs, those on both sides of the cut, and for comparison the best.

    `share` is that of the worst of the scored pairs in `table`, which may be removed: where the cut is.
    """
    rows = read_scores(table, columns=["shard", "row", "key", "score", "cosine"])
    order = by_score(rows)
    cut, half = share_of(len(order), share), SHOWN // 2
    parts = {
        "The worst pairs": order[: min(SHOWN, cut)],
        f"Just below the cut at {share:.0%}: the last that would be removed": order[max(SHOWN, cut - half) : cut],
        f"Just above the cut at {share:.0%}: the first that would be kept": order[cut : cut + half],
        "The best pairs, for comparison": order[max(cut + half, len(order) - half) :][::-1],
    }
    shown = {title: rows.take(part).to_pylist() for title, part in parts.items() if len(part)}
    wanted: dict[str, dict[int, list[dict[str, Any]]]] = {}  # by shard and row
    for row in itertools.chain.from_iterable(shown.values()):
        row["numbers"] = f"score {row['score']:.2f}, cosine {row['cosine']:.3f}"
        row |= {"source": "", "caption": "", "name": f"{row['shard']}:{row['key']}"}
        wanted.setdefault(row["shard"], {}).setdefault(row["row"], []).append(row)
    for shard in (shard for shard in manifest.shards if shard.name in wanted):
        here = wanted[shard.name]
        with open_records(manifest.url(shard), skip=0, caption_suffix=caption.suffix) as records:
            for number, record in enumerate(itertools.islice(records, max(here) + 1)):
                for row in here.get(number, ()):
                    with suppress(CorruptSample):  # it has a score, so it was readable a moment ago
                        row["source"] = thumbnail_url(rgb_image(record.image or b""), (2 * SIDE, SIDE))
                    row["caption"] = caption.read(record)
    title = f"Scores of {Path(manifest.root).resolve().name}"
    write_text(path, render("contact_sheet.html", {"title": title, "count": len(order), "parts": shown}))
