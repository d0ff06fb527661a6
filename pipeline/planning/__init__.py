"""What a run will cost, what a node can do, and what happened to a run."""

from typing import Literal, NamedTuple


class DoctorFinding(NamedTuple):
    """The result of one check; `remedy` says what to do about a "note" or "broken"."""

    subject: str
    status: Literal["good", "note", "broken"]
    found: str
    remedy: str = ""
