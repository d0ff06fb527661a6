"""How a trainer ends."""

from __future__ import annotations

from typing import Literal

from pipeline.checkpoint.reader import Checkpoint

EXIT_DONE, EXIT_NOT_SAVED = 0, 74
"""74 (EX_IOERR): the last checkpoint could not be written; make room, and start again with --resume latest."""


class RunEnds(Exception):
    """The end of a trainer: raised on all ranks at once where that is before its last step.

    Args:
        reason: For the log; `Trainer.fit` raises it as a `UserError` if that is the exit code.
        code: The exit code.
        save: Write a checkpoint first, unless there is one of the last step.
        start: From where another trainer continues: the end of this stage, or the checkpoint of a roll-back; None: the
            process ends.
    """

    def __init__(
        self,
        reason: str = "",
        *,
        code: int = EXIT_DONE,
        save: bool = False,
        start: Checkpoint | Literal["latest"] | None = None,
    ) -> None:
        super().__init__(reason)
        self.code, self.save, self.start = code, save, start
