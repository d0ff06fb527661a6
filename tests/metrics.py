"""What a run wrote: the records of its metrics.jsonl, also while it writes them, and its weights."""

import json

import torch
from safetensors.torch import load_file


def metrics(run, kind=None):
    """The records of one kind, or all; a last line without its end is still being written and is left out."""
    whole, _, _ = (run / "metrics.jsonl").read_text().rpartition("\n")
    found = map(json.loads, whole.splitlines())
    return [record for record in found if kind in (None, record["kind"])]


def weights(run, step=None):
    """The weights in the checkpoint of a step, or in the last one."""
    name = "*" if step is None else f"{step:08d}"
    return load_file(max((run / "checkpoints").glob(f"step-{name}")) / "open_clip_model.safetensors")


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())
