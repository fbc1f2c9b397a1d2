"""Rows of RLVR data sets: which verifier `dataset` and `ground_truth` mean.

open-instruct's sets name the verifier in `dataset`, in either case, and say in `ground_truth` what it needs:

    gsm8k, math, strict_math     the answer, as a text or a whole number, or a list of one; of GSM8K also the working with it after ####
    ifeval, ifeval_old           {"func_name": ..., arguments, null where unused} as JSON; or
    ifeval                       a list of one {"instruction_id": [...], "kwargs": [...]} as a Python literal or JSON, once or twice encoded

Of the latter the reward is the share of the instructions that are followed.
"""

import ast
import json
from collections.abc import Mapping
from typing import Any

ANSWERS = ("gsm8k", "math", "strict_math")
CONSTRAINTS = ("ifeval", "ifeval_old")
NO_ANSWERS = ("proof", "notfound")
"""What NuminaMath has in the place of answers that it lacks."""
DEEPEST = 3
"""Encodings of texts within texts that are undone."""


def verifier_of(dataset: Any, ground_truth: Any) -> dict[str, Any]:
    """The verifier of a row.

    Raises:
        ValueError: there is none of that name, several are named, or the ground truth is not what it needs.
    """
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
    """The value, or the only one of a list."""
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        raise ValueError(f"{column} has {len(value)} values: rows with one verifier are understood")
    return value[0]


def _decoded(value: Any) -> Any:
    """What a text says as JSON or as a Python literal, as often as it is encoded."""
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
    """IFEval's instructions: ids, and of each the arguments, null or absent where unused.

    Raises:
        ValueError: these are no lists of one length, an id is no text, or arguments are neither a mapping nor None.
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
    """Those that have a value.

    Raises:
        ValueError: one has no text for a name, which Python literals allow.
    """
    for name in arguments:
        if not isinstance(name, str):
            raise ValueError(f"argument {name!r:.80} has no text for a name")
    return {name: value for name, value in arguments.items() if value is not None}
