"""Studies: declared sets of runs (methods x settings x seeds) whose results are rendered as tables and figures.

NAME.yaml     the declaration of a study (read by `declare.py`)
unit.py       one run with its measurements and costs, in its own process
outcomes.py   outcomes -> means, spreads, paired differences;  publish.py  -> markdown, CSV, figures
"""

from pathlib import Path

from pipeline.config import suggest
from pipeline.departed import COMMANDS
from pipeline.errors import UserError


def study_names() -> tuple[str, ...]:
    """The studies that have a declaration."""
    files = Path(__file__).parent.glob("*.yaml")
    return tuple(sorted(path.stem for path in files if path.stem != "sizes"))


def check_name(name: str) -> None:
    """Check the name of a study.

    Raises:
        UserError: There is no such study, or no longer.
    """
    if name not in study_names():
        raise UserError(COMMANDS.get(f"study {name}") or f"There is no study {name!r}. {suggest(name, study_names())}")
