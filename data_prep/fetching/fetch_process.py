"""`python -m data_prep.fetching.fetch_process job.json`: one engine process, in its own process group.

It exits, with all its workers, when the program that started it is gone for any reason.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

_WATCH_SECONDS = 0.5


def main(path: str) -> None:
    _end_with_parent()
    # Spark's workers otherwise take whichever python3 comes first on the PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from data_prep.dataset.dataset_folder import Folder
    from data_prep.dataset.locks import engine_lock
    from data_prep.dataset.shard_plan import load_plan
    from data_prep.fetching.downloader import Job, run
    from data_prep.settings.download_config import DownloadConfig
    from pipeline.config import parse

    tree: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    config = parse(DownloadConfig, tree["config"])
    folder = Folder(Path(config.output), config.fetch.worker)
    with engine_lock(folder):
        run(Job(config, folder, load_plan(folder), tuple(tree["shards"]), mode=tree["mode"]))


def _end_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1])
