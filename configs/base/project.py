"""Folder layout of a project; no other module knows it."""

from dataclasses import dataclass
from pathlib import Path

from pedigree.configs.base.problems import UsageProblem


@dataclass(frozen=True)
class Project:
    """A folder with recipes and artifacts: a clone, or a folder made by `pedigree init`.

    All paths are absolute; no property or method creates anything.
    """

    root: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(self.root).absolute())

    @classmethod
    def find(cls, start: Path | None = None) -> "Project":
        """The project that contains `start` (default: the working directory).

        Raises:
            UsageProblem: neither `start` nor a parent folder contains both `.dvc/` and `configs/recipes/`.
        """
        here = (start or Path.cwd()).resolve()
        for folder in (here, *here.parents):
            if (folder / ".dvc").is_dir() and (folder / "configs" / "recipes").is_dir():
                return cls(folder)
        raise UsageProblem(f"no Pedigree project at or above {here}: run the command inside one, or make one with `pedigree init`")

    @property
    def recipes(self) -> Path:
        return self.root / "configs" / "recipes"

    @property
    def executions(self) -> Path:
        return self.root / "configs" / "execution"

    @property
    def artifacts(self) -> Path:
        return self.root / "artifacts"

    def recipe_folder(self, recipe: str) -> Path:
        """`artifacts/RECIPE`: params.yaml and one folder per artifact."""
        return self.artifacts / recipe

    def artifact(self, address: str) -> Path:
        """`artifacts/RECIPE/STAGE` for the address `RECIPE/STAGE`."""
        return self.artifacts / address

    @property
    def private(self) -> Path:
        """Git-ignored, machine-local state: scratch folders, leases."""
        return self.root / ".pedigree"

    def scratch(self, key: str) -> Path:
        """Working folder of the job for the stage with this key: checkpoints, log, unpublished output."""
        return self.private / "scratch" / key

    def code(self, sha256: str) -> Path:
        """Snapshot of Pedigree's code that jobs run."""
        return self.private / "code" / sha256

    @property
    def tokens(self) -> Path:
        """Tokenized rows, shared by jobs (`stages/training/token_cache.py`)."""
        return self.private / "tokens"

    def rehearsal(self, profile: str) -> "Project":
        """The separate project that holds rehearsals under a profile (its name or path)."""
        return Project(self.private / "rehearsals" / Path(profile).stem)

    @property
    def rehearsals(self) -> "list[Project]":
        """Existing rehearsal projects."""
        return [Project(folder) for folder in sorted((self.private / "rehearsals").glob("*/"))]

    @property
    def is_rehearsal(self) -> bool:
        return self.root.parent.name == "rehearsals" and self.root.parent.parent.name == ".pedigree"

    def lease(self, name: str) -> Path:
        """Folder of a lease's claims; `name` is a key, or an address with dashes."""
        return self.private / "leases" / name


PACKAGED = Project(Path(__file__).absolute().parents[2])
"""What Pedigree ships: recipes and profiles."""
