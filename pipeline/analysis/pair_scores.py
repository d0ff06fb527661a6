"""How much better each image-text pair fits than chance over the whole dataset, by a trained model.

    score_i = s_ii / tau - (l_1i + l_2i) / 2,    l_1i = log mean_j exp(s_ij / tau),    l_2i = log mean_j exp(s_ji / tau)

with s_ij the cosine of image i and text j: the mean of both directions' pointwise log-ratio under the model. A caption
that fits everything has a high cosine and a high normalizer, and so a low score. The log-normalizers l come from
NeuCLIP's network where the checkpoint has one, or from the pairs of randomly chosen shards.

Shards are scored one by one, each into a table of its own, so that a stopped job continues and ranks share the work.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from pipeline.analysis.shard_pairs import PairBatch, PairReader, facts_in, uid_of
from pipeline.data.order.hashing import draw
from pipeline.data.shards.manifest_format import Manifest
from pipeline.data.shards.storage import open_records
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.files import read_tree, replacing, write_json
from pipeline.model.evaluation_model import EvaluationModel
from pipeline.model.trimming import text_trimming, without_padding

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


Normalizers = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""[b, d] unit-norm image and text features and [b] sample ids -> log mean_j exp(s_ij / tau) of both sides, two [b]."""


@dataclass(frozen=True)
class ScoringFacts:
    """What scores depend on; stored beside them, so that parts of different jobs are never mixed."""

    model: str
    data: str
    caption: str
    normalizers: str
    reference: int
    tau: float


@dataclass(frozen=True)
class Scorer:
    """A model with its temperature, ready to score the pairs of a dataset."""

    model: EvaluationModel
    pairs: PairReader
    normalizers: Normalizers
    tau: float

    def rows(self, batch: PairBatch) -> Iterator[dict[str, Any]]:
        """The table's rows of a batch: the readable pairs, then those with a problem.

        Raises:
            UserError: A score is not finite.
        """
        shard = self.pairs.manifest.shards[batch.shard]
        fixed = {"shard": shard.name}
        if batch.captions:
            image, text = encode(self.model, batch)
            cosine = (image * text).sum(1)
            first, second = self.normalizers(image, text, torch.tensor(batch.sample_ids, device=image.device))
            values = {
                "cosine": cosine,
                "log_normalizer_image": first,
                "log_normalizer_text": second,
                "score": cosine / self.tau - (first + second) / 2,
            }
            columns = {name: value.cpu().numpy() for name, value in values.items()}
            if not all(np.isfinite(column).all() for column in columns.values()):
                raise UserError(
                    f"Scores of {shard.name} are not finite: the weights of {self.model.source} are damaged."
                )
            pixels = batch.image.flatten(-2)
            plain = (pixels.amin(-1) == pixels.amax(-1)).all(1).tolist()
            for at, row in enumerate(batch.rows):
                numbers = {name: float(column[at]) for name, column in columns.items()}
                yield fixed | {"sample_id": shard.offset + row, "row": row, "single_colour": plain[at], **numbers}
        for row, problem in batch.problems:
            yield fixed | {"sample_id": shard.offset + row, "row": row, "problem": problem}


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


def part_of(output: Path, shard: int) -> Path:
    """The table of one shard."""
    return output / "parts" / f"{shard:06d}.parquet"


def start_output(path: Path, facts: Any, *, what: str, apart: Collection[str] = ()) -> None:
    """Create a folder for results (`what`) by its file of facts, or check that it holds those of the same facts.

    `facts` is a dataclass of plain values, of which those in `apart` may differ.

    Raises:
        UserError: It holds others, or the file is damaged.
    """
    if path.is_file():
        if not isinstance(stored := read_tree(path).get("facts"), dict):
            raise UserError(f"{path} is damaged: give another --output, or delete it.")
        own = {name: value for name, value in json.loads(json.dumps(asdict(facts))).items() if name not in apart}
        if other := [name for name, value in own.items() if stored.get(name) != value]:
            differing = ", ".join(f"{name} ({stored.get(name)}, now {own[name]})" for name in other)
            raise UserError(
                f"{path.parent} holds {what} with another {differing}: give another --output, or delete it."
            )
        return
    write_json(path, {"facts": asdict(facts)})


def join_parts(manifest: Manifest, output: Path, facts: ScoringFacts) -> dict[str, Any]:
    """Write `scores.parquet` from the tables of all shards, and the counts, which are returned, to `scores.json`.

    Raises:
        UserError: Tables are missing.
    """
    paths = [part_of(output, index) for index in range(len(manifest.shards))]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise UserError(f"{len(missing)} tables are missing in {output / 'parts'} ({missing[0]}, ...): run it again.")
    problems, flags = dict[str, int](), dict.fromkeys(("transparent", "single_colour"), 0)
    with (
        replacing(output / TABLE_NAME) as temporary,
        pq.ParquetWriter(temporary, SCHEMA, write_page_checksum=True) as writer,
    ):
        for path in paths:
            table = read_scores(path, schema=SCHEMA)
            for problem in table["problem"].drop_null().to_pylist():
                problems[problem] = problems.get(problem, 0) + 1
            for name in flags:
                flags[name] += table[name].to_pylist().count(True)
            writer.write_table(table)
    scored = manifest.n - sum(problems.values())
    counts = {"pairs": manifest.n, "scored": scored, "problems": problems, **flags}
    write_json(output / FACTS_NAME, {"facts": asdict(facts), **counts})
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


def check_uids(manifest: Manifest) -> None:
    """Check that the first samples of a dataset have uids, which `best_uids` needs, before it is scored.

    Raises:
        UserError: One has none of 32 hexadecimal digits.
    """
    shard = manifest.shards[0]
    with open_records(manifest.url(shard), skip=0, caption_suffix="json") as records:
        uids = [uid_of(record.caption or b"") for record in itertools.islice(records, 10)]
    if not all(re.fullmatch(r"[0-9a-fA-F]{32}", uid or "") for uid in uids):
        raise UserError(
            f"The samples of {shard.name} have no uids of 32 hexadecimal digits, which --index-best selects by: use "
            "--list-worst with the rest of the share, and `neuclip verify --remove`."
        )


def best_uids(table: Path, share: float) -> np.ndarray:
    """uids of the pairs with the highest scores, in the form that `subset.index` reads: sorted pairs of uint64.

    Raises:
        UserError: The samples have no uids of 32 hexadecimal digits.
    """
    columns = read_scores(table, columns=["uid", "score"])
    score = columns["score"].to_numpy(zero_copy_only=False)
    uids = columns["uid"].to_pylist()
    scored = np.flatnonzero(np.isfinite(score))
    chosen = scored[np.argsort(-score[scored], kind="stable")][: share_of(len(scored), share)]
    try:
        halves = [(int(uids[i][:16], 16), int(uids[i][16:], 16)) for i in chosen if len(uids[i]) == 32]
    except (TypeError, ValueError) as error:
        raise UserError(f"Not all samples have uids of 32 hexadecimal digits ({error}).") from error
    if len(halves) < len(chosen):
        raise UserError("Not all samples have uids of 32 hexadecimal digits.")
    return np.sort(np.array(halves, dtype="u8,u8"))
