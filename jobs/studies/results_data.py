"""`results.json` of a study: where and how the runs were made, and their results; pages are rendered from it."""

from __future__ import annotations

import csv
import io
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from pipeline.cores import usable_cores
from pipeline.versions import source_commit

DATA_NAME = "results.json"


def write_data(folder: Path, *, study: str, size: str, command: str, versions: Mapping[str, str], **rest: Any) -> None:
    """Write `folder/results.json`; `rest` are the fields that only this kind of study has."""
    data = {
        "study": study,
        "size": size,
        "command": command,
        "date": date.today().isoformat(),
        "commit": source_commit(),
        "machine": {"cpu": cpu_name(), "cores": usable_cores(), "system": platform.system()},
        "versions": versions,
        **rest,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DATA_NAME).write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")


def read_data(folder: Path) -> dict[str, Any]:
    """Read `folder/results.json`."""
    return json.loads((folder / DATA_NAME).read_text(encoding="utf-8"))


def write_texts(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write each text under its file name. Returns their paths."""
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def provenance(data: Mapping[str, Any], *, reproduces: str, results: Sequence[Mapping[str, Any]]) -> str:
    """Sentences on the size, command, machine, versions and finished runs of a study, for its page.

    Args:
        data: The content of `results.json`.
        reproduces: What the study is modelled on.
        results: The finished runs' results.
    """
    packages = ", ".join(f"{name} {version}" for name, version in data["versions"].items() if version != "absent")
    # Results record their commit; older ones have only that of their publication, or none.
    commits = sorted({commit for result in results if (commit := result.get("commit", data.get("commit")))})
    commit = f" from commit {_listed(commits)}" if commits else ""
    return (
        f"Size `{data['size']}`; modelled on {reproduces}. Made with `{data['command']}` on {data['date']}{commit}, "
        f"{data['machine']['cores']} cores of {data['machine']['cpu']}; {packages}. "
        f"{len(results)} of {data['units']} runs are finished."
    )


def _listed(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def csv_of(header: Sequence[str], rows: Iterable[tuple[Sequence[Any], Sequence[float | None], Sequence[Any]]]) -> str:
    """CSV of rows given as (labels, figures, more labels); a figure that is None becomes an empty cell."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    for labels, figures, more in rows:
        writer.writerow([*labels, *("" if value is None else f"{value:.6g}" for value in figures), *more])
    return stream.getvalue()


def figure_title(file: str) -> str:
    """The title of a figure, from its file name."""
    return file.removesuffix(".svg").replace("-", " ")


def cpu_name() -> str:
    """The model name of this machine's CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "an unnamed CPU"
