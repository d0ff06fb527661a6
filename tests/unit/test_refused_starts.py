"""Starting a run: advice that works, suggested names, output folders, refusals, and forks of another run."""

import json
import re
import shutil
import socket
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from jobs.cli import cli
from jobs.cli import run as run_command
from pipeline.config import parse
from pipeline.distributed import start as start_module
from pipeline.distributed.heartbeat import Heartbeat
from pipeline.distributed.start import start_world
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.files import sha256_of
from pipeline.training.recipe import RunConfig, check_run, load_recipe
from pipeline.training.run_folder import LOCK_NAME, STARTING, folder_of_a_start, hold_folder
from tests.metrics import metrics
from tests.shards import jpeg, write_shards
from tests.training import prepare, settings_in, train_here
from tests.unit.test_checkpoint_validity import change_meta

COMMON = ["samples=100000", "data.sources=data/x"]


def test_the_advice_for_a_number_of_ranks_is_accepted():
    for ranks, more in ((3, []), (7, []), (6, ["engine.micro_batch=8"])):
        given = ["output=x", "batch_size=1024", "schedule.warmup_steps=1", *COMMON, *more]
        with pytest.raises(UserError, match=f"do not fit {ranks} ranks") as caught:
            check_run(load_recipe(None, [*given, "data.streams=64"]), world_size=ranks)
        advice = re.findall(r"(?:batch_size|data\.streams)=\d+", str(caught.value))
        check_run(load_recipe(None, [*given, *advice]), world_size=ranks)


MEANT = {"learning_rate": "optimizer.lr", "weight_decay": "optimizer.weight_decay", "num_workers": "data.workers",
         "modle": "model", "architecture": "model.arch"}  # fmt: skip


def test_the_suggested_setting_is_the_intended_one():
    for key, meant in MEANT.items():
        with pytest.raises(UserError, match=rf"Unknown key {key} .* The nearest valid key is {re.escape(meant)}\."):
            parse(RunConfig, {key: 1})


@pytest.mark.parametrize(
    "arguments", [["train"], ["train", "--dry-run"], ["plan"], ["train", "validation"], ["train", "epochs=1"]]
)
def test_a_mistyped_caption_field_is_refused_with_the_fields_of_the_samples(arguments, tmp_path, capsys):
    members = {"jpg": jpeg(1), "json": b'{"captions": ["a", "b"], "width": 3}', "txt": b"a"}
    write_shards(tmp_path / "own", [4], replace=dict.fromkeys(range(4), members))
    write_shards(tmp_path / "other", [4])
    command, *more = arguments
    settings = [f"data.sources={tmp_path}/own", f"output={tmp_path}/run", "data.caption=json:captoins"]
    settings += ["data.streams=1", "samples=4", "batch_size=4", "schedule.warmup_steps=1"]
    if more == ["epochs=1"]:  # of fewer samples than a batch has, which is said once the caption is right
        settings = [text for text in settings if not text.startswith(("samples", "batch_size"))] + ["batch_size=8"]
    if more == ["validation"]:
        more = ["data.caption=json:captions", f"validation.sources={tmp_path}/other"]
    with pytest.raises(SystemExit) as ended:
        run_command(cli, [command, *settings, *more], prog_name="neuclip")
    assert ended.value.code == 2
    message = " ".join(capsys.readouterr().err.split())
    expected = [
        "data.caption = 'json:captoins' is in none of the first samples",
        "The nearest is json:captions. Allowed: json, json:captions, json:width, txt.",
    ]
    if more and "other" in more[-1]:
        expected = ["'json:captions' is in none of the first samples", "Allowed: json, json:url, txt."]
    assert all(part in message for part in expected), message
    assert not (tmp_path / "run").exists()


def test_the_folder_of_a_run_is_not_taken_for_data(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("output: x")
    with pytest.raises(SystemExit):
        run_command(cli, ["verify", str(tmp_path)], prog_name="neuclip")
    message = " ".join(capsys.readouterr().err.split())
    assert f"It is the folder of a run: `neuclip doctor {tmp_path}` checks a run." in message


def config(output):
    return load_recipe(None, [f"output={output}", "batch_size=64", "schedule.warmup_steps=1", *COMMON])


@contextmanager
def start(run):
    with (
        hold_folder(run, world=World()),
        Heartbeat(Path(run.output, STARTING), world=World(), lost_after=45.0, limit=60.0) as heartbeat,
        folder_of_a_start(run, heartbeat=heartbeat),
    ):
        yield


def test_an_invalid_output_folder_is_a_user_error(tmp_path):
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=r"output = .*file.* cannot be the run's folder"), start(config(output)):
            pass


def test_a_refused_start_leaves_nothing_behind_and_removes_nothing_of_others(tmp_path):
    """Regression test: the whole folder was removed, with what others had put there meanwhile."""
    run, note = config(tmp_path / "run"), tmp_path / "run" / "heartbeats" / "note"

    def refused():
        with start(run):
            note.write_text("of somebody else")
            raise UserError("no")

    with pytest.raises(UserError, match="no"), start(run):
        raise UserError("no")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="no"):
        refused()
    assert [path for path in (tmp_path / "run").rglob("*") if path.is_file()] == [note]
    with start(run):
        pass
    assert (tmp_path / "run" / "config.yaml").exists()


def test_a_run_that_could_write_no_checkpoint_does_not_start(tmp_path):
    """Regression test: it trained to its end, and tried for ten minutes to write the last one."""
    prepare(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").touch()
    with pytest.raises(FileExistsError, match="run/checkpoints"):
        train_here(*settings_in(tmp_path, "run", "samples=8"))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("data.sources=nowhere", None),
        ("data.streams=2", None),
        ("evaluation.suite=nowhere", None),
        ("batch_size=16", "step-00000002 was written with batch_size = 8, and this run has 16, which cannot continue"),
        ("validation.sources=nowhere", None),
        ("model.arch=scenes-vit-micro", None),
        ("samples=8", r"samples = 8 is 1 step of batch_size = 8, but step-00000002 has trained 2 \(16 samples\)"),
        ("optimizer.name=muon", "step-00000002 was written with optimizer.name = 'adamw', and this run has 'muon'"),
        ("objective.name=sogclr", "was written with objective.name = 'openclip', and this run has 'sogclr'"),
        ("optimizer.name=lion", "was written with optimizer.name = 'adamw', and this run has 'lion'"),
    ],
)
def test_a_refused_start_changes_nothing_in_the_folder_of_a_run(run_that_crashed, wrong, why):
    def contents():
        files = (path for path in sorted(run_that_crashed.rglob("*")) if path.is_file() and path.name != LOCK_NAME)
        return {str(path): path.read_bytes() for path in files}

    before = contents()
    stage = ["engine.deepspeed=zero0_fp32"] if "muon" in wrong else []
    with pytest.raises(UserError, match=why):
        train_here(*settings_of_crash(run_that_crashed), wrong, *stage, resume="latest")
    assert contents() == before


MOMENT = "exp_avg_sq/visual.proj"
FORGED = {
    ("moments", "without a moment"): lambda state: state.pop(MOMENT),
    ("moments", "of another shape"): lambda state: state.update({MOMENT: torch.zeros(3)}),
    ("moments", "of integers"): lambda state: state.update({MOMENT: state[MOMENT].long()}),
    ("moments", "without second moments"): lambda state: [state.pop(k) for k in [*state] if k.startswith("exp_avg_sq")],
    ("moments", "of no parameter"): lambda state: [state.update({f"x{k}": state.pop(k)}) for k in [*state]],
    ("objective", "without its state"): lambda state: [state.pop(k) for k in [*state]],
    ("objective", "of another shape"): lambda state: state.update({k: torch.zeros(3, 2) for k in state}),
    ("open_clip_model", "without a weight"): lambda state: state.pop("visual.proj"),
}


def forge(run, name, change):
    file = run / "checkpoints" / "step-00000002" / f"{name}.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file)
    entry = {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
    change_meta(run, 2, lambda meta: meta["files"].update({file.name: entry}))


def test_a_parameter_that_never_has_a_gradient_has_no_moments_at_stage_0(run_that_crashed, tmp_path):
    run = shutil.copytree(run_that_crashed, tmp_path / "run")
    forge(run, "moments", lambda state: [state.pop(f"{key}/visual.proj") for key in ("exp_avg", "exp_avg_sq")])
    train_here(*settings_of_crash(run_that_crashed), f"output={run}", "engine.deepspeed=zero0_fp32", resume="latest")


def test_a_checkpoint_with_right_hashes_and_wrong_contents_is_refused(run_that_crashed, tmp_path):
    for (name, case), change in FORGED.items():
        run = shutil.copytree(run_that_crashed, tmp_path / name / case / "run")
        forge(run, name, change)
        settings = [*settings_of_crash(run_that_crashed), f"output={run}"]
        for stage in (0, 1) if name == "moments" else (1,):
            with pytest.raises(UserError, match="checkpoint"):
                train_here(*settings, f"engine.deepspeed=zero{stage}_fp32", resume="latest")


def test_a_new_run_asks_its_mirror_before_it_starts(run_that_crashed, tmp_path):
    """Regression test: only runs that continued asked it; a new one trained for days beside a mirror of another run."""
    (tmp_path / "file").touch()
    shutil.copytree(run_that_crashed / "checkpoints", tmp_path / "mirror" / "new" / "checkpoints")
    for mirror, why in (("file", "cannot be used"), ("mirror", "The mirror .* has checkpoints: add --resume latest")):
        settings = [*settings_of_crash(run_that_crashed), f"checkpoint.mirror={tmp_path / mirror}"]
        with pytest.raises(UserError, match=why):
            train_here(*settings, f"output={tmp_path / 'new'}")
        assert not (tmp_path / "new").exists()


def settings_of_crash(run):
    return settings_in(run.parent, run, "samples=24", "checkpoint.every=2", "checkpoint.keep_last=9")


@pytest.fixture(scope="module")
def run_that_crashed(tmp_path_factory):
    """A run with records after its last checkpoint, a heartbeat and an unfinished checkpoint."""
    run = prepare(tmp_path_factory.mktemp("crashed")) / "run"
    train_here(*settings_of_crash(run))
    shutil.rmtree(run / "checkpoints" / "step-00000003")
    (run / "heartbeats" / "rank-00000.json").write_text("{}")
    (part := run / "checkpoints" / ".step-00000003").mkdir()
    (part / "done-00000.json").write_text("{}")
    return run


def test_an_occupied_port_is_a_user_error(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in world.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port}, which is used by another program"), start_world():
            pass


def test_too_many_open_files_are_no_network_error(monkeypatch):
    def fail(*_, **__):
        raise torch.distributed.DistNetworkError("Failed to init uv loop")

    monkeypatch.setattr(start_module.dist, "TCPStore", fail)
    monkeypatch.setattr(start_module, "too_many_files", lambda error: True)
    with (
        pytest.raises(UserError, match=r"too many open files \(\d+ are allowed; Failed .*\): raise `ulimit -n`"),
        start_world(),
    ):
        pass


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    base = prepare(tmp_path_factory.mktemp("forks"), [30, 34])
    train_here(*settings_in(base, "first", "samples=48", "checkpoint.every=2", "checkpoint.keep_last=9"))
    return base


def test_the_command_of_a_fork_continues_it(base):
    first, second, third = (str(base / "first" / "checkpoints" / f"step-0000000{step}") for step in (2, 4, 6))
    fork = settings_in(base, "fork", "optimizer.lr=1e-4")
    with pytest.raises(UserError, match="is at step 6 of 6 of this run: there is nothing to train"):
        train_here(*fork, "samples=48", resume=third)
    train_here(*fork, "samples=48", resume=first)
    assert [record["step"] for record in metrics(base / "fork", "train")] == [3, 4, 5, 6]
    train_here(*fork, "samples=64", resume=first)
    shutil.move(first, base / "pruned")  # also when its origin was removed, as often as it is repeated
    for samples in (72, 80):
        train_here(*fork, f"samples={samples}", resume=first)
    assert [record["step"] for record in metrics(base / "fork", "train")] == list(range(3, 11))
    assert json.loads((base / "fork" / "origin.json").read_text())["digest"]
    shutil.copytree(second, first)  # made anew since
    for origin, more in ((second, ""), (str(base / "nothing"), ", which does not exist"), (first, "")):
        with pytest.raises(UserError, match=rf"of a run that was not begun from {origin}{more}: choose another output"):
            train_here(*fork, "samples=96", resume=origin)


def test_a_fork_whose_disk_is_lost_continues_from_its_mirror(base):
    start, another = (str(base / "first" / "checkpoints" / f"step-0000000{step}") for step in (4, 6))
    fork = settings_in(base, "mirrored", f"checkpoint.mirror=file://{base / 'mirror'}")
    train_here(*fork, "samples=48", resume=start)
    for lost in ("mirrored", "mirrored/checkpoints"):
        shutil.rmtree(base / lost)
        train_here(*fork, "samples=56", resume=start)
        assert [record["step"] for record in metrics(base / "mirrored", "train")][-1] == 7
        messages = [record["message"] for record in metrics(base / "mirrored", "event")]
        (message,) = [text for text in messages if "was downloaded" in text][-1:]
        assert "step-00000006" in message or "step-00000007" in message
    shutil.rmtree(base / "mirrored")
    with pytest.raises(UserError, match="belongs to run"):
        train_here(*fork, "samples=56", resume=another)
