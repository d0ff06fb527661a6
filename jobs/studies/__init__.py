"""Studies: declared sets of runs (methods x settings x seeds) whose results are rendered as tables and figures.

NAME.yaml     the declaration of a study (read by `declare.py`)
unit.py       one run with its measurements and costs, in its own process
schedule.py   runs all units of a study on the available devices
outcomes.py   outcomes -> means, spreads, paired differences;  publish.py  -> markdown, CSV, figures
small_towers.py   what `separation` and `tuned` share: towers that are trained in seconds
"""

from pathlib import Path

from pipeline.config import suggest
from pipeline.errors import UserError


def study_names() -> list[str]:
    """The studies that have a declaration."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.yaml") if path.stem != "sizes")


def check_name(name: str, *others: str) -> None:
    """Check the name of a study.

    Raises:
        UserError: It is neither a study's nor among `others`.
    """
    known = (*study_names(), *others)
    if name not in known:
        raise UserError(f"There is no study {name!r}. {suggest(name, known)}")
