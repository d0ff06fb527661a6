"""A process that imports the heavy packages once and forks for every program that a test runs.

Nine tenths of a small training run are imports: about 9 seconds of CPU per process. `tests.launch.run` therefore forks
programs from this server. Each is still a process with its own arguments, environment, working folder and output.

A request is a line of JSON on standard input. To start a program: the module, its arguments, the environment of each
rank, the working folder and the stem of the output files; the reply is the list of process ids. To wait for one: these
ids and a time limit in seconds; the reply is the list of exit codes.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import sys
import time
import traceback

SECONDS_TO_FOLLOW = 40.0
"""After one rank has failed, the others are ended after this time, as a launcher does."""


def preload():
    """Import what a training run imports, and keep Python's garbage collector from looking at it in every fork."""
    import deepspeed.runtime.zero.muon.original_muon  # noqa: F401 (it loads torch's compiler)
    import open_clip  # noqa: F401

    from pipeline.model.architectures import build_tokenizer

    build_tokenizer({"text_cfg": {}}, name="any")  # keeps the vocabulary
    gc.collect()
    gc.freeze()


def execute(module):
    """Run a module as `python -m` does. Returns its exit code."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


def start(request, environment):
    """Fork one rank. Returns its process id."""
    if child := os.fork():
        return child
    code = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(request["folder"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, suffix in ((1, ".out"), (2, ".err")):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            os.dup2(os.open(request["output"] + suffix, flags, 0o644), descriptor)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.argv = [request["module"], *request["arguments"]]
        code = execute(request["module"])
        atexit._run_exitfuncs()
        sys.stdout.flush()
    finally:
        os._exit(code)


def wait(children, *, seconds):
    """Wait for all ranks; those that outlive a failed one or the time limit are ended. Returns their exit codes.

    Ranks that are stopped (SIGSTOP) are ended when all others have ended.
    """
    codes: dict[int, int] = {}
    stopped: set[int] = set()
    deadline = time.monotonic() + seconds
    while True:
        for child in set(children) - codes.keys():
            done, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
            if done and os.WIFSTOPPED(status):
                stopped.add(child)
            elif done:
                codes[child] = os.waitstatus_to_exitcode(status)
                if codes[child]:
                    deadline = min(deadline, time.monotonic() + SECONDS_TO_FOLLOW)
        if len(codes) == len(children):
            return [codes[child] for child in children]
        if time.monotonic() > deadline or stopped | codes.keys() == set(children):
            for child in set(children) - codes.keys():
                os.kill(child, signal.SIGKILL)
        time.sleep(0.05)


def main():
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what is printed during imports is no reply
    preload()
    for line in sys.stdin:
        request = json.loads(line)
        sys.stdout.flush()
        sys.stderr.flush()
        if "seconds" in request:
            reply = wait(request["children"], seconds=request["seconds"])
        else:
            reply = [start(request, environment) for environment in request["environments"]]
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
