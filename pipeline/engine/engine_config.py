"""The `engine` section of a recipe, and the DeepSpeed file that it names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from pipeline.config import section, suggest
from pipeline.engine.optim import OptimizerConfig
from pipeline.errors import UserError

DS_CONFIGS = Path(__file__).parents[2] / "ds_configs"
BUCKET = 500_000_000
"""DeepSpeed's default `reduce_bucket_size`: the number of elements reduced at once, and the size of their buffer.
Our engine never takes more than the model has parameters."""
# Keys of a DeepSpeed file that the recipe decides: a file that sets one must agree with the recipe.
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
RECIPE_KEYS = (*BATCH_KEYS, "gradient_clipping")
KNOWN_KEYS = (
    *RECIPE_KEYS, "zero_optimization", "managed_gradient_accumulation", "zero_allow_untested_optimizer", "bf16",
    "data_types", "communication_data_type", "torch_autocast", "prescale_gradients", "gradient_predivide_factor",
    "zero_force_ds_cpu_optimizer", "disable_allgather", "steps_per_print", "wall_clock_breakdown", "timers",
)  # fmt: skip
"""What a DeepSpeed file may set. Other keys write files of their own, change the training, or have no effect here;
DeepSpeed passes over one that it does not know."""
KNOWN_ZERO_KEYS = (
    "stage", "overlap_comm", "reduce_scatter", "reduce_bucket_size", "allgather_partitions", "allgather_bucket_size",
    "contiguous_gradients", "round_robin_gradients", "ignore_unused_parameters", "sub_group_size", "offload_optimizer",
    "offload_param", "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
    "stage3_gather_16bit_weights_on_model_save",
)  # fmt: skip
KNOWN_OFFLOAD_KEYS = ("device", "pin_memory", "ratio", "buffer_count", "fast_init")
"""Without `nvme_path`: offloading to disks would write files outside the run's folder."""


@section
class EngineConfig:
    """How forward, backward and the optimizer step are run."""

    name: str = "deepspeed"
    """What runs forward, backward and the optimizer."""
    deepspeed: str = "auto"
    """ZeRO stage and precision: a file of ds_configs/ (without .json), or the path of a DeepSpeed JSON file. "auto":
    zero1_bf16, whose bf16 weights need no casts; but zero0_bf16 for an optimizer that works on whole layers (lamb,
    muon), and on a single CPU rank, where it was faster."""
    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Feature-cached accumulation (GradCache; open_clip's `--accum-freq`): how many samples of a rank are in memory
    with their graph at once. None: the whole local batch. `auto`: as many as fit into memory, which is tried before the
    first step by halving; a run that is resumed begins with the number that it has used."""
    gradient_clipping: float = Field(default=0.0, ge=0.0)
    """Largest gradient norm; 0 turns clipping off."""
    probe: bool = True
    """Compare the engine's first gradient with plain autograd, and refuse to train on a mismatch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto": a GPU where torch sees one."""
    timeout_minutes: float = Field(default=30.0, gt=0.0)
    """Limit for one phase of a step, collectives included. Then the ranks report which of them is behind, and exit."""
    lost_rank_seconds: float = Field(default=45.0, gt=0.0)
    """A rank without a heartbeat for as long is dead, and all others exit. Raise it where writing a small file to
    `output` can take longer."""

    def rows(self, local: int) -> int:
        """How many of a rank's `local` samples are a micro-batch; with `auto`, at most."""
        return min(self.micro_batch, local) if isinstance(self.micro_batch, int) else local


def deepspeed_settings(
    config: EngineConfig, *, global_batch: int, world_size: int, optimizer: OptimizerConfig | None = None
) -> dict[str, Any]:
    """The DeepSpeed file, with the recipe's batch sizes filled in; `global_batch` is over all ranks.

    Raises:
        UserError: The file is missing, sets what the recipe decides, or contradicts the recipe.
    """
    path = Path(config.deepspeed)
    if path.suffix != ".json":
        path = DS_CONFIGS / f"{_name(config, world_size, optimizer)}.json"
    if not path.is_file():
        names = ("auto", *sorted(p.stem for p in DS_CONFIGS.glob("*.json")))
        raise UserError(f"engine.deepspeed = {config.deepspeed!r}: no such file. {suggest(config.deepspeed, names)}")
    settings = _read(path)
    filled = {
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": global_batch // world_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.gradient_clipping,
    }
    _check_settings(settings, filled, path=path, world_size=world_size)
    # DeepSpeed's own timer would make the host wait for the device in every forward pass.
    quiet = {"steps_per_print": 2**62, "wall_clock_breakdown": False, "timers": {"throughput": {"enabled": False}}}
    if settings.get("bf16", {}).get("enabled"):
        settings["bf16"]["check_grad_overflow"] = True  # else gradients of inf and NaN are applied
    return {**settings, **filled, **quiet}


def _name(config: EngineConfig, world_size: int, optimizer: OptimizerConfig | None) -> str:
    """The file of ds_configs/ that a section names.

    "auto" takes stages whose backward pass does not wait for the device: stage 2 with `overlap_comm` does, before the
    host can prepare the next batch.
    """
    if config.deepspeed != "auto":
        return config.deepspeed
    whole_layers = optimizer is not None and optimizer.per_layer
    return "zero0_bf16" if whole_layers or (world_size == 1 and not on_gpu(config.device)) else "zero1_bf16"


def on_gpu(device: str) -> bool:
    """Whether a run computes on a GPU, by its `engine.device`."""
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def _read(path: Path) -> dict[str, Any]:
    """A DeepSpeed file as a dictionary whose sections are dictionaries, too."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"engine.deepspeed = {path} is not a readable JSON file: {error}") from error
    if not isinstance(settings, dict):
        raise UserError(f"{path} must hold a JSON object, not a {type(settings).__name__}.")
    sections = ("zero_optimization", "bf16", "data_types", "torch_autocast", "timers")
    zero = settings.get("zero_optimization")
    for name, value in (*settings.items(), *(zero.items() if isinstance(zero, dict) else ())):
        if name in (*sections, "offload_optimizer", "offload_param") and not isinstance(value, dict):
            raise UserError(f"{path} sets {name} = {value!r}: it must be a JSON object.")
    return settings


def _check_settings(settings: Mapping[str, Any], filled: Mapping[str, Any], *, path: Path, world_size: int) -> None:
    zero = settings.get("zero_optimization", {})
    offload = [key for name in ("offload_optimizer", "offload_param") for key in zero.get(name, {})]
    for keys, known, where in (
        (settings, KNOWN_KEYS, ""),
        (zero, KNOWN_ZERO_KEYS, "zero_optimization."),
        (offload, KNOWN_OFFLOAD_KEYS, "zero_optimization.offload_*."),
    ):
        if unknown := [key for key in keys if key not in known]:
            raise UserError(
                f"{path} sets {where}{unknown[0]!r}, which a DeepSpeed file cannot set here: remove it. Allowed are "
                f"{', '.join(known)}; optimizer, schedule and a run's own records (telemetry) are the recipe's."
            )
    stage = zero.get("stage", 0)
    if type(stage) is not int or not 0 <= stage <= 3:
        raise UserError(f"{path} sets zero_optimization.stage = {stage!r}: it must be 0, 1, 2 or 3.")
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
    if settings.get("bf16", {}).get("check_grad_overflow", True) is not True:
        raise UserError(
            f"{path} sets bf16.check_grad_overflow = {settings['bf16']['check_grad_overflow']!r}, with which DeepSpeed "
            "applies gradients of inf and NaN: remove it. It is always true here."
        )
    if zero_stage(settings) == 0 and settings.get("bf16", {}).get("enabled"):
        raise UserError(
            f"{path} sets bf16.enabled at ZeRO stage 0, where DeepSpeed (0.19) takes an optimizer step on zero "
            "gradients while it starts: use torch_autocast, as ds_configs/zero0_bf16.json does, or a higher stage."
        )


def in_fp32(config: EngineConfig, *, world_size: int = 1, optimizer: OptimizerConfig | None = None) -> str:
    """The name of the file of ds_configs/ with this one's stage in fp32; for a file of one's own, "zero1_fp32"."""
    name = _name(config, world_size, optimizer).replace("bf16", "fp32")
    return name if (DS_CONFIGS / f"{name}.json").is_file() else "zero1_fp32"


def zero_stage(settings: Mapping[str, Any]) -> int:
    """The ZeRO stage of a DeepSpeed configuration."""
    return int(settings.get("zero_optimization", {}).get("stage", 0))
