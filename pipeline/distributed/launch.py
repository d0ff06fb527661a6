"""Start several ranks of a program on this machine, like torchrun, but end with the failing rank's own message."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence


def launch(module: str, arguments: Sequence[str], *, ranks: int) -> int:
    """Run `python -m module arguments` as several ranks.

    Returns:
        The exit code: 0, or that of the first rank that failed, which has printed why.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        code = int(error.get_first_failure()[1].exitcode)
        return code if code > 0 else 128 - code  # a signal's number is negative there
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
