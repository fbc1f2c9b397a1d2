"""Verifiers of RLVR datasets, from `dataset` and `ground_truth`.

open-instruct's datasets name the verifier in `dataset`, in upper or lower case, with its arguments in `ground_truth`:

    gsm8k, math, strict_math     the answer as text or integer, or a list of one; for GSM8K also the solution with the answer after ####
    ifeval, ifeval_old           {"func_name": ..., arguments, null if unused} as JSON; or
    ifeval                       a list of one {"instruction_id": [...], "kwargs": [...]} as a Python literal or JSON, encoded once or twice

For the latter, the reward is the share of instructions followed.
"""

import ast
import json
from collections.abc import Mapping
from typing import Any

ANSWERS = ("gsm8k", "math", "strict_math")
CONSTRAINTS = ("ifeval", "ifeval_old")
NO_ANSWERS = ("proof", "notfound")
"""NuminaMath's placeholders for missing answers."""
DEEPEST = 3
"""Maximum levels of nested encoding."""


def verifier_of(dataset: Any, ground_truth: Any) -> dict[str, Any]:
    """The verifier of a row. Raises ValueError if it is unknown, several are named, or the ground truth does not fit it."""
    if isinstance(dataset, list) and len(dataset) > 1:
        raise ValueError(f"dataset names several verifiers ({', '.join(map(str, dataset)):.80}): rows with one verifier are understood")
    name = _single(dataset, "dataset")
    if not isinstance(name, str):
        raise ValueError(f"dataset {name!r} is no verifier's name")
    truth = _single(ground_truth, "ground_truth")
    match name.lower():
        case name if name in ANSWERS:
            return {"name": name, "answer": _answer(name, truth)}
        case name if name in CONSTRAINTS:
            return _constraint(_single(_decoded(truth), "ground_truth"))
        case name:
            raise ValueError(f"dataset {name!r} is none of the verifiers {', '.join((*ANSWERS, *CONSTRAINTS))}")


def _answer(name: str, truth: Any) -> str:
    text = str(truth) if isinstance(truth, int) and not isinstance(truth, bool) else truth
    if name == "gsm8k" and isinstance(text, str):
        text = text.rpartition("####")[2]
    if not isinstance(text, str) or not text.strip() or text.strip().lower() in NO_ANSWERS:
        raise ValueError(f"ground_truth {truth!r:.80} is no answer, which {name} compares with")
    return text.strip()


def _single(value: Any, column: str) -> Any:
    """The value, or the only element of a list."""
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        raise ValueError(f"{column} has {len(value)} values: rows with one verifier are understood")
    return value[0]


def _decoded(value: Any) -> Any:
    """Decode JSON or a Python literal, repeatedly if nested."""
    for _ in range(DEEPEST):
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        if not isinstance(value, str):
            return value
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            try:
                value = ast.literal_eval(value)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                raise ValueError(f"ground_truth {value[:80]!r} is neither JSON nor a Python literal") from None
    return value


def _constraint(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping) and "func_name" in given:
        if not isinstance(given["func_name"], str):
            raise ValueError(f"func_name {given['func_name']!r:.80} is no text")
        arguments = _used({name: value for name, value in given.items() if name != "func_name"})
        if isinstance(arguments.get("options"), str):
            arguments["options"] = [arguments["options"]]
        return {"name": "constraint", "function": given["func_name"], "arguments": arguments}
    if isinstance(given, Mapping) and {"instruction_id", "kwargs"} <= set(given):
        instructions = instructions_of(given["instruction_id"], given["kwargs"])
        return {"name": "ifeval", "instructions": instructions, "score": "share"}
    raise ValueError(f"ground_truth {given!r:.80} names neither a func_name nor an instruction_id with kwargs")


def instructions_of(ids: Any, arguments: Any) -> list[dict[str, Any]]:
    """IFEval's instructions from ids and their arguments, which are null or absent if unused.

    Raises ValueError if the lists differ in length, an id is not a string, or arguments are neither a mapping nor None.
    """
    if not isinstance(ids, list) or not isinstance(arguments, list) or len(ids) != len(arguments):
        raise ValueError("the ids of instructions and their arguments are not lists of one length")
    for name, given in zip(ids, arguments, strict=True):
        if not isinstance(name, str):
            raise ValueError(f"the id {name!r:.80} of an instruction is no text")
        if given is not None and not isinstance(given, Mapping):
            raise ValueError(f"the arguments {given!r:.80} of instruction {name} are no mapping")
    return [{"id": name, **_used(given or {})} for name, given in zip(ids, arguments, strict=True)]


def _used(arguments: Mapping[Any, Any]) -> dict[str, Any]:
    """Arguments that have a value. Raises ValueError if a name is not a string, which Python literals allow."""
    for name in arguments:
        if not isinstance(name, str):
            raise ValueError(f"argument {name!r:.80} has no text for a name")
    return {name: value for name, value in arguments.items() if value is not None}
