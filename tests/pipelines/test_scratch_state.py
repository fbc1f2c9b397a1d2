"""Damaged files of unfinished work: a run works all the same or says in one line what to type, and the commands that look go on looking.

A power cut, a full disk, an upgrade or somebody's editor leaves them.
"""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running_lab import Lab
from sweeps import nightly_after

from pedigree.data.store import heartbeat
from pedigree.pipelines.jobs.code import unused
from pedigree.pipelines.jobs.context import StageFailed
from pedigree.pipelines.maintain import gc
from pedigree.pipelines.run.ensure import Result
from pedigree.pipelines.run.runs import run_graph

Damage = Callable[[Path], object]


def text(name: str, text: str) -> Damage:
    """The file holds something else, whether it was there or not."""
    return lambda scratch: (scratch / name).write_text(text)


def folder(name: str) -> Damage:
    """A folder stands there instead."""

    def replace(scratch: Path) -> None:
        (scratch / name).unlink(missing_ok=True)
        (scratch / name).mkdir(parents=True)

    return replace


def edited(name: str, edit: Callable[[Any], object]) -> Damage:
    """What it holds is JSON, but not ours."""

    def change(scratch: Path) -> None:
        value = json.loads((scratch / name).read_text())
        edit(value)
        (scratch / name).write_text(json.dumps(value))

    return change


GOES_ON: dict[str, Damage] = {
    **{f"attempts {shown}": text("attempts.json", shown) for shown in ("", "{}", "null", "[1]", '[{"cause": 1}]', "[" * 2000)},
    "attempts folder": folder("attempts.json"),
    "code empty": text("code.json", ""),
    "code []": text("code.json", "[]"),
    **{f"input record {shown}": text("inputs/data-0/record.json", shown) for shown in ("", "[]", "{}", "half a rec")},
    "input record gone": lambda scratch: (scratch / "inputs/data-0/record.json").unlink(),
    "input gone": lambda scratch: shutil.rmtree(scratch / "inputs/data-0"),
    "checkpoint without a number": folder("checkpoints/step-x"),
    **{f"done {shown}": text("done.json", shown) for shown in ("", "[]", "null", '{"ok": true, "content": "12')},
    "done folder": folder("done.json"),
    "job empty": text("job.json", ""),
    "job []": text("job.json", "[]"),
    "job told []": edited("job.json", lambda job: job.update(told=[])),
    "job process []": edited("job.json", lambda job: job["told"].update(process=[])),
    "job process incomplete": edited("job.json", lambda job: job["told"]["process"].pop("started")),
    "job process wrong": edited("job.json", lambda job: job["told"]["process"].update(pid="1")),
    "job memory wrong": edited("job.json", lambda job: job["told"].update(memory={"kills": "x"})),
    "job folder": folder("job.json"),
    "inputs.json empty": text("inputs.json", ""),
    "inputs.json []": text("inputs.json", "[]"),
    "inputs.json of another form": text("inputs.json", '{"x": {"size": 1}}'),
    "progress of another form": text("progress.json", '{"step": "x", "total": [], "numbers": 3, "time": "now"}'),
    "dependencies empty": text("dependencies.json", ""),
    "curve torn": lambda scratch: (scratch / "curve.jsonl").write_text('{"step": 1, "rows": 5}\n{"step": 2, "lo'),
}
REFUSED: dict[str, Damage] = {
    **{f"spec {shown}": text("spec.json", shown) for shown in ("", "{}", "[]", "null", "{", "[" * 2000)},
    "spec folder": folder("spec.json"),
    "spec of another version": edited("spec.json", lambda spec: spec.update(brand_new=1)),
    "spec placement x": edited("spec.json", lambda spec: spec.update(placement="x")),
    "spec address strange": edited("spec.json", lambda spec: spec.update(address=["../.."])),
}
EVERY = GOES_ON | REFUSED


def rounds() -> dict[str, list[str]]:
    """One damage of each file at a time: what is the first of its file, what is the second."""
    files: dict[str, list[str]] = {}
    for what in EVERY:
        files.setdefault(what.partition(" ")[0], []).append(what)
    longest = max(map(len, files.values()))
    return {f"round {n}": [whats[n] for whats in files.values() if n < len(whats)] for n in range(longest)}


ROUNDS = rounds()
DAILY = 2
"""Later rounds damage in like ways what the first ones have damaged."""
REFUSED_NOW = ("spec folder", "spec of another version", "spec address strange")


class Unfinished:
    """A lab whose stage `clean` was killed after its checkpoint, when all but its report was written; as often as wanted."""

    def __init__(self, base: Path) -> None:
        self.lab, self.kept = Lab(base, processes=True), base / "kept"
        self.lab.edit("configs/execution/lab.yaml", "retries: 1", "retries: 0")
        faults = base / "faults"
        faults.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            assert isinstance(self.run("suite"), Result) and isinstance(self.run("raw"), Result)
            patch.setenv("PEDIGREE_FAULTS", str(faults))
            (faults / "job finished").write_text("0")
            end = self.run()
            assert isinstance(end, StageFailed) and end.cause == "crashed", end
        self.lab.processes = False
        self._copy(self.lab.root, self.kept)

    def again(self) -> None:
        """As it was."""
        shutil.rmtree(self.lab.root)
        self._copy(self.kept, self.lab.root)

    def run(self, stage: str = "clean", **options: Any) -> Any:
        (end,) = run_graph(self.lab.run(), {f"lab/{stage}"}, **options)
        return end

    @property
    def scratch(self) -> Path:
        (found,) = (self.lab.root / ".pedigree/scratch").iterdir()
        return found

    @staticmethod
    def _copy(source: Path, target: Path) -> None:
        subprocess.run(["cp", "-a", str(source), str(target)], check=True)  # links between files are kept


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Unfinished:
    return Unfinished(tmp_path_factory.mktemp("unfinished"))


@pytest.fixture
def unfinished(made: Unfinished, monkeypatch: pytest.MonkeyPatch) -> Unfinished:
    monkeypatch.setattr(heartbeat, "SILENCE_S", 1.0)
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.1)
    made.again()
    return made


@pytest.fixture
def lab(unfinished: Unfinished) -> Lab:
    return unfinished.lab


def test_undamaged_it_goes_on(unfinished: Unfinished) -> None:
    assert unfinished.run().outcome == "ran"
    told = json.loads((unfinished.lab.root / "artifacts/lab/clean/run.json").read_text())["attempts"]
    assert [attempt["cause"] for attempt in told] == ["crashed", "succeeded"] and told[1]["resumed_from"] == "step-1"


@pytest.mark.parametrize("round", nightly_after(2 * DAILY, [name for name in ROUNDS if any(what in GOES_ON for what in ROUNDS[name])]))
def test_what_can_be_done_without_counts_as_never_written(unfinished: Unfinished, round: str) -> None:
    for what in ROUNDS[round]:
        if what in GOES_ON:
            GOES_ON[what](unfinished.scratch)
    end = unfinished.run()
    assert isinstance(end, Result) and end.outcome == "ran", end
    told = json.loads((unfinished.lab.root / "artifacts/lab/clean/run.json").read_text())["attempts"]
    assert told[-1]["resumed_from"] == "step-1" and told[-1]["code"]["snapshot"]
    assert (unfinished.lab.root / "artifacts/lab/clean/evidence/curve.csv").read_text().startswith("step,rows\n1,5\n")


@pytest.mark.parametrize(
    "what",
    [pytest.param(what, id=what[:30], marks=() if what in REFUSED_NOW else pytest.mark.nightly) for what in REFUSED],
)
def test_what_the_work_means_nothing_without_is_named_with_what_to_type(
    unfinished: Unfinished, what: str, type_: Callable[..., tuple[int, str, str]]
) -> None:
    REFUSED[what](unfinished.scratch)
    key = unfinished.scratch.name[:12]
    for _ in range(2):  # typing again does not make it worse
        end = unfinished.run()
        assert isinstance(end, StageFailed) and end.cause == "refused", end
        assert f".pedigree/scratch/{unfinished.scratch.name}/spec.json" in end.message and str(unfinished.lab.root) not in end.message
        assert f"`pedigree scratch clean/{key} --clean`" in end.message and "--force clean" in end.message
        assert list((unfinished.scratch / "checkpoints").iterdir())
    code, said, _ = type_("scratch", f"clean/{key}", "--clean")
    assert code == 0 and "deleted 1 folder" in said
    assert unfinished.run().outcome == "ran"


@pytest.mark.parametrize("round", nightly_after(DAILY, ROUNDS))
def test_force_heals_everything(unfinished: Unfinished, round: str) -> None:
    """It reads nothing but whether a process lives, so every file may be damaged at once."""
    for what in ROUNDS[round]:
        EVERY[what](unfinished.scratch)
    end = unfinished.run(forced={"lab/clean"})
    assert isinstance(end, Result) and end.outcome == "ran", end
    told = json.loads((unfinished.lab.root / "artifacts/lab/clean/run.json").read_text())["attempts"]
    assert [attempt["cause"] for attempt in told] == ["succeeded"] and told[0].get("resumed_from") is None


@pytest.mark.parametrize("what", nightly_after(2, ["done ", "spec folder", "dependencies empty", "job process incomplete", "spec {}"]))
def test_force_typed_again_heals_it_too(unfinished: Unfinished, what: str) -> None:
    """Where a forced job had begun, the next `--force` would take its result."""
    (unfinished.scratch / "forced.json").write_text("{}")
    EVERY[what](unfinished.scratch)
    assert unfinished.run(forced={"lab/clean"}).outcome == "ran"


@pytest.mark.parametrize("round", nightly_after(DAILY, ROUNDS))
def test_commands_that_look_go_on_looking(unfinished: Unfinished, round: str, type_: Callable[..., tuple[int, str, str]]) -> None:
    for what in ROUNDS[round]:
        EVERY[what](unfinished.scratch)
    for command in (("status", "lab"), ("jobs",), ("scratch",)):
        code, *said = type_(*command)
        assert code == 0 and "bug" not in "".join(said), (command, said)
    code, *said = type_("cancel", "clean")
    assert code in (0, 2) and "bug" not in "".join(said), said
    unused(unfinished.lab.project)
    gc._refuse_company(gc.Signs(unfinished.lab.project), lambda: None)


def test_gc_looks_past_a_spec_that_is_no_mapping(unfinished: Unfinished, type_: Callable[..., tuple[int, str, str]]) -> None:
    (unfinished.scratch / "spec.json").write_text("[]")
    code, *said = type_("gc")
    assert code == 0, said


@pytest.mark.parametrize("what", nightly_after(1, ["spec folder", "spec ", "spec of another version", "spec null"]))
def test_without_anything_to_go_on_from_a_damaged_spec_costs_nothing(unfinished: Unfinished, what: str) -> None:
    shutil.rmtree(unfinished.scratch / "checkpoints")
    EVERY[what](unfinished.scratch)
    assert unfinished.run().outcome == "ran"


def test_a_bug_in_one_stage_ends_no_other_even_where_its_log_cannot_be_found(
    unfinished: Unfinished, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spec that the search for the log meets is no mapping; and the search itself may have a bug."""
    (unfinished.scratch / "spec.json").write_text("null")

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("pedigree.pipelines.run.runs.ensure", broken)
    end = unfinished.run()
    assert isinstance(end, StageFailed) and end.cause == "bug" and "ZeroDivisionError" in end.message
    monkeypatch.setattr("pedigree.pipelines.run.runs.log_file", broken)
    end = unfinished.run()
    assert isinstance(end, StageFailed) and end.cause == "bug" and end.log is None
