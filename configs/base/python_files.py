"""Python files of the project that a config names, with a function in each."""

import keyword
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from pedigree.configs.base.frozen import canonical_json
from pedigree.configs.base.paths import RelativePath


def _is_name(value: str) -> bool:
    return value.isidentifier() and not keyword.iskeyword(value)


def _python_file(value: str) -> str:
    if not value.endswith(".py"):
        raise ValueError(f"{value!r} is not a Python file: name a file that ends in .py")
    return value


def _function_name(value: str) -> str:
    if not _is_name(value):
        raise ValueError(f"{value!r} is not a function name")
    return value


PythonFile = Annotated[RelativePath, AfterValidator(_python_file)]
"""A `.py` file, relative to the project root."""
FunctionName = Annotated[str, AfterValidator(_function_name)]


def keyword_arguments(value: dict[str, Any], passed: Collection[str]) -> dict[str, Any]:
    """Validate additional keyword arguments of a function.

    Raises:
        ValueError: a name is not an identifier or one of those `passed` anyway, or a value is not JSON.
    """
    for name, given in value.items():
        if not _is_name(name) or name in passed:
            others = f"{', '.join([*passed][:-1])} and {[*passed][-1]}"
            raise ValueError(f"{name!r} is not a valid argument name: use an identifier other than {others}, which are passed anyway")
        try:
            canonical_json(given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {given!r} is not a JSON value ({error}): write it as a string or a number") from error
    return value


def problem_of_program(name: str, file: Path, function: str) -> str | None:
    """Why a file, called `name` by its recipe, cannot have a function, without running it; None if it may."""
    try:
        text = file.read_bytes()
        code = compile(text, name, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError) as error:
        return f"{name} is not Python: {error}"
    lacks = function not in code.co_names and b"import *" not in text
    return f"{name} has no function {function}: define it, or set `function`" if lacks else None
