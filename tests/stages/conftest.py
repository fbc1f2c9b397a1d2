"""What tests of training start from; nobody writes into it."""

import models
import pytest

from data.artifacts import Artifact


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
