"""Damage is found and reported by name, only damaged shards are fetched again, and removed samples stay removed."""

# ruff: noqa: F811 (imported fixtures are requested by name)
from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from PIL import Image

from data_prep import rebuild as rebuilding
from data_prep.dataset import canonical_tar, duplicates
from data_prep.dataset.dataset_folder import Folder, load_config
from data_prep.dataset.removal import remove
from data_prep.dataset.shard_plan import load_plan
from data_prep.dataset.verification import verify
from data_prep.ingest import prepare
from data_prep.rebuild import rebuild
from data_prep.settings.download_config import DownloadConfig
from jobs.manifest import command as manifest_command
from jobs.verify import command
from pipeline.analysis.shard_pairs import names_in
from pipeline.config import dump
from pipeline.data.shards.manifest_format import load_manifest
from pipeline.data.shards.shard_table import ShardTableBuilder
from pipeline.errors import UserError
from tests.images import encoded
from tests.ingested import ROWS, SHARD, copied, fetch_here, made, own_opener, site  # noqa: F401
from tests.web import Site, jpeg, picture


def kinds(root: Path) -> list[tuple[str, str]]:
    return [(problem.shard, problem.kind) for problem in verify(root)]


def test_an_intact_dataset_has_no_problems(copied: Path) -> None:
    assert verify(copied, decode=SHARD) == []
    result = CliRunner().invoke(command, [str(copied)], standalone_mode=False)
    assert "4 shards, 24 samples" in result.output
    assert result.return_value == 0


def test_every_kind_of_damage_is_reported(copied: Path) -> None:
    def shard(number: int) -> Path:
        return copied / f"shards/{number:05d}.tar"

    shard(0).unlink()
    shard(1).write_bytes(shard(1).read_bytes()[:9_000])
    flipped = bytearray(shard(2).read_bytes())
    flipped[700] ^= 1
    shard(2).write_bytes(flipped)
    shutil.copy(shard(3), copied / "shards/00009.tar")
    assert kinds(copied) == [
        ("shards/00000.tar", "missing"),
        ("shards/00001.tar", "size"),
        ("shards/00001.tar", "sha256"),
        ("shards/00001.tar", "damaged"),
        ("shards/00002.tar", "sha256"),
        ("shards/00009.tar", "not listed"),
    ]
    result = CliRunner().invoke(command, [str(copied)], standalone_mode=False)
    assert result.return_value == 1
    assert "There is a problem with 4 of 4 shards" in result.output


def test_a_published_sample_that_does_not_decode_is_reported(copied: Path) -> None:
    path = copied / "shards/00001.tar"
    members = [(f"{key}.{name}", parts[name]) for key, parts in canonical_tar.samples(path) for name in sorted(parts)]
    members[3] = (members[3][0], b"\xff\xd8\xff not an image")
    size, digest = canonical_tar.write(path, members)
    manifest = load_manifest(copied)
    rows = [(s.name, s.samples, s.bytes, s.sha256) for s in manifest.shards]
    rows[1] = ("shards/00001.tar", manifest.shards[1].samples, size, digest)
    replace(manifest, shards=ShardTableBuilder(rows).build()).save(copied)
    found = [str(problem) for problem in verify(copied, decode=SHARD)]
    assert any(problem.startswith("shards/00001.tar: undecodable: sample 0000000007") for problem in found)
    assert "shards/00001.tar: sample: 0000000007: the image differs from the stored one" in found
    assert "manifest.json: shards: it lists other shards than the records" in found


def test_removal_changes_only_affected_shards_and_is_permanent(copied: Path, site: Site) -> None:
    before = {path.name: path.read_bytes() for path in copied.glob("shards/*.tar")}
    uid, url, digest = f"{7:032x}", f"{site.base}/8.jpg", hashlib.sha256(jpeg(side=45)).hexdigest()
    done, manifest = remove(copied, {uid, url, digest, "0000000010", "unknown"})
    assert (done.asked, done.missing, done.samples, done.shards) == (5, ("unknown",), 4, 2)
    assert manifest.n == ROWS - 4
    assert manifest.failures == {"removed": 4}
    assert verify(copied) == []
    after = {path.name: path.read_bytes() for path in copied.glob("shards/*.tar")}
    assert [name for name in sorted(after) if after[name] != before[name]] == ["00000.tar", "00001.tar"]
    keys = {int(key) for shard in manifest.shards for key, _ in canonical_tar.samples(manifest.url(shard))}
    assert keys == set(range(ROWS)) - {5, 7, 8, 10}
    assert remove(copied, {uid})[1].digest == manifest.digest, "removing again changes nothing"

    # A rebuild of such a shard does not request samples removed by uid, URL or key, and gives the same bytes.
    config = load_config(copied)
    _, plan = prepare(config)
    Folder(copied).withdraw(1)
    asked = len(site.agents)
    again = fetch_here(config, plan, [1])
    assert len(site.agents) - asked == SHARD - 3
    assert (again.digest, again.failures) == (manifest.digest, {"removed": 4})


def test_a_removal_list_is_read_as_people_write_it(copied: Path, site: Site, tmp_path: Path) -> None:
    """Regression test: a mark of the encoding and capitals in hashes hid names, and U+2028 split one into others."""
    digest = hashlib.sha256(jpeg(side=45)).hexdigest()
    listed = tmp_path / "list.txt"
    lines = [f"{7:032x}", f"  {site.base}/8.jpg\t", digest.upper(), "no such\u20280000000011"]
    listed.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    result = CliRunner().invoke(command, [str(copied), "--remove", str(listed)], standalone_mode=False)
    assert "3 of 4 names found, 3 samples removed from 2 shards." in result.output
    assert "1 names match no uid, URL, hash or key of" in result.output
    assert r"'no such\u20280000000011'" in result.output
    assert result.return_value == 1
    assert verify(copied) == []
    listed.write_text(digest.upper())
    assert CliRunner().invoke(command, [str(copied), "--remove", str(listed)], standalone_mode=False).return_value == 0


def test_a_rebuild_includes_the_shards_of_all_workers(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a job array, the settings on disk are those of the task that wrote last."""
    config = load_config(copied)
    Folder(copied).config.write_text(dump(replace(config, fetch=replace(config.fetch, worker=1, workers=3))))
    manifest = load_manifest(copied)
    for number in (0, 1, 2):
        (copied / f"shards/{number:05d}.tar").unlink()
    asked: list[tuple[int, ...]] = []

    def fetch(config: DownloadConfig, shards: tuple[int, ...], **_: object) -> None:
        asked.append(shards)
        fetch_here(config, load_plan(Folder(copied)), list(shards), "rebuild")

    monkeypatch.setattr(rebuilding, "fetch", fetch)
    assert rebuild(copied, verify(copied), allow_addresses=True).digest == manifest.digest
    assert asked == [(0, 1, 2)]
    assert verify(copied) == []


def test_a_shard_is_dropped_when_all_its_samples_are_removed(copied: Path) -> None:
    _, manifest = remove(copied, {f"{k:032x}" for k in range(SHARD)})
    assert [shard.name for shard in manifest.shards] == [f"shards/0000{k}.tar" for k in (1, 2, 3)]
    assert not (copied / "shards/00000.tar").exists()
    assert load_manifest(copied).attempted == ROWS
    assert verify(copied) == []


def test_duplicates_are_found_and_can_be_removed(copied: Path, tmp_path: Path) -> None:
    found = duplicates.find_duplicates(copied)
    assert found.exact == [["0000000002", "0000000009"]]
    assert found.near == {"0000000020": "0000000004"}, "the same image, resized and recompressed"
    listed = tmp_path / "surplus.txt"
    result = CliRunner().invoke(command, [str(copied), "--duplicates", str(listed)], standalone_mode=False)
    assert listed.read_text().split() == ["0000000009", "0000000020"]
    assert "1 group of exact duplicates with 2 samples" in result.output
    assert "(near: 3 or fewer of 64 bits of the difference hash differ, and 8 x 8 thumbnails" in result.output
    result = CliRunner().invoke(command, [str(copied), "--remove", str(listed)], standalone_mode=False)
    assert "2 samples removed from 2 shards" in result.output
    assert duplicates.find_duplicates(copied) == duplicates.Duplicates([], {})


def test_images_that_cannot_be_compared_are_reported(tmp_path: Path) -> None:
    """Two 16-bit images are not duplicates, although clipped to white they were; a damaged one is named."""
    folder, ramp = tmp_path / "mine", np.tile(np.arange(20000, 60000, 400, dtype=np.uint16), (100, 1))
    members = [(f"s{k}.txt", b"a caption") for k in range(3)]
    for key, pixels in (("s0", ramp), ("s1", ramp[:, ::-1])):
        members.append((f"{key}.png", encoded(Image.fromarray(pixels.copy()), "PNG")))
    folder.mkdir()
    canonical_tar.write(folder / "00000.tar", sorted([*members, ("s2.png", b"no image")]))
    CliRunner().invoke(manifest_command, [str(folder)], standalone_mode=False)
    result = CliRunner().invoke(command, [str(folder), "--duplicates", str(tmp_path / "list")], standalone_mode=False)
    assert result.exception is None
    assert "0 near duplicates of an earlier sample" in result.output
    assert f"There is nothing to remove; {tmp_path / 'list'} is empty." in result.output
    assert "1 images cannot be decoded and were not compared: s2" in result.output


def test_identical_images_of_shards_from_elsewhere_are_exact_duplicates(tmp_path: Path) -> None:
    """No record has their hashes; the stored bytes are compared, and the names are what --remove accepts."""
    folder, bodies = tmp_path / "mine", []
    for seed in range(3):
        pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        bodies.append(encoded(Image.fromarray(pixels), "PNG"))
    folder.mkdir()
    for shard, images in enumerate(((0, 1), (2, 0))):
        members = [(f"s{k}.png", bodies[image]) for k, image in enumerate(images)]
        members += [(f"s{k}.txt", b"a caption") for k in range(2)]
        canonical_tar.write(folder / f"0000{shard}.tar", sorted(members))
    CliRunner().invoke(manifest_command, [str(folder)], catch_exceptions=False, standalone_mode=False)
    arguments = [str(folder), "--duplicates", str(tmp_path / "list")]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False, standalone_mode=False)
    assert "1 group of exact duplicates with 2 samples: 00000.tar:s0 = 00001.tar:s1" in result.output
    assert "0 near duplicates of an earlier sample" in result.output
    assert (tmp_path / "list").read_text().split() == ["00001.tar:s1"]
    arguments = [str(folder), "--remove", str(tmp_path / "list")]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False, standalone_mode=False)
    assert "1 samples removed from 1 shards" in result.output


def test_names_of_any_bytes_are_found_and_removed(tmp_path: Path) -> None:
    """Regression tests: such a name ended the search (70), and a name with a blank was removed with the one without."""
    folder, odd = tmp_path / "mine", os.fsdecode(b"caf\xe9")
    folder.mkdir()
    names, seeds = ["a", "a ", "b", odd], [0, 1, 2, 2]
    pictures = [np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8) for seed in seeds]
    bodies = [encoded(Image.fromarray(pixels), "PNG") for pixels in pictures]
    members = [
        (f"{name}.{suffix}", part)
        for name, body in zip(names, bodies, strict=True)
        for suffix, part in (("png", body), ("txt", b"text"))
    ]
    canonical_tar.write(folder / "0.tar", members)
    CliRunner().invoke(manifest_command, [str(folder)], catch_exceptions=False, standalone_mode=False)
    found = duplicates.find_duplicates(folder)
    assert found.exact == [["b", r"caf\udce9"]]
    assert set(names_in(str(folder / "0.tar"))[3].values()) == {r"caf\udce9"}
    done, manifest = remove(folder, {"a", r"caf\udce9"})
    assert (done.missing, manifest.n) == ((), 2)
    assert [key for key, _ in canonical_tar.samples(folder / "0.tar")] == ["a ", "b"]


@pytest.mark.parametrize("option", [["--duplicates"], ["--overlap", "suite"]])
def test_an_unwritable_list_is_rejected_before_the_search(copied: Path, option: list[str]) -> None:
    arguments = [str(copied), *option, str(copied / "nowhere" / "list.txt")]
    with pytest.raises(UserError, match="its folder does not exist"):
        CliRunner().invoke(command, arguments, catch_exceptions=False)


@pytest.mark.parametrize("option", [[], ["--rebuild"], ["--duplicates", "list"]])
def test_shards_outside_the_folder_are_rejected_in_plain_words(copied: Path, option: list[str]) -> None:
    manifest = load_manifest(copied)
    rows = [(s.name, s.samples, s.bytes, s.sha256) for s in manifest.shards]
    rows[0] = ("s3://bucket/00000.tar", *rows[0][1:])
    replace(manifest, shards=ShardTableBuilder(rows).build()).save(copied)
    with pytest.raises(UserError, match=r"1 of 4 shards .* 's3://bucket/00000.tar'; only local folders are checked"):
        CliRunner().invoke(command, [str(copied), *option], catch_exceptions=False)
    with pytest.raises(UserError, match="is not a folder on this machine"):
        verify("s3://bucket/data")


def test_shards_elsewhere_are_compared_with_consent_only(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "list").mkdir()
    pattern = str(copied / "shards" / "{00000..00003}.tar")
    CliRunner().invoke(manifest_command, [str(tmp_path / "list"), "--shards", pattern], catch_exceptions=False)
    for option in (["--duplicates"], ["--overlap", str(copied)]):
        arguments = [str(tmp_path / "list"), *option, str(tmp_path / "found.txt")]
        with pytest.raises(UserError, match="--allow-outside"):
            CliRunner().invoke(command, arguments, catch_exceptions=False)
        CliRunner().invoke(command, [*arguments, "--allow-outside"], catch_exceptions=False, standalone_mode=False)
        assert (tmp_path / "found.txt").read_text()


def test_samples_without_an_image_are_called_incomplete(tmp_path: Path) -> None:
    pictures = [(f"{k}.jpg", jpeg()) for k in range(4)]
    members = sorted([*pictures, *((f"{k}.txt", b"a caption") for k in range(5))])
    canonical_tar.write(tmp_path / "a.tar", members)
    CliRunner().invoke(manifest_command, [str(tmp_path)], catch_exceptions=False, standalone_mode=False)
    assert [str(problem) for problem in verify(tmp_path)] == ["a.tar: incomplete: sample 4 has no image, only txt"]


def test_overlap_with_evaluation_sets_is_found(copied: Path, tmp_path: Path) -> None:
    path = tmp_path / "suite/wds_pets_test/test/0.tar"
    path.parent.mkdir(parents=True)
    members = [("s0.cls", b"3"), ("s0.jpg", jpeg(side=53)), ("s1.cls", b"1"), ("s1.png", encoded(picture(90), "PNG"))]
    canonical_tar.write(path, members)
    listed = tmp_path / "overlap.txt"
    words = [str(copied), "--overlap", str(tmp_path / "suite"), str(listed)]
    result = CliRunner().invoke(command, words, standalone_mode=False)
    assert listed.read_text().split() == ["0000000013"]
    assert "1 samples look like an evaluation image" in result.output
    with pytest.raises(UserError, match="holds no tar"):
        duplicates.find_overlap(copied, tmp_path / "none")


def test_overlap_is_found_in_every_layout_of_a_suite(copied: Path, tmp_path: Path) -> None:
    """Regression test: sets outside of tars, such as Flickr30k's parquet, were passed over without a word."""
    suite = tmp_path / "suite"
    for kind, side in (("cup", 45), ("mug", 190)):
        (suite / "photos" / kind).mkdir(parents=True)
        (suite / "photos" / kind / "a.jpg").write_bytes(jpeg(side=side))
    (suite / "ds").mkdir()
    images = [{"bytes": jpeg(side=side), "path": None} for side in (47, 191)]
    pq.write_table(pa.table({"image": images, "caption": ["one", "two"]}), suite / "ds" / "test.parquet")
    described = "own: {folder: photos}\npairs: {dataset: ds, caption: caption}\ngone: {csv: gone.csv, label: x}\n"
    (suite / "tasks.yaml").write_text(described)
    listed = tmp_path / "overlap.txt"
    for given in (suite, suite / "tasks.yaml"):
        result = CliRunner().invoke(command, [str(copied), "--overlap", str(given), str(listed)], standalone_mode=False)
        assert listed.read_text().split() == ["0000000005", "0000000007"], result.output
        assert "gone is not compared: " in result.output


def test_overlap_is_found_by_the_hash_of_what_was_served(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression test: a copy whose stored image looks a little different was missed."""
    number = itertools.count()
    monkeypatch.setattr(duplicates, "signature", lambda body: (next(number) * 0x9E3779B97F4A7C15 % 2**64, bytes(192)))
    monkeypatch.setattr(duplicates, "near_pairs", lambda *_, **__: iter(()))
    others = [("pets", "a.jpg", jpeg(side=53)), ("pets", "b.jpg", jpeg(side=180))]
    assert duplicates.find_overlap(copied, "none", others=others) == {"0000000013": "pets"}


@pytest.mark.parametrize("distance", [0, 1, 3])
def test_near_duplicates_equal_those_of_an_all_pairs_search(distance: int) -> None:
    """Pairs, not chains: what resembles only a sample that is not kept is kept itself."""
    generator = np.random.default_rng(distance)
    base = generator.integers(0, 2**64, 60, dtype=np.uint64)
    flipped = base[:40].copy()
    for i in range(40):
        for bit in generator.choice(64, size=i % 5, replace=False):
            flipped[i] ^= np.uint64(1) << np.uint64(bit)
    hashes = np.concatenate([base, flipped, base[:20], base[:3]])
    colours = generator.integers(0, 256, (60, 192))
    moved = np.concatenate([colours[:40] + generator.integers(-9, 10, (40, 1)), colours[:20] + 40, colours[:3]])
    thumbnails = np.concatenate([colours, moved]).clip(0, 255).astype(np.uint8)
    expected: dict[int, int] = {}
    for j in range(len(hashes)):
        for i in range(j):
            colour = np.abs(thumbnails[i].astype(int) - thumbnails[j])
            near = int(hashes[i] ^ hashes[j]).bit_count() <= distance and colour.mean() <= 6 and colour.max() <= 32
            if near and i not in expected:
                expected[j] = i
                break
    found = duplicates.near_duplicates(duplicates.Signatures(hashes, thumbnails), distance=distance)
    assert found == expected
    assert 3 <= len(expected) < 60, "those of another colour are no duplicates"


def signature(image: Image.Image, *, size: tuple[int, int] = (512, 384), quality: int = 95) -> duplicates.Signatures:
    return duplicates.stacked([duplicates.signature(encoded(image.resize(size), "JPEG", quality=quality))])


def test_signatures_survive_scaling_and_compression_and_tell_colours_apart() -> None:
    image = picture(64).resize((512, 384), Image.Resampling.BICUBIC)
    one, other = signature(image), signature(image, size=(256, 192), quality=60)
    assert int(one.hashes[0] ^ other.hashes[0]).bit_count() <= 3
    assert duplicates.Signatures(one.hashes, other.thumbnails).near(0, np.array([0]))
    both = [signature(Image.new("RGB", (64, 64), colour)) for colour in ("#b00", "#00b")]
    assert both[0].hashes == both[1].hashes, "plain images, which the hash does not tell apart"
    stacked = duplicates.Signatures(
        *(np.concatenate(parts) for parts in zip(*(vars(b).values() for b in both), strict=True))
    )
    assert duplicates.near_duplicates(stacked, distance=3) == {}
