"""`neuclip score`: its values equal their definition, parts resume and are never mixed, and nothing is dropped."""

import json
import math
import re
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner

from data_prep.dataset import canonical_tar
from jobs.manifest import command as manifest_command
from jobs.score import command
from jobs.verify import command as verify_command
from pipeline.analysis.pair_scores import part_of, sampled_normalizers, share_of
from pipeline.checkpoint.layout import write_meta
from pipeline.data.shards.manifest_format import load_manifest
from pipeline.errors import UserError
from pipeline.model.evaluation_model import load_for_evaluation
from pipeline.model.starting_weights import FROM_WEIGHTS
from pipeline.model.towers import ModelConfig, build_towers
from pipeline.run_files import finished_checkpoints, model_folder_in, read_meta
from tests.launch import run as launch
from tests.shards import sample, write_shards


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A few steps on 40 pairs."""
    folder = tmp_path_factory.mktemp("score")
    write_shards(folder / "data", [20, 12, 8])
    launch(
        "jobs.train", "--recipe", "jobs/recipes/desk.yaml", "objective.name=openclip", f"output={folder / 'run'}",
        f"data.sources={folder / 'data'}", "samples=64", "batch_size=16", "data.streams=2", "schedule.warmup_steps=0",
    )  # fmt: skip
    return folder


def score(base, output, *options, data="data"):
    arguments = [str(base / "run"), "--data", str(base / data), "--output", str(output), "--workers", "0"]
    return CliRunner().invoke(command, [*arguments, "--device", "cpu", *options])


def table(output):
    return pq.read_table(output / "scores.parquet").to_pydict()


def test_sampled_normalizers_equal_the_definition_and_leave_out_the_own_pair():
    generator = torch.Generator().manual_seed(0)
    image, text = (torch.nn.functional.normalize(torch.randn(9, 4, generator=generator), dim=1) for _ in range(2))
    found = sampled_normalizers((image[:6], text[:6], torch.arange(6)), 0.1, image, text, torch.arange(9))
    for i in range(9):
        others = [j for j in range(6) if j != i]
        expected = [
            math.log(sum(math.exp(float(a[i] @ b[j]) / 0.1) for j in others) / len(others))
            for a, b in ((image, text), (text, image))
        ]
        assert [float(side[i]) for side in found] == pytest.approx(expected, rel=1e-4)


def test_every_pair_has_the_score_of_its_definition(base, tmp_path):
    result = score(base, tmp_path / "out", "--reference", "40", "--batch-size", "7")
    assert result.exit_code == 0, result.output
    assert "40 of 40 pairs have scores" in result.output
    rows = table(tmp_path / "out")
    assert rows["sample_id"] == list(range(40))
    assert rows["row"] == [*range(20), *range(12), *range(8)]
    facts = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert (facts["pairs"], facts["scored"], facts["problems"]) == (40, 40, {})
    model = load_for_evaluation(str(base / "run"))
    assert model.towers.logit is not None
    tau = math.exp(-model.towers.logit[0])
    assert facts["facts"]["tau"] == pytest.approx(tau)
    score_of = [
        c / tau - (a + b) / 2
        for c, a, b in zip(rows["cosine"], rows["log_normalizer_image"], rows["log_normalizer_text"], strict=True)
    ]
    assert rows["score"] == pytest.approx(score_of, abs=1e-4)


def test_a_stopped_job_continues_and_other_settings_are_refused(base, tmp_path):
    output = tmp_path / "out"
    assert score(base, output).exit_code == 0
    before, kept = table(output), part_of(output, 0).stat().st_mtime_ns
    part_of(output, 1).unlink()
    (output / "scores.parquet").unlink()
    assert score(base, output).exit_code == 0
    assert table(output) == before
    assert part_of(output, 0).stat().st_mtime_ns == kept
    refused = score(base, output, "--reference", "40")
    assert "another reference (8192, now 40)" in str(refused.exception)
    part = part_of(output, 0)
    damaged = bytearray(part.read_bytes())
    damaged[pq.ParquetFile(part).metadata.row_group(0).column(0).dictionary_page_offset + 60] ^= 1
    part.write_bytes(damaged)
    (output / "scores.parquet").unlink()
    refused = score(base, output)
    assert isinstance(refused.exception, UserError), refused.exception
    assert f"{part} is damaged" in str(refused.exception), "and its numbers are not taken as they are"
    part.unlink()
    assert score(base, output).exit_code == 0
    assert table(output) == before


def test_unreadable_samples_are_listed_with_their_reason(base, tmp_path):
    folder = shutil.copytree(base / "data", base / "damaged")
    last = folder / load_manifest(folder).shards[2].name
    last.write_bytes(last.read_bytes()[:-20000])
    result = score(base, tmp_path / "out", data="damaged")
    assert result.exit_code == 0, result.output
    rows = table(tmp_path / "out")
    assert rows["sample_id"] == list(range(40))
    bad = [row for row, problem in enumerate(rows["problem"]) if problem]
    assert bad
    assert all(row >= 32 and math.isnan(rows["score"][row] or math.nan) for row in bad)
    assert f"{40 - len(bad)} of 40 pairs have scores" in result.output


def test_mistakes_are_refused_before_anything_is_scored(base, tmp_path):
    for options, message in (
        (("--caption", "json:captoins"), "--caption = 'json:captoins' is in none of the first samples"),
        (("--list-worst", "2", str(tmp_path / "list")), "2.0 is not in the range 0<=x<=1."),
    ):
        result = score(base, tmp_path / "out", *options)
        assert message in f"{result.output} {result.exception}"
        assert not (tmp_path / "out").exists()


def test_the_worst_pairs_are_listed_and_shown(tmp_path, base):
    uids, worst = [f"{index:032x}" for index in range(40)], tmp_path / "worst.txt"
    named = {i: {**sample(i), "json": json.dumps({"key": f"{i:09d}", "uid": uids[i]}).encode()} for i in range(40)}
    write_shards(base / "named", [25, 15], replace=named)
    result = score(base, tmp_path / "out", "--list-worst", "0.25", str(worst), data="named")
    assert result.exit_code == 0, result.output
    rows = table(tmp_path / "out")
    assert rows["uid"] == uids
    order = np.argsort(rows["score"], kind="stable")
    assert worst.read_text().split() == [rows["key"][i] for i in order[:10]]
    page = (tmp_path / "out" / "worst.html").read_text()
    assert page.count("data:image/jpeg;base64,") == page.count("<figure") == 40, "each pair once"
    below, above = page.split("Just above the cut at 25%")
    assert below.count("<figure") == 10, "the worst are all that would be removed"
    assert above.split("The best pairs")[0].count("<figure") == 24
    assert f"caption {order[0]}<br>score {rows['score'][order[0]]:.2f}" in page
    assert f"neuclip verify {base / 'named'} --remove {worst}" in result.output


def test_scored_shards_from_elsewhere_can_be_curated(tmp_path, base):
    """Without JSON, and with the same keys in all shards."""
    folder = tmp_path / "foreign"
    for shard, first in (("a", 0), ("b", 20)):
        members = [(f"{k:03d}.{suffix}", body) for k in range(8) for suffix, body in sorted(sample(first + k).items())]
        (folder / shard).mkdir(parents=True)
        canonical_tar.write(folder / shard / "0.tar", members)
    CliRunner().invoke(manifest_command, [str(folder)], catch_exceptions=False, standalone_mode=False)
    before = load_manifest(folder)
    arguments = [str(base / "run"), "--data", str(folder), "--output", str(tmp_path / "out"), "--device", "cpu"]

    def run(*options):
        return CliRunner().invoke(command, [*arguments, *options])

    assert "its folder does not exist" in str(run("--list-worst", "0.25", str(tmp_path / "no" / "list")).exception)
    assert not (tmp_path / "out").exists(), "refused before the work"
    worst = tmp_path / "worst.txt"
    assert run("--list-worst", "0.25", str(worst)).exit_code == 0
    names = worst.read_text().split()
    assert len(names) == 4
    assert all(re.fullmatch(r"[ab]/0\.tar:00[0-7]", name) for name in names)
    result = CliRunner().invoke(verify_command, [str(folder), "--remove", str(worst)], standalone_mode=False)
    assert "4 of 4 names found, 4 samples removed" in result.output
    after = load_manifest(folder)
    assert (after.n, dict(after.failures)) == (before.n - 4, {"removed": 4})
    left = {f"{s.name}:{key}" for s in after.shards for key, _ in canonical_tar.samples(after.url(s))}
    assert left.isdisjoint(names)
    assert len(left) == 12
    result = CliRunner().invoke(verify_command, [str(folder)], standalone_mode=False)
    assert "12 samples" in result.output
    assert "everything matches" in result.output


def test_a_run_is_its_newest_checkpoint_and_not_a_copy_beside_it(base, tmp_path):
    """Regression test: a backup, another run's checkpoint that was put aside or an unfinished copy was the newest."""
    run = tmp_path / "run"
    shutil.copytree(base / "run", run)
    newest = finished_checkpoints(run)[-1]
    for name in (f"{newest.name}.bak", f"{newest.name}.run-0123456789abcdef", "step-old"):
        shutil.copytree(newest, newest.with_name(name))
    shutil.copytree(newest, newest.with_name("step-99999999"), ignore=shutil.ignore_patterns("checkpoint.json"))
    assert model_folder_in(run) == newest
    assert load_for_evaluation(str(run)).source == str(newest)


@pytest.mark.parametrize("part", ["", "ema"])
def test_damaged_weights_of_a_checkpoint_are_refused_by_name(base, tmp_path, part):
    """Regression test: features, scores and fine-tuning took them without a word."""
    folder = tmp_path / "step-00000004"
    shutil.copytree(finished_checkpoints(base / "run")[-1], folder)
    if part:  # as a run with ema.decay writes it
        (folder / part).mkdir()
        for name in ("open_clip_config.json", "open_clip_model.safetensors"):
            shutil.copy(folder / name, folder / part)
    meta = read_meta(folder)
    weights = folder / part / "open_clip_model.safetensors"
    name = str(weights.relative_to(folder))
    write_meta(folder, {**meta, "files": {**meta["files"], name: meta["files"]["open_clip_model.safetensors"]}})
    assert load_for_evaluation(str(folder / part)).source == str(folder / part)
    body = bytearray(weights.read_bytes())
    body[-1000:-900] = bytes(100)
    weights.write_bytes(body)

    def start_from(spec):
        return build_towers(ModelConfig(arch=FROM_WEIGHTS, pretrained=spec), seed=0)

    for load in (load_for_evaluation, start_from):
        with pytest.raises(UserError, match=r"open_clip_model\.safetensors is damaged: its SHA-256 is not the one in"):
            load(str(folder / part))


def test_a_share_of_pairs_is_exact():
    """Regression test: 0.29 of 100 pairs were 28."""
    assert [share_of(100, share) for share in (0.29, 0.57, 0.58, 1.0, 0.009)] == [29, 57, 58, 100, 0]
    assert share_of(1_400_000, 0.07) == 98_000
