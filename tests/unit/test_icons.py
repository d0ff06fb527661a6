"""`neuclip download --recipe icons`: every icon has an outcome, held-out icons stay out, the suite can be evaluated."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import stat
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from data_prep.dataset import canonical_tar
from data_prep.icons.icon_list import Icon, caption_of, declared_styles, hold_out, svg_of
from data_prep.icons.icon_package import HeldOutConfig, _unpacked
from data_prep.icons.make_icons import render
from jobs.download import command
from pipeline.data.shards.check_shards import check_shards
from pipeline.data.shards.manifest_format import load_manifest
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.evaluation.datasets.suite import open_suite, open_task
from tests.icons_package import SETS, write_archive, write_package
from tests.pair_files import digests

pytest.importorskip("resvg_py", reason="resvg-py is not installed: pip install -e '.[icons]'")
SMALL = (
    "held_out.sets=0.06", "held_out.pairs=20", "held_out.phrases=3", "image.size=32", "fetch.shard_size=100",
    "fetch.processes=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_package(tmp_path_factory.mktemp("npm") / "package")


@pytest.fixture(scope="module")
def made(package: Path) -> Path:
    output = package.parent / "icons"
    assert download(package, output).exit_code == 0
    return output


def download(package: Path | None, output: Path, *settings: str) -> Result:
    given = [f"output={output}", *SMALL, *settings, *([f"source.package={package}"] if package else [])]
    return CliRunner().invoke(command, ["--recipe", "icons", *given])


def samples(folder: Path) -> list[dict[str, Any]]:
    found = []
    for shard in load_manifest(folder).shards:
        for _, parts in canonical_tar.samples(folder / shard.name):
            found.append({**json.loads(parts["json"]), "png": parts["png"], "txt": parts["txt"].decode()})
    return found


def outcomes(folder: Path) -> dict[str, tuple[str, str]]:
    with (folder / "dropped.tsv").open() as file:
        return {row["place"]: (row["reason"], row["detail"]) for row in csv.DictReader(file, delimiter="\t")}


def test_every_icon_is_a_sample_or_has_a_reason(made: Path) -> None:
    manifest, dropped = load_manifest(made), outcomes(made)
    icons = {f"{prefix}:{name}" for prefix, (_, tree) in SETS.items() for name in tree["icons"]}
    used = {sample["source"] for sample in samples(made)}
    assert used | dropped.keys() == icons
    assert not used & dropped.keys()
    assert manifest.n == len(used)
    assert manifest.attempted == len(icons)
    reasons = {place: reason for place, (reason, _) in dropped.items() if reason != "held out"}
    assert reasons == {
        "odd:withdrawn": "hidden", "odd:cut-off": "not rendered", "odd:white": "blank image", "odd:123": "no caption",
        "odd:empty": "no drawing", "odd:nothing": "no drawing", "copy:dash": "duplicate drawing",
        "mine:cog": "licence", "shop:bag": "licence", "shop:till": "licence", "marks:acme": "brand logos",
        "fa-brands:acme": "brand logos",
    }  # fmt: skip
    assert dropped["mine:cog"] == ("licence", "GPL-3.0")
    assert dropped["odd:cut-off"][1], "the renderer's message"


def test_samples_have_caption_author_and_licence(made: Path) -> None:
    by_place = {sample["source"]: sample for sample in samples(made)}
    home = by_place["odd:home-16"]
    assert (home["txt"], home["captions"]) == ("home", ["home"])
    plain = next(sample for place, sample in by_place.items() if place.startswith("plain:"))
    assert {key: plain[key] for key in ("set", "author", "author_url", "licence", "licence_url")} == {
        "set": "Plain", "author": "Ada", "author_url": "https://example.org/ada", "licence": "MIT",
        "licence_url": "https://example.org/mit",
    }  # fmt: skip
    with Image.open(io.BytesIO(plain["png"])) as image:
        assert (image.size, image.mode) == ((32, 32), "RGB")
    sheet = (made / "datasheet.md").read_text()
    assert "| Plain (`plain`) | " in sheet
    assert "[Ada](https://example.org/ada)" in sheet
    assert "| Thin" not in sheet, "a set without samples has no line"
    texts = Counter(sample["txt"] for sample in samples(made))
    assert f"{len(texts) + 2} distinct ones" in sheet, "with those of the two icons that could not be rendered"
    assert "3.0 words on average" in sheet


def test_held_out_icons_are_not_trained_on(made: Path) -> None:
    used, dropped = samples(made), outcomes(made)
    author = {prefix: facts["author"]["name"] for prefix, (facts, _) in SETS.items()}
    tasks: dict[str, set[str]] = {}
    for place, (reason, task) in dropped.items():
        if reason == "held out":
            tasks.setdefault(task, set()).add(place)
    assert {place.partition(":")[0] for place in tasks["unseen-sets-retrieval"]} == {"thin"}
    assert not any(sample["source"].startswith("thin:") for sample in used)
    classes = (made.with_name("icons-suite") / "wds_icons-rare-phrases_test" / "classnames.txt").read_text().split("\n")
    assert len(tasks["rare-phrases"]) == 4 * 3
    assert not {sample["txt"] for sample in used} & set(classes) - {""}
    held = {(author[place.partition(":")[0]], place.partition(":")[2].removesuffix("-outline").replace("-", " "))
            for place in tasks["retrieval"]}  # fmt: skip
    assert len(held) == 20
    assert not {(sample["author"], sample["txt"]) for sample in used} & held


def test_the_evaluator_reads_the_suite(made: Path) -> None:
    suite = open_suite(made.with_name("icons-suite"))
    found = {entry.task.key: open_task(entry) for entry in suite.entries}
    counts = {key: data.counts["samples"] for key, data in found.items()}
    assert counts == {"icons/rare-phrases": 12, "icons/retrieval": 20, "icons/unseen-sets-retrieval": 12}
    for key in ("retrieval", "unseen-sets-retrieval"):
        with tarfile.open(made.with_name("icons-suite") / f"wds_icons-{key}_test" / "test" / "0.tar") as tar:
            texts = [tar.extractfile(m).read() for m in tar if m.name.endswith(".txt")]  # type: ignore[union-attr]
        assert len(set(texts)) == len(texts), "captions of a retrieval task are distinct"
        validation = load_manifest(made.with_name("icons-suite") / f"wds_icons-{key}_test")
        assert validation.n == counts[f"icons/{key}"]
        check_shards(validation, World())


def test_archive_processes_and_interruptions_do_not_change_the_bytes(
    package: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from data_prep.pairs import make_shards

    archive = write_archive(tmp_path / "a.tgz", package)
    assert download(archive, tmp_path / "two", "fetch.processes=2").exit_code == 0
    assert digests(tmp_path / "two") == digests(made)
    assert not list((tmp_path / "two" / "plan").glob("icons-*")), "the unpacked package is deleted"
    real = make_shards.write_shard

    def stop(job: Any, shard: int) -> int:
        if shard == 2:
            raise KeyboardInterrupt
        return real(job, shard)

    with monkeypatch.context() as patch:
        patch.setattr(make_shards, "write_shard", stop)
        download(archive, tmp_path / "cut")
    assert not (tmp_path / "cut" / "manifest.json").exists()
    archive.unlink()  # the list has all drawings: the package is not needed again
    assert download(archive, tmp_path / "cut").exit_code == 0
    assert digests(tmp_path / "cut") == digests(made)
    refused = download(package, tmp_path / "cut", "image.size=64")
    assert isinstance(refused.exception, UserError)
    assert "icon_size was '32'" in str(refused.exception)


def test_a_fraction_keeps_the_held_out_tasks(package: Path, made: Path, tmp_path: Path) -> None:
    assert download(package, tmp_path / "half", "source.fraction=0.5").exit_code == 0
    some, every = load_manifest(tmp_path / "half").n, load_manifest(made).n
    assert 0.4 * every < some < 0.6 * every
    tasks = [
        json.loads((f / "suite.json").read_text())["tasks"] for f in (tmp_path / "half-suite", Path(f"{made}-suite"))
    ]
    assert tasks[0] == tasks[1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "package.json").write_text('{"name": "@iconify/json", "version": "2.0.0"}'), "version 2.0.0"),
        (lambda p: (p / "package.json").write_text('{"name": "left-pad"}'), "not the package @iconify/json"),
        (lambda p: (p / "json" / "wide.json").write_text('{"icons": {'), "wide.json is damaged"),
        (lambda p: (p / "json" / "wide.json").unlink(), "wide.json cannot be read"),
        (lambda p: (p / "collections.json").write_text('{"plain": {"name": "Plain"}}'), "does not have the format"),
        (lambda p: shutil.rmtree(p), "does not exist: give the folder or the .tgz"),
    ],
)  # fmt: skip
def test_a_package_that_cannot_be_used_is_refused(package: Path, tmp_path: Path, damage: Any, message: str) -> None:
    copy = Path(shutil.copytree(package, tmp_path / "package"))
    damage(copy)
    done = download(copy, tmp_path / "out")
    with pytest.raises(UserError, match=message):
        raise done.exception or AssertionError(done.output)


def test_a_damaged_archive_is_refused(package: Path, tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "a.tgz", package)
    archive.write_bytes(archive.read_bytes()[:-3000])
    done = download(archive, tmp_path / "out")
    assert "is not a complete npm archive" in str(done.exception)


def test_an_archive_writes_nothing_outside_of_its_folder(package: Path, tmp_path: Path) -> None:
    """Python 3.11 has filters of its own for this from 3.11.4 on only."""
    inner = package / "package.json"
    for number, names in enumerate((["../evil.json"], ["/evil.json"], ["a.json", "a.json/b.json"])):
        archive, scratch = tmp_path / f"{number}.tgz", tmp_path / f"scratch{number}" / "below"
        scratch.mkdir(parents=True)
        with tarfile.open(archive, "w:gz") as tar:
            for name in names:
                member = tar.gettarinfo(inner)
                member.name = name
                tar.addfile(member, io.BytesIO(inner.read_bytes()))
        with pytest.raises(UserError, match=r"is named '\.\.'|is named ''|is not a complete npm archive"):
            _unpacked(archive, scratch, "2.2.535")
        assert not list(scratch.parent.glob("*.json"))
    assert not Path("/evil.json").exists()


def test_a_link_in_an_archive_is_left_out(package: Path, tmp_path: Path) -> None:
    (package / "json" / "link.json").symlink_to("/etc/passwd")
    archive = write_archive(tmp_path / "a.tgz", package)
    (package / "json" / "link.json").unlink()
    found = _unpacked(archive, tmp_path / "scratch", "2.2.535")
    assert (found / "package.json").is_file()
    assert not (found / "json" / "link.json").exists()


def test_the_npm_client_fetches_the_package(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that behaves like npm's: it writes the archive to the destination, or fails with its own messages."""
    archive = write_archive(tmp_path / "a.tgz", package)
    client = tmp_path / "bin" / "npm"
    client.parent.mkdir()
    monkeypatch.setenv("PATH", str(client.parent))
    done = download(None, tmp_path / "none")
    assert "needs the npm client" in str(done.exception)
    assert "source.package=FILE" in str(done.exception)
    monkeypatch.setenv("PATH", f"{client.parent}:{os.defpath}")
    client.write_text(f'#!/bin/sh\ntest "$1 $2" = "pack @iconify/json@2.2.535" && cp {archive} "$4"/iconify.tgz\n')
    client.chmod(client.stat().st_mode | stat.S_IXUSR)
    assert download(None, tmp_path / "fetched").exit_code == 0
    client.write_text("#!/bin/sh\necho 'npm error code ENOTFOUND' >&2; exit 1\n")
    done = download(None, tmp_path / "failed")
    assert "npm could not fetch @iconify/json@2.2.535 (code ENOTFOUND)" in str(done.exception)


def test_settings_of_url_tables_are_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["--recipe", "icons", f"output={tmp_path}", "guard.contact=me"])
    assert "guard" in str(done.exception)
    done = CliRunner().invoke(command, ["--recipe", "icons", f"output={tmp_path}", "--retry-failed"])
    assert done.exit_code == 2
    assert "icons have none" in done.output


@pytest.mark.parametrize(
    ("name", "caption"),
    [
        ("home-outline-rounded", "home"),  # declared
        ("sharp-home", "home"),  # a declared prefix
        ("heart-fill", "heart"),  # "heart" is in the set
        ("heart-fill-light", "heart"),
        ("traffic-light", "traffic light"),  # "traffic" is not
        ("outline", "outline"),
        ("arrow-up-2", "arrow up 2"),
        ("360", ""),
    ],
)
def test_captions(name: str, caption: str) -> None:
    names = {"heart", "heart-fill", "heart-fill-light", "traffic-light", "arrow-up-2", "360"}
    tree = {"suffixes": {"": "Fill", "outline": "x", "outline-rounded": "x"}, "prefixes": {"sharp": "x"}}
    prefixes, suffixes = declared_styles(tree)
    assert caption_of(name, prefixes=prefixes, suffixes=suffixes, siblings=names) == caption


def test_icons_are_centred_on_white_with_the_sides_of_their_set() -> None:
    body = {"body": '<path fill="currentColor" d="M0 0h4v2H0z"/>'}
    pixels = np.asarray(Image.open(io.BytesIO(render(svg_of(body, {"width": 4, "height": 2}), 32) or b"")))
    assert pixels.shape == (32, 32, 3)
    assert (pixels[8:24] == 0).all()
    assert (pixels[:8] == 255).all()
    assert (pixels[24:] == 255).all()
    shifted = svg_of({**body, "left": -4, "width": 8}, {"width": 4, "height": 8})
    pixels = np.asarray(Image.open(io.BytesIO(render(shifted, 32) or b"")))
    assert (pixels[:8, 16:] == 0).all()
    assert (pixels[:, :16] == 255).all()
    assert render(svg_of({"body": "<g/>"}, {}), 32) is None


def test_too_few_icons_for_what_is_held_out_is_an_error() -> None:
    icons = [Icon(f"a:{k}", "Ada", f"icon {k}") for k in range(20)]
    with pytest.raises(UserError, match=r"held_out.pairs = 11, but there are only 20 distinct captions"):
        hold_out(icons, HeldOutConfig(pairs=11, phrases=0))
    with pytest.raises(UserError, match=r"held_out.phrases = 1, but only 0 captions qualify"):
        hold_out(icons, HeldOutConfig(pairs=5, phrases=1))
    held = hold_out(icons, HeldOutConfig(pairs=5, phrases=0))
    assert Counter(held.values()) == {"retrieval": 5}
    assert hold_out(icons[::-1], HeldOutConfig(pairs=5, phrases=0)) == held
