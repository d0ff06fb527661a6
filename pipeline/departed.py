"""Settings and commands of earlier versions: what a user who still gives one reads."""

# ruff: noqa: E501 (an entry is a line)

from __future__ import annotations

from typing import Any

SETTINGS: dict[str, str] = {
    "attempts": "A watcher tries a checkpoint three times.",
    "checkpoint.blocking": "Checkpoints are written in the background.",
    "checkpoint.mirror_minutes": "The wait is two thirds of engine.timeout_minutes.",
    "checkpoint.retry_minutes": "The last checkpoint of a run is tried for 10 minutes.",
    "data.max_pixels": "Images of more than 178,956,970 pixels count as corrupt.",
    "data.prefetch": "Each worker keeps 2 batches ready.",
    "ema.warmup": "The average always warms up: min(decay, (1 + t) / (10 + t)) at step t.",
    "evaluation.examples": "Eight examples of a retrieval task are saved.",
    "evaluation.threads": "Set the environment's OMP_NUM_THREADS.",
    "examples": "Eight examples of a retrieval task are saved.",
    "fetch.decode_timeout": "An image may take 30 seconds.",
    "guard.max_backoff": "A host is left alone for 30 seconds at most; guard.backoff is the first pause.",
    "guard.max_redirects": "Five redirects are followed for one URL.",
    "guard.schemes": "URLs of http and https are fetched.",
    "held_out.": "The corpus of icons has left; commit c14979c has the program that makes it.",
    "image.resize_only_if_bigger": "Smaller images are stored as they are.",
    "model.image_features_cache": "Store the outputs once with `neuclip features DATA --images-only --model MODEL --output FOLDER`, and set data.image_features=FOLDER.",
    "monitor.restarts": "The run pauses after three restarts without a finished shard.",
    "monitor.stall": "The engine is restarted after 300 seconds without progress.",
    "monitor.window": "Success is measured over 1,000 URLs.",
    "order": "A watcher evaluates the newest checkpoint first.",
    "plan.": "It is an option of `neuclip plan`: --mfu, --dataset-size, --gpu-gib and so on; plan.gpus is --ranks.",
    "retry_after": "A watcher tries a failed checkpoint again after 300 seconds.",
    "selection.": "Joint selection of examples saved nothing where it was measured; train on all pairs.",
    "telemetry.histograms_every": "Distributions are written every 1,000 steps.",
    "telemetry.images": "The grid has 16 images.",
    "telemetry.images_every": "The grid of images is written every 1,000 steps; telemetry.tensorboard=false writes none.",
    "threads": "Set the environment's OMP_NUM_THREADS.",
    "validation.keep_best": "The checkpoint with the lowest validation loss is always kept.",
    "validation.min_delta": "Any lower loss counts as lower.",
}
"""Key, or prefix of keys that ends in a dot -> one sentence: what to use instead, or what happens without it."""

DEFAULTS: dict[str, Any] = {
    "checkpoint.mirror_minutes": 20.0,
    "checkpoint.retry_minutes": 10.0,
    "data.max_pixels": 178_956_970,
    "data.prefetch": 2,
    "ema.warmup": True,
    "fetch.decode_timeout": 30.0,
    "guard.max_backoff": 30.0,
    "guard.max_redirects": 5,
    "guard.schemes": ["http", "https"],
    "image.resize_only_if_bigger": True,
    "monitor.restarts": 3,
    "monitor.stall": 300.0,
    "monitor.window": 1_000,
    "plan.gpu_gib": 80.0,
    "plan.gpus": 1,
    "plan.gpus_per_node": 8,
    "plan.images_per_core": 500.0,
    "plan.mfu": 0.3,
    "plan.peak_tflops": 989.0,
    "plan.sample_bytes": 30_000,
    "retry_after": 300.0,
    "selection.chunks": 16,
    "telemetry.histograms_every": 1_000,
    "telemetry.images": 16,
    "telemetry.images_every": 1_000,
    "validation.keep_best": True,
}
"""Key -> the value that stored configurations have where nobody set it; of all other keys it is null, false or empty."""

COMMANDS: dict[str, str] = {
    "download --recipe icons": "The corpus of icons has left; commit c14979c has the program that makes it.",
    "study icons": "The corpus of icons has left; commit c14979c has the program that makes it. The study's results are in docs/studies/icons.",
    "study separation": "This study has left; docs/studies/separation has its results, commit c14979c its program.",
    "verify --rebuild": "`neuclip verify FOLDER --delete-damaged` deletes damaged shards, and the same `neuclip download` as before fetches them again.",
}
"""Command -> the same."""
