"""Reading shards: every tar format, damaged tars, and samples in streams."""

import io
import shutil
import tarfile

import pytest
import webdataset

from data_prep.dataset import canonical_tar as canonical
from data_prep.pairs.find_source import open_source
from data_prep.pairs.pair import PairOptions
from pipeline.data.loading.stream_reader import TRUNCATED, StreamReader
from pipeline.data.order.canonical_order import stream_order
from pipeline.data.shards.check_shards import check_shards
from pipeline.data.shards.manifest_format import load_manifest, make_manifest
from pipeline.data.shards.storage import open_records
from pipeline.data.shards.tar_reader import keys, read_records, split_name
from pipeline.distributed.world import World
from pipeline.errors import UserError
from tests.shards import jpeg, reader, sample, starts, write_members, write_shards, write_tar

DIALECTS = [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_records_match_webdataset(tmp_path, dialect):
    samples = [sample(i) for i in range(5)]
    path = tmp_path / "a.tar"
    write_tar(path, [*samples, {"txt": b"no image"}, {"jpg": b"no caption"}], format=dialect)
    expected = [(s.get("jpg"), s.get("txt")) for s in webdataset.WebDataset(str(path), shardshuffle=False)]
    for skip in (0, 1, 6):
        with open_records(str(path), skip=skip) as records:
            assert [(r.image, r.caption) for r in records] == expected[skip:]
    with path.open("rb") as file:
        assert len(list(keys(file))) == len(expected)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_long_names_directories_and_extended_headers(tmp_path, dialect):
    names = ["d/" + "x" * 90 + ".jpg", "d/" + "x" * 90 + ".txt", "é" * 20 + ".txt", "last.seg.TXT", "last.jpg"]
    if dialect != tarfile.USTAR_FORMAT:
        names[:2] = ["d/" + "y" * 300 + ".jpg", "d/" + "y" * 300 + ".txt"]
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=dialect) as tar:
        folder = tarfile.TarInfo("d")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name in names:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(name), 1e9 + 0.5  # type: ignore[assignment]  # a fraction needs a PAX header
            tar.addfile(info, io.BytesIO(name.encode()[: info.size]))
    with open(path, "rb") as file:
        found = list(read_records(file))
    assert [r.image is not None for r in found] == [True, False, True]
    assert [r.caption is not None for r in found] == [True, True, False]


def test_the_image_of_a_sample_is_its_first(tmp_path):
    samples = [{"jpg": b"photo", "png": b"mask", "txt": b"a cup"}, {"png": b"photo", "txt": b"a cat"}]
    write_tar(tmp_path / "a.tar", samples)
    with open_records(str(tmp_path / "a.tar")) as records:
        assert [record.image for record in records] == [b"photo", b"photo"]
    options = PairOptions(caption=("txt",))
    source = open_source(str(tmp_path / "a.tar"), options, tmp_path)
    assert [source.read(row) for row in source.rows] == [b"photo", b"photo"]


@pytest.mark.parametrize("cut", [100, 600, 3000])
def test_a_truncated_shard_loses_only_its_end(tmp_path, cut):
    """The shard is cut in the first header, the image or the caption of sample 3."""
    manifest = write_shards(tmp_path, [5, 3])
    path = tmp_path / "00000.tar"
    begin = starts(path)[3]
    path.write_bytes(path.read_bytes()[: begin + cut])
    one = reader(manifest)
    records = list(one.read(0))
    assert [r.problem for r in records] == ["", "", "", TRUNCATED, TRUNCATED, "", "", ""]
    assert [next(one.read(i)).problem for i in (2, 3)] == ["", TRUNCATED], "samples before the cut can be read again"
    assert [r.caption for r in records if not r.problem] == [f"caption {i}".encode() for i in (0, 1, 2, 5, 6, 7)]


def test_a_damaged_header_ends_a_shard_without_an_index(tmp_path):
    manifest = write_shards(tmp_path, [4])
    path = tmp_path / "00000.tar"
    begin = starts(path)[2]
    data = bytearray(path.read_bytes())
    data[begin + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="are not those of its manifest"):
        list(reader(manifest, altered_shards="stop").read(0))
    shutil.rmtree(tmp_path / "index")
    for altered in ("stop", "ignore"):
        records = list(reader(manifest, altered_shards=altered).read(0))
        assert [r.problem for r in records] == ["", "", TRUNCATED, TRUNCATED]


def test_missing_shard_is_retried_and_then_given_up(tmp_path):
    manifest = write_shards(tmp_path, [3, 2])
    (tmp_path / "00001.tar").unlink()
    one = reader(manifest, retries=2)
    records = list(one.read(0))
    assert [r.problem for r in records] == ["", "", ""] + ["shard cannot be read (FileNotFoundError)"] * 2
    assert one.pause.__self__ == pytest.approx([0.1, 0.4])
    assert next(one.read(3)).problem
    assert len(one.pause.__self__) == 2, "a lost shard is not retried again"


def test_a_temporary_failure_loses_nothing(tmp_path):
    manifest = write_shards(tmp_path, [6])
    whole, path = (tmp_path / "00000.tar").read_bytes(), tmp_path / "00000.tar"
    path.write_bytes(whole[: len(whole) // 2])
    one = reader(manifest, retries=1)
    one.pause = lambda _: path.write_bytes(whole) and None
    for position in (0, 4):
        assert [r.caption for r in one.read(position)] == [f"caption {i}".encode() for i in range(position, 6)]


def test_files_that_webdataset_ignores_are_not_samples(tmp_path):
    members = {"README": b"x", "0.jpg": jpeg(0), "._0.jpg": b"mac", "0.txt": b"a", "._0.txt": b"mac"}
    write_members(tmp_path / "a.tar", members.items())
    with open(tmp_path / "a.tar", "rb") as file:
        (record,) = read_records(file)
        assert (record.image, record.caption) == (members["0.jpg"], b"a")
        file.seek(0)
        assert len(list(keys(file))) == 1
    assert [key for key, _ in canonical.samples(tmp_path / "a.tar")] == ["0"]
    assert split_name("a.b/c.d.JPG") == ("a.b/c", "d.jpg")
    (seen,) = webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False)
    assert (seen["jpg"], seen["txt"]) == (record.image, record.caption)


def test_shards_that_differ_from_the_manifest_are_refused(tmp_path):
    manifest = write_shards(tmp_path, [5, 3, 4])
    assert check_shards(manifest, World()) == 3
    assert sum(check_shards(manifest, World(rank=k, size=2)) for k in range(2)) == 3
    (tmp_path / "00000.tar").unlink()
    (tmp_path / "00001.tar").write_bytes(b"short")
    with pytest.raises(UserError, match=r"1 are\s+missing \(00000.tar\) and 1 differ \(00001.tar has 5 bytes, not"):
        check_shards(manifest, World())
    only = make_manifest([("00002.tar", 5, manifest.shards[2].bytes, "")], root=tmp_path)
    with pytest.raises(UserError, match="holds 4 samples, but its manifest lists 5"):
        check_shards(only, World())


def kept_bytes(stream):
    return sum(len(record.image or b"") + len(record.caption or b"") for record in stream._buffer.values())


@pytest.mark.parametrize("turn", [0, 137])
def test_stream_memory_is_bounded_by_its_buffer(tmp_path, turn):
    """This also holds after a resume, when samples that were already emitted are read again."""
    write_shards(tmp_path, [60, 70, 70])
    order = stream_order(seed=0, epoch=0, stream=0, length=200, buffer=20)
    stream = StreamReader(reader(manifest := load_manifest(tmp_path)), order=order, first=0, turn=turn)
    kept = []
    for place, taken in zip(order.places(turn, 200).tolist(), stream.take(turn, 200), strict=True):
        assert taken.id == place
        assert taken.record.caption == f"caption {place}".encode()
        kept.append(kept_bytes(stream))
    sample_bytes = manifest.bytes / 200
    assert max(kept) < 20 * sample_bytes
    assert kept[-1] == 0


def test_peek_rereads_a_sample_that_was_already_taken(tmp_path):
    write_shards(tmp_path, [30])
    order = stream_order(seed=0, epoch=0, stream=0, length=30, buffer=4)
    stream = StreamReader(reader(load_manifest(tmp_path)), order=order, first=0, turn=0)
    (taken,) = stream.take(0, 1)
    assert stream.peek(0) == taken
    ahead = stream.peek(order.places(0, 30).tolist().index(29)).record
    assert ahead.caption == b"caption 29"
    assert kept_bytes(stream) < 10 * len(ahead.image + ahead.caption) + 10_000, (
        "a peek far ahead must not fill the buffer"
    )
    assert [sample.record.caption for sample in stream.take(1, 30)] == [
        f"caption {i}".encode() for i in order.places(1, 30).tolist()
    ]
