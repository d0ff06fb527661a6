"""A mirror on the Hugging Face hub: one commit for each checkpoint, a token, and a hub that refuses."""

import shutil

import pytest

from pipeline.checkpoint.mirror import Mirror
from pipeline.errors import UserError
from tests.hub import TOKEN, ModelHub, use_hub
from tests.training import prepare, settings_in, train_here
from tests.unit.test_mirror import test_a_fresh_machine_resumes_from_the_mirror  # noqa: F401 (with this file's `url`)
from tests.web import serve
from tests.written_checkpoints import begin, steps_in, write

REPOSITORY = "ada/runs"


@pytest.fixture
def hub(monkeypatch):
    from huggingface_hub import HfFileSystem, constants

    with serve() as site:
        HfFileSystem.clear_instance_cache()
        use_hub(monkeypatch, site.base)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield ModelHub(site, REPOSITORY)
        HfFileSystem.clear_instance_cache()


@pytest.fixture
def url(hub):
    return f"hf://{REPOSITORY}/deep"


def test_a_checkpoint_is_one_commit_and_a_refusal_does_not_end_the_run(tmp_path, hub, url, towers):
    run = tmp_path / "run"
    write(run, towers, [1], mirror=url)
    assert hub.commits == ["Checkpoint run/step-00000001"]
    here = {file.relative_to(run).as_posix(): file.read_bytes() for file in run.rglob("step-*/**/*") if file.is_file()}
    assert hub.files[REPOSITORY] == {f"deep/run/{name}": data for name, data in here.items()}
    hub.refuses = True
    events = write(run, towers, [2], mirror=url)
    assert "step-00000002 is NOT in the mirror" in events[-1]
    assert "out of storage" in events[-1]
    assert events[-1].endswith("Training continues.")
    hub.refuses = False
    write(run, towers, [3], mirror=url)
    assert steps_in(Mirror(url, run)) == [1, 3]


def test_a_run_pushes_while_it_trains_and_another_machine_continues_it(tmp_path, hub, url):
    settings = settings_in(prepare(tmp_path), "run", "checkpoint.every=2", f"checkpoint.mirror={url}")
    train_here(*settings, "samples=32")
    shutil.rmtree(tmp_path / "run")
    train_here(*settings, "samples=48", resume="latest")
    assert steps_in(Mirror(url, tmp_path / "run"))[-1] == 6
    assert "Checkpoint run/step-00000006" in hub.commits


def test_a_missing_token_or_repository_is_said_before_any_work(tmp_path, hub, url, monkeypatch):
    for address, token in (("hf://ada/none", TOKEN), (url, "hf_wrong")):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(UserError, match=rf"(?s){address}/run.* cannot be used .*not found.*the right to write"):
            begin(tmp_path / "run", address)
    assert hub.commits == []
