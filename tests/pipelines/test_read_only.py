"""Commands that only look change nothing, and work where nothing can be changed; without git they say what to type."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import InProcessCommand
from hostile_lab import snapshot
from running_lab import Lab

LOOKING = [
    ["plan", "lab"], ["plan", "lab", "--set", "cleaner.ngram=7"], ["status", "lab"], ["jobs"], ["scratch"], ["verify"],
    ["lineage", "lab/cleaner"], ["diff", "lab/raw", "lab/raw"], ["variants"], ["models"], ["recipes"], ["show", "lab"],
    ["validate", "lab"], ["logs", "raw"],
]  # fmt: skip
MANY = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from pedigree.pipelines.cli.main import main
said = []
for line in json.loads(sys.argv[1]):
    sys.argv, out, err = ["pedigree", *line], io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as end:
        said.append((end.code or 0, out.getvalue(), err.getvalue()))
print(json.dumps(said))
"""
"""Types command lines one after the other, without a start for each."""
READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && cd "$1" && shift && exec "$@"'


@pytest.fixture(scope="module")
def made(template: Lab, tmp_path_factory: pytest.TempPathFactory) -> InProcessCommand:
    """A lab whose recipe has been run once; nobody writes in it after that."""
    return InProcessCommand(template.twin(tmp_path_factory.mktemp("read")))


def read_only(root: Path, *command: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder that is mounted read-only for it alone."""
    inner = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", READ_ONLY, "sh", str(root), *command]
    return subprocess.run(inner, env=environment, capture_output=True, text=True, check=False)


def test_commands_that_look_touch_nothing(made: InProcessCommand):
    before = snapshot(made.lab.root)
    for line in LOOKING:
        made(*line)
        now = snapshot(made.lab.root)
        assert [name for name in before.keys() | now.keys() if before.get(name) != now.get(name)] == [], line


def test_a_clone_in_which_nobody_has_worked_is_looked_at_without_a_trace(tmp_path):
    command = InProcessCommand(Lab(tmp_path))
    before = snapshot(command.lab.root)
    assert "4 of 4 stages to run" in command("plan", "lab")
    assert "not built" in command("status", "lab")
    assert "no scratch folders" in command("scratch")
    assert snapshot(command.lab.root) == before and not (command.lab.root / ".dvc/tmp").exists()


def test_what_lies_in_the_remote_alone_is_looked_at_without_a_trace(made: InProcessCommand, tmp_path):
    lab = copy_of(made.lab, tmp_path)
    local = (lab.root / ".dvc/config.local").read_text()
    lab.write(".dvc/config.local", f"{local}    remote = store\n['remote \"store\"']\n    url = {tmp_path / 'store'}\n")
    command = InProcessCommand(lab)
    command("push", "lab")
    lab.shell("git add -A && git -c user.name=lab -c user.email=lab@example.org commit -qm made")
    lab.shell("rm -r .dvc/cache artifacts/lab/*/")
    before = snapshot(lab.root)
    for line, code in (
        (["plan", "lab"], 0), (["status", "lab"], 0), (["lineage", "lab/cleaner@HEAD"], 0), (["models"], 0), (["verify"], 0),
        (["diff", "lab/raw@HEAD", "lab/raw@HEAD"], 0), (["diff", "lab/raw@HEAD", "lab/cleaner@HEAD"], 1),
    ):  # fmt: skip
        said = command(*line, code=code)
        now = snapshot(lab.root)
        assert [name for name in before.keys() | now.keys() if before.get(name) != now.get(name)] == [], (line, said)
    assert "the files of 4 are only in the remote" in command("plan", "lab")


def copy_of(lab: Lab, folder: Path) -> Lab:
    copy = object.__new__(Lab)
    copy.code, copy.root, copy.environment = lab.code, folder / "project", lab.environment
    shutil.copytree(lab.root, copy.root)
    return copy


def of_any_disk(said: str) -> str:
    """What a command says without the disk's free space, which others change meanwhile."""
    return re.sub(r"[\d.]+ \w?B free", "", said)


def test_in_a_read_only_project_commands_look_and_those_that_write_name_the_folder(made: InProcessCommand):
    if shutil.which("unshare") is None or read_only(made.lab.root, "true").returncode:
        pytest.skip("this machine gives nobody a mount of their own")
    change = ["--set", "cleaner.ngram=7"]
    writing = [["run", "lab"], ["run", "lab", *change], ["compile", "lab", *change], ["report", "lab"]]
    done = read_only(made.lab.root, sys.executable, "-c", MANY, json.dumps(LOOKING + writing), environment=made.environment)
    assert done.returncode == 0, done.stderr
    for line, (code, out, err) in zip(LOOKING + writing, json.loads(done.stdout), strict=True):
        if line in writing:
            assert code in (1, 2) and out == "" and str(made.lab.root) in err and "must be writable" in err and ".tmp" not in err, err
            continue
        assert code == 0, (line, out, err)
        if line[0] not in ("verify", "jobs"):  # which tell of time
            assert of_any_disk(out) == of_any_disk(made(*line)), line
        assert line != ["verify"] or "all as recorded" in out


def test_without_git_every_command_says_what_to_type(tmp_path):
    command = InProcessCommand(Lab(tmp_path))
    shutil.rmtree(command.lab.root / ".git")
    command("scratch")
    for line in (["plan", "lab"], ["status", "lab"], ["run", "lab"], ["verify"], ["gc"]):
        said = command(*line, code=1)
        assert "`git init`" in said and str(command.lab.root) in said, line
    command.lab.shell("git init -q")
    assert "4 of 4 stages to run" in command("plan", "lab")
