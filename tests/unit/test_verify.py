"""Damage is reported by name; damaged shards are deleted and fetched again; duplicates and overlap are found."""

# ruff: noqa: F811 (imported fixtures are requested by name)
from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from PIL import Image

from data_prep import ingest
from data_prep.dataset import canonical_tar, duplicates
from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.ingest_report import write_report
from data_prep.dataset.manifest_writer import expected_manifest
from data_prep.dataset.removal import remove
from data_prep.dataset.shard_files import withdraw
from data_prep.dataset.shard_plan import load_plan
from data_prep.dataset.verification import verify
from data_prep.ingest import prepare
from jobs.verify import command
from pipeline.analysis.shard_pairs import facts_in
from pipeline.data.shards.manifest_format import ShardTable, load_manifest
from pipeline.errors import UserError
from pipeline.files import sha256_of
from tests.images import encoded
from tests.ingested import (  # noqa: F401
    ROWS,
    SHARD,
    contents,
    copied,
    fetch_here,
    in_process,
    index,
    made,
    own_opener,
    site,
)
from tests.web import jpeg, picture


def run(*words):
    """Call `neuclip verify`."""
    return CliRunner().invoke(command, [str(word) for word in words], standalone_mode=False, catch_exceptions=False)


def kinds(root):
    return [(problem.shard, problem.kind) for problem in verify(root)]


def test_the_command_sums_up(copied):
    result = run(copied)
    assert ("4 shards, 24 samples" in result.output, result.return_value) == (True, 0)
    (copied / "shards/00000.tar").unlink()
    for number in (1, 2):
        flip(copied / f"shards/0000{number}.tar", 700)
    result = run(copied)
    assert ("There is a problem with 3 files (2 sha256, 1 missing)" in result.output, result.return_value) == (True, 1)


def edit(path, change):
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def sign(path, **fields):
    """Change a record as if it had been written so."""
    path.write_text(replace(Folder(path.parent.parent).read_record(int(path.stem)), **fields).text())


def flip(path, place):
    body = bytearray(path.read_bytes())
    body[place] ^= 255
    path.write_bytes(body)


PLAN, MANIFEST, LIST = "plan/plan.json", "manifest.json", "plan/part-00000.parquet"
RECORD, META, TAR = "meta/00001.json", "meta/00001.parquet", "shards/00001.tar"
DAMAGES: list[tuple[str, str, Callable[[Path], object], int]] = [
    (MANIFEST, MANIFEST, lambda path: edit(path, lambda tree: tree["failures"].update({"dns": 7})), 0),
    (MANIFEST, MANIFEST, lambda path: edit(path, lambda tree: tree.update(attempted=99)), 0),
    (MANIFEST, MANIFEST, lambda path: edit(path, lambda tree: tree["facts"].update(urls=1)), 0),
    (MANIFEST, MANIFEST, lambda path: path.write_text("{"), 0),
    (MANIFEST, MANIFEST, Path.unlink, 0),
    (RECORD, RECORD, lambda path: path.write_text('{"shard": 1'), SHARD),
    (RECORD, RECORD, lambda path: edit(path, lambda tree: tree.update(samples="6")), SHARD),
    (RECORD, RECORD, Path.unlink, SHARD),
    (RECORD, RECORD, lambda path: sign(path, rules="0" * 16), SHARD),
    (RECORD, TAR, lambda path: sign(path, sha256="0" * 64), SHARD),
    (RECORD, META, lambda path: sign(path, meta_sha256="0" * 64), SHARD),
    (RECORD, META, lambda path: sign(path, samples=SHARD - 1, failures={"timeout": 1}), SHARD),
    (RECORD, RECORD, lambda path: shutil.copy(path.with_name("00002.json"), path), SHARD),
    (META, META, lambda path: flip(path, 200), SHARD),
    (PLAN, PLAN, lambda path: path.write_text("[]"), 0),
    (PLAN, PLAN, lambda path: edit(path, lambda tree: tree["rules"].pop("image")), 0),
    (PLAN, PLAN, lambda path: edit(path, lambda tree: tree.update(shard_size=0)), 0),
    (LIST, PLAN, lambda path: flip(path, 200), 0),
    (LIST, PLAN, Path.unlink, 0),
    (TAR, TAR, lambda path: flip(path, 700), SHARD),
    (TAR, TAR, lambda path: os.truncate(path, 9_000), SHARD),
    (TAR, TAR, Path.unlink, SHARD),
]  # fmt: skip
"""The file, the name that is reported, the damage, and the URLs that are requested again."""


@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_damage_is_reported_deleted_and_fetched_again(made, copied, site, number):
    path, reported, damage, lost = DAMAGES[number]
    before = contents(copied)
    damage(copied / path)
    assert reported in {problem.shard for problem in verify(copied)}
    assert run(copied, "--delete-damaged").return_value == 1
    asked = len(site.agents)
    ingest.download(replace(made, output=str(copied)))
    assert len(site.agents) - asked == lost
    assert contents(copied) == before
    assert verify(copied) == []


def test_a_list_that_cannot_be_made_again_is_refused(made, copied, tmp_path):
    """Neither another table nor other settings take the place of those that the shards were made with."""
    (copied / PLAN).write_text("[]")
    run(copied, "--delete-damaged")
    table = tmp_path / "urls.parquet"
    columns = pq.read_table(str(made.source.table)).to_pydict()
    pq.write_table(pa.table({**columns, "caption": ["another", *columns["caption"][1:]]}), table)
    config = replace(made, output=str(copied))
    for other in (
        replace(config, source=replace(made.source, table=str(table))),
        replace(config, image=replace(made.image, size=99)),
    ):
        with pytest.raises(UserError, match="holds shards of another list of URLs or other settings"):
            ingest.download(other)
    ingest.download(config)
    assert verify(copied) == []


def test_what_is_in_the_way_or_unknown_is_left_to_the_user(copied):
    shutil.copy(copied / "shards/00000.tar", copied / "shards/later.tar")
    (copied / "removed.txt").write_bytes(b"\xff")
    for name in ("meta/\u00b2.json", "meta/\u00b2.commit"):  # str.isdigit accepts digits that int() does not
        (copied / name).write_text("{}")
    before = contents(copied)
    assert kinds(copied) == [("removed.txt", "damaged"), ("shards/later.tar", "not listed")]
    run(copied, "--delete-damaged")
    assert contents(copied) == before
    (copied / "shards/00003.tar").unlink()
    (copied / "shards/00003.tar").mkdir()
    with pytest.raises(UserError, match=r"00003\.tar is a folder in the place of a file: move it away by hand"):
        run(copied, "--delete-damaged")


@pytest.mark.parametrize("name", [RECORD, META, TAR, PLAN, "removed.txt"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("nowhere")])
def test_what_is_no_file_is_reported_and_not_waited_for(copied, name, make):
    """Regression test: a folder or a pipe as record ended the command, a pipe as meta file was waited for without end,
    and a list of removed samples on a disk that was away was empty: a download would have fetched them again."""
    (copied / name).unlink(missing_ok=True)
    make(copied / name)
    assert name in {problem.shard for problem in verify(copied)}
    with pytest.raises(UserError, match=r"removed|00001|plan"):
        remove(copied, {f"{SHARD:010d}"})


def test_shards_of_others_are_listed_through_links_and_never_deleted(copied, tmp_path):
    """Regression test: tars in linked folders were not looked for."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/disk").symlink_to(copied / "shards")
    (tmp_path / "mine/disk/back").symlink_to(tmp_path / "mine")
    index(tmp_path / "mine")
    shutil.copy(copied / "shards/00000.tar", copied / "shards/later.tar")
    flip(copied / "shards/00001.tar", 700)
    assert {shard for shard, _ in kinds(tmp_path / "mine")} == {"disk/later.tar", "disk/00001.tar"}
    with pytest.raises(UserError, match=r"nothing was deleted\. Copy it again from its source"):
        run(tmp_path / "mine", "--delete-damaged")


def test_a_repeated_download_reports_a_cut_tar_before_it_requests_anything(made, copied, monkeypatch):
    monkeypatch.setattr(ingest, "fetch", lambda *_, **__: pytest.fail("the engine was started"))
    sign(copied / RECORD, rows=SHARD + 1, failures={"timeout": 1})
    os.truncate(copied / TAR, 1000)
    before = contents(copied)
    for retry in (False, True):
        with pytest.raises(UserError, match=r"00001\.tar has 1,000 bytes instead of [0-9,]+: .*--delete-damaged`"):
            ingest.download(replace(made, output=str(copied)), retry_failed=retry)
    assert contents(copied) == before


def test_an_unfinished_download_has_no_manifest_to_verify(copied):
    (copied / "manifest.json").unlink()
    (copied / "meta/00003.json").unlink()
    with pytest.raises(UserError, match="The download is not finished: run the same `neuclip download` again"):
        verify(copied)


def swap(members, *names):
    members.update(zip(names, [members[name] for name in reversed(names)], strict=True))


PARTS = "consists of jpg, json instead of an image, txt and json"
OTHER_MEMBERS: list[tuple[Callable[[dict[str, bytes]], object], list[str]]] = [
    (lambda members: members.pop("0000000011.txt"), [f"sample: 0000000011 {PARTS}"]),
    (lambda members: members.pop("0000000007.txt"), [f"sample: 0000000007 {PARTS}"]),
    (lambda members: members.pop("0000000007.jpg"), ["incomplete: sample 0000000007 has no image, only json, txt"]),
    (
        lambda members: members.update({"0000000007.png": b"x"}),
        ["sample: 0000000007: the image differs from the stored one"],
    ),
    (
        lambda members: swap(members, "0000000007.json", "0000000008.json"),
        [f"sample: 000000000{k}: url, caption, uid, key, sha256, width, height" for k in (7, 8)],
    ),
    (  # what a full disk once caused: one row's image under another row's key, in a shard that was then hashed
        lambda members: swap(members, "0000000006.jpg", "0000000007.jpg"),
        [f"sample: 000000000{k}: the image differs from the stored one" for k in (6, 7)],
    ),
    (
        lambda members: members.update({"0000000007.jpg": b"\xff\xd8\xff not an image"}),
        ["undecodable: sample 0000000007"],
    ),
]


def test_wrong_members_are_found_even_if_all_digests_agree(made, tmp_path):
    for number, (change, wanted) in enumerate(OTHER_MEMBERS):
        folder = Folder(Path(shutil.copytree(made.output, tmp_path / str(number))))
        members = {f"{key}.{suffix}": body for key, parts in canonical_tar.samples(folder.tar(1))
                   for suffix, body in parts.items()}  # fmt: skip
        change(members)
        canonical_tar.write(folder.tar(1), sorted(members.items()))
        sign(folder.record(1), bytes=folder.tar(1).stat().st_size, sha256=sha256_of(folder.tar(1)))
        assert "manifest.json: shards: it lists other shards than the records" in map(str, verify(folder.root))
        expected_manifest(folder, load_plan(folder)).save(folder.root)
        problems = "\n".join(map(str, verify(folder.root, decode=SHARD)))
        for problem in wanted:
            assert problem in problems


def test_commands_that_read_all_shards_name_a_damaged_one(copied):
    """Regression test: they reported a fault of the program."""
    for damage in (lambda path: path.write_bytes(b"x"), Path.unlink):
        damage(copied / TAR)
        for work in (write_report, duplicates.find_duplicates):
            with pytest.raises(UserError, match=r"00001\.tar is missing or (damaged|not a complete tar)"):
                work(copied)


def test_removal_is_permanent_and_its_list_is_read_as_people_write_it(made, copied, site, tmp_path):
    """Regression test: a mark of the encoding and capitals in hashes hid names, and U+2028 split one into others."""
    before = {path.name: path.read_bytes() for path in copied.glob("shards/*.tar")}
    digest, listed = hashlib.sha256(jpeg(side=45)).hexdigest(), tmp_path / "list.txt"
    lines = [f"{7:032x}", f"  {site.base}/8.jpg\t", digest.upper(), "0000000010", "no such\u20280000000011"]
    listed.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    result = run(copied, "--remove", listed)
    assert "4 of 5 names found, 4 samples removed from 2 shards." in result.output
    assert "1 names match no uid, URL, hash or key of" in result.output
    assert r"'no such\u20280000000011'" in result.output
    assert result.return_value == 1
    manifest = load_manifest(copied)
    assert (manifest.n, manifest.failures) == (ROWS - 4, {"removed": 4})
    assert verify(copied) == []
    after = {path.name: path.read_bytes() for path in copied.glob("shards/*.tar")}
    assert [name for name in sorted(after) if after[name] != before[name]] == ["00000.tar", "00001.tar"]
    keys = {int(key) for shard in manifest.shards for key, _ in canonical_tar.samples(manifest.url(shard))}
    assert keys == set(range(ROWS)) - {5, 7, 8, 10}
    listed.write_text(digest.upper())
    assert run(copied, "--remove", listed).return_value == 0
    assert load_manifest(copied).digest == manifest.digest, "removing again changes nothing"

    # A shard that is fetched again does not request samples removed by uid, URL or key, and gives the same bytes.
    config, plan = prepare(replace(made, output=str(copied)))
    withdraw(Folder(copied), 1)
    asked = len(site.agents)
    again = fetch_here(config, plan, [1])
    assert len(site.agents) - asked == SHARD - 3
    assert (again.digest, again.failures) == (manifest.digest, {"removed": 4})


def test_duplicates_are_found_and_removed_from_the_report_as_well(copied, tmp_path):
    # The last is the same image, resized and recompressed.
    assert duplicates.find_duplicates(copied) == ([["0000000002", "0000000009"]], {"0000000020": "0000000004"})
    listed = tmp_path / "surplus.txt"
    result = run(copied, "--duplicates", listed)
    assert listed.read_text().split() == ["0000000009", "0000000020"]
    assert "1 group of exact duplicates with 2 samples" in result.output
    assert "(near: 3 or fewer of 64 bits of the difference hash differ, and 8 x 8 thumbnails" in result.output
    write_report(copied)
    assert "2 samples removed from 2 shards" in run(copied, "--remove", listed).output
    assert duplicates.find_duplicates(copied) == ([], {})
    assert load_manifest(copied).digest in (copied / "report.html").read_text()
    assert verify(copied) == []


def noise(seed):
    return encoded(Image.fromarray(np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)), "PNG")


def from_elsewhere(folder, *shards):
    """Tars of pictures with captions, and their manifest."""
    folder.mkdir()
    for number, pictures in enumerate(shards):
        members = [(f"{key}.{suffix}", part) for key, body in pictures.items()
                   for suffix, part in (("png", body), ("txt", b"a caption"))]  # fmt: skip
        canonical_tar.write(folder / f"0000{number}.tar", members)
    index(folder)
    return folder


def test_images_that_cannot_be_compared_are_reported(tmp_path):
    """Two 16-bit images are not duplicates, although clipped to white they were; a damaged one is named."""
    ramp, listed = np.tile(np.arange(20000, 60000, 400, dtype=np.uint16), (100, 1)), tmp_path / "list"
    deep = [encoded(Image.fromarray(pixels.copy()), "PNG") for pixels in (ramp, ramp[:, ::-1])]
    folder = from_elsewhere(tmp_path / "mine", {"s0": deep[0], "s1": deep[1], "s2": b"no image"})
    output = run(folder, "--duplicates", listed).output
    assert "0 near duplicates of an earlier sample" in output
    assert f"There is nothing to remove; {listed} is empty." in output
    assert "1 images cannot be decoded and were not compared: s2" in output


def test_identical_images_of_shards_from_elsewhere_are_exact_duplicates(tmp_path):
    """No record has their hashes; the stored bytes are compared, and the names are what --remove accepts."""
    one, two, three = map(noise, range(3))
    folder = from_elsewhere(tmp_path / "mine", {"s0": one, "s1": two}, {"s0": three, "s1": one})
    output = run(folder, "--duplicates", tmp_path / "list").output
    assert "1 group of exact duplicates with 2 samples: 00000.tar:s0 = 00001.tar:s1" in output
    assert "0 near duplicates of an earlier sample" in output
    assert (tmp_path / "list").read_text().split() == ["00001.tar:s1"]
    assert "1 sample removed from 1 shard." in run(folder, "--remove", tmp_path / "list").output


def test_names_of_any_bytes_are_found_and_removed(tmp_path):
    """Regression tests: such a name ended the search (70), and a name with a blank was removed with the one without."""
    pictures = {"a": noise(0), "a ": noise(1), "b": noise(2), os.fsdecode(b"caf\xe9"): noise(2)}
    folder = from_elsewhere(tmp_path / "mine", pictures)
    assert duplicates.find_duplicates(folder)[0] == [["b", r"caf\udce9"]]
    assert facts_in(str(folder / "00000.tar"))[3]["key"] == r"caf\udce9"
    done, manifest = remove(folder, {"a", r"caf\udce9"})
    assert (done.missing, manifest.n) == ((), 2)
    assert [key for key, _ in canonical_tar.samples(folder / "00000.tar")] == ["a ", "b"]


def test_an_unwritable_list_is_rejected_before_the_search(copied):
    for option in (["--duplicates"], ["--overlap", "suite"]):
        with pytest.raises(UserError, match="its folder does not exist"):
            run(copied, *option, copied / "nowhere" / "list.txt")


def test_shards_outside_the_folder_are_rejected_in_plain_words(copied, tmp_path):
    manifest = load_manifest(copied)
    rows = [(s.name, s.samples, s.bytes, s.sha256) for s in manifest.shards]
    rows[0] = ("s3://bucket/00000.tar", *rows[0][1:])
    replace(manifest, shards=ShardTable(rows)).save(copied)
    with pytest.raises(UserError, match=r"1 of 4 shards .* 's3://bucket/00000.tar'; only local folders are checked"):
        run(copied, "--duplicates", tmp_path / "list")
    assert ("manifest.json", "shards") in kinds(copied)
    with pytest.raises(UserError, match="is not a folder on this machine"):
        verify("s3://bucket/data")


def test_shards_elsewhere_are_compared_with_consent_only(copied, tmp_path):
    (tmp_path / "list").mkdir()
    pattern = str(copied / "shards" / "{00000..00003}.tar")
    index(tmp_path / "list", "--shards", pattern)
    arguments = [str(tmp_path / "list"), "--duplicates", str(tmp_path / "found.txt")]
    with pytest.raises(UserError, match="--allow-outside"):
        run(*arguments)
    run(*arguments, "--allow-outside")
    assert (tmp_path / "found.txt").read_text()


def test_overlap_is_found_in_every_layout_of_a_suite(copied, tmp_path):
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
    official = suite / "wds_pets_test"
    (official / "test").mkdir(parents=True)
    members = [("s0.cls", b"3"), ("s0.jpg", jpeg(side=53)), ("s1.cls", b"1"), ("s1.png", encoded(picture(90), "PNG"))]
    canonical_tar.write(official / "test/0.tar", members)
    for name, text in (("test/nshards.txt", "1"), ("classnames.txt", "a\nb\nc\nd"),
                       ("zeroshot_classification_templates.txt", "a {c}")):  # fmt: skip
        (official / name).write_text(text)
    listed = tmp_path / "overlap.txt"
    for given, keys in ((suite, [5, 7, 13]), (suite / "tasks.yaml", [5, 7])):
        result = run(copied, "--overlap", given, listed)
        assert list(map(int, listed.read_text().split())) == keys, result.output
        assert f"{len(keys)} samples look like an evaluation image" in result.output
        assert "gone is not compared: " in result.output
        assert result.return_value == 1, "not all sets were compared"
    with pytest.raises(UserError, match="There is no suite"):
        duplicates.find_overlap(copied, tmp_path / "none")


def test_overlap_is_found_by_the_hash_of_what_was_served(copied, tmp_path, monkeypatch):
    """Regression test: a copy whose stored image looks a little different was missed."""
    number = itertools.count()
    monkeypatch.setattr(duplicates, "signature", lambda body: (next(number) * 0x9E3779B97F4A7C15 % 2**64, bytes(192)))
    monkeypatch.setattr(duplicates, "near_pairs", lambda *_, **__: iter(()))
    for kind, side in (("a", 53), ("b", 180)):
        (tmp_path / "suite/photos" / kind).mkdir(parents=True)
        (tmp_path / "suite/photos" / kind / "x.jpg").write_bytes(jpeg(side=side))
    (tmp_path / "suite/tasks.yaml").write_text("pets: {folder: photos}\n")
    assert duplicates.find_overlap(copied, tmp_path / "suite") == {"0000000013": "pets"}


def test_near_duplicates_equal_those_of_an_all_pairs_search():
    """Pairs, not chains: what resembles only a sample that is not kept is kept itself."""
    generator = np.random.default_rng(3)
    base = generator.integers(0, 2**64, 60, dtype=np.uint64)
    flipped = base[:40].copy()
    for i in range(40):
        for bit in generator.choice(64, size=i % 5, replace=False):
            flipped[i] ^= np.uint64(1) << np.uint64(bit)
    hashes = np.concatenate([base, flipped, base[:20], base[:3]]).tolist()
    colours = generator.integers(0, 256, (60, 192))
    moved = np.concatenate([colours[:40] + generator.integers(-9, 10, (40, 1)), colours[:20] + 40, colours[:3]])
    thumbnails = np.concatenate([colours, moved]).clip(0, 255)
    expected: dict[int, int] = {}
    for j in range(len(hashes)):
        for i in range(j):
            colour = np.abs(thumbnails[i] - thumbnails[j])
            near = (hashes[i] ^ hashes[j]).bit_count() <= 3 and colour.mean() <= 6 and colour.max() <= 32
            if near and i not in expected:
                expected[j] = i
                break
    each = [(bits, colour.astype(np.uint8).tobytes()) for bits, colour in zip(hashes, thumbnails, strict=True)]
    assert duplicates.near_duplicates(each) == expected
    assert 3 <= len(expected) < 60, "those of another colour are no duplicates"


def test_signatures_survive_scaling_and_compression_and_tell_colours_apart():
    image = picture(64).resize((512, 384), Image.Resampling.BICUBIC)
    plain = [Image.new("RGB", (64, 64), colour) for colour in ("#b00", "#00b")]  # which the hash does not tell apart
    bodies = [encoded(image, "JPEG", quality=95), encoded(image.resize((256, 192)), "JPEG", quality=60)]
    each = [duplicates.signature(body) for body in (*bodies, *(encoded(colour, "PNG") for colour in plain))]
    assert each[2][0] == each[3][0]
    assert duplicates.near_duplicates(each) == {1: 0}
