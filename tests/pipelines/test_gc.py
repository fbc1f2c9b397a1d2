"""`pedigree gc`: what a kept lineage needs survives, whatever has become of its `dvc.lock`; the rest goes; doubt deletes nothing."""

import json
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from commands import InProcessCommand
from faulty_store import KEYS, s3_server
from running_lab import Lab

from pedigree.configs.base.problems import UsageProblem
from pedigree.data.artifacts.artifacts import read_json, read_record
from pedigree.data.store import heartbeat
from pedigree.pipelines.jobs.lease import lease
from pedigree.pipelines.ledger.by_id import bring
from pedigree.pipelines.ledger.cache import remove
from pedigree.pipelines.ledger.ledger import Ledger
from pedigree.pipelines.lineage.ancestry import read_pedigree
from pedigree.pipelines.lineage.verify import verify_project
from pedigree.pipelines.maintain.gc import collect
from pedigree.pipelines.run.ensure import Result
from pedigree.pipelines.run.exchange import push
from pedigree.pipelines.run.runs import run_graph

COMMIT = "git add -A && git -c user.name=t -c user.email=t@t commit -qm"


def run(lab: Lab, *overrides: str, recipe: str = "lab", only: str | None = None) -> None:
    context = lab.run(*overrides)
    selection = {context.graph.find(only).address} if only else None
    ends = run_graph(context, selection)
    assert all(isinstance(end, Result) for end in ends), ends


@pytest.fixture(scope="module")
def origin(template: Lab, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The recipe made with five rows and committed, and then a recipe with six."""
    lab = template.twin(tmp_path_factory.mktemp("gc"))
    lab.edit(".dvc/config", "[core]\n", "[core]\n    remote = store\n")
    lab.shell(f"{COMMIT} five")
    lab.edit("configs/recipes/lab.yaml", "count: 5", "count: 6")
    return lab


@pytest.fixture(scope="module")
def old(origin: Lab) -> dict[str, str]:
    """Ids of the artifacts with five rows."""
    return ids(origin)


@pytest.fixture(scope="module")
def made_six(origin: Lab, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    lab = elsewhere(origin, tmp_path_factory.mktemp("six"))
    run(lab)
    lab.shell(f"{COMMIT} six")
    return lab


def elsewhere(lab: Lab, folder: Path) -> Lab:
    """A copy with an empty remote."""
    copy, store = lab.elsewhere(folder), folder / "store"
    copy.write(".dvc/config.local", f"{(copy.root / '.dvc/config.local').read_text()}['remote \"store\"']\n    url = {store}\n")
    store.mkdir()
    return copy


@pytest.fixture
def lab(origin: Lab, tmp_path: Path) -> Lab:
    return elsewhere(origin, tmp_path)


@pytest.fixture
def six(made_six: Lab, tmp_path: Path) -> Lab:
    """The same when the recipe with six rows has been made and committed."""
    return elsewhere(made_six, tmp_path)


def ids(lab: Lab) -> dict[str, str]:
    """Stage → id of what lies in place."""
    return {path.parent.name: read_pedigree(path.parent).id for path in lab.root.glob("artifacts/lab/*/record.json")}


def held(lab: Lab, stage: str, identifier: str) -> bool:
    """Whether an artifact can be had whole out of the cache; every file is hashed."""
    target = lab.root / ".pedigree" / f"held-{identifier}"
    found = bring(Ledger(lab.project), f"lab/{stage}", target, identifier=identifier)
    shutil.rmtree(target, ignore_errors=True)
    return found


def objects(lab: Lab) -> set[str]:
    return set(Ledger(lab.project).cache.objects())


def sweep_up(lab: Lab, *, remote: bool = False, workspace: bool = False) -> None:
    """Deletes, and looks whether all is well after it."""
    collect(lab.project, remote=remote, workspace=workspace, delete=True)
    assert not collect(lab.project, remote=remote, workspace=workspace).objects
    assert verify_project(lab.project, remote=False).problems == []


def test_what_no_branch_names_goes_and_the_rest_is_restored_without_a_job(six: Lab, old: dict[str, str]) -> None:
    before = objects(six)
    listed = collect(six.project)
    assert objects(six) == before and listed.objects and set(listed.owners.values()) == {"lab/raw", "lab/clean", "lab/cleaner"}
    new = ids(six)
    sweep_up(six)
    assert objects(six) == before - listed.objects.keys()
    assert [held(six, stage, old[stage]) for stage in ("raw", "clean", "cleaner")] == [False] * 3
    shutil.rmtree(six.root / "artifacts/lab/clean")
    (six.root / "artifacts/lab/dvc.lock").unlink()
    six.forget_runs()
    run(six)
    assert six.runs() == [] and ids(six) == new


def test_a_branch_or_tag_keeps_what_it_names_unless_the_working_tree_alone_counts(six: Lab, old: dict[str, str]) -> None:
    for name in ("refs/tags/old", "refs/heads/old", "refs/remotes/origin/old"):
        six.shell(f"git update-ref {name} HEAD~1")
        assert not collect(six.project).objects
        six.shell(f"git update-ref -d {name}")
        assert collect(six.project).objects
    six.shell("git -c user.name=t -c user.email=t@t tag -a -m x old HEAD~1")
    sweep_up(six)
    assert held(six, "cleaner", old["cleaner"])
    sweep_up(six, workspace=True)
    assert not held(six, "cleaner", old["cleaner"])


@pytest.mark.parametrize("untracked", [False, True])
def test_a_stash_keeps_what_it_names_also_in_files_that_are_new(lab: Lab, untracked: bool) -> None:
    if untracked:
        lab.shell("git rm -q --cached artifacts/lab/dvc.lock && git -c user.name=t -c user.email=t@t commit -qm forgotten")
    run(lab)
    new = ids(lab)
    lab.shell("git -c user.name=t -c user.email=t@t stash push -q -u")
    lab.shell("echo x > other && git -c user.name=t -c user.email=t@t stash push -q -u")  # refs/stash itself is only this newest one
    shutil.rmtree(lab.root / "artifacts", ignore_errors=True)
    lab.shell("git checkout -q -- artifacts || true")
    sweep_up(lab)
    assert held(lab, "cleaner", new["cleaner"])


def test_an_ancestor_whose_entry_was_overwritten_survives_by_the_lineage_of_its_child(lab: Lab, old: dict[str, str]) -> None:
    for stage in ("raw", "clean"):  # `cleaner` stays what it was: made from what no dvc.lock names any more
        run(lab, only=stage)
    lab.shell(f"{COMMIT} half && git tag -d old 2>/dev/null; true")
    assert ids(lab)["cleaner"] == old["cleaner"] and ids(lab)["raw"] != old["raw"]
    sweep_up(lab)
    assert all(held(lab, stage, old[stage]) for stage in ("raw", "clean", "cleaner"))
    assert all(held(lab, stage, ids(lab)[stage]) for stage in ("raw", "clean"))


def test_where_an_ancestor_is_lost_an_equal_payload_is_kept_in_its_place(lab: Lab) -> None:
    lab.edit("configs/recipes/lab.yaml", "count: 6", "count: 5")
    old = ids(lab)
    run(lab, "cleaner.ngram=7")  # passes the same rows on
    (variant,) = lab.root.glob("artifacts/lab+*")
    equal = read_pedigree(variant / "cleaner").id
    lab.edit("configs/recipes/lab.yaml", "count: 5", "count: 6")
    for stage in ("raw", "clean"):
        run(lab, only=stage)
    shutil.rmtree(variant)
    lab.shell(f"{COMMIT} half")
    ledger = Ledger(lab.project)
    for path in ledger.locks.past_files():
        entry = yaml.safe_load(path.read_text())
        (md5,) = [out["md5"] for out in entry["outs"] if out["path"].endswith("record.json")]
        if read_record(read_json(ledger.cache.path(md5)), "record.json").id in (old["raw"], old["clean"]):
            path.unlink()
    sweep_up(lab)
    assert not held(lab, "clean", old["clean"]) and bring(
        Ledger(lab.project), f"{variant.name}/cleaner", lab.root / "got", identifier=equal
    )


@pytest.mark.parametrize("other", ["variant", "recipe"])
def test_what_a_variant_or_another_recipe_was_made_from_survives(lab: Lab, other: str) -> None:
    lab.edit("configs/recipes/lab.yaml", "count: 6", "count: 5")
    old = ids(lab)
    if other == "variant":
        run(lab, "cleaner.ngram=7")
    else:
        lab.write("configs/recipes/more.yaml", "description: more\nexecution: lab\nextends: lab\nstages: {cleaner: {ngram: 9}}\n")
        from pedigree.pipelines.run.opening import Request, open_run

        context = open_run(lab.project, Request("more"))
        context.code_root = lab.code
        assert all(isinstance(end, Result) for end in run_graph(context))
        (lab.root / "configs/recipes/more.yaml").unlink()  # its dvc.lock is what counts
    lab.edit("configs/recipes/lab.yaml", "count: 5", "count: 6")
    run(lab)
    lab.shell(f"{COMMIT} both")
    sweep_up(lab)
    assert held(lab, "raw", old["raw"]) and held(lab, "clean", old["clean"]) and not held(lab, "cleaner", old["cleaner"])


def test_an_artifact_that_lies_in_place_is_kept_though_nothing_names_it(lab: Lab, old: dict[str, str]) -> None:
    (lab.root / "artifacts/lab/dvc.lock").unlink()
    sweep_up(lab, workspace=True)
    assert all(held(lab, stage, identifier) for stage, identifier in old.items())


@pytest.mark.parametrize("name", ["lineage.json", "record.json"])
def test_a_lineage_that_is_damaged_or_lost_means_that_nothing_is_deleted(lab: Lab, name: str) -> None:
    run(lab)
    lab.shell(f"{COMMIT} six && git tag old HEAD~1")
    lock = yaml.safe_load(lab.shell("git show old:artifacts/lab/dvc.lock").stdout)
    (md5,) = [out["md5"] for out in lock["stages"]["cleaner"]["outs"] if out["path"].endswith(name)]
    path = Ledger(lab.project).cache.path(md5)
    path.chmod(0o644)
    for damage, said in ((lambda: path.write_bytes(b"x"), "damaged"), (path.unlink, "nowhere")):
        damage()
        before = objects(lab)
        with pytest.raises(
            UsageProblem, match=rf"nothing is deleted: the lineage of lab/cleaner \(artifacts/lab/dvc.lock at \w+\).*{said}"
        ):
            collect(lab.project, delete=True)
        assert objects(lab) == before


def test_a_lock_with_the_marks_of_a_merge_may_name_anything(lab: Lab) -> None:
    lock = lab.root / "artifacts/lab/dvc.lock"
    lock.write_text("<<<<<<< ours\n" + lock.read_text())
    with pytest.raises(UsageProblem, match=r"nothing is deleted: artifacts/lab/dvc.lock cannot be read"):
        collect(lab.project, delete=True)


def test_while_somebody_works_nothing_is_deleted(six: Lab) -> None:
    before = objects(six)
    told: list[bool] = []
    with lease(six.project.lease("lab--raw"), "pedigree run lab"):
        assert collect(six.project).objects
        with pytest.raises(UsageProblem, match="`pedigree run lab` is running"):
            collect(six.project, delete=True, listening=lambda: told.append(True))
    assert objects(six) == before and not told  # it is of this machine: nobody needs to listen


def test_other_machines_are_listened_to_before_anything_is_deleted_and_that_is_said(six: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "SILENCE_S", 0.5)
    told: list[bool] = []
    with lease(six.project.lease("lab--raw"), "pedigree run lab"):
        claim = max(six.project.lease("lab--raw").glob("*.json"))
        held = json.loads(claim.read_text())
        held["process"]["machine"] = "elsewhere"
        claim.write_text(json.dumps(held))
        with suppress(UsageProblem):  # its pulse is that of this process, which lives
            collect(six.project, delete=True, listening=lambda: told.append(True))
    assert told == [True]


def test_data_of_somebody_elses_is_not_ours_to_delete(lab: Lab) -> None:
    dvc = f"{sys.executable} -m dvc"
    lab.shell(f"mkdir mine && echo data > mine/data.txt && {dvc} add -q mine/data.txt && mkdir theirs")
    lab.shell(f"cd theirs && {dvc} stage add -q -n own -o out.txt 'echo made > out.txt' && {dvc} repro -q own")
    sweep_up(lab)
    lab.shell(f"rm mine/data.txt theirs/out.txt && {dvc} checkout -q mine/data.txt.dvc theirs/dvc.yaml")
    assert (lab.root / "mine/data.txt").read_text() == "data\n" and (lab.root / "theirs/out.txt").read_text() == "made\n"


def test_a_cache_that_others_share_is_left_alone(lab: Lab, tmp_path: Path) -> None:
    lab.write(".dvc/config.local", f"{(lab.root / '.dvc/config.local').read_text()}[cache]\n    dir = {tmp_path / 'shared'}\n")
    with pytest.raises(UsageProblem, match="outside this project"):
        collect(lab.project, delete=True)


@pytest.mark.parametrize(("point", "passes"), [("gc object deleted", 3), pytest.param("gc entries deleted", 0, marks=pytest.mark.nightly)])
def test_a_kill_in_between_harms_nothing_and_the_next_call_goes_on(six: Lab, tmp_path: Path, point: str, passes: int) -> None:
    expected = objects(six) - collect(six.project).objects.keys()
    faults = tmp_path / "faults"
    faults.mkdir()
    (faults / point).write_text(str(passes))
    code = "from pedigree.configs.base.project import Project; from pedigree.pipelines.maintain.gc import collect\n"
    code += "collect(Project.find(), delete=True)"
    environment = {**six.environment, "PEDIGREE_FAULTS": str(faults)}
    killed = subprocess.run([sys.executable, "-c", code], cwd=six.root, env=environment, check=False)
    assert killed.returncode == -9 and objects(six) > expected
    assert verify_project(six.project, remote=False).problems == []
    sweep_up(six)
    assert objects(six) == expected
    six.forget_runs()
    shutil.rmtree(six.root / "artifacts/lab/raw")
    run(six)
    assert six.runs() == []


def test_after_the_remote_is_swept_a_fresh_clone_restores_all_that_is_kept(lab: Lab, tmp_path: Path) -> None:
    old = ids(lab)
    push(run_with_rows(lab, 5))
    push(run_with_rows(lab, 6))
    lab.shell(f"{COMMIT} six")
    stray = tmp_path / "store/files/md5/ab" / ("c" * 30)
    stray.parent.mkdir(parents=True, exist_ok=True)
    stray.write_text("of nobody")
    there = Ledger(lab.project).remote.files()
    listed = collect(lab.project, remote=True)
    assert stray.exists() and f"ab{'c' * 30}" in listed.remote_objects and listed.remote_entries
    sweep_up(lab, remote=True)
    left = Ledger(lab.project).remote.files()
    assert left[0].keys() == there[0].keys() - listed.remote_objects.keys() and not stray.exists()
    assert left[1].keys() == there[1].keys() - set(listed.remote_entries)
    assert verify_project(lab.project).problems == []

    clone = object.__new__(Lab)
    clone.code, clone.root, clone.environment = lab.code, tmp_path / "clone", lab.environment
    subprocess.run(["git", "clone", "-q", lab.root, clone.root], check=True)
    shutil.copy(lab.root / ".dvc/config.local", clone.root / ".dvc/config.local")
    assert all(held(clone, stage, identifier) for stage, identifier in ids(lab).items())
    assert not held(clone, "cleaner", old["cleaner"])
    clone.forget_runs()
    run(clone)
    assert clone.runs() == []
    # what was deleted can be pushed again: nobody believes it to be there
    lab.edit("configs/recipes/lab.yaml", "count: 6", "count: 5")
    run(lab)
    push(lab.run())
    assert verify_project(lab.project).unpushed == 0


@pytest.mark.nightly
def test_a_bucket_is_swept_too(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with s3_server("pedigree-gc") as url:
        lab.write(".dvc/config.local", f"{(lab.root / '.dvc/config.local').read_text()}    endpointurl = {url}\n")
        lab.edit(".dvc/config.local", f"url = {lab.root.parent / 'store'}", "url = s3://pedigree-gc/store")
        push(run_with_rows(lab, 5))
        remove(lab.root / "artifacts/lab/cleaner")
        lock = lab.root / "artifacts/lab/dvc.lock"
        stages = yaml.safe_load(lock.read_text())["stages"]
        lock.write_text(yaml.safe_dump({"schema": "2.0", "stages": {name: entry for name, entry in stages.items() if name != "cleaner"}}))
        there, listed = Ledger(lab.project).remote.files(), collect(lab.project, remote=True, workspace=True)
        assert sum(listed.remote_objects.values()) == sum(there[0][oid] for oid in listed.remote_objects) > 0
        sweep_up(lab, remote=True, workspace=True)
        left = Ledger(lab.project).remote.files()
        assert left[0].keys() == there[0].keys() - listed.remote_objects.keys() and left[1].keys() < there[1].keys()
        assert verify_project(lab.project).unpushed == 0


def run_with_rows(lab: Lab, count: int):
    recipe = lab.root / "configs/recipes/lab.yaml"
    recipe.write_text(recipe.read_text().replace("count: 5", f"count: {count}").replace("count: 6", f"count: {count}"))
    run(lab)
    return lab.run()


def test_the_command_lists_first_and_deletes_when_told(six: Lab) -> None:
    def gc(*options: str) -> list[str]:
        return InProcessCommand(six)("gc", *options).splitlines()

    before = objects(six)
    listed = gc()
    assert {line.split()[0] for line in listed[1:4]} == {"lab/clean", "lab/cleaner", "lab/raw"}
    assert listed[-1] == "`pedigree gc --yes` deletes them."
    assert objects(six) == before
    deleted = gc("--yes")[-1]
    assert re.match("deleted: .* from the cache, 1 code snapshot; 4 artifacts kept with all ancestors", deleted)
    assert objects(six) < before
    assert gc()[-1].startswith("would be deleted: 0 objects")
