"""Rows in the columns that TRL and other software read, and `data/sources/layouts.py` too: the way out to its way in."""

import json
from collections.abc import Mapping
from typing import Any

from pedigree.configs.base.frozen import canonical_json
from pedigree.data.chat.tools import OFFERED, arguments_of, turns_of
from pedigree.data.records.records import Answer


def plain(row: Mapping[str, Any], record: str) -> Mapping[str, Any]:
    """A row of an artifact in those columns; rows other than conversations, prompts and preferences stay as they are.

    What has another form in every row is JSON text, because tables have one type per column: `verifier` and `tools`.
    """
    if record not in ("conversation", "prompt", "preference"):
        return row
    arguments = arguments_of(row.get("template_arguments"))
    tools = arguments.pop(OFFERED, None)
    turns = turns_of(row["messages"])
    found: dict[str, Any] = {"id": row["id"], "source": row["source"]}
    match record:
        case "conversation":
            found["messages"] = turns
        case "prompt":
            found["prompt"] = turns
            found |= {"verifier": canonical_json(row["verifier"])} if row["verifier"] else {}
        case "preference":
            found |= {"prompt": turns, **_compared(row)}
    return found | ({"tools": json.dumps(tools)} if tools else {}) | ({"chat_template_kwargs": arguments} if arguments else {})


def _compared(row: Mapping[str, Any]) -> dict[str, Any]:
    """A pair as `chosen` and `rejected`, a longer list as `answers`, and a single answer as `completion` with its `label`."""
    match row["answers"]:
        case [answer]:
            good = {"label": bool(answer["score"])} if answer["score"] in (0, 1) else {"score": answer["score"]}
            return {"completion": [_turn(answer)], **good}
        case [better, worse]:
            scores = {f"score_{side}": one["score"] for side, one in (("chosen", better), ("rejected", worse)) if one["score"] is not None}
            strength = {} if row["strength"] is None else {"strength": row["strength"]}
            return {"chosen": [_turn(better)], "rejected": [_turn(worse)], **scores, **strength}
        case answers:
            return {"answers": [{name: one[name] for name in ("text", "score", "finish_reason") if name in one} for one in answers]}


def _turn(answer: Answer) -> dict[str, Any]:
    cut = {"finish_reason": "length"} if answer.get("finish_reason") == "length" else {}
    return {"role": "assistant", "content": answer["text"], **cut}
