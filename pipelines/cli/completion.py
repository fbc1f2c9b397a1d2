"""Shell completion. For speed, it reads file names and a few lines of text but parses no YAML and loads no recipe."""

import re
from pathlib import Path

from typer import Context

PACKAGED = Path(__file__).absolute().parents[2]
STAGE = re.compile(r"^  ([a-z][a-z0-9_]*):", re.MULTILINE)


def recipes(incomplete: str) -> list[str]:
    return _stems("recipes", incomplete) + (variants(incomplete) if "+" in incomplete else [])


def profiles(incomplete: str) -> list[str]:
    return sorted({*_stems("execution", incomplete), *_stems("execution", incomplete, PACKAGED)})


def packaged(incomplete: str) -> list[str]:
    """Complete the recipes that Pedigree ships."""
    return _stems("recipes", incomplete, PACKAGED)


def stages(context: Context, incomplete: str) -> list[str]:
    """Complete stages of the recipe given earlier on the command line."""
    before = [word for word in context.args if not word.startswith("-")]  # params lacks the recipe while an option still needs its value
    root, recipe = _root(), str(context.params.get("recipe") or next(iter(before), ""))
    return sorted(name for name in _stages(root, recipe) if name.startswith(incomplete)) if root and recipe else []


def artifacts(incomplete: str) -> list[str]:
    """Complete `RECIPE/STAGE` of existing artifacts."""
    root = _root()
    records = (root / "artifacts").glob("*/*/record.json") if root else ()
    names = ("/".join(path.parts[-3:-1]) for path in records)
    return sorted(name for name in names if name.startswith(incomplete))


def variants(incomplete: str) -> list[str]:
    root = _root()
    names = (path.parent.name for path in (root / "artifacts").glob("*+*/source.json")) if root else ()
    return sorted(name for name in names if name.startswith(incomplete))


def _root() -> Path | None:
    here = Path.cwd()
    return next((folder for folder in (here, *here.parents) if (folder / "configs" / "recipes").is_dir()), None)


def _stems(folder: str, incomplete: str, root: Path | None = None) -> list[str]:
    root = root or _root()
    names = (path.stem for path in (root / "configs" / folder).glob("*.yaml")) if root else ()
    return sorted(name for name in names if name.startswith(incomplete))


def _stages(root: Path, recipe: str) -> set[str]:
    """Return the compiled recipe's stages if it was compiled, else those in the recipe file, where rounds are not unrolled."""
    compiled = root / "artifacts" / recipe / "params.yaml"
    try:
        if compiled.is_file():
            return set(re.findall(r"^([a-z][a-z0-9_]*):", compiled.read_text(), re.MULTILINE))
        return set(STAGE.findall((root / "configs" / "recipes" / f"{recipe}.yaml").read_text().partition("\nstages:")[2]))
    except (OSError, UnicodeDecodeError):
        return set()
