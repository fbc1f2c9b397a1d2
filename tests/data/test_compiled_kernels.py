import os
import subprocess
import sys
from pathlib import Path

from data.kernels import compiled

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """
from data.kernels import compiled

@compiled
def twice(number):
    return 2 * number

assert twice({argument}) == 2 * {argument}
print(sum(twice.stats.cache_hits.values()), sum(twice.stats.cache_misses.values()))
"""


def hits_and_misses(folder: Path, cache: Path, argument: int) -> str:
    """Of a process that runs its own copy of the source."""
    folder.mkdir(parents=True)
    (folder / "some.py").write_text(SOURCE.format(argument=argument))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PEDIGREE_CACHE": str(cache)}
    return subprocess.run([sys.executable, "some.py"], cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout


def test_machine_code_of_one_copy_of_a_source_serves_another_and_none_of_another_source(tmp_path):
    assert hits_and_misses(tmp_path / "one", tmp_path / "cache", 3) == "0 1\n"
    assert hits_and_misses(tmp_path / "two", tmp_path / "cache", 3) == "1 0\n"
    assert hits_and_misses(tmp_path / "three", tmp_path / "cache", 4) == "0 1\n"
    assert not list(tmp_path.glob("*/__pycache__"))


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PEDIGREE_CACHE", str(tmp_path / "file"))

    def thrice(number):
        return 3 * number

    assert compiled(thrice)(5) == 15
