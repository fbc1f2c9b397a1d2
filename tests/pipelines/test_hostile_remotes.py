"""What a remote, a branch, a recipe, a bundle or a store that somebody else wrote may not do."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from handmade import project_at
from hostile_lab import COMMIT, CONFIG, ROWS, Folder, record_of, snapshot
from sweeps import nightly_unless

from pedigree.configs.base.document import ConfigError
from pedigree.configs.base.problems import UsageProblem
from pedigree.configs.base.project import Project
from pedigree.configs.language.compile import write_compiled
from pedigree.configs.language.recipe import load_recipe, load_recipes
from pedigree.data.artifacts.artifacts import Run, parse_record
from pedigree.data.artifacts.mirror import Mirror
from pedigree.data.store.storage import ContentChanged
from pedigree.pipelines.cli.main import main
from pedigree.pipelines.ledger.cache import remove
from pedigree.pipelines.ledger.ledger import Ledger
from pedigree.pipelines.reproduce.rebuild import members_of, profile, recipe, write_project
from pedigree.pipelines.reproduce.trust import is_own
from pedigree.pipelines.reproduce.work_tree import RecordedCode, check_out

SECRET = "private canary".upper()  # runs keep the patch of this very file: it must not hold the text
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
MISTYPED = "No such option|No such command|Missing argument|unexpected extra argument"
"""A command of the corpus that ends so has met nothing hostile."""
RECIPE = "description: One stage.\nexecution: cpu\nstages:\n  raw: " + json.dumps(
    {"kind": "prepare_data", **{name: value for name, value in CONFIG.items() if name != "task"}}
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a project whose one stage is recorded and pushed, its remote, and a folder of somebody's own."""
    top = tmp_path_factory.mktemp("remotes")
    project = project_at(top / "project")
    settings = "[core]\n    no_scm = true\n    remote = store\n    site_cache_dir = ../../site\n"
    (project.root / ".dvc" / "config").write_text(settings + "['remote \"store\"']\n    url = ../../remote\n")
    (project.recipes / "lab.yaml").write_text(RECIPE)
    graph = load_recipes(project.recipes, "lab")[-1]
    write_compiled(project.root, [graph])
    folder = Folder(exported=False)
    folder.record = record_of(folder.files, version=graph.nodes["lab/raw"].declaration.version)
    folder.write(project.artifact("lab/raw"))
    (project.artifact("lab/raw") / "evidence" / "metrics.json").write_text("{}")
    ledger = Ledger(project)
    ledger.commit(graph.nodes["lab/raw"], check=lambda: None)
    ledger.push(graph.nodes["lab/raw"])
    ledger.remote.send_past()
    (top / "canary" / "deep").mkdir(parents=True)
    (top / "canary" / "diary.jsonl").write_text(SECRET)
    return top


class Place:
    """A copy of it that a stranger changes."""

    def __init__(self, top: Path) -> None:
        self.top, self.root, self.remote, self.canary = top, top / "project", top / "remote", top / "canary"
        self.lock = self.root / "artifacts/lab/dvc.lock"

    def put(self, data: bytes, suffix: str = "") -> str:
        """An object of the remote under the name that it should have."""
        name = hashlib.md5(data).hexdigest() + suffix
        path = self.remote / "files/md5" / name[:2] / name[2:]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return name

    def name(self, part: str, oid: str) -> None:
        """Makes `dvc.lock`, and every entry of the run cache, name an object as a part of the artifact."""
        runs = [path for base in (self.remote, self.root / ".dvc/cache") for path in (base / "runs").rglob("*") if path.is_file()]
        for file in (self.lock, *runs):
            text = file.read_text()
            file.write_text(re.sub(rf"(path: raw/{re.escape(part)}\n(?: +hash: md5\n)? +md5: ).*", lambda found: found[1] + oid, text))

    def listing(self, members: object) -> None:
        self.name("payload", self.put(json.dumps(members).encode(), ".dir"))


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Place:
    for name in ("project", "remote", "canary"):
        shutil.copytree(made / name, tmp_path / name, copy_function=shutil.copy)
    return Place(tmp_path)


def member(place: Place, path: object) -> dict:
    return {"md5": place.put(b"owned\n"), "relpath": path}


CASES: dict[str, Callable[[Place], object]] = {
    "listing-above": lambda place: place.listing([member(place, "../../../../../canary/diary.jsonl")]),
    "listing-by-absolute-path": lambda place: place.listing([member(place, str(place.canary / "diary.jsonl"))]),
    "listing-through-the-middle": lambda place: place.listing([member(place, "a/../../../../../../canary/diary.jsonl")]),
    "listing-with-escapes": lambda place: place.listing([member(place, "\x1b[2Jrows.jsonl")]),
    "listing-of-one-name-twice": lambda place: place.listing(
        [member(place, "rows.jsonl"), {"md5": place.put(ROWS), "relpath": "rows.jsonl"}]
    ),
    "listing-of-numbers": lambda place: place.listing([{"md5": 7, "relpath": 7}]),
    "listing-that-is-none": lambda place: place.listing({"rows.jsonl": "x"}),
    "listing-that-is-deep": lambda place: place.name("payload", place.put(b"[" * 100_000 + b"]" * 100_000, ".dir")),
    "listing-of-an-object-above": lambda place: place.listing([{"md5": "../../../../canary/diary.jsonl", "relpath": "rows.jsonl"}]),
    "object-above": lambda place: place.name("record.json", "../../../../../canary/diary.jsonl"),
    "object-by-absolute-path": lambda place: place.name("run.json", str(place.canary / "diary.jsonl")),
    "object-that-is-an-option": lambda place: place.name("lineage.json", "--help"),
    "record-that-is-deep": lambda place: place.name("record.json", place.put(b"[" * 100_000 + b"]" * 100_000)),
    "record-of-another-stage": lambda place: place.name("record.json", place.put(json.dumps(record_of({"rows.jsonl": b"{}\n"})).encode())),
    "lock-with-a-tag": lambda place: place.lock.write_text(
        f"schema: '2.0'\nstages: !!python/object/apply:os.system ['rm -rf {place.canary}']\n"
    ),
    "lock-that-is-deep": lambda place: place.lock.write_text("schema: '2.0'\nstages: " + "[" * 900 + "]" * 900 + "\n"),
    "lock-that-is-no-text": lambda place: place.lock.write_bytes(b"\xff\xfe\x00stages"),
}


def hostile(change: Callable[[Place], object]) -> Callable[[Place], object]:
    CASES[change.__name__.replace("_", "-")] = change
    return change


@hostile
def dependency_above(place):
    deps = "    deps:\n    - path: x\n      hash: md5\n      md5: ../../../../../canary/diary.jsonl\n"
    place.lock.write_text(place.lock.read_text().replace("    params:\n", deps + "    params:\n", 1))


@hostile
def member_above(place):
    files = "      files:\n      - relpath: x\n        md5: ../../../../../canary/diary.jsonl\n"
    place.lock.write_text(re.sub(r"(path: raw/payload\n.*\n.*\n)", lambda found: found[1] + files, place.lock.read_text()))


@hostile
def run_with_an_option_for_a_commit(place):
    run = {"schema_version": 1, "address": "lab/raw", "attempts": [{"code": {"commit": "--upload-pack=touch owned"}}]}
    place.name("run.json", place.put(json.dumps(run).encode()))


@hostile
def lock_that_is_a_bomb(place):
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in zip("abcdefgh", "bcdefghi", strict=True)]
    place.lock.write_text(f"schema: '2.0'\nstages:\n  raw:\n    cmd: x\n    outs: *i\n{chr(10).join(lines)}\n")


@hostile
def lock_of_outputs_outside(place):
    oid = place.put(b"owned\n")
    other = f"  other:\n    cmd: x\n    outs:\n    - path: {place.canary}/diary.jsonl\n      hash: md5\n      md5: {oid}\n"
    place.lock.write_text(place.lock.read_text() + other)


@hostile
def lock_of_outputs_above(place):
    text = place.lock.read_text()
    where = "../../../canary/deep/x/payload"
    place.lock.write_text(text + f"  other:\n    cmd: x\n    outs:\n    - path: {where}\n      hash: md5\n      md5: {'0' * 32}.dir\n")


@hostile
def lock_that_is_a_pipe(place):
    place.lock.unlink()
    os.mkfifo(place.lock)


@hostile
def lock_that_is_a_link(place):
    place.lock.unlink()
    place.lock.symlink_to(place.canary / "diary.jsonl")


@hostile
def run_cache_of_strange_names(place):
    for name in ("runs/aa/evil", "runs/zz/" + "0" * 64 + "/x", "runs/..hidden", "runs/aa/" + "0" * 64 + "/" + "0" * 64):
        path = place.remote / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"cmd: pedigree stage lab/raw\nouts: [{{path: {place.canary}/diary.jsonl, md5: ../../canary/diary.jsonl}}]\n")


@hostile
def run_cache_that_is_a_bomb(place):
    for path in (place.remote / "runs").rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            path.write_text("a: &a [x, x]\nb: &b [*a, *a]\nouts: [*b, *b]\n")


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_remote_or_branch_does_no_harm(
    name: str, place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    CASES[name](place)
    remove(place.root / ".dvc/cache")
    remove(place.root / "artifacts/lab/raw")
    commands = (
        "plan lab", "pull lab", "verify", "gc", "gc --remote", "lineage lab/raw", "export lab/raw out",
        "reproduce lab/raw --dry-run", "report lab", "models",
    )  # fmt: skip
    said = harmless(place, commands, monkeypatch, capfd)
    if name.startswith("lock-that") or name == "lock-with-a-tag":
        assert "nothing is deleted" in said["gc"] and "restore it from git" in said["gc"].lower(), said["gc"]


def harmless(place: Place, commands: Iterable[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Types commands in the project; each ends in a message, and none reads or writes outside. Returns what each said."""
    outside, said = snapshot(place.canary), {}
    monkeypatch.chdir(place.root)
    monkeypatch.setattr(sys, "stdin", open(os.devnull))
    capfd.readouterr()
    for command in commands:
        monkeypatch.setattr(sys, "argv", ["pedigree", *command.split()])
        ended = 0
        try:
            main()
        except SystemExit as error:
            ended = int(error.code or 0)
        out, err = capfd.readouterr()
        said[command] = out + err
        assert ended in (0, 1, 2) and "Traceback" not in out + err, f"{command}: {err}"
        assert not re.search(MISTYPED, out + err), f"{command}: {err}"
        assert SECRET not in out + err and not OBEYED.search(out + err), f"{command}: {out}{err}"
        assert len(err) < 6000
    assert snapshot(place.canary) == outside
    assert not (place.top / "owned").exists() and not list(place.root.rglob("owned"))
    for path in place.root.rglob("*"):
        assert path.is_symlink() or not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    return said


FETCHED = {"listing-above", "record-that-is-deep", "object-above", "object-that-is-an-option", "member-above", "lock-with-a-tag"}


@pytest.mark.parametrize("name", nightly_unless(FETCHED | {name for name in CASES if name.startswith("lock-that")}, CASES))
def test_a_hostile_branch_that_was_fetched_does_no_harm(
    name: str, place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is not checked out: what lies in place is sound, and only git knows the other `dvc.lock`."""
    sound = place.lock.read_bytes()
    CASES[name](place)
    git(place.root, "init", "-q", "-b", "main")
    if place.lock.is_file() and not place.lock.is_symlink():
        git(place.root, "add", "-f", "artifacts/lab/dvc.lock")
    git(place.root, "commit", "-q", "--allow-empty", "-m", "theirs")
    hidden = not git(place.root, "ls-files")
    git(place.root, "update-ref", "refs/remotes/fork/theirs", "HEAD")
    place.lock.unlink()
    place.lock.write_bytes(sound)
    git(place.root, "add", "-f", "artifacts/lab/dvc.lock")
    git(place.root, "commit", "-q", "--allow-empty", "--amend", "-m", "ours")
    remove(place.root / ".dvc/cache")
    theirs = "lab/raw@fork/theirs"
    commands = ("gc --remote", "models", f"lineage {theirs}", f"export {theirs} out", f"reproduce {theirs} --dry-run")
    said = harmless(place, commands, monkeypatch, capfd)
    assert hidden or "is not in any dvc.lock" not in said[f"lineage {theirs}"], "it was met"
    assert "errors.pydantic.dev" not in said["gc --remote"]
    if not hidden and (name.startswith("lock-that") or name in ("lock-with-a-tag", "object-above", "object-that-is-an-option")):
        assert "nothing is deleted" in said["gc --remote"] and "--workspace" in said["gc --remote"], said["gc --remote"]


def test_a_sound_remote_is_pulled(place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Else the corpus would prove nothing."""
    remove(place.root / ".dvc/cache")
    remove(place.root / "artifacts/lab/raw")
    monkeypatch.chdir(place.root)
    for command in ("pull lab", "verify", "lineage lab/raw"):
        monkeypatch.setattr(sys, "argv", ["pedigree", *command.split()])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code, capfd.readouterr()
    assert (place.root / "artifacts/lab/raw/payload/rows.jsonl").read_bytes() == ROWS


def test_a_project_vouches_for_what_it_made_and_for_no_other_run_of_it(place: Place) -> None:
    """An id says nothing of code and patch: a stranger may lay a run of his own beside a record of ours."""
    ledger, folder = Ledger(Project(place.root)), place.root / "artifacts/lab/raw"
    ours = {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in ("record.json", "run.json", "lineage.json")}
    assert is_own(ledger, ours)
    for name in ours:
        assert not is_own(ledger, ours | {name: hashlib.md5(b"theirs").hexdigest()})
    git(place.root, "init", "-q")
    git(place.root, "add", "-f", "artifacts/lab/dvc.lock")
    git(place.root, "commit", "-qm", "made")
    place.lock.write_text("schema: '2.0'\nstages: {}\n")
    git(place.root, "commit", "-qam", "forgotten")
    assert is_own(ledger, ours), "the history knows it"
    git(place.root, "checkout", "-q", "--orphan", "other")
    git(place.root, "commit", "-qm", "other")
    git(place.root, "update-ref", "refs/remotes/fork/main", "master" if "master" in git(place.root, "branch") else "main")
    git(place.root, "branch", "-D", "master" if "master" in git(place.root, "branch") else "main")
    assert not is_own(ledger, ours), "a branch that was fetched from somebody vouches for nothing"


def test_an_object_of_no_name_is_never_looked_for(place: Place) -> None:
    """A hash that is a path was joined to the cache's folder, found to be damaged, and deleted."""
    remote = Ledger(Project(place.root)).remote
    outside = snapshot(place.canary)
    for oid in ("../../../../canary/diary.jsonl", "..", "", "/etc/passwd", "0" * 31, "0" * 32 + ".dirt", "A" * 32):
        with pytest.raises(Exception, match="not a DVC object name"):
            remote.provide([oid])
    assert snapshot(place.canary) == outside


# --- recipes -----------------------------------------------------------------------------------------------------------

BOMB = "\n".join(
    ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)), "stages: {raw: {kind: *a9}}", ""]
)
RECIPES: dict[str, bytes] = {
    "aliases of aliases": BOMB.encode(),
    "an alias inside its anchor": b"stages: &a {raw: *a}\n",
    "deep nesting": b"stages: " + b"[" * 5000 + b"]" * 5000,
    "deep nesting by lines": b"".join(b" " * n + b"a:\n" for n in range(2000)),
    "a tag of Python": b"stages: !!python/object/apply:os.system ['touch owned']\n",
    "a tag of bytes": b"stages: {raw: {kind: !!binary aGk=}}\n",
    "a set": b"stages: !!set {raw, clean}\n",
    "a huge number": b"stages: {raw: {kind: prepare_data, seed: " + b"9" * 6000 + b"}}\n",
    "a mapping for a key": b"stages: {{a: b}: c}\n",
    "no text": b"\xff\xfe\x00\x01stages",
    "a control character": b"description: '\x1b[2J'\nstages: {}\n",
    "a path that hides its end": b"stages: {raw: {kind: prepare_data, record: prompt, sources: [{type: files, path: ../../canary/..}]}}\n",
    "a folder for a repository": b"stages: {raw: {kind: source_model, source: {type: hub, repo: ../../canary, revision: '"
    + COMMIT.encode()
    + b"'}}}\n",
    "a template above": b"stages: {raw: {kind: source_model, source: {type: folder, path: x}, chat_template: ../../canary}}\n",
    "a stage named as a path": b"stages: {../../canary: {kind: prepare_data}}\n",
    "a parent above": b"extends: ../../canary/diary\nstages: {}\n",
    "a URL of the machine": b"stages: {raw: {kind: prepare_data, record: prompt, sources: [{type: stored, name: x, "
    b"url: 'file:///etc/passwd.jsonl', sha256: '" + b"0" * 64 + b"'}]}}\n",
    "five megabytes": b"description: " + b"x" * (5 << 20),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_hostile_recipe_is_one_clean_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "hostile.yaml").write_bytes(RECIPES[name])
    began = time.process_time()
    with pytest.raises(ConfigError) as error:
        load_recipe(tmp_path, "hostile")
    assert time.process_time() - began < 10, "it was built before it was measured"
    assert str(error.value).startswith("hostile.yaml")
    assert not (tmp_path / "owned").exists()


def test_a_recipe_that_is_a_pipe_is_no_wait_without_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hostile.yaml")
    with pytest.raises(ConfigError, match="not a regular file"):
        load_recipe(tmp_path, "hostile")


# --- a branch that is checked out --------------------------------------------------------------------------------------

VARIANT = "lab+0a1b2c3d"
SOURCES: dict[str, bytes | str] = {
    "empty": b"",
    "no JSON": b"recipe: lab\n",
    "no text": b'\xff{"recipe": "lab", "set": []}',
    "a list": b"[]",
    "null": b"null",
    "no recipe": b'{"set": []}',
    "no set": b'{"recipe": "lab"}',
    "a recipe of another type": b'{"recipe": {"a": 1}, "set": []}',
    "a set of another type": b'{"recipe": "lab", "set": 7}',
    "a set of mappings": b'{"recipe": "lab", "set": [{}]}',
    "a surprise": b'{"recipe": "lab", "set": [], "hook": "touch owned"}',
    "a recipe twice": b'{"recipe": "lab", "recipe": "x", "set": []}',
    "escapes": b'{"recipe": "\\u001b[2Jlab", "set": []}',
    "a recipe above": b'{"recipe": "../../../canary/diary", "set": []}',
    "nul": b'{"recipe": "a\\u0000.yaml", "set": []}',
    "nested": b"[" * 100_000 + b"]" * 100_000,
    "five megabytes": b'{"recipe": "' + b"x" * (5 << 20) + b'", "set": []}',
    "a pipe": "pipe",
    "a link": "link",
    "a folder": "folder",
}
COMPILED: dict[str, bytes | str] = {
    "no text": b"\xffstages: {}\n",
    "a bomb": BOMB.encode(),
    "a tag": b"artifacts: !!python/object/apply:os.system ['touch owned']\n",
    "nested": b"artifacts: " + b"[" * 5000 + b"]" * 5000,
    "a list": b"- artifacts\n",
    "names that are a list": b"artifacts: [x]\n",
    "a name that is a number": b"artifacts: {x: 7}\n",
    "labels that are a number": b"artifacts: {x: {type: model, path: raw/payload, labels: 7}}\n",
    "a name that is an option": b"artifacts: {--format=x: {type: model, path: raw/payload}}\n",
    "a path above": b"artifacts: {x: {type: model, path: ../../../canary/deep/payload}}\n",
    "a pipe": "pipe",
    "a link": "link",
}


def lay(place: Place, path: Path, held: bytes | str) -> None:
    """A file as a branch, an archive or a share may bring it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if isinstance(held, bytes):
        path.write_bytes(held)
    elif held == "folder":
        path.mkdir()
    elif held == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(place.canary / "diary.jsonl")


@pytest.mark.parametrize("name", SOURCES)
def test_a_hostile_source_of_a_variant_does_no_harm(
    name: str, place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lay(place, place.root / "artifacts" / VARIANT / "source.json", SOURCES[name])
    lay(place, place.root / "artifacts" / VARIANT / "params.yaml", SOURCES[name] if isinstance(SOURCES[name], str) else b"\xffraw:\n")
    with no_longer_than(10):
        said = harmless(place, ("variants", "scratch", f"stage {VARIANT}/raw", "status lab"), monkeypatch, capfd)
    if name not in ("a recipe above", "nul"):
        assert f"artifacts/{VARIANT}/source.json" in said[f"stage {VARIANT}/raw"]
        assert "`pedigree compile lab`" in said[f"stage {VARIANT}/raw"], said


@pytest.mark.parametrize("name", COMPILED)
def test_a_hostile_compiled_file_does_no_harm(
    name: str, place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lay(place, place.root / "artifacts/lab/dvc.yaml", COMPILED[name])
    with no_longer_than(10):
        said = harmless(place, ("models", "lineage nothing", "status lab", "compile lab", "models"), monkeypatch, capfd)
    assert "dvc.yaml" in said["compile lab"], "what lay there is replaced"
    assert "no named models" in said["models"]


@contextmanager
def no_longer_than(seconds: int) -> Iterator[None]:
    """A pipe that is opened for good would hang without end."""

    def late(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# --- a recipe that records spell -----------------------------------------------------------------------------------------


def rebuilt(tmp_path: Path, **changes: object) -> tuple[dict, Project]:
    folder = Folder()
    run = changes.pop("run", folder.run)
    record = parse_record(json.dumps(record_of(folder.files, **changes)).encode(), "record.json")
    return members_of(record, Run.model_validate(run), {}, {}), project_at(tmp_path / "project")


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "external", "config": {"command": "touch owned"}},
        {"config": CONFIG | {"sources": [{"type": "hub", "repo": "../../canary", "revision": COMMIT, "split": "x"}]}},
        {"config": CONFIG | {"sources": [{"type": "stored", "name": "x", "url": "file:///etc/a.json", "sha256": "0" * 64}]}},
        {"config": {"extends": "/etc/passwd"}},
    ],
    ids=["kind", "hub", "url", "extends"],
)
def test_a_hostile_config_is_no_recipe(tmp_path: Path, changes: dict) -> None:
    members, _ = rebuilt(tmp_path, **changes)
    (tmp_path / "reproduction.yaml").write_text(json.dumps(recipe(members)))
    with pytest.raises(ConfigError):
        load_recipe(tmp_path, "reproduction")


@pytest.mark.parametrize("path", ["/etc/passwd", "~/.ssh/id_rsa", "../canary/diary.jsonl", "rows/../../canary"])
@pytest.mark.parametrize("kind", ["files", "folder", "program"])
def test_a_record_reads_no_file_outside_its_project(tmp_path: Path, kind: str, path: str) -> None:
    with pytest.raises(UsageProblem, match="records name none outside their project"):
        rebuilt(tmp_path, config=CONFIG | {"sources": [{"type": kind, "path": path}]})


def test_a_config_changes_neither_kind_nor_inputs(tmp_path: Path) -> None:
    members, _ = rebuilt(tmp_path, config=CONFIG | {"kind": "rlvr", "in": {"leak_from": "../../canary/diary"}})
    (stage,) = recipe(members)["stages"].values()
    assert (stage["kind"], stage["in"]) == ("prepare_data", {})


PLACES = ".dvc/config .git/hooks/x .git .env configs configs/recipes configs/execution/recorded.yaml artifacts/x dvc.yaml"


@pytest.mark.parametrize("name", PLACES.split())
def test_a_source_file_takes_no_place_of_the_projects_own(tmp_path: Path, name: str) -> None:
    members, project = rebuilt(tmp_path, source_files={name: hashlib.sha256(b"").hexdigest()})
    place = project.root / name
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"")
    with pytest.raises(UsageProblem, match="in source_files, a name reserved"):
        write_project(tmp_path / "home", members, [project.root], set(members))
    assert not (tmp_path / "home" / name).is_file() or name in (".dvc/config", "configs/execution/recorded.yaml")


@pytest.mark.parametrize(
    "name", ["configs/templates/house.jinja", "configs/axolotl.yaml", "configs/recipes.yaml", ".data/rows.jsonl", ".environments/mine.py"]
)
def test_any_other_source_file_is_taken(tmp_path: Path, name: str) -> None:
    members, project = rebuilt(tmp_path, source_files={name: hashlib.sha256(b"given").hexdigest()})
    (project.root / name).parent.mkdir(parents=True, exist_ok=True)
    (project.root / name).write_bytes(b"given")
    write_project(tmp_path / "home", members, [project.root], set(members))
    assert (tmp_path / "home" / name).read_bytes() == b"given"


def test_a_source_file_is_taken_through_no_link(tmp_path: Path) -> None:
    members, project = rebuilt(tmp_path, source_files={"data/rows.jsonl": hashlib.sha256(SECRET.encode()).hexdigest()})
    (tmp_path / "canary").mkdir()
    (tmp_path / "canary" / "rows.jsonl").write_text(SECRET)
    (project.root / "data").symlink_to(tmp_path / "canary")
    with pytest.raises(UsageProblem, match="links are not followed"):
        write_project(tmp_path / "home", members, [project.root], set(members))


def test_a_source_file_that_is_nowhere_is_told_by_its_content_and_how_to_send_it(tmp_path: Path) -> None:
    sha256 = hashlib.sha256(b"wanted").hexdigest()
    members, project = rebuilt(tmp_path, source_files={"data/rows.jsonl": sha256})
    (project.root / "data").mkdir()
    (project.root / "data" / "rows.jsonl").write_bytes(b"another content")
    sent: list[tuple[str, str]] = []

    def bring(member: object, name: str, wanted: str, target: Path) -> bool:
        sent.append((name, wanted))
        target.write_bytes(b"forged")  # what a remote claims to be the file is hashed too
        return True

    for comes in (lambda *_: False, bring):
        with pytest.raises(UsageProblem) as caught:
            write_project(tmp_path / "home", members, [project.root], set(members), bring=comes)
        assert f"was made from data/rows.jsonl with sha256 {sha256[:12]}, which is in neither its commit nor this" in str(caught.value)
        assert "place that file at data/rows.jsonl, send it with `pedigree push RECIPE --inputs` from where it is" in str(caught.value)
    assert sent == [("data/rows.jsonl", sha256)]
    (project.root / "data" / "rows.jsonl").write_bytes(b"wanted")
    write_project(tmp_path / "home", members, [project.root], set(members), bring=lambda *_: False)
    assert (tmp_path / "home" / "data" / "rows.jsonl").read_bytes() == b"wanted"


@pytest.mark.parametrize("count", [0, 10**6, "8", 2.5])
def test_processes_without_end_are_not_started(tmp_path: Path, count: object) -> None:
    run = json.loads(json.dumps(Folder().run))
    run["numerics"]["world_size"] = count
    members, _ = rebuilt(tmp_path, run=run)
    with pytest.raises(UsageProblem, match="world_size"):
        profile(members)


# --- code ---------------------------------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str, **more: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | more
    command = ["git", "-c", "user.name=lab", "-c", "user.email=lab@example.org", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repositories(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A clone of ours, and a stranger's repository that it knows nothing of."""
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        git(tmp_path / name, "init", "-q", "-b", "main")
        (tmp_path / name / "a.py").write_text(f"# {name}\n")
        git(tmp_path / name, "add", "-A")
        git(tmp_path / name, "commit", "-qm", name)
    yield tmp_path / "ours", tmp_path / "theirs"


def bundle_of(theirs: Path, file: Path, *references: str) -> Callable[[str, Path], bool]:
    git(theirs, "bundle", "create", "--quiet", str(file), *references)

    def fetch(name: str, target: Path) -> bool:
        shutil.copyfile(file, target)
        return True

    return fetch


def test_a_bundle_that_holds_another_commit_under_the_name_leaves_nothing(repositories, tmp_path):
    ours, theirs = repositories
    git(theirs, "update-ref", f"refs/pedigree/{COMMIT}", "HEAD")
    git(theirs, "update-ref", "refs/heads/evil", "HEAD")
    before = git(ours, "for-each-ref")
    fetch = bundle_of(theirs, tmp_path / "x.bundle", f"refs/pedigree/{COMMIT}", "refs/heads/evil")
    with pytest.raises(UsageProblem, match="it is forged"):
        check_out(RecordedCode(COMMIT), tmp_path / "tree", fetch, ours)
    assert git(ours, "for-each-ref") == before and not (tmp_path / "tree").exists()


def test_a_bundle_brings_its_commit_and_no_other_reference(repositories, tmp_path):
    ours, theirs = repositories
    commit = git(theirs, "rev-parse", "HEAD")
    for name in (f"refs/pedigree/{commit}", "refs/heads/main2", "refs/tags/model@v1.0.0", "refs/stash"):
        git(theirs, "update-ref", name, "HEAD")
    fetch = bundle_of(theirs, tmp_path / "x.bundle", f"refs/pedigree/{commit}", "refs/heads/main2", "refs/tags/model@v1.0.0", "refs/stash")
    check_out(RecordedCode(commit), tmp_path / "tree", fetch, ours)
    assert [line.split()[2] for line in git(ours, "for-each-ref").splitlines()] == ["refs/heads/main", f"refs/pedigree/{commit}"]


def test_a_patch_cannot_leave_the_work_tree(repositories, tmp_path):
    ours, _ = repositories
    commit = git(ours, "rev-parse", "HEAD")
    (tmp_path / "canary").mkdir()
    hunk = "@@ -0,0 +1 @@\n+owned\n"
    for path in ("../canary/owned", "a/../../canary/owned", ".git/hooks/post-checkout", f"{tmp_path}/canary/owned"):
        patch = f"diff --git a/{path} b/{path}\nnew file mode 100755\n--- /dev/null\n+++ b/{path}\n{hunk}"
        with pytest.raises(UsageProblem, match="git apply"):
            check_out(RecordedCode(commit, hashlib.sha256(patch.encode()).hexdigest(), patch), tmp_path / "tree", lambda *_: False, ours)
    link = "diff --git a/out b/out\nnew file mode 120000\n--- /dev/null\n+++ b/out\n@@ -0,0 +1 @@\n+../canary\n"
    link += "\\ No newline at end of file\n"
    through = f"diff --git a/out/owned b/out/owned\nnew file mode 100644\n--- /dev/null\n+++ b/out/owned\n{hunk}"
    with pytest.raises(UsageProblem, match="git apply"):
        check_out(
            RecordedCode(commit, hashlib.sha256((link + through).encode()).hexdigest(), link + through),
            tmp_path / "tree",
            lambda *_: False,
            ours,
        )
    assert not list((tmp_path / "canary").iterdir())


# --- stores of checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "manifest",
    [
        {"../../canary/diary.jsonl": "0" * 64},
        {"/etc/passwd": "0" * 64},
        {"state.json": "../x"},
        {"state.json": 7},
        {"state.json": "0" * 64, "STATE.json": "0" * 64},
        ["state.json"],
        "deep",
    ],
)
def test_a_hostile_manifest_is_no_checkpoint(tmp_path: Path, manifest: object) -> None:
    mirror = Mirror.of(f"file://{tmp_path}/store", "key")
    folder = tmp_path / "store" / "key" / "step-000001"
    folder.mkdir(parents=True)
    (tmp_path / "canary").mkdir()
    (tmp_path / "canary" / "diary.jsonl").write_text(SECRET)
    text = "[" * 100_000 + "]" * 100_000 if manifest == "deep" else json.dumps(manifest)
    (folder / "manifest.json").write_text(text)
    before = snapshot(tmp_path / "canary")
    with pytest.raises(ContentChanged):
        mirror.download_checkpoint("step-000001", tmp_path / "here", lambda: None)
    assert snapshot(tmp_path / "canary") == before


def test_strange_names_in_a_store_are_no_checkpoints_and_no_attempts(tmp_path: Path) -> None:
    mirror = Mirror.of(f"file://{tmp_path}/store", "key")
    for name in ("step-x", "step-000002", "step-1e9", "step-" + "9" * 200):
        (tmp_path / "store" / "key" / name).mkdir(parents=True)
        (tmp_path / "store" / "key" / name / "manifest.json").write_text("{}")
    assert mirror.checkpoints() == ["step-000002"]
    attempts = [{"started_at": "2026-01-02T03:04:05+00:00", "code": {"commit": "--upload-pack=x"}}]
    (tmp_path / "store" / "key" / "attempts.json").write_text(json.dumps(attempts))
    assert mirror.attempts() == []
