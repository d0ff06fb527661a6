"""Settings and commands of earlier versions: what a user who still gives one reads."""

_ICONS = "The corpus of icons has left; commit c14979c has the program that makes it."

SETTINGS: dict[str, str] = {"held_out.": _ICONS}
"""Key, or prefix of keys that ends in a dot -> one sentence: what to use instead, or what happens without it."""

COMMANDS: dict[str, str] = {
    "download --recipe icons": _ICONS,
    "study icons": f"{_ICONS} The study's results are in docs/studies/icons.",
    "study separation": "This study has left; docs/studies/separation has its results, commit c14979c its program.",
}
"""Command -> the same."""
