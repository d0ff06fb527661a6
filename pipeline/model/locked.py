"""Locked towers: parts of the model that keep their weights while the rest is trained (LiT, arXiv:2111.07991)."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.errors import UserError

DROP_SETTINGS = ("p", "drop_prob", "prob", "share", "dropout")
"""Names under which modules of torch, timm, open_clip and ours keep the probability of dropping something."""


def lock_towers(clip: nn.Module, *, image: int | None, text: int | None) -> None:
    """Freeze towers in place.

    Args:
        clip: open_clip's model.
        image: Blocks at the end of the image tower that stay trainable, 0 for none; None does not lock the tower.
        text: Likewise of the text tower.

    Raises:
        UserError: This architecture cannot be locked so, or nothing would be left to train.
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
        with next(clip.parameters()).device:  # where open_clip makes the frozen batch norms
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


def check_constant_image_tower(visual: nn.Module, *, locked: bool) -> None:
    """Check that an image tower's outputs depend on the image alone for as long as a run takes.

    Args:
        visual: The image tower, in the form in which it is trained.
        locked: `model.lock_image`.

    Raises:
        UserError: Its weights are trained, its batch norms follow the batches, or it drops something at random.
    """
    remedy = "Change that, or leave model.image_features_cache out."
    trained = [name for name, parameter in visual.named_parameters() if parameter.requires_grad]
    if not locked or trained:
        what = f"{len(trained)} of its parameters are trained, such as visual.{trained[0]}" if trained else "it is not"
        raise UserError(
            f"model.image_features_cache needs an image tower that is wholly locked, with model.lock_image=true and "
            f"model.unlocked_image_blocks=0: {what}. (The projection behind timm's towers stays trainable when "
            f"open_clip locks them.) {remedy}"
        )
    for name, module in visual.named_modules():
        if isinstance(module, _BatchNorm):
            raise UserError(f"model.image_features_cache: the batch norm visual.{name} follows the batches. {remedy}")
        chance = _drop_probability(module)
        if chance:
            raise UserError(
                f"model.image_features_cache: visual.{name} ({type(module).__name__}) drops a random share of "
                f"{chance:g}, so that features differ from step to step. Patch dropout ends with "
                f"model.patch_dropout=0, the others with an architecture file without them. {remedy}"
            )


def _drop_probability(module: nn.Module) -> float:
    if "drop" not in type(module).__name__.lower() and not isinstance(module, nn.MultiheadAttention):
        return 0.0
    values = (getattr(module, name, None) for name in DROP_SETTINGS)
    return next((float(value) for value in values if isinstance(value, float | int) and value), 0.0)
