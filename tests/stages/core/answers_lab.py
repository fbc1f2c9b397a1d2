"""Answers of policies by hand."""

from typing import Any

from pedigree.data.records.answer_pool import AnswerFacts


def said(label: str, value: float | None, prompt: str = "q", **more: Any) -> AnswerFacts:
    """An answer of a policy; texts differ unless `text` says otherwise."""
    given = {"length": 10, "asked": 5, "ended": True, "blank": False, "rewards": (), "on_policy": False} | more
    text = given.pop("text", f"{prompt} by {label}").encode()
    return AnswerFacts(place=0, id=f"{prompt}/{label}/0", prompt_id=prompt, policy=label, text=text, value=value, **given)
