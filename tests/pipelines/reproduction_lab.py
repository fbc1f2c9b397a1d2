"""A whole clone in a temporary folder: project and code in one git repository, a git origin, a DVC remote, commands as processes.

Its data stages do little: `prepare_data` writes `count` rows, `decontaminate` passes rows on; a stage notes that it ran in the
file that `LAB_RUNS` names, never ends if its name is `LAB_HOLDS`, and appends the text of `LAB_NOISE` to its rows: so a test makes an
unsound stage.
"""

import filecmp
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from running_lab import RECIPE, unneeded

from pedigree.configs.base.project import Project
from pedigree.pipelines.jobs.launcher import LocalLauncher

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("configs", "data", "pipelines", "stages")
PROFILE = "{slots: 2, numerics: {threads: 1}, placement: {slots: 1, retries: 0}}"
STAGE = '''"""Rows without meaning."""

import os
import time
from pathlib import Path

from pedigree.data.records.records import load, save
from pedigree.stages.job.job import only


def run(config, inputs, job):
    rows = ROWS
    name = job.address.partition("/")[2]
    with Path(os.environ["LAB_RUNS"]).open("a") as stream:
        stream.write(name + "\\n")
    while os.environ.get("LAB_HOLDS") == name:
        time.sleep(0.1)
    rows = [*rows, *({"noise": noise} for noise in filter(None, [os.environ.get("LAB_NOISE")]))]
    job.log(1, rows=len(rows))
    save(job.out, "report", rows)
    return {"rows": len(rows)}
'''
ROWS = {
    "prepare_data": '[{"n": n, "seed": config.sources[0].seed} for n in range(config.sources[0].count)]',
    "decontaminate": 'load(only(inputs, "data"))',
}


def _left_out(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if name.endswith(".yaml")}


def _unneeded(folder: str, names: list[str]) -> set[str]:
    return unneeded(folder, names) | _left_out(folder, names)


class Clone:
    """A clone and what tests do in it."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self.root = folder, root
        self.runs_log = folder / f"{root.name}.log"
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {
            "PYTHONPATH": str(root),
            "DVC_NO_ANALYTICS": "1",
            "LAB_RUNS": str(self.runs_log),
            "GIT_CONFIG_GLOBAL": os.devnull,
        }

    @property
    def code(self) -> Path:
        return self.root

    @property
    def launcher(self) -> LocalLauncher:
        return LocalLauncher(Project(self.root))

    @classmethod
    def first(cls, folder: Path, *, whole: bool = False) -> "Clone":
        """The repository, with a DVC remote, committed. `whole`: with the code of all stages."""
        clone = cls(folder, folder / "first")
        for package in PACKAGES:
            shutil.copytree(REPOSITORY / package, clone.root / package, ignore=_left_out if whole else _unneeded)
        shutil.copytree(REPOSITORY / "pedigree", clone.root / "pedigree", symlinks=True)
        for kind, rows in ROWS.items():
            clone.write(f"stages/{kind}/run.py", STAGE.replace("rows = ROWS", f"rows = {rows}"))
        for name in (".gitignore", ".dvcignore", ".dvc/.gitignore"):
            clone.write(name, (REPOSITORY / name).read_text())
        config = (REPOSITORY / ".dvc/config").read_text().replace("[core]\n", "[core]\n    remote = store\n")
        clone.write(".dvc/config", f"{config}['remote \"store\"']\n    url = {folder / 'store'}\n")
        clone.shell("git init -q -b main")
        clone.write("configs/recipes/lab.yaml", RECIPE)
        clone.write("configs/execution/lab.yaml", PROFILE)
        clone.commit()
        return clone

    def another(self, name: str) -> "Clone":
        """A fresh clone: what git has, and nothing else but bytecode, which its first command would make for seconds."""
        clone = Clone(self.folder, self.folder / name)
        subprocess.run(["git", "clone", "-q", "--no-local", str(self.root), str(clone.root)], check=True, capture_output=True)
        for package in PACKAGES:
            for cache in (self.root / package).rglob("__pycache__"):
                shutil.copytree(cache, clone.root / cache.relative_to(self.root))
            for source in (self.root / package).rglob("*.py"):
                target = clone.root / source.relative_to(self.root)
                if target.exists() and filecmp.cmp(source, target, shallow=False):
                    shutil.copystat(source, target)  # bytecode is of a source of this time
        return clone

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.root / name).read_text()
        assert old in text
        self.write(name, text.replace(old, new))

    def commit(self) -> str:
        self.shell("git add -A && git -c user.name=lab -c user.email=lab@example.org commit -qm lab")
        return self.shell("git rev-parse HEAD").stdout.strip()

    def shell(self, command: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(command, shell=True, cwd=self.root, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def pedigree(self, *arguments: str, code: int = 0, **environment: str) -> str:
        """Output of a command, which has to end with this exit code."""
        command = [sys.executable, "-P", "-m", "pedigree.pipelines.cli", *arguments]
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self.environment | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}"
        return done.stdout

    def ran(self) -> list[str]:
        """Names of the stages that have run since the last call, sorted."""
        names = sorted(self.runs_log.read_text().split()) if self.runs_log.exists() else []
        self.runs_log.unlink(missing_ok=True)
        return names

    def report(self) -> dict:
        """The newest record of a reproduction."""
        newest = max((self.root / ".pedigree/reproductions").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        return json.loads(newest.read_text())

    def verdicts(self) -> dict[str, str]:
        return {stage["address"].partition("/")[2]: stage["verdict"] for stage in self.report()["stages"]}
