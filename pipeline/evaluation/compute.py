"""Features in micro-batches of one fixed, padded size, so that their bits depend only on the weights and the sample.

The k-th micro-batch always holds samples [kM, (k+1)M), in this order, padded with zeros: it is the same tensor for any
batch size and any number of loader workers or processes. On a CPU every micro-batch is computed by one thread (the
order of a matrix product's sums depends on the number of threads) and several micro-batches run at a time instead. On
CUDA, TF32 and cuDNN's search for the fastest kernel are off; bits are then equal on equal GPUs with equal libraries.
Between other devices, which results record, features differ by rounding: those of ViT-B/32 and of our tiny model by
4e-7 at most between AVX-512 and SSE4.1 code, cosines by 3e-7. Only an image whose two best classes are that close can
change its prediction.

Shape legend: C classes, M micro-batch, B loader batch, d feature dimension.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.cores import thread_map
from pipeline.distributed.devices import true_fp32
from pipeline.errors import UserError
from pipeline.evaluation.datasets.task_data import TaskError
from pipeline.model.evaluation_model import EvaluationModel

T = TypeVar("T")
TEXTS_PER_UNIT = 1024
"""About how many prompts are encoded together, those of whole classes."""


def microbatches(batches: Iterable[tuple[Tensor, ...]], size: int) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Re-cut `[B, ...]` batches into `(valid, [size, ...])`, the last one padded with zeros."""
    held: list[tuple[Tensor, ...]] = []
    rows = 0
    for batch in batches:
        held.append(batch)
        rows += len(batch[0])
        while rows >= size:
            joined = tuple(torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*held, strict=True))
            yield size, tuple(part[:size] for part in joined)
            rows -= size
            held = [tuple(part[size:] for part in joined)] if rows else []
    if rows:
        joined = tuple(torch.cat(parts) for parts in zip(*held, strict=True))
        yield rows, tuple(torch.cat([part, part.new_zeros(size - rows, *part.shape[1:])]) for part in joined)


class Compute:
    """Where and how features are computed; use as a context manager.

    On a CPU each of `threads` computes whole micro-batches. `on_result` is called after every micro-batch.

    Raises:
        UserError: The precision is bf16 and the device does not compute it in hardware.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        threads: int | None = None,
        precision: str = "fp32",
        on_result: Callable[[], None] = lambda: None,
    ) -> None:
        if precision == "bf16":
            check_bf16(device)
        self.device, self.precision = device, precision
        self.threads = (threads or torch.get_num_threads()) if device.type == "cpu" else 1
        self._on_result = on_result
        self._pool: ThreadPoolExecutor | None = None
        self._restore = contextlib.ExitStack()

    def __enter__(self) -> Compute:
        if self.device.type == "cpu":
            self._restore.callback(torch.set_num_threads, torch.get_num_threads())
            self._pool = ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,))
            torch.set_num_threads(1)
        else:
            for name, value in (("benchmark", False), ("deterministic", True)):
                self._restore.callback(setattr, torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
                setattr(torch.backends.cudnn, name, value)
            self._restore.enter_context(true_fp32(self.device))
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        self._restore.close()

    def map(self, function: Callable[..., T], items: Iterable[tuple]) -> Iterator[T]:
        """`function(*item)` for every item, in order, several at a time, with a bounded number in flight."""
        results: Iterable[T] = (function(*item) for item in items)
        if self._pool is not None:
            results = thread_map(self._pool, lambda item: function(*item), items, ahead=2 * self.threads + 1)
        for result in results:
            self._on_result()
            yield result

    def encoding(self) -> contextlib.AbstractContextManager[object]:
        """The context in which encoders run."""
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=False)

    def name(self) -> str:
        """The device as recorded in results: what two computers must have in common for bit-identical features."""
        if self.device.type == "cuda":
            return f"cuda {torch.cuda.get_device_name(self.device)}"
        capability = torch.backends.cpu.get_cpu_capability()
        return f"{self.device.type} {platform.machine()} {capability} {kernel_fingerprint()}"


def check_bf16(device: torch.device) -> None:
    """Refuse a device that would emulate bf16 in software, many times slower than fp32."""
    if device.type == "cuda":
        has = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
        has = any(flag in flags for flag in ("avx512_bf16", "amx_bf16", " bf16"))
    if not has:
        raise UserError(f"precision = 'bf16', but this {device.type} does not compute bf16 in hardware: use fp32.")


@functools.cache
def kernel_fingerprint() -> str:
    """Digest of a few results of this process's CPU kernels.

    Which instructions are used depends on the CPU and on torch's, MKL's and oneDNN's environment variables; only
    torch's choice can be queried. Kernels that sum in another order give other last bits, which this digest captures.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        generator = torch.Generator().manual_seed(0)
        digest = hashlib.sha256()
        for rows, inner, columns in ((64, 192, 768), (50, 513, 64), (257, 96, 31)):
            x = torch.randn(rows, inner, generator=generator)
            y = x @ torch.randn(inner, columns, generator=generator)
            z = torch.nn.functional.gelu(torch.nn.functional.layer_norm(y, (columns,)))
            digest.update(torch.softmax(z, -1).numpy().tobytes() + y.numpy().tobytes())
        image = torch.randn(2, 3, 64, 64, generator=generator)
        weight = torch.randn(24, 3, 16, 16, generator=generator)
        digest.update(torch.nn.functional.conv2d(image, weight, stride=16).numpy().tobytes())
        return digest.hexdigest()[:12]
    finally:
        torch.set_num_threads(threads)


class TextSide:
    """The distinct texts of a task (class names, captions or cues), in units that processes share among themselves.

    `templates` have `{c}` for the text; without them every text is taken as it is. `prompts` are those of every text,
    instead of filled templates; the texts are then distinct. `rows` holds for every text its row among the distinct.
    """

    def __init__(
        self,
        texts: Sequence[str],
        *,
        templates: Sequence[str] | None = None,
        prompts: Sequence[Sequence[str]] = (),
    ) -> None:
        unique = list(dict.fromkeys(texts))
        row = {text: number for number, text in enumerate(unique)}
        self.rows = torch.tensor([row[text] for text in texts])
        per_unit = max(1, TEXTS_PER_UNIT // max(map(len, prompts or (templates or "1",))))
        self.units = [unique[start : start + per_unit] for start in range(0, len(unique), per_unit)]
        self._templates, self._prompts = templates, dict(zip(texts, prompts, strict=False))
        facts = [texts, templates, prompts] if prompts else [texts, templates]
        self.digest = hashlib.sha256(json.dumps(facts, ensure_ascii=False).encode()).hexdigest()

    def encode(self, model: EvaluationModel, unit: int, *, compute: Compute, micro_batch: int) -> Tensor:
        """Encode one unit as [len(units[unit]), d] unit-norm fp32 features."""
        texts = self.units[unit]
        if self._templates is None:
            return encode_texts(model, texts, compute=compute, micro_batch=micro_batch)
        prompts = [self._prompts.get(text) or filled(self._templates, text) for text in texts]
        return mean_features(model, prompts, compute=compute, micro_batch=micro_batch)

    def similarities(self, features: Tensor, texts: Tensor) -> Tensor:
        """[rows, d] features, [distinct texts, d] -> [rows, texts as given] cosines; equal texts have equal bits.

        Columns of one matrix product can differ in the last bit although their vectors are equal, so that a tie between
        repeated texts would be decided by noise. The product is therefore taken over distinct texts.
        """
        return (features @ texts.T)[:, self.rows.to(features.device)]


def ranks(scores: Tensor, target: Tensor) -> Tensor:
    """[rows, candidates], [rows] -> how many candidates come before the target; ties go to the lower index."""
    value = scores.gather(1, target[:, None])
    lower = torch.arange(scores.shape[1], device=scores.device)[None, :] < target[:, None]
    return (scores > value).sum(1) + ((scores == value) & lower).sum(1)


def encode_texts(model: EvaluationModel, texts: Sequence[str], *, compute: Compute, micro_batch: int) -> Tensor:
    """Encode texts as [len(texts), d] unit-norm fp32 features on the CPU."""
    pieces = ((model.tokenize(list(texts[at : at + micro_batch])),) for at in range(0, len(texts), micro_batch))

    def encode(valid: int, columns: tuple[Tensor, ...]) -> Tensor:
        with compute.encoding():
            return model.encode_text(columns[0].to(compute.device))[:valid].float().cpu()

    features = torch.cat(list(compute.map(encode, microbatches(pieces, micro_batch))))
    check_finite(features, what=lambda row: f"the text {texts[row]!r}")
    return features


def check_finite(features: Tensor, *, what: Callable[[int], str]) -> None:
    """Refuse features with a NaN or an infinity, which have no score; `what` names a row in the message."""
    broken = (~torch.isfinite(features).all(dim=1)).nonzero()
    if len(broken):
        raise TaskError(
            f"{len(broken)} features are not finite, the first is that of {what(int(broken[0]))}: "
            "the weights of this checkpoint are damaged or its training diverged."
        )


def filled(templates: Sequence[str], name: str) -> list[str]:
    """The prompts of a class."""
    return [template.replace("{c}", name) for template in templates]


def class_vectors(
    model: EvaluationModel, classnames: Sequence[str], templates: Sequence[str], *, compute: Compute, micro_batch: int
) -> Tensor:
    """[C, d] classifier: every template filled in, encoded, L2-normalised, averaged over templates, renormalised."""
    prompts = [filled(templates, name) for name in classnames]
    return mean_features(model, prompts, compute=compute, micro_batch=micro_batch)


def mean_features(
    model: EvaluationModel, prompts: Sequence[Sequence[str]], *, compute: Compute, micro_batch: int
) -> Tensor:
    """[C, d] normalised means of the normalised features of each class's prompts, of which each may have any number."""
    flat = [text for own in prompts for text in own]
    features = encode_texts(model, flat, compute=compute, micro_batch=micro_batch)
    parts = features.split([len(own) for own in prompts])
    return F.normalize(torch.stack([part.mean(dim=0) for part in parts]), dim=-1)
