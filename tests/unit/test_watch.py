"""Watchers: evaluation order, failures, lost results, stray files, and the templates that call them."""

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from click.testing import CliRunner

import jobs
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.evaluation.datasets.datacomp import TASKS
from pipeline.evaluation.datasets.suite import open_suite
from pipeline.evaluation.identity import suite_identity
from pipeline.evaluation.run.session import EvaluationConfig
from pipeline.evaluation.watcher import (
    ATTEMPTS,
    DONE,
    FAILED,
    LEDGER_FOLDER,
    RELEASED,
    Turn,
    WatchConfig,
    Watcher,
    brief,
    forget_after,
)
from pipeline.files import sha256_of
from tests.checkpoints import save_step
from tests.evaluation_suite import write_classification

CLUSTER = Path(jobs.__file__).parent / "cluster"


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    root = tmp_path_factory.mktemp("mini")
    write_classification(root, TASKS["cifar10"], samples=8)
    return open_suite(root)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr("pipeline.evaluation.watcher.RETRY_SECONDS", 0.0)


def make_watcher(run, suite, **settings):
    """A watcher and what it says."""
    config, messages = WatchConfig(**{"interval": 0.01, **settings}), list[str]()
    processes = (World(), torch.device("cpu"))
    quick = EvaluationConfig(workers=0, micro_batch=8)
    made = Watcher([run], suite=suite, config=config, evaluation=quick, processes=processes, say=messages.append)
    return made, messages


def states(watcher):
    """How the last attempts at the checkpoints of the only run ended."""
    return {turn.checkpoint.name: turn.last["how"] for turn in watcher.turns() if turn.last}


def evaluated(messages):
    """Return the steps evaluated in each pass, in order."""
    return [
        [int(step) for step in re.findall(r"step-(\d+)", line)] for line in messages if line.startswith("Evaluating")
    ]


def test_the_newest_checkpoint_is_evaluated_alone_first_then_older_ones_in_groups(tmp_path, suite, monkeypatch):
    for step in (100, 150, 200, 300, 400):
        save_step(tmp_path, step)
    monkeypatch.setattr("pipeline.evaluation.watcher.TOGETHER", 2)
    watcher, messages = make_watcher(tmp_path, suite, every=100)
    assert watcher.step()
    save_step(tmp_path, 500)
    for _ in range(2):  # the second time, nothing is left
        watcher.run(once=True)
        assert evaluated(messages) == [[400], [500], [300, 200], [100]]
    assert set(states(watcher).values()) == {DONE}
    assert all((tmp_path / "evaluation" / name / "cifar10.json").is_file() for name in states(watcher))


def replace_checkpoint(run, step, *, weights_of):
    """Put another checkpoint in the place of one, with the dates of the first: only its content tells."""
    path, other = run / f"checkpoints/step-{step:08d}", save_step(run / "other", weights_of)
    dates = (path / "checkpoint.json").stat()
    shutil.rmtree(path)
    other.rename(path)
    for file in path.iterdir():
        os.utime(file, (dates.st_atime, dates.st_mtime))


def test_a_damaged_checkpoint_is_abandoned_and_does_not_block_others(tmp_path, suite):
    for step in (100, 200, 300):
        save_step(tmp_path, step)
    broken = tmp_path / "checkpoints/step-00000200/open_clip_model.safetensors"
    broken.write_bytes(broken.read_bytes()[:1000])
    watcher, messages = make_watcher(tmp_path, suite)
    assert not watcher.run(once=True)
    assert any("step-00000200 is abandoned after 3 attempts" in line for line in messages)
    assert states(watcher) == {"step-00000100": DONE, "step-00000200": FAILED, "step-00000300": DONE}
    (abandoned,) = (turn for turn in watcher.turns() if turn.is_abandoned)
    assert "step-00000200" in abandoned.last["reason"]
    later, messages = make_watcher(tmp_path, suite)
    assert not later.run(once=True)
    assert any("remove that folder to try again" in line for line in messages)
    replace_checkpoint(tmp_path, 200, weights_of=200)  # by a whole copy
    assert watcher.run(once=True)
    assert set(states(watcher).values()) == {DONE}


def test_a_failed_task_is_retried_later_and_finished_results_are_kept(tmp_path):
    save_step(tmp_path / "run", 100)
    root = tmp_path / "suite"
    write_classification(root, TASKS["cifar10"], samples=8)
    second = write_classification(root, TASKS["mnist"], samples=8)
    (second / "test/1.tar").rename(second / "test/away")
    watcher, messages = make_watcher(tmp_path / "run", open_suite(root))
    assert watcher.step()
    assert re.search(r"mnist: .*missing: 1\.tar", messages[-1])
    first = tmp_path / "run/evaluation/step-00000100/cifar10.json"
    inode = first.stat().st_ino
    (second / "test/away").rename(second / "test/1.tar")
    assert watcher.run(once=True)
    assert states(watcher) == {"step-00000100": DONE}
    assert first.stat().st_ino == inode


def test_a_replaced_checkpoint_is_evaluated_again(tmp_path, suite):
    """Regression test: a checkpoint that took another's name was never scored."""
    save_step(tmp_path, 100)
    watcher, messages = make_watcher(tmp_path, suite)
    result = tmp_path / "evaluation/step-00000100/cifar10.json"
    assert watcher.run(once=True)
    first = json.loads(result.read_text())["inputs"]["checkpoint"]
    replace_checkpoint(tmp_path, 100, weights_of=7)
    assert watcher.run(once=True)
    assert any("was replaced by other weights" in line for line in messages)
    assert json.loads(result.read_text())["inputs"]["checkpoint"] != first
    assert len(evaluated(messages)) == 2


def test_a_watcher_that_is_interrupted_or_cannot_write_holds_no_lock(tmp_path, suite, monkeypatch):
    save_step(tmp_path, 100)
    watcher, _ = make_watcher(tmp_path, suite)
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.evaluation.evaluate", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            watcher.step()
    assert states(watcher) == {"step-00000100": RELEASED}
    with monkeypatch.context() as patch:
        denied = PermissionError(13, "Permission denied", str(tmp_path / LEDGER_FOLDER))
        patch.setattr("pipeline.evaluation.watcher.file_lock", Mock(side_effect=denied))
        with pytest.raises(UserError, match=rf"{LEDGER_FOLDER}.* cannot be written: Permission denied"):
            watcher.step()
    assert make_watcher(tmp_path, suite)[0].step()


def test_command_line_errors_name_the_mistake(tmp_path, suite):
    from jobs.watch import command

    arguments = [str(tmp_path), "--suite", str(suite.folder), "--once"]
    for wrong, message in (
        ([*arguments, "intervall=3"], "The nearest valid key is interval"),
        ([*arguments, "evaluation.batch_size=0"], r"evaluation\.batch_size = 0"),
        ([str(tmp_path / "none"), *arguments[1:]], "no run folder '.*none'"),
    ):
        with pytest.raises(UserError, match=message):
            command.main(wrong, standalone_mode=False)
    assert command.main(arguments, standalone_mode=False) == 0


def calls(text):
    """Return the arguments of every `neuclip watch` or `jobs.watch` in a template, without comments or line breaks."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")).replace("\\\n", " ")
    found = re.findall(r'(?:(?:neuclip|NEUCLIP)"? watch|jobs\.watch) (.*--suite[^>\n]*)', lines)
    return [[part for part in shlex.split(call) if part != "$@"] for call in found]


@pytest.mark.parametrize("path", sorted(CLUSTER.glob("watch-*")), ids=lambda path: path.name)
def test_templates_call_the_program_with_valid_arguments(path):
    from jobs.watch import command

    text = path.read_text()
    if path.suffix == ".timer":
        assert "Unit=neuclip-watch.service" in text
        return
    found = calls(text)
    assert len(found) == 1
    context = command.make_context("watch", found[0])
    assert context.params["suite"]
    if path.suffix == ".sbatch":
        subprocess.run(["bash", "-n", path], check=True)


def test_result_files_take_precedence_over_the_ledger(tmp_path, suite):
    for step in (100, 200, 300):
        save_step(tmp_path, step)
    watcher, _ = make_watcher(tmp_path, suite)
    assert watcher.run(once=True)
    shutil.rmtree(tmp_path / "evaluation/step-00000100")
    (tmp_path / "evaluation/step-00000200/cifar10.json").unlink()
    (watcher.turns()[-1].folder / "attempt.json").write_text("")
    again, messages = make_watcher(tmp_path, suite)
    assert again.run(once=True)
    assert evaluated(messages) == [[300], [200, 100]]
    assert sum("has no results, although" in line for line in messages) == 2
    assert set(states(again).values()) == {DONE}
    assert (tmp_path / "evaluation/step-00000100/cifar10.json").is_file()


def test_a_checkpoint_that_is_being_copied_is_ignored(tmp_path, suite):
    whole, run = save_step(tmp_path / "other", 100), tmp_path / "run"
    names = ("open_clip_config.json", "open_clip_model.safetensors")
    files = {name: {"bytes": (whole / name).stat().st_size, "sha256": sha256_of(whole / name)} for name in names}
    (whole / "checkpoint.json").write_text(json.dumps({"step": 100, "files": files}))
    copy = run / "checkpoints" / whole.name
    copy.mkdir(parents=True)
    watcher, messages = make_watcher(run, suite)
    assert not watcher.step()
    for name in ("checkpoint.json", *names):
        body = (whole / name).read_bytes()
        (copy / name).write_bytes(body[: len(body) // 2])
        assert not watcher.run(once=True) or name == "checkpoint.json"
        (copy / name).write_bytes(body)
    assert watcher.run(once=True)
    assert sum("is not complete yet" in line for line in messages) == 1
    assert "failed" not in " ".join(messages)
    assert [turn.last["attempts"] for turn in watcher.turns()] == [1]


def test_stray_files_do_not_stop_a_watcher(tmp_path, suite):
    save_step(tmp_path, 100)
    for name in ("checkpoints/step-old", "checkpoints/step-00000200.bak", "evaluation/step-x", "evaluation/step-1.x"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "checkpoint.json").write_text("{}")
    (tmp_path / "checkpoints/step-00000300").write_text("a file")
    watcher, messages = make_watcher(tmp_path, suite)
    folder = watcher.turns()[0].folder
    folder.mkdir(parents=True)
    (folder / "attempt.json").write_text("[]")
    (folder.parent / "notes.txt").write_text("stray")
    assert watcher.run(once=True)
    assert evaluated(messages) == [[100]]
    forget_after(tmp_path, 50)
    assert not folder.exists()
    assert (tmp_path / "evaluation/step-x").is_dir()


def test_the_ledger_treats_other_data_or_settings_as_another_suite(tmp_path):
    """The identity depends on contents: the folder's data matters, its name does not."""
    roots = [tmp_path / "a/mini", tmp_path / "b/mini", tmp_path / "c/mini"]
    for root, seed in zip(roots, (0, 0, 1), strict=True):
        for key in ("cifar10", "mnist"):
            write_classification(root, TASKS[key], samples=8, seed=seed)
    known, settings = tmp_path / "digests.json", EvaluationConfig()
    same, copied, other = (suite_identity(open_suite(root), settings, known=known) for root in roots)
    assert same == copied != other
    assert same.startswith("mini-")
    assert same != suite_identity(open_suite(roots[0]), EvaluationConfig(blank_class="drop"), known=known)
    assert same != suite_identity(open_suite(roots[0]).only(["mnist"]), settings, known=known), "a part of it"
    tar = roots[0] / "wds_cifar10_test/test/1.tar"
    tar.write_bytes(tar.read_bytes()[:-1] + b"\1")
    assert same != suite_identity(open_suite(roots[0]), settings, known=known), "one byte at the end of a file"
    known.write_text("damaged")
    assert same == suite_identity(open_suite(roots[1]), settings, known=known)


def test_a_checkpoint_has_one_owner_and_few_attempts_that_fail_or_kill_it(tmp_path):
    turn, other = (Turn(tmp_path / "step-00000100", tmp_path / "ledger", weights) for weights in "ab")
    for _ in range(5):
        assert turn.claim()
        assert not Turn(turn.checkpoint, turn.folder, "a").claim()
        turn.end(RELEASED)
    for number in range(ATTEMPTS):
        assert turn.claim()
        assert not turn.is_abandoned, "its watcher is alive"
        if number:
            turn.held.close()  # as a kill releases the lock
        else:
            turn.end(FAILED)
    assert not turn.claim()
    assert turn.is_abandoned
    assert other.claim()
    other.end(DONE)
    assert other.last["attempts"] == 1, "of another checkpoint of this name"
    assert not other.claim(), "it is done"
    assert other.claim(again=True)


def test_a_checkpoint_that_failed_is_left_alone_for_a_while_by_every_watcher(tmp_path, monkeypatch):
    """Regression test: three watchers used up its attempts within seconds."""
    monkeypatch.setattr("pipeline.evaluation.watcher.RETRY_SECONDS", 60.0)
    turn = Turn(tmp_path / "step-00000100", tmp_path / "ledger", "a")
    assert turn.claim()
    turn.end(FAILED)
    for later in (100, -100):  # also if the clock was set back
        assert not turn.claim()
        os.utime(turn.folder / "attempt.json", (time.time() - later,) * 2)
        assert turn.claim()
        turn.end(FAILED)
    assert Turn(turn.checkpoint, turn.folder, "b").claim(), "other weights need not wait"


def test_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    turn = Turn(tmp_path / "step-00000100", tmp_path / "ledger", "a")
    assert turn.claim()
    turn.end(DONE)
    assert turn.last["how"] == DONE


def test_messages_about_many_failures_are_short():
    text = brief({f"task{number}": "a reason " * 200 for number in range(38)})
    assert len(text) < 1200
    assert "and 35 more tasks failed" in text


def test_scores_are_in_tensorboard_without_another_command(tmp_path):
    """`neuclip watch` and `neuclip evaluate` write them at the checkpoint's step; nothing is left behind."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from jobs.evaluate import command as evaluate
    from jobs.watch import command as watch

    write_classification(tmp_path / "suite", TASKS["mnist"], samples=6)
    run, options = tmp_path / "run", ["--suite", str(tmp_path / "suite"), "--device", "cpu"]
    for step in (10, 20):
        save_step(run, step)
    (run / "tensorboard").mkdir()
    first = [str(run / "checkpoints/step-00000010"), *options, "workers=0", "micro_batch=16"]
    both = [str(run), *options, "--once", "evaluation.workers=0", "evaluation.micro_batch=16"]
    for command, arguments, steps in ((evaluate, first, (10,)), (watch, both, (10, 20))):
        done = CliRunner().invoke(command, arguments, standalone_mode=False)
        assert done.return_value == 0, done.output
        events = EventAccumulator(str(run / "tensorboard/evaluation"))
        events.Reload()
        assert events.Tags()["scalars"] == ["evaluation/mnist"]
        results = [json.loads((run / f"evaluation/step-{step:08d}/mnist.json").read_text()) for step in steps]
        expected = [(step, pytest.approx(tree["score"])) for step, tree in zip(steps, results, strict=True)]
        assert [(event.step, event.value) for event in events.Scalars("evaluation/mnist")] == expected
    assert [path.name for path in (run / "tensorboard").iterdir()] == ["evaluation"]
    assert not list(run.glob(".evaluation-*"))
