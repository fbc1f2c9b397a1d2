"""Print the subpackages of each package with their files, lines and imports of each other: `python -m docs.rooms`."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("configs", "data", "stages", "pipelines")


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it; `from a import b` counts as `a` and `a.b`."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (alias.name.removeprefix("pedigree.") for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                module = module.removeprefix("pedigree.")
                yield module
                yield from (f"{module}.{alias.name}" for alias in names)


def main() -> None:
    for package in PACKAGES:
        files, lines, arrows = Counter[str](), Counter[str](), defaultdict[str, set[str]](set)
        paths = {path: path.relative_to(ROOT / package).parts[0].removesuffix(".py") for path in (ROOT / package).rglob("*.py")}
        rooms = set(paths.values()) - {"__init__"}
        for path, room in paths.items():
            files[room] += 1
            lines[room] += path.read_text().count("\n")
            others = (name.split(".") for name in imports(path) if name.startswith(f"{package}."))
            arrows[room] |= {other[1] for other in others if other[1] in rooms - {room}}
        try:
            order = list(TopologicalSorter(arrows).static_order())
        except CycleError as error:
            order, circle = sorted(rooms), " <- ".join(error.args[1])
        else:
            circle = "none"
        count = sum(map(len, arrows.values()))
        print(f"\n{package}: {files.total()} files, {lines.total()} lines, {count} arrows, circles: {circle}")
        for room in order:
            if room in rooms:
                print(f"  {room:20} {files[room]:4} files {lines[room]:6} lines  imports {', '.join(sorted(arrows[room])) or '-'}")


if __name__ == "__main__":
    main()
