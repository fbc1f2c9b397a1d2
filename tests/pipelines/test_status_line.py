"""What takes long is told: how far hashing, restoring, exporting and verifying are, and to whom."""

import io
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from running_lab import CLEAN, Lab, outcomes, status
from typer.testing import CliRunner
from waiting import until

from pedigree.data.artifacts import source_files
from pedigree.data.artifacts.artifacts import sha256_path
from pedigree.data.artifacts.source_files import KnownHashes
from pedigree.data.store import hashing
from pedigree.pipelines.cli.console import echo
from pedigree.pipelines.cli.main import app
from pedigree.pipelines.cli.progress import Board, Display, Row, StatusLine
from pedigree.pipelines.jobs import context
from pedigree.pipelines.jobs.events import StageBusy
from pedigree.pipelines.ledger import cache
from pedigree.pipelines.lineage.verify import verify_project
from pedigree.pipelines.prefect.observer import Observer
from pedigree.pipelines.publish.export import export
from pedigree.pipelines.run.plans import plan
from pedigree.pipelines.run.runs import run_graph, settled

NOISE = 5 << 20
"""Bytes of a payload that counts as large here."""
LONG = 4 << 20


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A lab with one large artifact."""
    lab = Lab(tmp_path_factory.mktemp("telling"))
    lab.knobs(clean={"bytes": NOISE})
    assert set(outcomes(lab).values()) == {"ran"}
    return lab


@pytest.fixture
def lab(made: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The same at another place, where DVC knows no file yet and little is much."""
    for module in (context, cache):
        monkeypatch.setattr(module, "LONG_BYTES", LONG)
    monkeypatch.setattr(hashing, "PIECE_BYTES", 1 << 20)
    return made.elsewhere(tmp_path)


def told_of(lab: Lab) -> tuple[list[tuple[str, str, str]], Any]:
    told: list[tuple[str, str, str]] = []

    def watch(address: str, state: str, detail: str = "", **_: Any) -> None:
        told.append((address, state, detail))

    return told, lab.run(watch=watch)


def hashed_by_dvc(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths that DVC itself reads to hash them."""
    from dvc_data.hashfile import hash as dvc_hash

    found, real = [], dvc_hash.file_md5

    def spied(path: str, *args: Any, **kwargs: Any) -> str:
        found.append(path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(dvc_hash, "file_md5", spied)
    return found


def test_a_moved_project_is_hashed_by_us_who_tell_of_it_and_not_once_more_by_dvc(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    by_dvc = hashed_by_dvc(monkeypatch)
    told, run = told_of(lab)
    assert all(not row.reasons for row in plan(run))
    (address,) = {address for address, state, _ in told if state == "hashing"}
    shown = [detail for _, state, detail in told if state == "hashing"]
    assert address == "lab/clean" and len(shown) >= 5 and shown[-1] == "5.2 MB of 5.2 MB"
    assert by_dvc and not [path for path in by_dvc if path.endswith("noise")]  # DVC hashes what is small
    told.clear()
    assert all(not row.reasons for row in plan(run)) and told == []


def test_a_file_that_is_replaced_while_it_is_hashed_is_not_taken_for_the_old_one(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    noise, real = lab.root / "artifacts/lab/clean/payload/noise", cache.md5_of

    def replaced(path: Path, *given: Any) -> str | None:
        found = real(path, *given)
        if path == noise:
            noise.write_bytes(bytes(NOISE))
        return found

    monkeypatch.setattr(cache, "md5_of", replaced)
    run = lab.run()
    assert "output payload changed" in run.ledger.reasons(run.graph.find("clean"))


def test_project_files_are_hashed_once_and_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    real = source_files.hash_files
    monkeypatch.setattr(source_files, "hash_files", lambda paths, **given: (read.extend(paths), real(paths, **given))[1])
    (tmp_path / "a").mkdir()
    for name in ("a/x", "a/y", "b"):
        (tmp_path / name).write_text(name)
    known, told = KnownHashes(), list[tuple[int, int]]()
    right = {name: sha256_path(tmp_path / name) for name in ("a", "b")}
    read.clear()
    for _ in range(3):
        assert {name: known.sha256(tmp_path / name, lambda *far: told.append(far)) for name in right} == right
    assert len(told) == len(read) == 3
    before = (tmp_path / "b").stat()
    (tmp_path / "b").write_text("c")  # as long, and as old to all appearances
    os.utime(tmp_path / "b", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert known.sha256(tmp_path / "b") == sha256_path(tmp_path / "b") != right["b"]
    (tmp_path / "a/x").write_text("z")
    assert known.sha256(tmp_path / "a") == sha256_path(tmp_path / "a")


def test_the_first_look_of_a_run_is_told_and_leaves_no_stage_hashing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(StatusLine, "__call__", lambda self, words: told.append(words))
    monkeypatch.chdir(lab.root)
    result = CliRunner().invoke(app, ["run", "lab"])
    assert result.exit_code == 0 and "4 stages up to date" in result.output
    assert told[-1] == "lab/clean: hashing 5.2 MB of 5.2 MB"
    lab.edit("configs/recipes/lab.yaml", "ngram: 5", "ngram: 6")
    (lab.root / "artifacts/lab/clean/payload/noise").touch()
    seen, run = told_of(lab)
    assert [end.address for end in settled(plan(run))] == ["lab/suite", "lab/raw", "lab/clean"]
    assert [state for address, state, _ in seen if address == "lab/cleaner"][-1] == "pending"


@pytest.mark.parametrize("state", ["hashing", "restoring"])
def test_what_changes_all_the_time_is_kept_and_told_to_prefect_at_most_once(lab: Lab, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    run, kept = lab.run(), list[int]()
    observer = Observer(run, list(run.graph.nodes))
    monkeypatch.setattr(observer, "_keep", lambda: kept.append(1))
    for done in range(100):
        run.watch(StageBusy("lab/clean", state, f"{done} of 100 MB"))  # pyright: ignore[reportArgumentType]
    assert len(kept) == (0 if state == "hashing" else 1)


def test_files_that_are_put_into_place_and_hashed_are_told_of(lab: Lab) -> None:
    shutil.rmtree(lab.root / "artifacts/lab/clean")
    told, run = told_of(lab)
    assert outcomes_of(run)["clean"] == "restored" and status(lab) == CLEAN
    placed = [detail for address, state, detail in told if (address, state) == ("lab/clean", "restoring")]
    total = int(placed[-1].split()[2])
    assert total >= 5 and placed == [f"{n} of {total} files" for n in range(1, total + 1)]
    assert len([detail for address, state, detail in told if (address, state) == ("lab/clean", "hashing")]) >= 5
    assert not [address for address, state, _ in told if state in ("restoring", "hashing") and address != "lab/clean"]


def outcomes_of(run: Any) -> dict[str, str]:
    return {end.address.partition("/")[2]: getattr(end, "outcome", str(end)) for end in run_graph(run)}


def test_hashing_is_shown_without_a_terminal_too() -> None:
    board = Board("tiny", {"tiny/sft": Row(name="sft")})
    display = Display(board, io.StringIO(), interval_s=15)
    board.update(StageBusy("tiny/sft", "hashing", "1.0 GB of 3.0 GB"))
    (line,) = display.lines(100.0)
    assert "hashing  1.0 GB of 3.0 GB" in line
    board.update(StageBusy("tiny/sft", "hashing", "2.0 GB of 3.0 GB"))
    assert display.lines(105.0) == []
    (line,) = display.lines(115.0)
    assert "2.0 GB of 3.0 GB" in line


def test_exporting_and_verifying_tell_how_far_they_are(lab: Lab, tmp_path: Path) -> None:
    told: dict[str, list[tuple[int, int]]] = {}

    def far(what: str) -> Any:
        return lambda done, total: told.setdefault(what, []).append((done, total))

    export(lab.root / "artifacts/lab/clean", "lab/clean", tmp_path / "out", progress=far)
    more = {what for what, steps in told.items() if len(steps) >= 2}
    assert more == {"checking", "copying", "checking the copy"} and told.keys() - more == {"writing to the disk"}
    assert all(total > NOISE for steps in told.values() for _, total in steps)
    read: list[int] = []
    verdict = verify_project(lab.project, report=read.append)
    assert read == sorted(read) and read[-1] == verdict.read_bytes and len(read) > verdict.files


def test_a_command_that_looks_says_what_lasts_beside_its_result() -> None:
    stream = io.StringIO()
    with StatusLine(stream, interval_s=3600) as telling:
        telling.far("checking")(1, 2)
    assert stream.getvalue() == ""  # it took no time
    with StatusLine(stream, interval_s=0.05) as telling:
        telling.far("checking")(1_000_000, 2_000_000)
        until(lambda: stream.getvalue().count("\n") == 1)
        telling.watch(StageBusy("lab/raw", "hashing", "1 of 2 \x1b[31m"))
        telling.watch(StageBusy("lab/raw", "checking", "nothing of interest"))
        until(lambda: stream.getvalue().count("\n") == 2)
    checked, hashed = stream.getvalue().splitlines()
    assert checked == "checking 1.0 MB of 2.0 MB" and hashed.startswith("lab/raw: hashing 1 of 2 ") and "\x1b" not in hashed


def test_on_a_terminal_it_is_one_line_that_goes_away_and_leaves_the_result_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    with StatusLine(stream) as telling:
        telling.far("[bold]checking")(1, 3)
        until(lambda: "[bold]checking 1 byte of 3 bytes" in stream.getvalue())
        telling.far("signing")(0, 3)  # said once, and shown all the same
        until(lambda: "signing 0 bytes of 3 bytes" in stream.getvalue())
        echo("the result")
    assert capsys.readouterr() == ("the result\n", "") and "the result" not in stream.getvalue()
