"""How fast an artifact is tracked, from its job's last byte to `dvc.lock`, against the MD5 of the same bytes.

Tracking is: SHA-256 and MD5 of every file for the record and for DVC, the copy into the cache, the entry in `dvc.lock` and in the run
cache. The peer reads the files one after the other through `hashlib.md5`, and keeps nothing.

    python -m benchmarks.tracking
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks.report import Reading, Watch, in_turn, write
from pedigree.configs.base.project import Project
from pedigree.configs.language.compile import write_compiled
from pedigree.configs.language.recipe import load_recipe
from pedigree.data.artifacts.artifacts import PARTS, survey
from pedigree.pipelines.ledger.ledger import Ledger

SHARDS, SHARD_BYTES, ROUNDS = 4, 256 << 20, 5
RECIPE = """
description: One stage.
execution: none
stages:
  raw:
    kind: prepare_data
    record: conversation
    sources: [{type: arithmetic, operations: [add], digits: [1], count: 5, seed: 2}]
"""


def project_in(folder: Path) -> Project:
    """A git and DVC repository with a compiled recipe."""
    recipes = folder / "configs" / "recipes"
    recipes.mkdir(parents=True)
    (recipes / "bench.yaml").write_text(RECIPE)
    for command in (["git", "init", "-q"], ["dvc", "init", "-q"], ["dvc", "config", "core.site_cache_dir", str(folder / "site")]):
        subprocess.run(command, cwd=folder, check=True)
    write_compiled(folder, [load_recipe(recipes, "bench")])
    return Project(folder)


def main() -> None:
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        project = project_in(Path(folder))
        node = load_recipe(project.recipes, "bench").nodes["bench/raw"]
        artifact = project.artifact(node.address)
        for part in PARTS:
            place = artifact / part
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("{}") if "." in part else place.mkdir()
        shards = [artifact / "payload" / f"model-{number}.safetensors" for number in range(SHARDS)]

        def new_bytes() -> None:
            for shard in shards:
                shard.unlink(missing_ok=True)
                shard.write_bytes(os.urandom(SHARD_BYTES))
            (artifact / "evidence" / "note").write_bytes(os.urandom(8))
            shutil.rmtree(project.root / ".dvc" / "cache", ignore_errors=True)

        def track() -> None:
            Ledger(project).commit(node, None, survey(artifact / "payload", md5=True))

        def md5() -> None:
            for shard in shards:
                with shard.open("rb") as stream:
                    hashlib.file_digest(stream, "md5")

        watch, gib = Watch(), SHARDS * SHARD_BYTES / 2**30
        ours, peer = [], []
        for _ in range(ROUNDS):
            new_bytes()
            tracked, read = in_turn(track, md5)
            ours.append(gib / tracked)
            peer.append(gib / read)
    write("tracking", [Reading("tracking of an artifact, against its MD5 alone", ours, peer, "GiB/s")], ("dvc",), watch.read())


if __name__ == "__main__":
    main()
