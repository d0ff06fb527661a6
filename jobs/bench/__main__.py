"""List the benchmarks, one per line: `python -m jobs.bench`. For one of them: `python -m jobs.bench.NAME --help`."""

from __future__ import annotations

import ast
from pathlib import Path


def main() -> None:
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        print(f"python -m jobs.bench.{path.stem:<14} {about.splitlines()[0] if about else ''}")


if __name__ == "__main__":
    main()
