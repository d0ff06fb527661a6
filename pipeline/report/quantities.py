"""Titles, units and explanations of logged quantities. Unknown quantities are shown under their own names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["number", "share"]


@dataclass(frozen=True)
class Quantity:
    """How a logged value is displayed."""

    title: str
    """Title, with the unit if there is one."""
    note: str = ""
    """One sentence on how to read it."""
    kind: Kind = "number"
    """A "share" is shown in percent."""
    zero: bool = False
    """The axis starts at zero."""
    smooth: bool = True
    """A moving average is drawn over the values."""
    log: bool = False
    """The axis is logarithmic."""


def _share(what: str, *, part_of: str = "") -> Quantity:
    note = f"A part of {part_of}." if part_of else ""
    return Quantity(f"Time in {what}, share of a step", note, kind="share", zero=True)


KNOWN: dict[str, Quantity] = {
    "loss": Quantity(
        "Loss", "The objective's own loss. It can be negative, and losses of different methods are not comparable."
    ),
    "normalizer_gap": Quantity(
        "Normalizer gap",
        "How far the method's log-normalizers are from those of the batch, mean absolute difference (nats): after the "
        "updates on the batch (in use) and before them (cold).",
        zero=True,
    ),
    "tau": Quantity("Temperature τ", "", smooth=False),
    "lr": Quantity("Learning rate of the encoders", smooth=False),
    "tau_lr": Quantity("Learning rate of the temperature", smooth=False),
    "npn_lr": Quantity("Learning rate of the normalizer network", smooth=False),
    "bias": Quantity("Bias of the logits", smooth=False),
    "gamma": Quantity("Weight γ of new values in the moving average", smooth=False),
    "samples_per_second": Quantity("Throughput, samples per second", zero=True),
    "cpu_ms": Quantity("CPU time of a step, ms", "All threads of rank 0, without its loading workers.", zero=True),
    "data_wait": Quantity("Waiting for data, share of a step", "Near zero: loading is not the limit.", "share", True),
    "slowest_rank": Quantity(
        "Slowest rank", "The others wait for it; far from random: look at its node.", smooth=False
    ),
    "slowest_rank_ms": Quantity(
        "Step time of the slowest rank, ms", "Of its own: without waiting in the objective's collectives.", zero=True
    ),
    "median_rank_ms": Quantity("Step time of the median rank, ms", "As for the slowest rank.", zero=True),
    "slowest_rank_data_wait": Quantity(
        "The slowest rank's wait for data", "Share of a step. High: its loading is why it is slow.", "share", True
    ),
    "ratio_max": Quantity(
        "Largest ratio of normalizers", "Batch's normalizer over the predicted one, after the cap; near 1 is good."
    ),
    "prototype_norm": Quantity("Mean length of a prototype", "Prototypes start at length 1."),
    "learnability": Quantity("Learnability of the pairs read", "The learner's loss minus the reference's, per pair."),
    "selected_learnability": Quantity("Learnability of the selected pairs", "Each alone, within all pairs read."),
    "samples_not_selected": Quantity("Samples read and not selected", smooth=False),
    "gradient_norm": Quantity("Gradient norm", "Of the encoders, before clipping.", zero=True),
    "time_forward": _share("the towers, forward"),
    "time_backward": _share("the towers, backward"),
    "time_objective": _share("the objective"),
    "time_optimizer": _share("the optimizer"),
    "time_selection": _share("the selection of pairs"),
    "time_npn": _share("the normalizer network", part_of="the objective's time"),
    "time_communication": _share("the objective's collectives", part_of="the objective's time"),
    "host_memory_gib": Quantity("Host memory, GiB", "Peak of rank 0's process.", zero=True, smooth=False),
    "memory_gib": Quantity("GPU memory, GiB", "Peak allocated by rank 0.", zero=True, smooth=False),
    "mfu": Quantity("Model FLOPs utilization", "Share of the device's peak.", "share", True),
    "skipped_steps": Quantity("Steps skipped", smooth=False),
    "rollbacks": Quantity("Roll-backs to a checkpoint", smooth=False),
    "corrupt_samples": Quantity("Corrupt samples in this epoch", smooth=False),
    "drift_events": Quantity("Replicated states that differed between ranks", smooth=False),
}


def quantity(key: str) -> Quantity:
    """How `key` is displayed; an unknown key has its own name as the title."""
    return KNOWN.get(key) or Quantity(key.replace("_", " ")[:1].upper() + key.replace("_", " ")[1:])


def rounded(value: float) -> str:
    """At most three significant digits: 1.79951 -> 1.8, 0.00002231 -> 2.23e-05, 123456 -> 123,456."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
