"""List the benchmarks, one per line: `python -m jobs.bench`. For one of them: `python -m jobs.bench.NAME --help`."""

from __future__ import annotations

import ast
from pathlib import Path


def main() -> None:
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        text = path.read_text(encoding="utf-8")
        if 'if __name__ == "__main__":' in text:  # the others are parts of these
            about = ast.get_docstring(ast.parse(text)) or ""
            print(f"python -m jobs.bench.{path.stem:<16} {about.splitlines()[0]}")


if __name__ == "__main__":
    main()
