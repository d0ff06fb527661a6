"""Start our programs as a user would, in separate processes, and wait for them."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from pipeline.distributed.processes import without_launcher

ROOT = Path(__file__).parents[1]


def run(module, *arguments, ranks=0, timeout=300, check=True, folder=ROOT):
    """Run `python -m module arguments` in `folder`, as `ranks` connected processes if `ranks` is more than 0.

    They are forked from a server that has imported the heavy packages (see `tests/fork_server.py`). Benchmarks, and
    everything with TEST_LAUNCHER=torchrun, are started by Python and torchrun.
    """
    if os.environ.get("TEST_LAUNCHER") == "torchrun" or module.startswith("jobs.bench."):
        call, variables = command(module, *arguments, ranks=ranks), {**environment(), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(call, cwd=folder, env=variables, capture_output=True, text=True, timeout=timeout)
    else:
        with Program(module, *arguments, ranks=ranks, folder=folder) as program:
            done = program.wait(timeout)
    if check:
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done


class Program:
    """A program started as by `run`, which continues; what is left of it at the end of the block is killed."""

    def __init__(self, module, *arguments, ranks=0, folder=ROOT):
        self._words, self._kept, self._ended = [module, *arguments], tempfile.TemporaryDirectory(), False
        self._printed = [Path(self._kept.name) / f"output.{end}" for end in ("out", "err")]
        base, port = {**environment(), "PYTHONPATH": str(ROOT)}, str(free_port())
        shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        environments = [
            {**base, **shared, "MASTER_PORT": port, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)
        ]
        request = {
            "module": module,
            "arguments": arguments,
            "environments": environments or [base],
            "folder": str(folder),
            "output": f"{self._kept.name}/output",
        }
        for path in self._printed:
            path.touch()
        self.pids = _ask(request)

    def wait(self, seconds=120):
        """Its end, with the exit code of the first rank that failed; after these seconds it is killed."""
        codes = _ask({"children": self.pids, "seconds": seconds})
        self._ended = True
        out, err = (path.read_text(errors="replace") for path in self._printed)
        return subprocess.CompletedProcess(self._words, next((code for code in codes if code), 0), out, err)

    def kill(self):
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)

    def poll(self):
        """None while all ranks run; this and `communicate` are for `wait_for`, as those of a `Popen`."""
        return None if all(map(lives, self.pids)) else True

    def communicate(self):
        return "".join(path.read_text(errors="replace") for path in self._printed)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if not self._ended:
            self.kill()
            self.wait()
        self._kept.cleanup()


def _ask(request):
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    answer: list[int] = json.loads(server.stdout.readline())
    return answer


@functools.cache
def _server():
    """The server of this test process; it ends with its standard input."""
    call = [sys.executable, "-m", "tests.fork_server"]
    return subprocess.Popen(call, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def command(module, *arguments, ranks=0):
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d"]
        launcher += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    return [*launcher, "-m", module, *arguments]


def python(*arguments, timeout=120, **variables):
    """Run Python with these arguments, in a process of its own that has these variables as well."""
    own = {**environment(), "PYTHONPATH": str(ROOT), **variables}
    call = [sys.executable, *arguments]
    return subprocess.run(call, cwd=ROOT, env=own, capture_output=True, text=True, timeout=timeout, check=False)


def environment():
    """This process's environment without what launchers and our own command line set in it; one thread per rank."""
    kept = without_launcher(os.environ)
    kept.pop("PYTHONSAFEPATH", None)
    return {**kept, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def free_port():
    """Return a free port on 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition, what, *logs, process=None, seconds=60, pause=0.05):
    """Wait until something is true.

    Args:
        condition: What is awaited.
        what: In words, for the failure.
        logs: Files whose end is shown then.
        process: Who brings it about, and must not end before.
        seconds: The longest time that it may take.
        pause: Seconds between two looks.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        ended = process is not None and process.poll() is not None
        if ended or time.monotonic() > deadline:
            shown = "\n".join(log.read_text()[-3000:] for log in logs if log.exists())
            printed = process.communicate() if process is not None and ended else ""
            raise AssertionError(
                f"{what}: not {'before the process ended' if ended else f'in {seconds:g} s'} {printed}{shown}"
            )
        time.sleep(pause)


def lives(pid):
    """Whether a process is running; a zombie is not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
