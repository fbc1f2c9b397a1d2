"""Where things lie in a project: the only place that knows the folder layout."""

from dataclasses import dataclass
from pathlib import Path

from configs.base.problems import UsageProblem


class ProjectNotFound(UsageProblem):
    """No Pedigree project at or above the folder."""


@dataclass(frozen=True)
class Project:
    """A cloned repository. All paths are absolute; nothing is created by asking for one."""

    root: Path

    @classmethod
    def find(cls, start: Path | None = None) -> "Project":
        """The project that holds `start` (default: the working directory).

        Raises:
            ProjectNotFound: no folder above `start` holds both `.dvc/` and `configs/recipes/`.
        """
        here = (start or Path.cwd()).resolve()
        for folder in (here, *here.parents):
            if (folder / ".dvc").is_dir() and (folder / "configs" / "recipes").is_dir():
                return cls(folder)
        raise ProjectNotFound(f"no Pedigree project at or above {here}: run the command inside a clone of one")

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
        """Git-ignored state of this machine: scratch folders, leases."""
        return self.root / ".pedigree"

    def scratch(self, key: str) -> Path:
        """Where the job of the stage with this key works: checkpoints, log, unpublished output."""
        return self.private / "scratch" / key

    def code(self, sha256: str) -> Path:
        """A snapshot of our code, which jobs run."""
        return self.private / "code" / sha256

    @property
    def tokens(self) -> Path:
        """Tokenised rows, which jobs share (`stages/training/token_cache.py`)."""
        return self.private / "tokens"

    def rehearsal(self, profile: str) -> "Project":
        """Where rehearsals under a profile (its name or path) lie: a project of its own, which shares nothing with this one."""
        return Project(self.private / "rehearsals" / Path(profile).stem)

    @property
    def rehearsals(self) -> "list[Project]":
        """Those that there are."""
        return [Project(folder) for folder in sorted((self.private / "rehearsals").glob("*/"))]

    @property
    def is_rehearsal(self) -> bool:
        return self.root.parent.name == "rehearsals" and self.root.parent.parent.name == ".pedigree"

    def lease(self, name: str) -> Path:
        """The folder of a lease's claims; `name` is a key, or an address with dashes."""
        return self.private / "leases" / name
