"""The page of a data set: what it shows of each origin, and in a browser, accessible and as narrow as a phone."""

# ruff: noqa: F811 (imported fixtures are requested by name)
import io
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from PIL import Image

from data_prep.dataset import canonical_tar
from data_prep.dataset.ingest_report import _reasons, write_report
from data_prep.dataset.removal import remove
from data_prep.dataset.verification import verify
from jobs.download import summary
from jobs.report import command
from pipeline.data.shards.make_manifest import index_shards
from pipeline.errors import UserError
from tests.browser import browser, opened, problems_everywhere
from tests.images import encoded
from tests.ingested import ROWS, copied, fetch_here, made, own_opener, prepared, site  # noqa: F401
from tests.pair_files import make, write_csv, write_images
from tests.web import jpeg


def page_of(folder, *options):
    result = CliRunner().invoke(command, [str(folder), *options], catch_exceptions=False, standalone_mode=False)
    return Path(result.output.strip()).read_text()


def test_converted_pairs_have_a_page(tmp_path):
    names = write_images(tmp_path / "photos", 10)
    shutil.copy(tmp_path / "photos" / names[1], tmp_path / "photos" / names[7])
    (tmp_path / "photos" / names[4]).write_bytes(b"no picture")
    rows = [("image", "caption"), *((name, f"picture {name}") for name in names)]
    make(write_csv(tmp_path / "photos" / "list.csv", rows), tmp_path / "data")
    page = page_of(tmp_path / "data")
    assert "of 10 rows" in page
    assert "<td>not an image</td>" in page
    assert "All samples were compared: 1 looks like an earlier one." in page
    assert page.count('alt="picture 007.jpg"') == 1


def test_transparent_images_and_lists_of_captions_of_a_download(site, tmp_path):
    clear = Image.new("RGBA", (20, 20), (255, 0, 0, 0))
    bodies = [jpeg(), encoded(clear, "PNG"), encoded(clear.convert("RGB").convert("RGBA"), "PNG"), jpeg(30)]
    lists = [["a cat", "", "a tabby"], ["a red square"], [" ", "another"], []]
    urls = [site.image(f"/list/{k}", body) for k, body in enumerate(bodies)]
    config, plan = prepared(tmp_path, {"url": urls, "captions": lists}, caption="captions")
    manifest = fetch_here(config, plan, [0])
    assert manifest.failures == {"no caption": 1}
    assert "Images with transparent pixels, put on a background: 1." in summary(manifest, tmp_path)
    page = write_report(config.output).read_text()
    assert re.search(r">Images with transparency</\w+>\s*<[^>]+>1<", page)
    ((_, cat), (_, square), (_, other)) = canonical_tar.samples(tmp_path / "data/shards/00000.tar")
    assert (cat["txt"], json.loads(cat["json"])["captions"]) == (b"a cat", ["a cat", "a tabby"])
    assert (other["txt"], json.loads(other["json"])["captions"]) == (b"another", ["another"])
    assert min(Image.open(io.BytesIO(square["jpg"])).getextrema()) >= (250, 255)
    assert verify(config.output) == []
    remove(config.output, {"0000000001"})
    write_report(config.output)
    assert verify(config.output) == []


def test_the_page_is_accessible_and_fits_a_phone_screen(tmp_path):
    """Regression test: the meanings of reasons were cut off at the edge, one word a line."""
    names = write_images(tmp_path / "photos", 4)
    (tmp_path / "photos" / names[0]).write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    (tmp_path / "photos" / names[1]).write_bytes(b"no picture")
    rows = [("image", "caption"), *((name, f"picture {name}") for name in names)]
    folder = tmp_path / "a-data-set-with-rather-a-long-name-and-no-blank-in-it"
    make(write_csv(tmp_path / "photos" / "list.csv", rows), folder)
    assert 'alt=""' not in page_of(folder)
    with browser() as started:
        assert problems_everywhere(started, folder / "report.html") == []
        with opened(started, folder / "report.html", width=390) as tab:
            assert "unsupported format" in tab.inner_text(".scroll")
            assert tab.evaluate("(e => e.scrollWidth - e.clientWidth)(document.querySelector('.scroll'))") <= 0


def test_shards_from_elsewhere_have_a_page_in_another_folder(copied, tmp_path):
    members = [("1.jpg", (copied / "shards/00000.tar").read_bytes()[:2_000]), ("1.json", b'{"text": "a"}')]
    shutil.copytree(copied / "shards", tmp_path / "theirs")
    canonical_tar.write(tmp_path / "theirs" / "odd.tar", members)
    index_shards(tmp_path / "theirs")
    before = sorted(tmp_path.glob("theirs/**/*"))
    page = page_of(tmp_path / "theirs", "--output", str(tmp_path / "pages"))
    assert sorted(tmp_path.glob("theirs/**/*")) == before
    assert f'Image-text pairs</div><div class="value">{ROWS + 1}</div>' in page
    assert "image cannot be decoded" in page
    assert f'alt="picture {ROWS - 1}"' in page
    assert "a sample</td>" not in page_of(tmp_path / "theirs", "--caption", "json:caption")


def test_a_page_elsewhere_changes_nothing_in_a_download(copied, tmp_path):
    """Regression test: a lock was taken in the data set, which may be read-only."""
    shutil.rmtree(copied / "staging")
    before = sorted(copied.rglob("*"))
    assert "picture 1" in page_of(copied, "--output", str(tmp_path / "pages"))
    assert sorted(copied.rglob("*")) == before


def test_pages_of_data_sets_are_written_one_by_one(copied, tmp_path):
    with pytest.raises(UserError, match="is a data set, not a run: report on data sets one by one"):
        page_of(copied, str(tmp_path))
    with pytest.raises(UserError, match=r"Nor is it a data set with a manifest\.json; `neuclip manifest"):
        page_of(tmp_path)
    with pytest.raises(UserError, match=r"--caption = 'json:captoin' is in none of the .* nearest is json:caption"):
        page_of(copied, "--output", str(tmp_path / "pages"), "--caption", "json:captoin")
    assert not (tmp_path / "pages").exists()


def test_many_reasons_are_counted_and_not_all_listed():
    manifest = SimpleNamespace(failures={f"reason {k}": 1 + (k < 3) for k in range(300_000)}, attempted=300_003)
    rows = _reasons(manifest, is_download=True)
    assert [row["name"] for row in rows[:4]] == ["reason 0", "reason 1", "reason 2", "reason 10"]
    assert (len(rows), rows[-1]["name"]) == (41, "299,960 other reasons")
    assert sum(row["count"] for row in rows) == 300_003
