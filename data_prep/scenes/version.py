"""Identity of a corpus: a digest of the settings and of the code that renders and serves it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from data_prep.evalsets import write_sets
from data_prep.scenes.scenes_config import ScenesConfig
from pipeline.config import to_tree


def corpus_digest(config: ScenesConfig, *further: Path) -> str:
    """SHA-256, 64 hex digits, of the settings, the source files that make the corpus, and the files in `further`.

    Equal digests mean the same images, captions and faults, up to the versions of numpy and Pillow.
    """
    digest = hashlib.sha256(json.dumps(to_tree(config), sort_keys=True).encode())
    for path in (*sorted(Path(__file__).parent.glob("*.py")), Path(write_sets.__file__), *further):
        digest.update(f"\n{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()
