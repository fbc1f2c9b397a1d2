"""A recipe in a text, loaded as it is or with some of its words exchanged."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from pedigree.configs.base.document import ConfigError
from pedigree.configs.base.shrink import StandIns
from pedigree.configs.language.graph import Graph
from pedigree.configs.language.recipe import load_recipe

STAND = StandIns(defaultdict(lambda: "a" * 40), defaultdict(lambda: "b" * 64), "http://127.0.0.1:1/v1")
"""What a rehearsal has in place of a hub and of endpoints."""


@dataclass(frozen=True)
class Recipe:
    """The recipe `made`."""

    text: str

    def load(self, folder: Path, *changes: tuple[str, str]) -> Graph:
        """Written into the folder; `changes` are (old, new) words."""
        text = self.text
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (folder / "made.yaml").write_text(text)
        return load_recipe(folder, "made")

    def complaints(self, folder: Path, *changes: tuple[str, str]) -> list[str]:
        """What is said of a recipe that is refused."""
        with pytest.raises(ConfigError) as caught:
            self.load(folder, *changes)
        return [problem.message for problem in caught.value.problems]
