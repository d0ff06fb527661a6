"""Signals that ask a run to stop; tested in separate processes."""

import os
import signal
import subprocess
import sys

import pytest

from pipeline.distributed.signals import STOP_SIGNALS
from tests.launch import ROOT

STARTING = """
import hashlib
from pipeline.distributed.signals import exit_on_stop_signals
exit_on_stop_signals()
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes in C code, in which no handler of Python runs
"""
BEGUN = """
import os, time
from pipeline.distributed.signals import StopSignals, exit_on_stop_signals, ignore_stop_signals
exit_on_stop_signals()
signals = StopSignals()
signals.begin()
"""
TRAINING = f"""{BEGUN}
print("ready", flush=True)
while not signals.received:
    time.sleep(0.01)
{{meanwhile}}
print("saved", flush=True)
signals.end()
"""
ENDED = f"""{BEGUN}
ignore_stop_signals()
signals.end()
print("ready", flush=True)
time.sleep(1)
print("ended", flush=True)
"""
SLOW_IMPORT = """
print("ready", flush=True)
__import__("hashlib").pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


def ended_by(number, *arguments, before=None, path=""):
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=before,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


def test_a_signal_before_the_first_step_ends_the_run_immediately():
    for number in STOP_SIGNALS:
        code, _, errors = ended_by(number, "-c", STARTING)
        assert code == 75
        assert f"Stopped by {number.name} while starting" in errors
    code, _, _ = ended_by(signal.SIGINT, "-c", STARTING, before=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert code == 75, "although the shell ignores it"


@pytest.mark.parametrize(
    ("first", "second", "saved"),
    [
        (signal.SIGUSR1, 0, True),
        (signal.SIGTERM, signal.SIGTERM, True),
        (signal.SIGINT, signal.SIGTERM, True),  # Ctrl-C, and what a launcher sends because of it
        (signal.SIGINT, signal.SIGINT, False),
        (signal.SIGTERM, signal.SIGINT, False),
    ],
)
def test_a_signal_during_training_is_recorded_and_only_a_second_ctrl_c_does_not_wait(first, second, saved):
    meanwhile = f"os.kill(os.getpid(), {int(second)}); time.sleep(0.01)"
    code, output, errors = ended_by(first, "-c", TRAINING.format(meanwhile=meanwhile))
    assert (code, output, errors) == (0, "saved\n", "") if saved else "KeyboardInterrupt" in errors and not output


@pytest.mark.parametrize(
    "start", [("-m", "jobs.cli", "train"), ("-m", "jobs.cli", "--debug", "train"), ("-m", "jobs.train")]
)
def test_signals_are_handled_before_torch_is_imported(tmp_path, start):
    (tmp_path / "torch.py").write_text(SLOW_IMPORT)
    assert ended_by(signal.SIGTERM, *start, "--recipe", "cc3m", path=f"{tmp_path}:{ROOT}")[0] == 75


def test_a_signal_after_the_run_has_ended_changes_nothing():
    code, output, errors = ended_by(signal.SIGTERM, "-c", ENDED)
    assert (code, output, errors) == (0, "ended\n", "")
