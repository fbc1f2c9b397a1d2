"""Environments of the project: what they receive and return, and what becomes of a conversation that they cannot go on with."""

import os
from pathlib import Path
from typing import Any

import pytest
from waiting import deadline, until

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.methods.environment_programs import EnvironmentProgram
from pedigree.stages.verifiers import project_programs, sandbox
from pedigree.stages.verifiers.environments import ProgramEnvironments, Reaction

pytestmark = pytest.mark.skipif(sandbox.program() is None, reason="bubblewrap is not installed: apt-get install bubblewrap")
COUNTING = """
import json, os, random, time

class Environment:
    def reset(self, seed, messages, answer, step):
        self.draw, self.sum, self.step_size = random.Random(seed), 0, step
        return f"{messages[0]['content']} {answer}"

    def step(self, answer):
        if answer == "hang":
            time.sleep(10**6)
        if answer == "die":
            os._exit(1)
        if answer == "short":
            return "one thing"
        if answer == "nan":
            return "x", float("nan"), False
        if answer == "echo":
            return json.loads('"\\\\ud83d"') + "!", None, False
        if answer == "nothing":
            return None, None, False
        self.sum += int(answer) * self.step_size
        return f"{self.sum} {self.draw.random()}", None if self.sum < 3 else self.sum, self.sum > 9
"""


def opened(folder: Path, text: str, threads: int = 1, **fields: Any) -> ProgramEnvironments:
    (folder / "mine.py").write_text(text)
    config = EnvironmentProgram.model_validate({"path": "environments/mine.py", "max_turns": 3, **fields})
    return ProgramEnvironments(config, folder / "mine.py", [{"name": "exact_match", "answer": "x"}], threads)


def prompt(name: str) -> dict[str, Any]:
    verifier = {"name": "exact_match", "answer": name}
    return {"id": name, "source": "s", "messages": [{"role": "user", "content": "q"}], "verifier": verifier}


def says(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of the time for what hangs. All else has the whole of it, however slow this machine is."""
    send = project_programs.ProgramProcess.send

    def sent(program: project_programs.ProgramProcess, message: Any, seconds: float) -> None:
        send(program, message, seconds)
        if "hang" in repr(message):
            program.deadline.begin(program.deadline.seconds / 100)

    monkeypatch.setattr(project_programs.ProgramProcess, "send", sent)


@pytest.mark.parametrize("trusted", [False, True])
def test_a_failure_is_unknown_with_its_cause_and_ends_no_other_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    """All conversations share a process: that of one that hangs or dies is replaced, and the others are repeated in the new one."""
    hurried(monkeypatch)
    seconds = deadline(100)
    environments = opened(tmp_path, COUNTING, arguments={"step": 2}, seconds=seconds, trusted=trusted)
    try:
        (whole, begun), (other, _) = environments.reset(prompt("a"), 5), environments.reset(prompt("b"), 5)
        assert begun.result()[:3] == ("q a", None, False)
        first = environments.step(whole, "1").result()
        assert isinstance(first, Reaction) and first.reward is None and not first.done
        draws = []
        for bad, cause in (
            ("hang", f"the environment output no complete line for {seconds / 100:g} s (seconds: {seconds:g})"),
            ("die", f"the environment ended (seconds: {seconds:g})"),
            ("x", "ValueError: invalid literal for int() with base 10: 'x'"),
            ("short", "must return (observation, reward, done)"),
            ("nan", "returned NaN, and a reward is a finite number"),
            ("nothing", "neither a text nor a list of messages"),
        ):
            failed, _ = environments.reset(prompt("c"), 5)
            found = environments.step(failed, bad).result()
            assert isinstance(found, str) and cause in found and "sandboxed" not in found
            environments.end(failed)
        draws = [environments.step(one, "1").result() for one in (whole, other)]
        assert [one.reward for one in draws if isinstance(one, Reaction)] == [4, None]
        echoed = environments.step(other, "echo").result()
        assert isinstance(echoed, Reaction) and echoed.messages == says("?!")  # a tokenizer takes no half of a surrogate pair
        last = environments.step(whole, "3").result()
        assert last[:3] == ([], 10, True)
        (again, _) = environments.reset(prompt("a"), 5)
        environments.step(again, "1")
        assert environments.step(again, "1").result()[:3] == draws[0][:3]  # the second draw of the seed, also where it was repeated
    finally:
        environments.close()


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("class Environment:\n    def reset(self): pass", "has no method 'step'"),
        ("class Environment:\n    def reset(self, level): pass\n    def step(self, answer): pass", "missing a required argument: 'level'"),
    ],
)
def test_what_is_no_environment_is_refused_at_its_start(tmp_path: Path, text: str, cause: str) -> None:
    with pytest.raises(PedigreeError, match=r"environments/mine\.py: Environment cannot be used:") as raised:
        opened(tmp_path, text)
    assert cause in str(raised.value)


def test_a_stop_while_an_environment_loads_leaves_no_process(tmp_path: Path) -> None:
    """Here after the process before has ended."""
    first, second = tmp_path / "first", tmp_path / "second"
    text = f"""
import os, time
from pathlib import Path
first, second = Path({str(first)!r}), Path({str(second)!r})
(first.parent / "new").write_text(str(os.getpid()))
(first.parent / "new").rename(second if first.exists() else first)
if second.exists():
    time.sleep(60)

class Environment:
    def reset(self): pass
    def step(self, answer): os._exit(1)
"""
    environments = opened(tmp_path, text, trusted=True)
    try:
        episode, _ = environments.reset(prompt("a"), 5)
        assert environments.step(episode, "x").result() == "the environment ended (seconds: 60)"
        waiting = environments.step(episode, "y")
        until(second.exists)
    finally:
        environments.close()
    assert "ended before Environment could be used" in str(waiting.result())
    with pytest.raises(ProcessLookupError):
        os.kill(int(second.read_text()), 0)


def test_a_sandbox_that_does_not_start_again_ends_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environments = opened(tmp_path, COUNTING, arguments={"step": 2})
    try:
        episode, _ = environments.reset(prompt("a"), 5)
        assert environments.step(episode, "die").result() == "the environment ended (seconds: 60)"
        (tmp_path / "ends.py").write_text("raise SystemExit(1)\n")
        monkeypatch.setattr(sandbox, "RUNNER", tmp_path / "ends.py")
        with pytest.raises(PedigreeError, match="the sandbox did not come up"):
            environments.step(episode, "1").result()
    finally:
        environments.close()
