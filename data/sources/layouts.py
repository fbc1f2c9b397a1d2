"""Parse rows in the common layouts into examples; any other row is rejected with one sentence."""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from typing import Any

from pedigree.configs.rows.row_sources import LAYOUT_COLUMNS, OutOfTurn, RecordType
from pedigree.data.chat.tools import arguments_in, calls_in, is_there
from pedigree.data.chat.turns import in_turn, messages_from, refuse_more_than_messages
from pedigree.data.records.messages import CALL, MARKED, divided, message_problem, text_and_calls
from pedigree.data.records.records import Answer, Message
from pedigree.data.sources import dialogues
from pedigree.data.sources.dialogues import is_transcript, messages_of
from pedigree.data.sources.examples import Example
from pedigree.data.sources.row_files import Unreadable, text_of
from pedigree.data.sources.verifiable import named, stated, verifier_of

BEGINNINGS = ("messages", "conversations", "prompt", "conversation", "context_messages")
"""Columns with a conversation or its beginning; the first that exists is used."""
LIST = re.compile(r"\s*\[\s*[]{]")
"""The beginning of a list of objects, or an empty list, as text."""
LABELS: Mapping[Any, float] = {True: 1.0, False: 0.0, "true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0}
"""Label of a single answer → score; 1 and 0 equal the first two."""
BESIDE = {"system": "system", "system_prompt": "system", "history": None}
"""Columns with a part of the conversation → the layout column that reads them."""
IN_TURN = OutOfTurn()
"""All faults are refused."""
OTHER_ANSWERS = {"chosen", "rejected", "response1", "response2", "responses", "answers"}
"""Columns of layouts with text-only answers."""


def unfolded(place: str, row: Any, record: RecordType) -> list[tuple[str, Any]]:
    """(place, row) of each example in a row; only a tree of conversations has several."""
    if not dialogues.is_tree(row):
        return [(place, row)]
    try:
        parts = list(dialogues.comparisons(row) if record == "preference" else dialogues.conversations(row))
    except ValueError as error:
        return [(place, Unreadable(text_of(row), str(error)))]
    if not parts:
        lacks = "two answers with ranks to one turn" if record == "preference" else "an answer"
        return [(place, Unreadable(text_of(row), f"the tree of conversations lacks {lacks}"))]
    return [(f"{place}/{number}", part) for number, part in enumerate(parts)]


def example_of(row: Any, verifier: str | None = None, rules: OutOfTurn = IN_TURN, record: RecordType | None = None) -> Example:
    """Parse a row in one of the common layouts; other columns are ignored.

        messages [, verifier]                               chat; the last turn is the user's or the assistant's
        messages | prompt, dataset, ground_truth            RLVR prompt, see `data/sources/verifiable.py`; the ground truth may also be in
                                                            `reward_model` (verl), or [{value}, {ground_truth}] (Open-Reasoner-Zero)
        prompt, completion | response                       chat and its last turn
        instruction [, input], output                       Alpaca; `instruction` and `input` are a prompt in every layout
        instruction [, context], response                   Dolly
        conversations [, chosen, rejected]                  ShareGPT (`from`, `value`)
        [messages | prompt,] chosen, rejected               pair: answers, or whole chats with the same beginning
        chosen, rejected                                    pair of transcripts, see `data/sources/dialogues.py`
        context, response1, response2, overall_preference   pair; a preference below 0 prefers the first (HelpSteer3)
        messages | prompt, answers                          ranked answers: texts, best first, or {text, score} in any order
        messages | prompt, responses, rewards               scored answers in two lists (RLHFlow)
        prompt, answers                                     transcript and ranked answers {answer, rank}, 1 is best (Nectar)
        messages | prompt, tool_calls                       chat whose last turn calls tools (xLAM's `query` and `answers`)

    `conversation` and `context_messages` are other names for `messages`; `system` is a system turn before them. A list of messages may be
    stored as JSON text; a `completion` or `response` only next to a beginning that is, because an assistant may write JSON.
    A truncated sample has `finish_reason: length` in the assistant's turn, in an element of `answers`, or in the row if it has one answer;
    a pair has `finish_reason_chosen` and `finish_reason_rejected`. An element of `answers` may have a `win_rate`.
    Rows that their own dataset disowns are rejected: `problem_is_valid` or `solution_is_valid` other than yes, and `question_type: proof`
    with a ground truth (NuminaMath).
    A single answer may have a `label` (good: true or 1, bad: false or 0) or a numeric `score`; a pair may have `score_chosen` and
    `score_rejected`, and a `strength`, the probability that chosen is better. See `data/chat/turns.py` for fields of turns. Every row may
    have `template_arguments` or `chat_template_kwargs`, a mapping or its JSON text, and the `tools` or `functions` that it offers.

    `verifier` compares answers with the ground truth, overriding the row; `rules` apply to turns out of order, `record` is the type that
    the row becomes. Raises ValueError, one sentence, if the row cannot be read, or has missing, empty or wrong-role messages, and Dropped
    as `in_turn`.
    """
    if isinstance(row, Unreadable):
        raise ValueError(row.reason)
    try:
        met: set[str] = set()
        example = _parse(row, verifier, lambda messages: in_turn(messages, rules, record == "conversation", met))
        if record == "preference" and len(example.answers) == 1 and example.answers[0]["score"] is None:
            _refuse_unclear(row)
        messages = in_turn(_after_system(row, example.messages), rules, is_whole=False, met=met)
        faults = frozenset(met)
        return _checked(replace(example, messages=messages, template_arguments=arguments_in(row), out_of_turn=faults), rules.kept)
    except OverflowError as error:  # an integer too large for a float
        raise ValueError(str(error)) from error


def refuse_beside(row: Any) -> None:
    """Raise ValueError for a row with a part of its conversation in a column that is read only where `columns` lists it."""
    for name, column in BESIDE.items() if isinstance(row, dict) else ():
        if not is_there(row.get(name)):
            continue
        if column is None:
            raise ValueError(f"the row has {name}, which is not read: write its turns into messages, or leave it out by `columns`")
        listed = ", ".join(f"{one}: {one}" for one in row if one in LAYOUT_COLUMNS and one != name)
        raise ValueError(
            f"the row has {name}, which becomes a turn only if listed: write `columns: {{{column}: {name}, {listed}}}` in the source, or "
            f"the same without {column}"
        )


def _after_system(row: Any, messages: list[Message]) -> list[Message]:
    """The messages after the row's column `system`, if any."""
    given = row.get("system") if isinstance(row, dict) else None
    if not is_there(given):
        return messages
    if not isinstance(given, str):
        raise ValueError(f"system is a {type(given).__name__}, not a text")
    turn: Message = {"role": "system", "content": given}
    if messages[:1] == [turn]:
        return messages
    if any(message["role"] == "system" for message in messages):
        raise ValueError("the row has a column system and another system turn: leave one of them out")
    return [turn, *messages]


def with_hints(example: Example, row: Any) -> Example:
    """The example with the row's column `hints`, a text or a list of texts, as an argument of its verifier, if it has both."""
    hints = row.get("hints") if isinstance(row, dict) else None
    if example.verifier is None or not is_there(hints):
        return example
    return replace(example, verifier={**example.verifier, "hints": [hints] if isinstance(hints, str) else hints})


def _refuse_unclear(row: Any) -> None:
    """Raise ValueError for a single answer's label that is neither true nor false, or for a score that is not a finite number."""
    for name, meant in (("label", "neither true (a good answer) nor false (a bad one)"), ("score", "no finite number")):
        if is_there(row.get(name)):
            raise ValueError(f"{name} {row[name]!r:.80} is {meant}")


def _labelled(label: Any) -> float | None:
    """The score of a label, also where it is written as 1 or 0, or as text."""
    label = label.strip().lower() if isinstance(label, str) else label
    return LABELS.get(label) if isinstance(label, (bool, int, float, str)) else None


def _parse(row: Any, verifier: str | None, ordered: Callable[[list[Message]], list[Message]]) -> Example:
    row = _named(row)
    if not isinstance(row, dict):
        is_list = isinstance(row, list) and any(isinstance(one, dict) and set(LAYOUT_COLUMNS) & one.keys() for one in row)
        remedy = ": a list of rows is a file of its own, named .json" if is_list else ""
        raise ValueError(f"the row is not an object with named fields{remedy}")
    refuse_more_than_messages(row)
    if verifier is not None:
        row = {"ground_truth": None, **row, "dataset": None}
    columns = [row[column] for column in ("dataset", "ground_truth") if column in row]
    verifiable = len(columns) == 2 and (verifier is not None or any(value is not None for value in columns))
    row = {name: value for name, value in row.items() if value is not None}
    _refuse_disowned(row, verifiable)
    own = row["source"] if isinstance(row.get("source"), str) else None
    calls = "tool_calls" in row and is_there(row["tool_calls"])
    if calls and (others := (OTHER_ANSWERS | ({"output"} if "instruction" in row else set())) & set(row)):
        raise ValueError(f"the row has tool_calls and {', '.join(sorted(others))}, and one of them alone can be the answer")
    if {"response1", "response2"} <= set(row):
        row = _compared(row)
    if {"responses", "rewards"} <= set(row):
        row = {**row, "answers": _rewarded(row["responses"], row["rewards"])}
    if {"chosen", "rejected"} & set(row):
        return _pair(row, own)
    if "answers" in row:
        return _by_rank(row, own) if _has_ranks(row["answers"]) else Example(_turns(row), _ranked(row["answers"]), source=own)
    if "instruction" in row and not calls:
        columns = ("output",) if set(BEGINNINGS) & set(row) else ("output", "completion", "response")
        answers = tuple(_single(row[column], row) for column in columns if column in row)[:1]
        return Example([{"role": "user", "content": instruction(row)}], answers, _verifier_in(row, verifier, verifiable), source=own)
    messages = _turns(row)
    row["verifier"] = _verifier_in(row, verifier, verifiable)
    for column in ("completion", "response"):
        if column in row:
            as_text = isinstance(_beginning(row)[1], str) and not isinstance(_stored(_beginning(row)[1]), str)
            messages = [*messages, *_chat(_stored(row[column]) if as_text else row[column])]
            break
    if calls:
        messages = [*messages, *calls_in(row["tool_calls"], "tool_calls")]
    messages = ordered(messages)
    if messages and messages[-1]["role"] in MARKED:
        return _answered(messages, row, own)
    return Example(messages, verifier=row["verifier"], source=own)


def instruction(row: dict[str, Any]) -> str:
    """The text of a prompt in Alpaca's columns, or in Dolly's, whose `context` is Alpaca's `input`."""
    more = "context" if "response" in row and not {"input", "output"} & set(row) else "input"
    parts = [part for part in (row["instruction"], row.get(more)) if part]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f"instruction and {more} are not both texts")
    return "\n\n".join(parts)


def _verifier_in(row: dict[str, Any], verifier: str | None, verifiable: bool) -> dict[str, Any] | None:
    """The verifier of a row, by its ground truth if it is `verifiable`."""
    if verifiable:
        truth = row.get("ground_truth")
        return verifier_of(row.get("dataset"), truth) if verifier is None else named(verifier, truth)
    return stated(row["verifier"]) if "verifier" in row else None


def _answered(messages: list[Message], row: dict[str, Any], own: str | None) -> Example:
    """A conversation whose last turn is an answer, calls, or both."""
    before, turn = divided(messages)
    text, calls = text_and_calls(turn)
    row = {"finish_reason": turn[-1]["finish_reason"], **row} if "finish_reason" in turn[-1] else row
    return Example(before, (_single(text, row),), verifier=row["verifier"], source=own, train=turn[0].get("train"), calls=calls)


def _named(row: Any) -> Any:
    """Unnest question and ground truth into separate columns."""
    match row:
        case {"reward_model": {"ground_truth": truth}} if row.get("ground_truth") is None:
            return {**row, "ground_truth": truth}
        case [{"value": question}, {"ground_truth": {"value": truth}}]:
            return {"prompt": question, "ground_truth": truth}
        case _:
            return row


def _refuse_disowned(row: dict[str, Any], verifiable: bool) -> None:
    """Raise ValueError for a row that its own dataset marks as unusable, as NuminaMath does."""
    for column in ("problem_is_valid", "solution_is_valid"):
        if column in row and str(row[column]).lower() not in ("yes", "true"):
            raise ValueError(f"{column} is {row[column]!r:.80}: the set itself does not vouch for this row")
    if verifiable and str(row.get("question_type")).lower() == "proof":
        raise ValueError(f"question_type is {row['question_type']!r:.80}: no answer shows whether a proof is right")


def _single(text: str, row: dict[str, Any]) -> Answer:
    """One answer with the row's label, or else its score, if any."""
    score = _labelled(row.get("label"))
    return _answer(text, _number(row.get("score")) if score is None else score, row.get("finish_reason"))


def _answer(text: str, score: float | None, finish_reason: Any = None, win_rate: Any = None) -> Answer:
    """An answer; finish reasons other than `length` (`tool_calls`, `eos`) are dropped."""
    answer: Answer = {"text": text, "score": score}
    if finish_reason == "length":
        answer["finish_reason"] = "length"
    if win_rate is not None:
        answer["win_rate"] = win_rate
    return answer


def _ranked(given: Any) -> tuple[Answer, ...]:
    """Answers, best first: texts in the given order, scored answers by score (stable for ties)."""
    if not isinstance(given, list) or not given:
        raise ValueError("answers is no list with something in it")
    if all(isinstance(one, str) for one in given):
        return tuple({"text": one, "score": None} for one in given)
    if not all(isinstance(one, dict) and {"text", "score"} <= set(one) and _number(one["score"]) is not None for one in given):
        raise ValueError("answers are neither texts, the best first, nor {text, score} with a finite score each")
    best_first = sorted(given, key=lambda one: float(one["score"]), reverse=True)
    return tuple(_answer(one["text"], float(one["score"]), one.get("finish_reason"), one.get("win_rate")) for one in best_first)


def _rewarded(responses: Any, rewards: Any) -> list[dict[str, Any]]:
    if not isinstance(responses, list) or not isinstance(rewards, list) or len(responses) != len(rewards):
        raise ValueError("responses and rewards are not lists of one length")
    return [{"text": text, "score": score} for text, score in zip(responses, rewards, strict=True)]


def _has_ranks(given: Any) -> bool:
    return isinstance(given, list) and any(isinstance(one, dict) and "rank" in one for one in given)


def _by_rank(row: dict[str, Any], own: str | None) -> Example:
    """Answers with ranks (1 is best) to a prompt that may be a transcript. Ranks do not become scores."""
    given = row["answers"]
    if not all(isinstance(one, dict) and "answer" in one and _number(one.get("rank")) is not None for one in given):
        raise ValueError("answers with ranks are not {answer, rank} with a number each")
    best_first = sorted(given, key=lambda one: float(one["rank"]))
    for one, after in pairwise(best_first):
        if one["rank"] == after["rank"]:
            raise ValueError(f"two answers have the rank {one['rank']:g}, so that neither is the better one")
    prompt = row.get("prompt")
    messages = _turns({"messages": messages_of(prompt)} if isinstance(prompt, str) and is_transcript(prompt) else row)
    if messages and messages[-1]["role"] == "assistant" and messages[-1]["content"] == "":
        messages = messages[:-1]  # "Assistant:", after which the answer comes
    return Example(messages, tuple(_answer(one["answer"], None) for one in best_first), source=own)


def _compared(row: dict[str, Any]) -> dict[str, Any]:
    """Convert two responses and a signed preference to chosen and rejected."""
    number = _number(row.get("overall_preference"))
    if number is None:
        raise ValueError(f"overall_preference {row.get('overall_preference')!r} is no number, which is below 0 where response1 is better")
    if number == 0:
        raise ValueError("overall_preference is 0: neither response is the better one")
    better, worse = ("response1", "response2") if number < 0 else ("response2", "response1")
    rest = {name: value for name, value in row.items() if name not in BEGINNINGS}
    before = _turns({"prompt": row["context"]} if "context" in row else {})
    return {**rest, "messages": before, "chosen": row[better], "rejected": row[worse]}


def _number(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    return float(value) if isinstance(value, (int, float, Decimal)) and not isinstance(value, bool) and math.isfinite(value) else None


def _pair(row: dict[str, Any], own: str | None) -> Example:
    """Chosen and rejected: answers to a given beginning, or two whole chats with the same beginning."""
    if not {"chosen", "rejected"} <= set(row):
        raise ValueError("only one of chosen and rejected is there")
    row = {**row, **{side: _stored(row[side]) for side in ("chosen", "rejected")}}
    before = _turns(row) if set(BEGINNINGS) & set(row) else None
    whole = before is None and is_transcript(row["chosen"]) and is_transcript(row["rejected"])
    chosen, rejected = ((messages_of if whole else _chat)(row[side]) for side in ("chosen", "rejected"))
    if before is None and "instruction" in row and chosen and chosen[0]["role"] in MARKED:
        before = _turns(row)
    if len(chosen) > 1 or len(rejected) > 1:
        if chosen[:-1] != rejected[:-1]:
            raise ValueError("chosen and rejected do not answer the same beginning")
        if chosen[0]["role"] in MARKED:
            before = [*(before or ()), *chosen[:-1]]
        else:
            column, given = _beginning(row) if before else ("", "")
            if column == "prompt" and not isinstance(_stored(given), str) and before != chosen[:-1]:
                raise ValueError(
                    "prompt is not the beginning of chosen and rejected: correct it, or leave it out by `columns` of the source"
                )
            before = chosen[:-1]
    if before is None:
        raise ValueError("there is no prompt: neither messages, prompt, instruction nor conversations")
    for side, turns in (("chosen", chosen), ("rejected", rejected)):
        if turns and turns[-1]["role"] == CALL:
            raise ValueError(f"{side} ends with a call, and answers that are compared are texts")
        if not turns or turns[-1]["role"] != "assistant":
            raise ValueError(f"{side} does not end with the assistant's turn")
    high, low = (_number(row.get(f"score_{side}")) for side in ("chosen", "rejected"))
    if high is None or low is None:
        high = low = None
    elif high < low:
        raise ValueError(f"chosen has the score {high}, below rejected's {low}")
    strength = _number(row.get("strength"))
    if "strength" in row and (strength is None or not 0 <= strength <= 1):
        raise ValueError(f"strength {row['strength']!r} is no probability: 0 to 1 is meant")
    better, worse = (
        _answer(turns[-1]["content"], score, row.get(f"finish_reason_{side}") or turns[-1].get("finish_reason"))
        for side, turns, score in (("chosen", chosen, high), ("rejected", rejected, low))
    )
    return Example(before, (better, worse), source=own, strength=strength)


def _turns(row: dict[str, Any]) -> list[Message]:
    column, given = _beginning(row)
    given = _stored(given)
    if not isinstance(given, str):
        return _chat(given)
    if column != "prompt" and (LIST.match(given) or isinstance(_decoded(given), (dict, list, str))):
        raise ValueError(f"{column} is a text that begins as a list of messages, and is not one as JSON: store a list, or its JSON text")
    return [{"role": "user", "content": given}]


def _beginning(row: dict[str, Any]) -> tuple[str, Any]:
    """(column with the conversation or its beginning, its value)."""
    for column in BEGINNINGS:
        if column in row:
            return column, row[column]
    if "instruction" in row:
        return "prompt", instruction(row)
    raise ValueError("there are no messages")


def _stored(given: Any) -> Any:
    """The list of messages in a JSON text; anything else is returned as it is."""
    if not isinstance(given, str) or not LIST.match(given):
        return given
    turns = _decoded(given)
    are_messages = turns and all(isinstance(turn, dict) and {"role", "from"} & turn.keys() for turn in turns)
    return turns if are_messages else given


def _decoded(text: str) -> Any:
    """The value of a JSON text, None for other texts."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _chat(given: Any) -> list[Message]:
    """Convert a list of messages, one ShareGPT message, or one answer's text to messages."""
    if isinstance(given, str):
        return [{"role": "assistant", "content": given}]
    return messages_from(given if isinstance(given, list) else [given])


def _checked(example: Example, kept: Collection[str]) -> Example:
    if kept and example.answers:  # which may follow another turn than the user's
        problem = message_problem([*example.messages, {"role": "assistant", "content": "."}], "assistant", kept)
    else:
        problem = message_problem(example.messages, "user", kept)
    if example.train is not None and not isinstance(example.train, bool):
        problem = f"the last turn has train {example.train!r}: true or false is meant"
    if not _is_json(example.verifier):
        problem = "the verifier holds something that JSON has no form for"
    if example.answers and not example.messages:
        problem = "there is no turn of the user"
    if problem:
        raise ValueError(problem)
    for number, answer in enumerate(example.answers):
        text, which = answer["text"], ("answer", "rejected answer")[number] if number < 2 else f"answer {number}"
        if text is not None and not isinstance(text, str):
            raise ValueError(f"the {which} is a {type(text).__name__}, not a text")
        if text is None or not (text.strip() or example.calls):
            raise ValueError(f"the {which} is empty")
    return example


def _is_json(value: Any) -> bool:
    """Whether a value is strict JSON; Parquet may hold dates and bytes, and Python's JSON allows NaN."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
