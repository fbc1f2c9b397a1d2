"""Hints for prompts whose answers are all equally wrong (`configs.methods.training.Hints`)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pedigree.configs.methods.training import Rlvr
from pedigree.data.chat.chat import Chat
from pedigree.data.records.records import derived_id, hints_of
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Job


def hopeless(scores: Sequence[float]) -> bool:
    """Whether v_1 = ... = v_G < 1, so that the answers give no signal; an unknown score (NaN) says nothing."""
    return len({*scores}) == 1 and scores[0] < 1


def hinted(row: Mapping[str, Any], config: Rlvr, chat: Chat) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """The prompt with each of its hints, weakest first, and its token ids; without those that are longer than `max_prompt_length`."""
    if config.hints is None:
        return
    messages = row["messages"]
    place = max(place for place, message in enumerate(messages) if message["role"] == "user")
    for number, hint in enumerate(hints_of(row), 1):
        asked = {**messages[place], "content": messages[place]["content"] + config.hints.text.replace("{hint}", hint)}
        made = {**row, "id": derived_id(row["id"], f"hint-{number}"), "messages": [*messages[:place], asked, *messages[place + 1 :]]}
        ids = chat.prompt(made["messages"], row.get("template_arguments"))
        if len(ids) <= config.max_prompt_length:
            yield made, ids


def refuse_unhinted(rows: Sequence[Mapping[str, Any]], config: Rlvr, chat: Chat, job: Job) -> None:
    """Render all prompts with their hints before the first step.

    Raises:
        ChatError: one cannot be asked.
        StageError: no prompt has hints.
    """
    if config.hints is None:
        return
    if not any(map(hints_of, rows)):
        raise StageError(f"hints is set, but none of {len(rows)} prompts has any: add `hints` to their verifiers, or remove the setting")
    fitting = 0
    for number, row in enumerate(rows):
        job.doing("tokenizing hints", number, len(rows), "prompts")
        fitting += any([*hinted(row, config, chat)])
    print(f"{fitting} of {len(rows)} prompts have a hint with which max_prompt_length {config.max_prompt_length} holds", flush=True)
