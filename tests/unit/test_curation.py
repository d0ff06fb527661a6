"""The benchmark of curation: exchanged captions and kept samples in shards that training accepts."""

from __future__ import annotations

from pathlib import Path

from data_prep.dataset import canonical_tar
from jobs.bench.curation import all_captions, rewrite
from jobs.bench.curator import exchanged
from pipeline.data.shards.check_shards import check_shards
from pipeline.data.shards.manifest_format import load_manifest
from pipeline.distributed.world import World
from tests.shards import write_shards


def test_captions_are_exchanged_and_samples_left_out(tmp_path: Path) -> None:
    write_shards(tmp_path / "all", [6, 4])
    source = load_manifest(tmp_path / "all")
    own = all_captions(source)
    places = list(own)
    order = exchanged(len(places), share=0.4, seed=0)
    captions = {place: own[places[index]] for place, index in zip(places, order, strict=True)}
    kept = {place for place in places if place[1] % 2}
    rewrite(source, tmp_path / "half", captions=captions, kept=kept)
    made = load_manifest(tmp_path / "half")
    check_shards(made, World())
    assert [shard.samples for shard in made.shards] == [3, 2]
    wanted = [captions[place] for place in places if place in kept]
    assert list(all_captions(made).values()) == wanted
    assert sum(captions[place] != own[place] for place in places) == 4
    before, after = (
        [parts["jpg"] for shard in manifest.shards for _, parts in canonical_tar.samples(manifest.url(shard))]
        for manifest in (source, made)
    )
    assert after == [body for place, body in zip(places, before, strict=True) if place in kept]
