"""Verifiers of RLVR datasets, from `dataset` and `ground_truth`.

open-instruct's datasets name the verifier in `dataset`, in upper or lower case, with its arguments in `ground_truth`:

    gsm8k, math, strict_math     the answer as text or number, or a list of one; for GSM8K also the solution with the answer after ####
    ifeval, ifeval_old           {"func_name": ..., arguments, null if unused} as JSON; or
    ifeval                       a list of one {"instruction_id": [...], "kwargs": [...]} as a Python literal or JSON, encoded once or twice
    code                         a list of tests such as "assert f(1) == 2", encoded or not
    code_stdio                   a list of {"input": ..., "output": ...}, encoded or not; also {"inputs": [...], "outputs": [...]}; each a
                                 text, a number, or a list of lines

For ifeval's list, the reward is the share of instructions followed. `gsm8k` becomes `gsm`, which reads numbers whole. Several verifiers and
as many ground truths become `several`, which gives the mean of their scores: open-instruct adds them.
"""

import ast
import builtins
import json
from collections.abc import Mapping
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

import numpy as np

from pedigree.data.records.decimals import as_written

NAMES = {
    "gsm8k": "gsm", "math": "math", "strict_math": "strict_math", "ifeval": "ifeval", "ifeval_old": "ifeval", "code": "python",
    "code_stdio": "python",
}  # fmt: skip
"""Name in rows → verifier, or the family of two."""
NO_ANSWERS = ("proof", "notfound", "nan")
"""Placeholders for missing answers: NuminaMath's, and that of a column of texts in pandas."""
DEEPEST = 3
"""Maximum levels of nested encoding."""


def verifier_of(dataset: Any, ground_truth: Any) -> dict[str, Any]:
    """The verifier of a row. Raises ValueError if one is unknown, or a ground truth does not fit it."""
    if isinstance(dataset, list) and len(dataset) > 1:
        if not isinstance(ground_truth, list) or len(ground_truth) != len(dataset):
            found = len(ground_truth) if isinstance(ground_truth, list) else 1
            all_names = ", ".join(map(str, dataset))
            raise ValueError(
                f"dataset names several verifiers ({all_names:.80}), and ground_truth has {found} values: one for each is meant"
            )
        parts = [verifier_of(name, truth) for name, truth in zip(dataset, ground_truth, strict=True)]
        return {"name": "several", "verifiers": parts, "score": "share"}
    name = _single(dataset, "dataset")
    if not isinstance(name, str):
        raise ValueError(f"dataset {name!r} is no verifier's name")
    if name.lower() not in NAMES:
        raise ValueError(f"dataset {name!r} is none of the verifiers {', '.join(NAMES)}")
    return named(NAMES[name.lower()], ground_truth)


def named(name: str, truth: Any) -> dict[str, Any]:
    """The verifier of this name, with a ground truth. Raises ValueError if it does not fit."""
    if name == "python":
        return _program(truth)
    if name == "facts":
        found = _decoded(truth)
        if not isinstance(found, dict):
            return {"name": name, "answer": truth}
        if found.get("name") not in (None, name):
            raise ValueError(f"ground_truth has a fact called name ({found['name']!r:.80}), which is the verifier's: call it otherwise")
        return {**found, "name": name}
    if name == "exact_match" and isinstance(truth, list):
        return {"name": name, "answer": [_answer(name, one) for one in truth]}
    truth = _single(truth, "ground_truth")
    return _constraint(_single(_decoded(truth), "ground_truth")) if name == "ifeval" else {"name": name, "answer": _answer(name, truth)}


def stated(verifier: Any) -> Any:
    """A row's own verifier, encoded or not. Tables fill fields of other rows with null, and hold whole numbers as floats; a right answer
    may be a number too."""
    given = _used(_decoded(verifier))
    if not isinstance(given, dict):
        return given
    if isinstance(given.get("verifiers"), list):
        given["verifiers"] = list(map(stated, given["verifiers"]))
    if given.get("name") != "choice" and _written(given.get("answer")) is not None:
        given["answer"] = _written(given["answer"])
    return given


def _answer(name: str, truth: Any) -> str:
    text = _written(truth)
    if name in ("gsm", "gsm8k") and text is not None:
        text = text.rpartition("####")[2]
    if text is None or not text.strip() or text.strip().lower() in NO_ANSWERS:
        raise ValueError(f"ground_truth {truth!r:.80} is no answer, which {name} compares with")
    return text.strip()


def _written(value: Any) -> str | None:
    """A text, or a number as people write it: 42 for 42.0, all digits instead of an exponent; None for anything else."""
    if isinstance(value, str) or value is None or isinstance(value, (bool, np.bool_)):
        return value if isinstance(value, str) else None
    if isinstance(value, Integral):
        return str(int(value))
    if not isinstance(value, (Real, Decimal)) or not np.isfinite(float(value)):
        return None
    text = format(as_written(value), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _program(truth: Any) -> dict[str, Any]:
    """Tests of a function, or examples of what a program prints."""
    given = _listed(truth)
    if given and all(isinstance(one, Mapping) and {"input", "output"} <= set(one) for one in given):
        return {"name": "python", "examples": [{name: _lines(name, one[name]) for name in ("input", "output")} for one in given]}
    if not given or not all(isinstance(one, str) for one in given):
        raise ValueError(f"ground_truth {truth!r:.80} is no list of tests: neither 'assert f(1) == 2' nor {{input, output}}")
    tests = "\n".join(given) + "\n"
    return {"name": "python", "before": "", "tests": tests, "entry": _tested(tests)}


def _lines(name: str, value: Any) -> str:
    text = "\n".join(value) if isinstance(value, list) and all(isinstance(one, str) for one in value) else _written(value)
    if text is None:
        raise ValueError(f"{name} {value!r:.80} of an example is not text")
    return text


def _listed(truth: Any) -> list[Any]:
    """Tests or examples as a list, one alone, or two lists of inputs and outputs."""
    given = _decoded(truth)
    if isinstance(given, Mapping) and {"inputs", "outputs"} <= set(given) and not given.get("fn_name"):
        inputs, outputs = given["inputs"], given["outputs"]
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError("inputs and outputs are not lists of one length")
        return [{"input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)]
    return given if isinstance(given, list) else [given]


def _tested(tests: str) -> str:
    """The function that tests call."""
    try:
        nodes = list(ast.walk(ast.parse(tests)))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"the tests {tests[:80]!r} are not valid Python") from None
    if not any(isinstance(node, ast.Assert) for node in nodes):
        raise ValueError(f"the tests {tests[:80]!r} assert nothing, so every program would pass")
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler) and node.name}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    called = sorted(used - bound - set(dir(builtins)))
    if len(called) != 1 or called[0][0].isupper():
        raise ValueError(
            f"the tests use {', '.join(called) or 'nothing of the program'}: tests of one function are understood, and no class"
        )
    return called[0]


def _single(value: Any, column: str) -> Any:
    """The value, or the only element of a list."""
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        raise ValueError(f"{column} has {len(value)} values: rows with one verifier are understood")
    return value[0]


def _decoded(value: Any) -> Any:
    """Decode JSON or a Python literal, repeatedly if nested; any other text stays as it is."""
    for _ in range(DEEPEST):
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        if not isinstance(value, str):
            break
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            try:
                value = ast.literal_eval(value)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                break
    return value


def _constraint(given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        raise ValueError(f"ground_truth {given[:80]!r} is neither JSON nor a Python literal")
    if isinstance(given, Mapping) and "func_name" in given:
        if not isinstance(given["func_name"], str):
            raise ValueError(f"func_name {given['func_name']!r:.80} is not text")
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
            raise ValueError(f"the id {name!r:.80} of an instruction is not text")
        if given is not None and not isinstance(given, Mapping):
            raise ValueError(f"the arguments {given!r:.80} of instruction {name} are no mapping")
    return [{"id": name, **_used(given or {})} for name, given in zip(ids, arguments, strict=True)]


def _used(value: Any) -> Any:
    """A value without fields that are null, and with whole floats as integers. Raises ValueError if a name is not a string, which Python
    literals allow."""
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise ValueError(f"argument {name!r:.80} has no text for a name")
        return {name: _used(one) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        return list(map(_used, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value
