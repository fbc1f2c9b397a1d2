"""Reward functions of the project: what they receive, what they return, and what becomes of an answer that they cannot reward."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from waiting import deadline

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.methods.reward_terms import RewardProgram
from pedigree.stages.verifiers import project_programs, sandbox
from pedigree.stages.verifiers.reward_programs import Answered, RewardFunction

pytestmark = pytest.mark.skipif(sandbox.program() is None, reason="bubblewrap is not installed: apt-get install bubblewrap")
CAUSES = """
import os, time

def reward(completions, how):
    if how[0] == "hang":
        time.sleep(10**6)
    if how[0] == "die":
        os._exit(1)
    if how[0] == "half":
        raise ValueError("\\ud83d")
    if how[0] == "raise":
        return [int(text[0]["content"]) for text in completions]
    return {"short": [1.0], "nan": [float("nan"), 1.0], "text": ["1.0", 2], "none": [None, True], "scalar": 1.0}[how[0]]
"""
"""`how` is an argument of the prompt's verifier."""
OK = [None, 1.0]


def answers(prompt: str, *texts: str, **verifier: Any) -> list[Answered]:
    row = {"id": prompt, "source": "s", "messages": [{"role": "user", "content": f"q {prompt}"}], "verifier": verifier or None}
    return [Answered(row, text, [*range(len(text))], "stop", 0.5) for text in texts]


def values(folder: Path, text: str, groups: Sequence[Sequence[Answered]], **fields: Any) -> list[Any]:
    (folder / "mine.py").write_text(text)
    term = RewardProgram.model_validate({"type": "program", "path": "rewards/mine.py", **fields})
    function = RewardFunction(term, folder / "mine.py", [group[0].prompt["verifier"] for group in groups], 2, lambda: None)
    try:
        return function.values(groups)
    finally:
        function.close()


def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of the time for what hangs. All else has the whole of it, however slow this machine is."""
    send = project_programs.ProgramProcess.send

    def sent(program: project_programs.ProgramProcess, message: Any, seconds: float) -> None:
        send(program, message, seconds)
        if "hang" in repr(message):
            program.deadline.begin(program.deadline.seconds / 100)

    monkeypatch.setattr(project_programs.ProgramProcess, "send", sent)


@pytest.mark.parametrize("trusted", [False, True])
def test_an_answer_that_a_function_cannot_reward_is_unknown_with_its_cause_and_no_other_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    hurried(monkeypatch)
    hows = ["hang", "die", "raise", "short", "nan", "text", "none", "scalar", "half"]
    groups = [answers(how, "a", "2", name="extracted", how=how) for how in hows]
    seconds = deadline(100)
    found = dict(zip(hows, values(tmp_path, CAUSES, groups, seconds=seconds, trusted=trusted), strict=True))
    assert found["hang"] == [f"the function output no complete line for {seconds / 100:g} s (seconds: {seconds:g})"] * 2
    assert found["die"] == [f"the function ended (seconds: {seconds:g})"] * 2
    assert all("ValueError: invalid literal for int() with base 10: 'a'" in one and "runner" not in one for one in found["raise"])
    assert found["short"] == ["returned 1 rewards for 2 answers"] * 2
    assert found["nan"] == ["returned NaN, and a reward is a finite number", 1.0]
    assert found["text"] == ['returned "1.0", and a reward is a finite number', 2.0]
    assert all(one.endswith("ValueError: ?") for one in found["half"])  # half of a surrogate pair is in no file and on no terminal
    assert found["none"] == OK and all("'float' object is not iterable" in one for one in found["scalar"])


def test_a_function_of_trl_receives_the_columns_of_the_answers_to_one_prompt(tmp_path: Path) -> None:
    text = """
import numpy as np

async def reward(prompts, completions, completion_ids, answer, scale, **columns):
    assert [one[0]["content"] for one in prompts] == ["q " + name for name in columns["id"]] and len({*columns["id"]}) == 1
    assert columns["verifier_score"] == [0.5] * len(prompts) and columns["finish_reason"] == ["stop"] * len(prompts)
    said = [one[0]["content"] for one in completions]
    return np.array([scale * (len(ids) + (one == right)) for ids, one, right in zip(completion_ids, said, answer, strict=True)])
"""
    groups = [answers("p", "12", "345", name="gsm", answer="12"), answers("q", "6", name="gsm", answer="7")]
    assert values(tmp_path, text, groups, arguments={"scale": 0.5}) == [[1.5, 1.5], [0.5]]


def test_a_function_of_verl_receives_one_answer(tmp_path: Path) -> None:
    text = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "bad":
        raise KeyError("bad")
    return {"score": float(solution_str == ground_truth), "id": extra_info["id"]}
"""
    groups = [answers("p", "12", "bad", "13", name="gsm", answer="12")]
    ((right, bad, wrong),) = values(tmp_path, text, groups, form="verl", function="compute_score")
    assert (right, wrong) == (1.0, 0.0) and bad.endswith("KeyError: 'bad'")


def test_async_functions_of_a_trusted_file_have_all_prompts_together(tmp_path: Path) -> None:
    """Each waits for the other one."""
    text = """
import asyncio
there = {}

async def reward(completions, id):
    me, other = id[0], {"p": "q", "q": "p"}[id[0]]
    for name in (me, other):
        there.setdefault(name, asyncio.Event())
    there[me].set()
    await there[other].wait()
    return [1.0] * len(completions)
"""
    assert values(tmp_path, text, [answers("p", "a"), answers("q", "b", "c")], trusted=True) == [[1.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def reward(completions, solution):\n    return []\n", r"missing a required argument: 'solution'; its arguments may be prompts, "),
        ("import torch\n", r"rewards/mine\.py: reward cannot be used:\n(.*\n)*.*No module named 'torch'"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("import os\nos._exit(0)\n", r"rewards/mine\.py ended before reward could be used"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_before_any_answer(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(PedigreeError, match=told):
        values(tmp_path, text, [answers("p", "a", name="gsm", answer="1")])


def test_the_sandbox_hides_network_files_and_the_environment_and_trust_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_TEST", "1")
    (tmp_path / "secret.txt").write_text("x")
    text = f"""
import os, socket

def reward(completions):
    def works(attempt):
        try:
            return bool(attempt())
        except OSError:
            return False
    attempts = [lambda: os.environ.get("SECRET_OF_TEST"), lambda: open({str(tmp_path / "secret.txt")!r}).read(), socket.socket]
    return [float(works(one)) for one in attempts]
"""
    groups = [answers("p", "a", "b", "c")]
    assert values(tmp_path, text, groups) == [[0.0, 0.0, 0.0]]
    assert values(tmp_path, text, groups, trusted=True) == [[1.0, 1.0, 1.0]]


def test_without_a_sandbox_only_trusted_files_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "program", lambda: None)
    sandbox.require.cache_clear()
    text, groups = "def reward(completions):\n    return [1.0]\n", [answers("p", "a")]
    with pytest.raises(PedigreeError, match=r"reward functions run only in a sandbox.*or set `trusted: true` for rewards/mine\.py"):
        values(tmp_path, text, groups)
    assert values(tmp_path, text, groups, trusted=True) == [[1.0]]


LOADS_FOREVER = """
import os, time
from pathlib import Path
starts, folder = START, Path(FOLDER)
found = folder / f"start-{len([*folder.glob('start-*')])}"
(folder / "new").write_text(str(os.getpid()))
(folder / "new").rename(found)
if found.name == f"start-{starts}":
    time.sleep(10**6)  # as a model that takes long to load

def reward(completions):
    os._exit(1)
"""


@pytest.mark.parametrize("start", [0, 1])
def test_a_stop_while_a_file_loads_ends_its_process_and_starts_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    """At the first start, and after a process that ended has been replaced."""
    monkeypatch.setattr(project_programs, "LOADING_SECONDS", deadline(400))
    text, loading = LOADS_FOREVER.replace("START", str(start)).replace("FOLDER", repr(str(tmp_path))), tmp_path / f"start-{start}"
    (tmp_path / "mine.py").write_text(text)
    term = RewardProgram.model_validate({"type": "program", "path": "rewards/mine.py", "trusted": True})
    stopped: list[float] = []

    def beat() -> None:
        if loading.exists():
            stopped.append(time.monotonic())
            raise KeyboardInterrupt

    function = None
    with pytest.raises(KeyboardInterrupt):
        function = RewardFunction(term, tmp_path / "mine.py", [None], 1, beat)
        function.values([answers("p", "a"), answers("q", "b")])
    if function:
        function.close()
    assert time.monotonic() - stopped[0] < deadline(120)
    with pytest.raises(ProcessLookupError):
        os.kill(int(loading.read_text()), 0)
    assert len([*tmp_path.glob("start-*")]) == start + 1


DIES_ONCE = """
import os

def reward(completions):
    if completions[0][0]["content"] == "die":
        os._exit(1)
    return [1.0] * len(completions)
"""


@pytest.mark.parametrize("trusted", [False, True])
def test_a_process_that_replaces_another_runs_the_text_that_was_read_first(tmp_path: Path, trusted: bool) -> None:
    (tmp_path / "mine.py").write_text(DIES_ONCE)
    term = RewardProgram.model_validate({"type": "program", "path": "rewards/mine.py", "trusted": trusted})
    function = RewardFunction(term, tmp_path / "mine.py", [None], 1, lambda: None)
    try:
        (tmp_path / "mine.py").write_text("def reward(completions):\n    return [2.0] * len(completions)\n")
        found = function.values([answers("p", "die"), answers("q", "b")])
    finally:
        function.close()
    assert found == [["the function ended (seconds: 60)"], [1.0]]


def test_a_sandbox_that_does_not_start_again_ends_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known about the function, so that no reward is unknown because of it."""
    (tmp_path / "mine.py").write_text(DIES_ONCE)
    term = RewardProgram.model_validate({"type": "program", "path": "rewards/mine.py"})
    function = RewardFunction(term, tmp_path / "mine.py", [None], 1, lambda: None)
    try:
        assert function.values([answers("p", "die")]) == [["the function ended (seconds: 60)"]]
        (tmp_path / "ends.py").write_text("raise SystemExit(1)\n")
        monkeypatch.setattr(sandbox, "RUNNER", tmp_path / "ends.py")
        with pytest.raises(PedigreeError, match="the sandbox did not come up"):
            function.values([answers("q", "b"), answers("r", "c")])
    finally:
        function.close()


def test_a_file_that_cannot_be_loaded_again_is_the_cause_of_an_unknown_reward(tmp_path: Path) -> None:
    text = f"""
import os
from pathlib import Path
Path({str(tmp_path / "started")!r}).mkdir()

def reward(completions):
    os._exit(1)
"""
    ended, not_loaded = values(tmp_path, text, [answers("p", "a"), answers("q", "b")], trusted=True)
    assert ended == ["the function ended (seconds: 60)"]
    assert "rewards/mine.py: reward cannot be used:\n" in not_loaded[0] and "FileExistsError" in not_loaded[0]
