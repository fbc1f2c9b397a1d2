"""Python files of the project that a config names, with a function in each."""

import ast
import keyword
import sys
from collections.abc import Collection, Iterator
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


def problem_of_program(root: Path, name: str, function: str) -> str | None:
    """Why the file `name` of the project at `root` cannot have a function, or imports other files of the project, without running it."""
    try:
        text = (root / name).read_bytes()
        tree = ast.parse(text, name)
        code = compile(tree, name, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError) as error:
        return f"{name} is not Python: {error}"
    for module in _imported(tree):
        if module.startswith(".") or _is_in(root, module) or _is_in((root / name).parent, module):
            return f"{name} imports {module} from the project, but is hashed and given to jobs alone: copy what it needs into {name}"
    lacks = function not in code.co_names and b"import *" not in text
    return f"{name} has no function {function}: define it, or set `function`" if lacks else None


def _imported(tree: ast.AST) -> Iterator[str]:
    """Modules that a file imports; `from a import b` counts as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            before = "." * node.level + (f"{node.module}." if node.module else "")
            yield from (before + alias.name for alias in node.names)


def _is_in(folder: Path, module: str) -> bool:
    """Whether a module is a file below a folder, and not of Python's standard library."""
    parts = module.split(".")
    places = [folder.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)] if parts[0] not in sys.stdlib_module_names else []
    return any(place.with_name(f"{place.name}.py").is_file() or (place / "__init__.py").is_file() for place in places)
