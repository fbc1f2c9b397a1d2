import ast
import importlib.util
import sys
from pathlib import Path

import pytest

from pedigree.data.contamination.compiled import compiled

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """
from pedigree.data.contamination.compiled import compiled

@compiled
def times(number):
    return {factor} * number
"""


def hits_and_misses(folder: Path, factor: int) -> tuple[int, int]:
    """Of a module from its own copy of the source."""
    folder.mkdir()
    (folder / "some.py").write_text(SOURCE.format(factor=factor))
    spec = importlib.util.spec_from_file_location(f"some_{folder.name}", folder / "some.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.times(3) == factor * 3
    return sum(module.times.stats.cache_hits.values()), sum(module.times.stats.cache_misses.values())


def test_machine_code_of_one_copy_of_a_source_serves_another_and_none_of_another_source(tmp_path, monkeypatch):
    monkeypatch.setenv("PEDIGREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert [hits_and_misses(tmp_path / name, factor) for name, factor in (("one", 2), ("two", 2), ("three", 4))] == [(0, 1), (1, 0), (0, 1)]
    assert not list(tmp_path.glob("*/__pycache__"))


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PEDIGREE_CACHE", str(tmp_path / "file"))

    def thrice(number):
        return 3 * number

    assert compiled(thrice)(5) == 15


def names_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def is_compiled(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and "compiled" in {name for one in node.decorator_list for name in names_in(one)}


def foreign_names(tree: ast.Module) -> set[str]:
    """What functions that are compiled read, by whatever way, of what a module imports."""
    imported = {
        alias.asname or alias.name: getattr(node, "module", alias.name)
        for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
    }  # fmt: skip
    ours = {name for name, module in imported.items() if module.split(".")[0] == "pedigree"}
    reads: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            reads[node.name] = {name for part in node.body for name in names_in(part)}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            reads |= dict.fromkeys((name for target in targets for name in names_in(target)), names_in(node.value))
    left, seen = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and is_compiled(node)], set()
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += reads.get(name, ())
    return seen & ours


KERNELS = [path for path in sorted((ROOT / "data").rglob("*.py")) if any(map(is_compiled, ast.parse(path.read_text()).body))]


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_machine_code_has_nothing_of_another_file_in_it(path):
    """It is kept by what its own file says: what it needs of others it must be given."""
    assert not foreign_names(ast.parse(path.read_text()))


def test_what_comes_from_another_file_by_a_constant_and_a_function_is_found():
    source = """
from pedigree.data.contamination.reading import WORDS
from pedigree.data.contamination.compiled import compiled
def longest(): return max(map(len, WORDS))
MOST = longest()
@compiled
def cut(text): return text[:MOST]
"""
    assert foreign_names(ast.parse(source)) == {"WORDS"} and KERNELS
