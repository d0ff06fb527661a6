"""Invalid ingestion settings are refused with clear messages before anything is fetched."""

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from huggingface_hub import HfApi, constants

from data_prep import ingest
from data_prep.dataset.manifest_writer import rules_of
from data_prep.download_config import DownloadConfig, SourceConfig
from data_prep.sources.metadata_tables import pin
from pipeline.config import dump, merge, parse, parse_overrides, to_tree
from pipeline.errors import UserError
from tests.downloads import download_config


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"guard": {"allow_addresses": ["localhost"]}}, "neither an IP address nor a network"),
        ({"guard": {"allow_addresses": "localhost"}}, "names such as localhost are not allowed here"),
        ({"guard": {"opt_outs": "noia"}}, "noai"),
        ({"fetch": {"worker": 2, "workers": 2}}, "worker = 2 must be below workers = 2"),
        ({"guard": {"max_pixels": 400_000_000}}, "178956970"),
        ({"fetch": {"master": "yarn"}}, "is for the distributors pyspark and ray"),
        ({"fetch": {"distributor": "dask"}}, "multiprocessing"),
        ({"image": {"encode_format": "png", "encode_quality": 95}}, "from 0 to 9"),
        ({"source": {"url": "u", "caption": "u"}}, "named for two purposes"),
        ({"source": {"keep": ["md5", "NSFW"]}}, "every sample has its own md5"),
        ({"source": {"hash": "h", "keep": ["sha256"]}}, "every sample has its own sha256"),
        ({"fetch": {"proceses": 2}}, "nearest valid key is fetch.processes"),
        ({"source": {"name": ["cc3m"]}}, "source.name"),
        ({"source": {"name": "cc12"}}, "The nearest is cc12m"),
        ({"guard": {"contact": "a)\r\nX: y"}}, "guard.contact"),
        ({"image": {"encode_format": "ppm"}}, "was removed. Images are stored encoded: jpg, png or webp"),
        ({"image": {"resize_mode": "border"}}, "was removed. Images keep their shape: `keep_ratio_largest`"),
        ({"monitor": {"probe": 64}}, "(given 64) was removed. A column of other hashes"),
        (
            {"source": {"name": "datacomp-small", "table": "x"}, "image": {"skip_reencode": True}},
            "skip_reencode = true with source.blur = 'face_bboxes'",
        ),
    ],
)
def test_invalid_settings_are_refused(tree, words):
    with pytest.raises(UserError, match="configuration is not valid") as caught:
        parse(DownloadConfig, {"output": "x", **tree})
    assert words in str(caught.value)


def test_values_of_the_command_line_are_read_as_meant():
    words = ["output=x", "guard.allow_addresses=127.0.0.1", "guard.opt_outs=noai", "source.keep=NSFW"]
    config = parse(DownloadConfig, parse_overrides([*words, "image.resize_mode=no"]))
    assert config.guard.allow_addresses == ("127.0.0.1",)
    assert config.guard.opt_outs == ("noai",)
    assert config.source.keep == ("NSFW",)
    assert config.image.resize_mode == "no", "which YAML takes for false"
    assert parse(DownloadConfig, yaml.safe_load(dump(config))) == config
    found = SourceConfig(name="cc3m", table="x.tsv", caption="text", header=("text", "url"))
    assert (found.caption, found.url, found.format, found.rows) == ("text", "url", "tsv", 3_318_333)


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("source.hash=null", "hash", None),
        ("source.hash=", "hash", None),
        ("source.blur=null", "blur", None),
        ("source.caption=caption", "caption", "caption"),
        ("source.files=null", "files", None),
        ("source.format=auto", "format", "auto"),
    ],
)
def test_a_setting_that_equals_the_default_wins_over_the_named_source(word, name, value):
    below = {"output": "x", "source": {"name": "datacomp-small"}}
    named = parse(DownloadConfig, below).source
    assert (named.caption, named.hash, named.blur, named.files) == ("text", "sha256", "face_bboxes", "small/*.parquet")
    config = parse(DownloadConfig, merge(below, parse_overrides([word])))
    assert getattr(config.source, name) == value
    assert getattr(parse(DownloadConfig, to_tree(config)).source, name) == value, "the value must survive a round trip"


def test_wrong_tables_are_refused_with_the_remedy(tmp_path):
    columns = {"url": [f"https://example.org/{k}.jpg" for k in range(20)], "caption": [f"{k} cats" for k in range(20)]}
    pq.write_table(pa.table(columns), tmp_path / "urls.parquet")

    for source, words in (
        ({"url": "link"}, "has no column 'link'. Its columns are 'url', 'caption'"),
        ({"url": "caption", "caption": "url"}, "Column 'url' does: set source.url=url"),
        ({"rows": 21}, "The table has 20 rows, but table is published with 21"),
        ({"sha256": {"urls.parquet": "0" * 64}}, "it is damaged or another version"),
        ({"sha256": {"other.parquet": "0" * 64}}, "other.parquet is not among urls.parquet"),
    ):
        with pytest.raises(UserError) as caught:
            ingest.prepare(download_config(tmp_path / "out", tmp_path / "urls.parquet", source=source))
        assert words in str(caught.value)
        assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"needs source\.table"):
        ingest.prepare(parse(DownloadConfig, {"output": str(tmp_path / "out"), "source": {"name": "cc3m"}}))
    notes = []
    config = download_config(tmp_path / "out", tmp_path / "urls.parquet", source={"rows": 20})
    assert (ingest.prepare(config, on_note=notes.append)[1].rows, notes) == (20, [])


def test_a_refused_start_leaves_what_somebody_has_put_into_its_new_folder(tmp_path, monkeypatch):
    def check(*_, **__):
        (tmp_path / "out/mine").write_text("x")
        raise UserError("refused")

    monkeypatch.setattr(ingest, "check_source", check)
    with pytest.raises(UserError, match="refused"):
        ingest.prepare(download_config(tmp_path / "out", tmp_path / "urls.parquet"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_unavailable_distributor_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ingest.importlib.util, "find_spec", lambda name: None)
    for name in ("pyspark", "ray"):
        with pytest.raises(UserError, match=r"not installed here.*\.\[scale\]"):
            ingest.download(download_config(tmp_path / "out", tmp_path / "none", fetch={"distributor": name}))


@pytest.mark.parametrize("error", [httpx.ConnectError("no route\nto host"), httpx.ReadTimeout(""), RuntimeError()])
def test_unreachable_hub_is_reported(monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "dataset_info", fail)
    with pytest.raises(UserError, match=r"cannot be read \((no route|ReadTimeout|RuntimeError)\)"):
        pin(SourceConfig(name="datacomp-small"))


def test_downloads_of_earlier_versions_can_be_continued():
    """Their plans and records have these rules, or a digest of them."""
    config = parse(DownloadConfig, {"output": "x", "image": {"background": "green"}})
    image = {"size": 256, "resize_mode": "keep_ratio", "skip_reencode": False, "encode_format": "jpg",
             "encode_quality": 95, "min_size": 0, "max_aspect_ratio": 1e6, "resize_only_if_bigger": True}  # fmt: skip
    guard = {"allow_addresses": [], "trust_proxy": False, "max_bytes": 20_000_000, "max_pixels": 89_478_485,
             "opt_outs": ["noai", "noimageai", "noindex", "noimageindex"], "user_agent": "neuclip",
             "schemes": ["http", "https"], "max_redirects": 5}  # fmt: skip
    assert rules_of(parse(DownloadConfig, {"output": "x"})) == {"image": image, "guard": guard}
    assert rules_of(config) == {"image": {**image, "background": "green"}, "guard": guard}
