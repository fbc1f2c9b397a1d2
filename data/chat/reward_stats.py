"""`reward_stats.json` in the payload of a reward model: how its scores are read and normalized.

    {"mean": ..., "std": ..., "read_at": "conversation"}

A score is read at the last token of the rendered conversation, as transformers and vLLM read it. Models trained before version 0.2 have no
`read_at`: they were trained, and are read, at the answer's last token, before the newline that most templates write after it.
"""

import json
from pathlib import Path
from typing import Any

FILE = "reward_stats.json"
READ_AT = {"read_at": "conversation"}


def reads_closed(payload: Path) -> bool:
    """Whether the score is read at the last token of the conversation; see `Chat.answered`."""
    try:
        found: Any = json.loads((payload / FILE).read_text())
    except (OSError, ValueError):  # `reward_statistics` reports it
        return False
    return isinstance(found, dict) and found.items() >= READ_AT.items()
