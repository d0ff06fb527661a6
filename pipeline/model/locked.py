"""Locked towers: parts of the model that keep their weights while the rest is trained (LiT, arXiv:2111.07991)."""

from __future__ import annotations

from torch import nn

from pipeline.errors import UserError


def lock_towers(clip: nn.Module, *, image: int | None, text: int | None) -> None:
    """Freeze towers in place.

    Args:
        clip: open_clip's model.
        image: blocks at the end of the image tower that stay trainable, 0 for none; None does not lock the tower.
        text: likewise of the text tower.

    Raises:
        UserError: this architecture cannot be locked so, or nothing would be left to train.
    """
    if image is not None:
        _lock(clip, "image", image)
    if text is not None:
        _lock(clip, "text", text)
    learned = (parameter for name, parameter in clip.named_parameters() if not name.startswith("logit_"))
    if not any(parameter.requires_grad for parameter in learned):  # the logit scale belongs to the objective
        raise UserError("Both towers are locked: nothing is left to train. Unlock one, or some of its last blocks.")


def _lock(clip: nn.Module, side: str, unlocked: int) -> None:
    before = sum(p.requires_grad for p in clip.parameters())
    try:
        if side == "image":
            clip.lock_image_tower(unlocked_groups=unlocked, freeze_bn_stats=True)  # type: ignore[operator]
        else:
            clip.lock_text_tower(unlocked_layers=unlocked, freeze_layer_norm=True)  # type: ignore[operator]
    except (AssertionError, NotImplementedError, AttributeError, TypeError, RuntimeError) as error:
        raise UserError(
            f"model.lock_{side}: open_clip cannot lock this architecture's {side} tower with {unlocked} blocks "
            f"unlocked ({error or type(error).__name__})."
        ) from error
    if sum(p.requires_grad for p in clip.parameters()) == before:
        raise UserError(f"model.lock_{side} with {unlocked} blocks unlocked leaves the whole tower trainable.")
