"""What a score is a function of, and what a suite is: the only place that says which scores are comparable.

The identity of a result is a flat mapping that the result records. It has three parts: the conditions (weights,
architecture, settings, device, code and packages), the task (protocol, metric, groups, columns and prompts of a
`tasks.yaml`), and the data (files and prompts). A stored result is reused, and an earlier one belongs to a summary,
only if its identity is the one that an evaluation would have now.

`suite.lock.json` beside the results holds digests of the data that was evaluated first. Later evaluations check them;
one lock serves all checkpoints of a run, so that every point of a curve is a score over the same data:

    {"suites": {"mini": ["cifar10", ...]},
     "tasks": {"cifar10": {"data": "<digest>", "files": {"test/0.tar": "<sha256>", ...}}}}
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserError
from pipeline.evaluation.datasets.suite import Entry, Suite
from pipeline.evaluation.datasets.task_data import (
    ACCEPT,
    TaskData,
    TaskError,
    file_facts,
    plain,
    reading,
)
from pipeline.evaluation.protocol import PROTOCOLS
from pipeline.files import read_tree, sha256_of, write_json
from pipeline.versions import version_of, versions

if TYPE_CHECKING:
    from pipeline.evaluation.run.session import EvaluationConfig, Session
    from pipeline.model.evaluation_model import EvaluationModel

LOCK_NAME = "suite.lock.json"
ROOT = Path(__file__).parents[2]
_FOLDERS = ("", "checkpoint/", "distributed/", "pictures/", "model/**/", "evaluation/**/")
SCORED_BY = tuple(f"pipeline/{folder}*.py" for folder in _FOLDERS)
"""The code of this project that a score is a function of: `evaluation`, and the folders that it may import."""
PACKAGES = (
    *("torch", "torchvision", "open_clip_torch", "timm", "transformers", "tokenizers", "ftfy", "regex"),
    *("pillow", "numpy", "pyarrow", "datasets", "webdataset"),
)
"""What computes towers, tokens, pixels and rows, beside Python; not all architectures need all of them."""
SETTINGS = ("blank_class", "micro_batch", "precision")
"""The settings of `EvaluationConfig` that can change a score."""
TASK_FIELDS = ("protocol", "main_metric", "fields", "group", "secondary_groups")
OWN_FIELDS = ("image", "caption", "label", "split", "revision", "classnames", "templates", "prompts")
"""What a `tasks.yaml` says about a task beside where its data is."""


def conditions(model: EvaluationModel, session: Session) -> dict[str, Any]:
    """What all results of one summary have in common."""
    return {
        "checkpoint": model.digest,
        "architecture": model.architecture.name,
        "model_config": model_config_digest(model),
        **{name: getattr(session.config, name) for name in SETTINGS},
        "device": session.compute.name(),
        "code": code_version(),
        "packages": versions(PACKAGES),
    }


def definition(entry: Entry) -> str:
    """Digest of what is asked of a task's data: protocol and metric, and the prompts and columns of a `tasks.yaml`."""
    facts = {name: getattr(entry.task, name) for name in TASK_FIELDS}
    if entry.own is not None:
        facts |= {name: asdict(entry.own)[name] for name in OWN_FIELDS}
    module = PROTOCOLS[entry.task.protocol].__module__
    if module.partition(".")[0] != "pipeline":  # a package of the user's own; ours are part of the code's version
        facts["source"] = sha256_of(str(sys.modules[module].__file__))
    return _digest(facts)


def identity_of(
    conditions: Mapping[str, Any], entry: Entry, data: TaskData, *, files: Mapping[str, str]
) -> dict[str, Any]:
    """Everything that determines a result. `files` holds the digests of the data, by name."""
    prompts = json.dumps([data.classnames, data.prompts or data.templates], ensure_ascii=False)
    return {
        **conditions,
        "task": definition(entry),
        "task_data": data_digest(files, data.columns),
        "layout": data.layout,
        "prompts": hashlib.sha256(prompts.encode()).hexdigest(),
    }


def misfit(inputs: Mapping[str, Any], entry: Entry, *, conditions: Mapping[str, Any], data: str | None) -> str:
    """Why a stored result, which records `inputs`, is not what an evaluation would give now; empty when it is.

    `data` is the digest of the task's data; None if that is not known.
    """
    other = [name for name, value in conditions.items() if inputs.get(name) != value]
    if other:
        shown = (f"{name}={plain(inputs.get(name), longest=80)}" for name in other)
        return f"it has other settings: {', '.join(shown)}"
    if inputs.get("task") != definition(entry):
        return "it has another metric, or other prompts or columns"
    if data is not None and inputs.get("task_data") != data:
        return "it is of other data"
    return ""


def data_digest(files: Mapping[str, str], columns: Sequence[str] = ()) -> str:
    """One digest for a task's data, from those of its files by name, and the columns that are read, where chosen."""
    lines = [f"{digest}  {name}" for name, digest in files.items()] + [f"column {name}" for name in columns]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def model_config_digest(model: EvaluationModel) -> str:
    """Digest of the architecture and preprocessing, which the weights do not determine."""
    cfg, preprocessing = model.architecture.model_cfg, dict(model.architecture.preprocess_cfg)
    towers = {key: value for key, value in cfg.items() if key != "init_logit_bias"}
    return _digest({"model_cfg": towers, "preprocess_cfg": preprocessing, **model.architecture.own_background})


@functools.cache
def code_version() -> str:
    """Version of this project, and a digest of all of its code that scores depend on."""
    return f"{version_of('neuclip')} {code_digest(ROOT)}"


def code_digest(root: Path) -> str:
    """Digest of the files below `root` that match `SCORED_BY`."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SCORED_BY for path in root.glob(pattern)):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=list).encode()).hexdigest()


@dataclass
class SuiteLock:
    """The lock in one file, as it was read when the evaluation started."""

    path: Path
    suites: dict[str, list[str]] = field(default_factory=dict)
    """The tasks of every suite that was evaluated, by the suite's name."""
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Digests of every task's files, and one of its data, by key."""

    @classmethod
    def read(cls, path: Path) -> SuiteLock:
        """Read the lock from a file; it is empty if there is no file."""
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            return cls(path, tree["suites"], tree["tasks"])
        except FileNotFoundError:
            return cls(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} is damaged ({plain(repr(error), longest=200)}), so data cannot be compared "
                "with what was evaluated first. Restore it, or remove it to write it anew."
            ) from error

    def lost(self, suite: Suite) -> list[str]:
        """Tasks that the suite had when it was locked and that are now missing.

        A suite that shares no task with the locked one of the same name is treated as another suite.
        """
        before = self.suites.get(suite.name, [])
        return [key for key in before if key not in suite.keys] if set(before) & set(suite.keys) else []

    def check(self, key: str, data: TaskData, files: Mapping[str, str]) -> None:
        """Compare a task's data with what was evaluated first."""
        locked = self.tasks.get(key)
        if locked is None or locked["data"] == data_digest(files, data.columns):
            return
        before = locked["files"]
        names = [name for name in {**before, **files} if before.get(name) != files.get(name)]
        what = f"{len(names)} files ({', '.join(names[:3])}) are new, missing or have another SHA-256"
        if not names:
            what = f"other columns are read ({', '.join(data.columns)})"
        raise TaskError(f"{key}: {what} than when it was first evaluated ({self.path}). {ACCEPT}")

    def add(self, key: str, data: TaskData, files: Mapping[str, str]) -> bool:
        """Lock a task's data. Returns whether that changed the lock."""
        before, facts = self.tasks.get(key), {"data": data_digest(files, data.columns), "files": dict(files)}
        self.tasks[key] = facts
        return before != facts

    def write(self, suite: Suite, *, replacing: bool) -> Path:
        """Write the lock, merged with what other processes have locked in the meantime.

        With `replacing`, our entries take precedence over those in the file.
        """
        now = SuiteLock.read(self.path)
        tasks = {**now.tasks, **self.tasks} if replacing else {**self.tasks, **now.tasks}
        keys = suite.keys if replacing else tuple(dict.fromkeys([*now.suites.get(suite.name, ()), *suite.keys]))
        suites = {**now.suites, suite.name: [key for key in keys if key in tasks]}
        return write_json(self.path, {"suites": suites, "tasks": dict(sorted(tasks.items()))}, durable=True)


def suite_identity(suite: Suite, config: EvaluationConfig, *, known: Path) -> str:
    """The suite's name with a digest of its tasks, their files' contents and the settings that can change a score.

    A renamed folder gives another name but the same digest. The code is not part of it: after an update, watchers do
    not score again what has scores. A part of a suite has another identity than the whole. The file `known` keeps
    SHA-256 of files by path, size, dates and inode, so that watchers read them once; an evaluation reads all of them.

    Raises:
        UserError: A file of the suite cannot be read.
    """
    digest = hashlib.sha256(json.dumps([getattr(config, name) for name in SETTINGS]).encode())
    before, digests = read_tree(known), read_tree(known)
    for entry in suite.entries:
        digest.update(f"{entry.task.key} {entry.task.main_metric} {entry.own}\n".encode())
        with reading(suite.folder):
            for name, path in entry.files():
                key = f"{path.resolve()} {file_facts(path)}"
                digests[key] = digests.get(key) or sha256_of(path)
                digest.update(f"{digests[key]}  {name}\n".encode())
    if digests != before:
        with suppress(OSError):  # then the lock of a checkpoint cannot be written either, which is an error
            write_json(known, digests)
    return f"{suite.name}-{digest.hexdigest()[:12]}"
