"""Images that kill the worker that decodes them: after the second time, their URL is never requested again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable

from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.locks import part_lock
from data_prep.fetching.decoding_note import noted_url
from pipeline.files import write_json, write_text

DEATHS = 2


def record_deaths(folder: Folder, shards: Iterable[int]) -> list[str]:
    """Count the deaths of workers that were processing these shards.

    Returns:
        The URLs whose images they were decoding; URLs that reached the limit are added to `quarantine.txt`.
    """
    urls = [url for shard in shards if (url := noted_url(folder.staging / f"{shard:05d}.decoding"))]
    if not urls:
        return []
    path = folder.staging / "deaths.json"
    try:
        deaths = Counter[str](json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        deaths = Counter()
    deaths.update(urls)
    write_json(path, deaths)
    worst = {url for url, times in deaths.items() if times >= DEATHS}
    if worst:
        with part_lock(folder, "quarantine", wait=True):
            lines = sorted(folder.quarantined() | worst)
            write_text(folder.quarantine, "".join(f"{line}\n" for line in lines), durable=True)
    return urls
