"""The built-in corpus: procedural images and captions, served by a small web server with simulated failures.

    from data_prep.scenes import ScenesConfig, serve_scenes, write_suite, write_url_table

    with serve_scenes(config) as base:              # http://127.0.0.1:<port>
        write_url_table(config, base, "table.parquet")
        ...                                         # ingest the table as if it were CC3M
    write_suite(config, "suite")                    # held-out tasks in the benchmark's layout

Everything is a pure function of the config and the index of a scene, so nothing needs to be stored.
"""

from data_prep.scenes.published import (
    ALWAYS_FAILS,
    Fault,
    corpus_digest,
    count_faults,
    fault_of,
    uid,
    url,
    write_url_table,
)
from data_prep.scenes.scene import HELD_OUT_START, FaultRates, ScenesConfig
from data_prep.scenes.scene_suite import write_suite
from data_prep.scenes.server import serve_scenes

__all__ = [
    "ALWAYS_FAILS",
    "HELD_OUT_START",
    "Fault",
    "FaultRates",
    "ScenesConfig",
    "corpus_digest",
    "count_faults",
    "fault_of",
    "serve_scenes",
    "uid",
    "url",
    "write_suite",
    "write_url_table",
]
