"""The `engine` section of a recipe, and the DeepSpeed file that it names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipeline.config import section, suggest
from pipeline.errors import UserError

DS_CONFIGS = Path(__file__).parents[2] / "ds_configs"
BUCKET = 500_000_000
"""DeepSpeed's default `reduce_bucket_size`: the number of elements reduced at once, and the size of their buffer.
Our engine never takes more than the model has parameters."""
# Keys of a DeepSpeed file that the recipe decides: a file that sets one must agree with the recipe.
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
RECIPE_KEYS = (*BATCH_KEYS, "gradient_clipping")
FORBIDDEN_KEYS = ("optimizer", "scheduler", "fp16")


@section
class EngineConfig:
    """How forward, backward and the optimizer step are run."""

    deepspeed: str = "zero2_bf16"
    """ZeRO stage and precision: a file of ds_configs/ (without .json), or the path of any DeepSpeed JSON file."""
    micro_batch: int | None = Field(default=None, ge=1)
    """Feature-cached accumulation (GradCache; open_clip's `--accum-freq`): how many samples of a rank are in memory
    with their graph at once. None: the whole local batch."""
    gradient_clipping: float = Field(default=0.0, ge=0.0)
    """Largest gradient norm; 0 turns clipping off."""
    probe: bool = True
    """Compare the engine's first gradient with plain autograd, and refuse to train on a mismatch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto": a GPU where torch sees one."""
    timeout_minutes: float = Field(default=30.0, gt=0.0)
    """Limit for one phase of a step, collectives included. Then the ranks report which of them is behind, and exit."""


def deepspeed_settings(config: EngineConfig, *, global_batch: int, world_size: int) -> dict[str, Any]:
    """The DeepSpeed file, with the recipe's batch sizes filled in.

    Raises:
        UserError: The file is missing, sets what the recipe decides, or contradicts the recipe.
    """
    path = Path(config.deepspeed)
    if path.suffix != ".json":
        path = DS_CONFIGS / f"{config.deepspeed}.json"
    if not path.is_file():
        names = tuple(sorted(p.stem for p in DS_CONFIGS.glob("*.json")))
        raise UserError(f"engine.deepspeed = {config.deepspeed!r}: no such file. {suggest(config.deepspeed, names)}")
    settings = json.loads(path.read_text(encoding="utf-8"))
    filled = {
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": global_batch // world_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.gradient_clipping,
    }
    _check_settings(settings, filled, path=path, world_size=world_size)
    # DeepSpeed's own timer would make the host wait for the device in every forward pass.
    quiet = {"steps_per_print": 2**62, "wall_clock_breakdown": False, "timers": {"throughput": {"enabled": False}}}
    return {**settings, **filled, **quiet}


def _check_settings(settings: Mapping[str, Any], filled: Mapping[str, Any], *, path: Path, world_size: int) -> None:
    for key in FORBIDDEN_KEYS:
        if key in settings:
            raise UserError(f"{path} sets {key!r}, which the recipe decides (see optimizer.*, schedule.*): remove it.")
    for key in RECIPE_KEYS:
        if key in settings and settings[key] not in ("auto", filled[key]):
            raise UserError(
                f"{path} sets {key} = {settings[key]}, but the recipe makes it {filled[key]} (global batch "
                f"{filled['train_batch_size']}, {world_size} ranks): remove it from the file or change the recipe."
            )
    if settings.get("managed_gradient_accumulation", True):
        raise UserError(
            f"{path} must set managed_gradient_accumulation to false: the trainer decides where a step ends."
        )
    if zero_stage(settings) == 0 and settings.get("bf16", {}).get("enabled"):
        raise UserError(
            f"{path} sets bf16.enabled at ZeRO stage 0, where DeepSpeed (0.19) takes an optimizer step on zero "
            "gradients while it starts: use torch_autocast, as ds_configs/zero0_bf16.json does, or a higher stage."
        )


def in_fp32(config: EngineConfig) -> str:
    """The name of the file of ds_configs/ with this one's stage in fp32; for a file of one's own, "zero1_fp32"."""
    name = config.deepspeed.replace("bf16", "fp32")
    return name if (DS_CONFIGS / f"{name}.json").is_file() else "zero1_fp32"


def zero_stage(settings: Mapping[str, Any]) -> int:
    """The ZeRO stage of a DeepSpeed configuration."""
    return int(settings.get("zero_optimization", {}).get("stage", 0))
