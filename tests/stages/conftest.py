"""What tests of training start from; nobody writes into it."""

from collections.abc import Iterator
from typing import Any

import models
import pytest

from pedigree.data.artifacts.artifacts import Artifact


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Two layers of random weights."""
    return models.tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """28 rows of unequal length: three batches of 8 and one of 4."""
    return models.dataset(tmp_path_factory.mktemp("conversations"), "conversation", models.arithmetic(28))


@pytest.fixture(scope="session")
def preferences(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """36 certain pairs."""
    return models.dataset(tmp_path_factory.mktemp("preferences"), "preference", models.sums_or_not_known(36))


@pytest.fixture(scope="module")
def shared_engines() -> Iterator[Any]:
    """Engines that the file's jobs in this process share."""
    from engine_lab import Pool  # loads torch

    pool = Pool()
    yield pool
    pool.close()
