"""Damaged tars: every reader raises only the documented errors, in bounded time."""

import contextlib
import io
import random
import subprocess
import tarfile
import time

import pytest

from data_prep.dataset import canonical_tar
from data_prep.pairs.members import open_tars
from data_prep.pairs.pair import PairOptions
from pipeline.data.shards.storage import StreamHash, open_records, scan_members
from pipeline.data.shards.tar_reader import DamagedTar, keys, members, read_records
from pipeline.errors import UserError
from pipeline.evaluation.datasets.task_data import TaskError
from pipeline.evaluation.datasets.webdataset import read_members
from pipeline.tars import SPARSE, headers, refuse_unended, skip_payload
from tests.shards import sample, write_tar

MUTATIONS, SECONDS = 2000, 1.0
HEADER_FIELDS = ((124, 136), (148, 156), (156, 157), (257, 265), (345, 500), (0, 100))
"""Size, checksum, type, magic, prefix, name."""


def valid_tars(folder):
    """Return a USTAR, a GNU and a PAX tar, the latter two with long names."""
    tars = []
    for number, form in enumerate((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        path = folder / f"{number}.tar"
        write_tar(path, [sample(i) for i in range(3)], format=form)
        if form != tarfile.USTAR_FORMAT:
            with tarfile.open(path, "a", format=form) as tar:
                info = tarfile.TarInfo("n" * 180 + ".jpg")
                info.size = 5
                tar.addfile(info, io.BytesIO(b"12345"))
        tars.append(path.read_bytes())
    return tars


def with_checksum(header):
    """Return the header with a corrected checksum, so that readers accept the rest."""
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return header


def mutate(data, rng):
    """Damage one to four places: bits, fields of headers (with their checksum corrected), cuts, repeated parts."""
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        kind = rng.random()
        if kind < 0.6 and len(damaged) >= 512:
            start = 512 * rng.randrange(len(damaged) // 512)
            header = bytearray(damaged[start : start + 512])
            low, high = rng.choice(HEADER_FIELDS)
            large = b"\x80" + (1 << rng.randrange(24, 60)).to_bytes(11, "big")  # a size that some file could have
            values = (
                rng.randbytes(high - low),
                b"7" * (high - low),
                b"\xff" * (high - low),
                b"\x80" + b"\xff" * 40,
                large,
            )
            header[low:high] = rng.choice(values)[: high - low].ljust(high - low, b"\0")
            damaged[start : start + 512] = with_checksum(header) if rng.random() < 0.8 else header
        elif kind < 0.8 and damaged:
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        elif kind < 0.9:
            del damaged[rng.randrange(len(damaged) + 1) :]
        elif len(damaged) > 1024:
            start = rng.randrange(len(damaged) - 512)
            damaged[start:start] = damaged[start : start + 512]
    return bytes(damaged)


def ours(data, path):
    path.write_bytes(data)
    for read in (
        lambda file: list(read_records(file)),
        lambda file: list(keys(file)),
        lambda file: list(members(file, wanted=lambda suffix: suffix == "txt")),
    ):
        with contextlib.suppress(DamagedTar), path.open("rb") as file:
            read(file)
    with contextlib.suppress(DamagedTar):
        index = scan_members(path)
        for stream_hash in (StreamHash(), None):
            with open_records(str(path), index=index, stream_hash=stream_hash) as indexed, path.open("rb") as file:
                assert [(r.image, r.caption) for r in indexed] == [(r.image, r.caption) for r in read_records(file)]


def its_callers(data, path):
    path.write_bytes(data)
    with contextlib.suppress(DamagedTar):
        list(canonical_tar.samples(path))
    with contextlib.suppress(UserError):
        list(open_tars(path.parent, [path], PairOptions(), path.parent / "cache").rows)
    with contextlib.suppress(TaskError):
        list(read_members(path))


@pytest.mark.parametrize("reader", [ours, its_callers])
def test_damage_raises_only_documented_errors_in_bounded_time(reader, tmp_path):
    tars, rng, slowest = valid_tars(tmp_path), random.Random(20261122), 0.0
    for number in range(MUTATIONS):
        data = mutate(rng.choice(tars), rng)
        start = time.process_time()
        try:
            reader(data, tmp_path / "damaged.tar")
        except Exception as error:
            raise AssertionError(f"mutation {number}: {type(error).__name__}: {error}") from error
        slowest = max(slowest, time.process_time() - start)
    assert slowest < SECONDS


def header(name, size, kind):
    block = bytearray(512)
    block[: len(name)], block[124 : 124 + len(size)], block[156:157], block[257:263] = name, size, kind, b"ustar\0"
    return bytes(with_checksum(block))


def test_invalid_sizes_are_reported_as_damage():
    pax = header(b"x", b"%011o\0" % 20, b"x") + b"20 size=-1234567890\n".ljust(512, b"\0")
    for what, data in {
        "a size that no file has": header(b"0.jpg", b"\x80" + b"\xff" * 11, b"0"),
        "a negative size": header(b"0.jpg", b"-0000000001\0", b"0"),
        "a negative size in a PAX header": pax + header(b"0.jpg", b"%011o\0" % 5, b"0"),
        "a PAX length of 9,000 digits": header(b"x", b"%011o\0" % 9000, b"x") + b"9" * 9216,
        "a PAX header of 2 MiB": header(b"x", b"%011o\0" % (1 << 21), b"x") + b"4 a\n" * (1 << 19),
    }.items():
        with pytest.raises(DamagedTar):
            pytest.fail(f"{what}: {list(read_records(io.BytesIO(data)))}")


class Pipe(io.BytesIO):
    def seekable(self):
        return False


@pytest.mark.parametrize("stream", [io.BytesIO, Pipe])
def test_every_cut_is_noticed(stream, tmp_path):
    """Regression test: half of a tar that was cut inside a file was in no count where it can be sought."""
    for data in valid_tars(tmp_path):
        end = len(data.rstrip(b"\0")) + -len(data.rstrip(b"\0")) % 512
        for cut in range(1, end, 7):
            told: list[int] = []
            with contextlib.suppress(DamagedTar):
                list(read_records(stream(data[:cut]), on_unended=lambda told=told: told.append(1)))
                assert told, cut


@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_sparse_files_are_refused_before_they_are_read_and_what_follows_is_found(form, tmp_path):
    with (tmp_path / "0.jpg").open("wb") as file:
        for piece in range(9):
            file.seek(piece << 20)
            file.write(b"x" * 4096)
    (tmp_path / "1.jpg").write_bytes(b"whole")
    command = ["tar", f"--format={form}", "--sparse", "-cf", "a.tar", "0.jpg", "1.jpg"]
    subprocess.run(command, cwd=tmp_path, check=True)
    names = []
    with (tmp_path / "a.tar").open("rb") as file:
        for name, size, _, kind in headers(file, strict=True, on_unended=refuse_unended):
            skip_payload(file, size)
            names.append((name, kind))
        for read in (read_records, keys, members):
            file.seek(0)
            with pytest.raises(DamagedTar, match="as a sparse file: write the shard again without tar's --sparse"):
                list(read(file))
    assert names == [("0.jpg", SPARSE), ("1.jpg", "")]
