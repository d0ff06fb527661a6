"""JSON files that contain the SHA-256 of their own content, so that any changed byte is found.

Files of versions before 0.2 have none, and are read as they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_OWN = "own_sha256"


def signed(tree: Mapping[str, Any]) -> str:
    """The text of a file with this content."""
    digest = hashlib.sha256(json.dumps(tree).encode()).hexdigest()
    return json.dumps({**tree, _OWN: digest}, indent=1) + "\n"


def content(text: bytes) -> dict[str, Any]:
    """The content of a file.

    Raises:
        ValueError: It is not a JSON object, or was changed.
    """
    try:
        tree = json.loads(text)
        if not isinstance(tree, dict):
            raise ValueError("it is not a JSON object")
        if tree.pop(_OWN, None) is not None and text != signed(tree).encode():
            raise ValueError("it does not have its own SHA-256")
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return tree
