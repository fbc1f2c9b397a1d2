from pathlib import Path

import pytest
from chain_lab import CHAIN, Recipes


@pytest.fixture
def recipes(tmp_path: Path) -> Recipes:
    return Recipes(tmp_path)


@pytest.fixture
def chain(recipes: Recipes) -> Recipes:
    recipes.write("chain", CHAIN)
    return recipes
