"""Rows that a program of the project makes: which rows come, and what of a program that is wrong, uneven, silent or hostile is told."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from data_lab import rows_of, run_stage
from waiting import deadline, until

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.language.recipe import load_recipe
from pedigree.configs.language.suites import complaints
from pedigree.configs.rows.datasets import PrepareData
from pedigree.data.artifacts.artifacts import Artifact
from pedigree.stages.verifiers import project_programs, row_programs, sandbox

pytestmark = pytest.mark.skipif(sandbox.program() is None, reason="bubblewrap is not installed: apt-get install bubblewrap")
PUZZLES = """
import random

def rows(count, seed, digits=1):
    print("not a row")
    draw = random.Random(seed)
    for number in range(2 * count):
        a, b = (draw.randrange(10**digits) for _ in range(2))
        yield {"prompt": f"{number}: {a} + {b}?", "completion": str(a + b), "tags": sorted({"x", "y"})}
"""


def prepared(folder: Path, text: str, count: int = 5, **more: Any) -> Artifact:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "puzzles.py").write_text(text)
    source = {"type": "program", "path": "data/puzzles.py", "count": count, "seed": 7, **more}
    config = {"record": "conversation", "sources": [source]}
    return run_stage(folder / "job", "prepare_data", config, {"data/puzzles.py": folder / "puzzles.py"}, threads=1)


def made(folder: Path, text: str, silent: float = 600.0, count: int = 5) -> list[Any]:
    """The rows alone, without a stage around them."""
    (folder / "puzzles.py").write_text(text)
    (source,) = PrepareData.model_validate(
        {"record": "prompt", "sources": [{"type": "program", "path": "puzzles.py", "count": count, "seed": 7}]}
    ).sources
    assert source.type == "program"
    return [row for _, row in row_programs.rows_of(source, folder / "puzzles.py", silent, lambda made: None)]


def late(silent: float) -> str:
    """A pattern of what is told."""
    return re.escape(f"output no complete line for {silent:g} s")


def test_rows_are_those_that_the_function_gives_for_count_seed_and_arguments(tmp_path: Path) -> None:
    """No more than `count` of them are taken, whatever it prints and however many more there are."""
    namespace: dict[str, Any] = {}
    exec(PUZZLES, namespace)
    expected = [row for row, _ in zip(namespace["rows"](5, 7, digits=3), range(5), strict=False)]
    kept = prepared(tmp_path, PUZZLES, arguments={"digits": 3})
    found = {row["messages"][0]["content"]: row["messages"][1]["content"] for row in rows_of(kept)}
    assert found == {row["prompt"]: row["completion"] for row in expected} and {row["source"] for row in rows_of(kept)} == {"puzzles"}
    assert kept.record.metrics["sources"] == {"puzzles": 5}


def test_what_is_no_row_is_a_bad_one_and_told_with_its_number(tmp_path: Path) -> None:
    text = """
def rows(count, seed):
    yield {"prompt": "a", "completion": "b"}
    yield {"prompt": "c", "completion": {1, 2}}
    yield ["d"]
    yield {"prompt": "e", "completion": float("nan")}
    yield {"question": "f"}
"""
    with pytest.raises(PedigreeError) as caught:
        prepared(tmp_path / "a", text)
    for told in (
        "puzzles: 4 malformed rows of 5, and max_bad_rows 0 allows 0",
        "puzzles.py[1]: is not JSON: Object of type set is not JSON serializable",
        "puzzles.py[2]: is a list, and a row is a mapping from columns to values",
        "puzzles.py[3]: is not JSON: Out of range float values",
        "puzzles.py[4]: ",
    ):
        assert told in str(caught.value)
    kept = prepared(tmp_path / "b", text, max_bad_rows=4)
    assert len(rows_of(kept)) == 1 and kept.record.metrics["bad_rows"] == 4
    bad = (kept.path / "evidence" / "bad_rows.jsonl").read_text().splitlines()
    assert json.loads(bad[0])["text"] == '{"prompt": "c", "completion": "<set>"}'


def test_fewer_rows_than_count_are_an_error_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(PedigreeError, match=r"data/puzzles\.py: rows output 3 rows, but count is 5: lower count, or output more"):
        prepared(tmp_path, "def rows(count, seed):\n    return [{'prompt': str(n), 'completion': 'x'} for n in range(3)]\n")


GREEDY = "def rows(count, seed):\n    yield {}\n    held = [bytes(2**29) for _ in range(9)]\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "def pick(n):\n    return [1][n]\n\ndef rows(count, seed):\n    yield {'prompt': 'a'}\n    yield pick(5)\n",
            ["after 1 rows of 5:", 'File "puzzles.py", line 6, in rows', "yield pick(5)", "return [1][n]", "IndexError: list index"],
        ),
        ("def rows(count, seed)\n    pass\n", ["after 0 rows of 5:", "line 1", "SyntaxError: expected ':'"]),
        ("def row(count, seed):\n    return []\n", ["NameError: puzzles.py has no function 'rows'"]),
        ("def rows(count):\n    return []\n", ["TypeError: rows() got an unexpected keyword argument 'seed'"]),
        ("import numpy\n", ["ModuleNotFoundError: No module named 'numpy'"]),
        ("def rows(count, seed):\n    raise SystemExit(0)\n", ["after 0 rows of 5:", "SystemExit: 0"]),
        ("def rows(count, seed):\n    raise ValueError('\\ud83d')\n", ["after 0 rows of 5:", "ValueError: ?"]),
        (GREEDY, ["after 1 rows of 5:", "MemoryError"]),
    ],
)
def test_an_error_of_the_program_is_told_with_the_end_of_its_traceback(tmp_path: Path, text: str, told: list[str]) -> None:
    with pytest.raises(PedigreeError) as caught:
        made(tmp_path, text)
    assert [words for words in told if words not in str(caught.value)] == [] and "runner.py" not in str(caught.value)


@pytest.mark.parametrize("draw", ["random.random()", "id(object())", "os.urandom(4).hex()"])
def test_rows_that_differ_from_run_to_run_are_refused_with_both(tmp_path: Path, draw: str) -> None:
    text = f"import os, random\ndef rows(count, seed):\n    yield {{'prompt': 'a'}}\n    yield {{'prompt': str({draw})}}\n"
    with pytest.raises(PedigreeError, match=r'is not deterministic; with equal count, seed and arguments row 1 is {"row": .* and {"row": '):
        made(tmp_path, text)


def test_sets_of_texts_have_one_order_in_all_runs(tmp_path: Path) -> None:
    text = "def rows(count, seed):\n    yield from ({'prompt': word} for word in {'a', 'b', 'c', 'd', 'e'})\n"
    assert made(tmp_path, text) == made(tmp_path, text)


class FromTheFirstRow(project_programs.Deadline):
    """How long two sandboxes take to start is this machine's business: the time for a row runs once there is one. Each time that it is
    begun is kept."""

    begun: list[float]

    def __init__(self, seconds: float) -> None:
        self.begun = []
        super().__init__(deadline(600))

    def begin(self, seconds: float) -> None:
        self.begun.append(seconds)
        super().begin(seconds)


@pytest.fixture
def from_the_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_programs, "Deadline", FromTheFirstRow)


def test_a_program_that_hangs_or_dies_is_ended_and_says_how_far_it_came(tmp_path: Path, from_the_first_row: None) -> None:
    silent = deadline(1)
    with pytest.raises(PedigreeError, match=rf"puzzles\.py: rows {late(silent)} after 1 rows of 5 .*heartbeat_timeout_s"):
        made(tmp_path, "def rows(count, seed):\n    yield {'prompt': 'a'}\n    while True:\n        pass\n", silent)
    with pytest.raises(PedigreeError, match=r"rows ended after 2 rows of 5"):
        made(tmp_path, "import os\ndef rows(count, seed):\n    yield {'prompt': 'a'}\n    yield {'prompt': 'b'}\n    os._exit(0)\n")
    with pytest.raises(PedigreeError, match="rows wrote into the stream of its results after 0 rows of 5"):
        made(tmp_path, "import os\ndef rows(count, seed):\n    os.write(3, b'no JSON' + bytes([10]))\n    yield {}\n")


@pytest.mark.parametrize("line", ["no JSON", '{"raised', "[1]", '{"bad": 1}', "[" * 100_000])
def test_a_line_of_no_known_form_is_the_programs_own(line: str) -> None:
    with pytest.raises(project_programs.ProgramFailed, match="wrote into the stream of its results"):
        project_programs.parsed(line.encode(), *row_programs.FORMS)


DRIPS = """
import os, time
def rows(count, seed):
    yield {"prompt": "a"}
    while True:
        os.write(3, b" ")
        time.sleep(0.2)  # many bytes in the time of a row, and no row
"""
HANGS_THE_SECOND_TIME = """
import time
def rows(count, seed):
    yield {"prompt": "a"}
    time.sleep(SECONDS)
    yield {"prompt": "b"}
"""


def test_bytes_without_an_end_are_no_row(tmp_path: Path, from_the_first_row: None) -> None:
    silent = deadline(1)
    with pytest.raises(PedigreeError, match=rf"rows {late(silent)} after 1 rows of 5"):
        made(tmp_path, DRIPS, silent)


def test_both_runs_have_one_time_for_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_the_first_row: None) -> None:
    """A run that is late by itself would be waited for when the other one has taken all of the time already: it begins with a row of both,
    and not again with that of one."""
    start, sleeps, silent, limits = row_programs.ProgramProcess, [0, 10**6], deadline(1), list[Any]()

    def with_its_own_time(mode: str, order: dict[str, Any], limit: FromTheFirstRow) -> project_programs.ProgramProcess:
        limits.append(limit)
        return start(mode, {**order, "program": order["program"].replace("SECONDS", str(sleeps.pop(0)))}, limit)

    monkeypatch.setattr(row_programs, "ProgramProcess", with_its_own_time)
    with pytest.raises(PedigreeError, match=rf"rows {late(silent)} after 1 rows of 5"):
        made(tmp_path, HANGS_THE_SECOND_TIME, silent)
    assert limits[0] is limits[1] and limits[0].begun == [deadline(600), silent]


def test_both_runs_make_their_first_row_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is started before the first has its row."""
    start, seen = row_programs.ProgramProcess, []

    def watched(*given: Any) -> project_programs.ProgramProcess:
        program = start(*given)
        lines = program.lines
        program.lines = (seen.append("line") or line for line in lines)
        seen.append("started")
        return program

    monkeypatch.setattr(row_programs, "ProgramProcess", watched)
    assert made(tmp_path, "def rows(count, seed):\n    yield {'prompt': 'a'}\n", count=1) == [{"prompt": "a"}]
    assert seen[:3] == ["started", "started", "line"]


def test_no_more_rows_than_count_are_taken_of_what_a_program_writes_to_its_pipe(tmp_path: Path) -> None:
    text = "import os\ndef rows(count, seed):\n    while True:\n        os.write(3, b'{\"row\": {}}' + bytes([10]))\n    yield\n"
    with pytest.raises(PedigreeError, match=r"data/puzzles\.py: rows output more rows than count 5: it must write only to files"):
        prepared(tmp_path, text)


def test_a_program_sees_no_file_of_the_project_and_no_network(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    text = f"""
import os, socket
def rows(count, seed):
    yield {{"prompt": str(os.path.exists({str(tmp_path / "secret.txt")!r}))}}
    yield {{"prompt": str(os.path.exists("/packages"))}}
    yield {{"prompt": str({str(Path(__file__).parents[2])!r} in open("/proc/self/mountinfo").read())}}
    yield {{"prompt": str(sorted(name for name in os.environ if "PEDIGREE" in name or "KEY" in name))}}
    for act in (lambda: socket.create_connection(("127.0.0.1", 1)), lambda: open("/usr/x", "w"), lambda: open("/proc/1/environ").read()):
        try:
            yield {{"prompt": f"did it: {{act()!r}}"}}
        except OSError as error:
            yield {{"prompt": "refused"}}
"""
    told = [row["prompt"] for row in made(tmp_path, text, count=7)]
    assert told == ["False", "False", "False", "[]", "refused", "refused", "refused"]


def test_a_sandbox_that_does_not_come_up_says_nothing_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_command", lambda flags: ((sandbox.program(),), ("--ro-bind", "/nonexistent", "/x", "--", "python")))
    with pytest.raises(PedigreeError, match=r"the sandbox did not come up.*nonexistent"):
        made(tmp_path, PUZZLES)


def test_a_sandbox_that_is_ended_before_it_is_up_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bubblewrap's child waits to be set up, with the pipe of the rows, and so early it does not die with it: here a shell's."""
    monkeypatch.setattr(sandbox, "_command", lambda flags: (("sh", "-c", "sleep 60 & echo $! > child; sleep 60", "sh"), ()))
    monkeypatch.chdir(tmp_path)

    def interrupted(pipe: int, seconds: float) -> bool:
        until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text() != "")
        raise KeyboardInterrupt

    monkeypatch.setattr(project_programs, "readable", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path, PUZZLES)
    child = Path("/proc", (tmp_path / "child").read_text().strip(), "stat")
    until(lambda: not child.exists() or child.read_text().split()[2] == "Z", 30)


def test_where_nothing_locks_a_program_in_none_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "program", lambda: None)
    sandbox.require.cache_clear()
    try:
        with pytest.raises(PedigreeError, match=r"programs that generate rows run only in a sandbox.*read its rows from a file instead"):
            prepared(tmp_path, PUZZLES)
    finally:
        sandbox.require.cache_clear()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"path": "data/puzzles.txt"}, "is not a Python file"),
        ({"function": "rows()"}, "is not a function name"),
        ({"arguments": {"seed": 3}}, "'seed' is not a valid argument name"),
        ({"arguments": {"x y": 3}}, "'x y' is not a valid argument name"),
        ({"arguments": {"day": {1, 2}}}, "is not a JSON value"),
        ({"path": "../puzzles.py"}, "path"),
    ],
)
def test_a_call_that_cannot_be_meant_is_refused(fields: dict[str, Any], problem: str) -> None:
    source = {"type": "program", "path": "data/puzzles.py", "count": 5, "seed": 7, **fields}
    with pytest.raises(ValueError, match=problem):
        PrepareData.model_validate({"record": "prompt", "sources": [source]})


def test_the_program_is_a_dependency_and_an_unseen_suite_shares_it_with_nothing(tmp_path: Path) -> None:
    program = "{type: program, path: data/puzzles.py, count: %d, seed: 7, arguments: {digits: %d}}"
    suite = f"{{kind: prepare_data, record: item, task: t, split: unseen, sources: [{program % (5, 2)}]}}"
    rows = f"{{kind: prepare_data, record: prompt, sources: [{program % (9, 2)}]}}"
    (tmp_path / "made.yaml").write_text(f"stages:\n  suite: {suite}\n")
    assert load_recipe(tmp_path, "made").find("suite").files == ("data/puzzles.py",)
    for digits, refused in ((2, True), (3, False)):
        (tmp_path / "made.yaml").write_text(f"stages:\n  suite: {suite}\n")
        nodes = load_recipe(tmp_path, "made").nodes
        (tmp_path / "other.yaml").write_text(f"stages:\n  rows: {rows.replace('digits: 2', f'digits: {digits}')}\n")
        assert bool(list(complaints({**nodes, **load_recipe(tmp_path, "other").nodes}))) is refused
