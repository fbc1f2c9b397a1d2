"""The private names of DVC that Pedigree uses, because there is no public interface. After an update of DVC, compare each with its code."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dvc.repo import Repo

READ_IN = "3.67.1"
"""The version of DVC in which these names were read."""


def waiting_repo(root: Path, config: dict[str, Any]) -> "Repo":
    """A repo whose lock waits for its holder instead of failing. `Repo` has no public option for this."""
    from dvc.repo import Repo

    return Repo(str(root), config=config, _wait_for_lock=True)


def untouched_repo(root: Path, config: dict[str, Any], private: str | None) -> "Repo":
    """A repo that writes nothing into its folder: no `.gitignore` and, with `private` as the folder of its own files, no `.dvc/tmp`."""
    from dvc.repo import Repo

    class Untouched(Repo):
        def _ignore(self) -> None:
            """Write no .gitignore."""

    kind: Any = type("Elsewhere", (Untouched,), {"tmp_dir": private}) if private else Untouched
    return kind(str(root), config=config)


def run_cache_names(entry: Mapping[str, Any]) -> tuple[str, str]:
    """A run cache entry's folder (a hash of command, dependencies, parameters and output paths) and file (a hash of everything)."""
    from dvc.stage.cache import _get_cache_hash

    return _get_cache_hash(dict(entry), key=True), _get_cache_hash(dict(entry))
