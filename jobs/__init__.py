"""The programs: one module per job. See `neuclip --help`."""

import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def _find_our_pipeline() -> None:
    """Let `import pipeline` find this project's package although the working folder has a `pipeline.py`.

    `python -m` puts the working folder before installed packages.
    """
    spec = None if "pipeline" in sys.modules else find_spec("pipeline")
    if spec is not None and spec.origin and Path(spec.origin).resolve() != ROOT / "pipeline" / "__init__.py":
        sys.path.insert(0, str(ROOT))


_find_our_pipeline()
