"""Policies in an environment: what `evaluate` and `sample` make of whole conversations. Most engines are functions here."""

from collections.abc import Sequence
from contextlib import nullcontext
from math import comb
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from data_lab import rows_of, run_stage
from models import a_job, config_of, dataset, killed_at, publish
from row_reading import read_rows
from test_conversations import PROGRAMS, end_turns
from test_rlvr import ONE_THREAD, needs_sandbox
from tiny_models import make

from pedigree.configs.base.frozen import PortInput
from pedigree.configs.judging.pairing import Pair, pair_problem, unjudged
from pedigree.configs.language.kinds import KINDS
from pedigree.data.artifacts.artifacts import Artifact, read_json
from pedigree.data.chat.chat import Chat
from pedigree.data.records.answer_pool import noted
from pedigree.stages.evaluate import run as evaluate
from pedigree.stages.job.failures import StageError
from pedigree.stages.sample import run as sample
from pedigree.stages.sampling import generate
from pedigree.stages.sampling.sampler import Generation, Request, seed_of

GAME = """
class Environment:
    def reset(self, seed, id, goal):
        self.goal, self.seed = goal, seed
        if id == "p3":
            raise OSError("no game")
        return f" Game {seed}."

    def step(self, answer):
        right = answer == self.goal
        return f"No, {self.seed}.", 1 if right else -0.25, right
"""
PLAYED = {"path": "mine.py", "max_turns": 3, "max_observation": 40, "trusted": True}
EVALUATE: dict[str, Any] = {
    "environment": {**PLAYED, "samples": 6, "pass_at": [1, 2]},
    "sampling": {"max_tokens": 4},
    "resamples": 100,
    "dtype": "fp32",
    "seed": 7,
    "max_unknown": 0.9,
}
SAMPLE: dict[str, Any] = {
    "environment": PLAYED,
    "sampling": {"temperature": [0.5, 1.0], "max_tokens": 4},
    "samples_per_prompt": 6,
    "prompts": {"count": 4},
    "dtype": "fp32",
    "seed": 7,
}


def row(number: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Guess {number}."}]
    return {"id": f"p{number}", "source": "test", "messages": messages, "verifier": {"name": "facts", "goal": "a"}, **more}


def says(request: Request) -> str:
    return "a" if request.seed % 3 == 0 else "b"


class Engine:
    """Answers by the seed of a request."""

    def __init__(self, chat: Chat, asked: list[list[Request]]) -> None:
        self.chat, self.asked = chat, asked

    def stream(self, requests: Sequence[Request], sampling: Any, stop_ids: Any, arrived: Any, beat: Any, *, chunk: bool) -> None:
        assert chunk
        self.asked.append([*requests])
        for place, request in enumerate(requests):
            ids = [*self.chat.response_ids(says(request)), self.chat.eos_id]
            arrived(place, Generation(ids, [-1.0] * len(ids), "stop"))

    def abandon(self) -> None: ...


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("policy")
    make(folder / "payload", context=512)
    end_turns(folder / "payload")
    return publish(folder, "source_model", "policy")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, policy: Artifact) -> list[list[Request]]:
    """The requests of each call of the engines, which are functions from now on."""
    chat, found = Chat(policy.payload), list[list[Request]]()
    for module in (evaluate, sample):
        monkeypatch.setattr(module, "WarmEngines", lambda *_: nullcontext(SimpleNamespace(expect=lambda _: None)))
    monkeypatch.setattr(generate, "open_engines", lambda _, count, ahead: nullcontext([Engine(chat, found) for _ in range(count)]))
    return found


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "mine.py").write_text(GAME)
    return {"mine.py": tmp_path / "mine.py"}


def turns_of(first: int, game: int) -> list[str]:
    """The answers to a game, by the seed of the first one, and what the environment says in between."""
    said = [says(Request([], seed_of(first, turn) if turn else first)) for turn in range(3)]
    said = said[: said.index("a") + 1] if "a" in said else said
    return [text for answer in said for text in (answer, f"No, {game}.")][:-1]


def test_an_evaluation_scores_conversations_by_what_the_environment_gave(tmp_path, policy, asked, files):
    suite = dataset(tmp_path / "suite", "item", [row(number, task="game") for number in range(4)])
    made = [
        run_stage(tmp_path / str(size), "evaluate", EVALUATE | {"chunk_size": size}, files, policies={"a": policy}, suites={"game": suite})
        for size in (1, 64)
    ]
    assert made[0].record.content == made[1].record.content  # whichever conversations run together
    rows = read_rows(made[0].payload / "rows.jsonl")
    for number, found in enumerate(rows[:3]):
        game = seed_of("environment", 7, "game", f"p{number}")
        talks = [turns_of(seed_of(7, "game", f"p{number}", *([index] if index else [])), game) for index in range(6)]
        for talk, one in zip(talks, found["answers"], strict=True):
            assert [message["content"] for message in one["messages"]] == [f"Guess {number}. Game {game}.", *talk[:-1]]
            turns, right = (len(talk) + 1) // 2, talk[-1] == "a"
            earned = -0.25 * (turns - right) + right
            success = float(earned >= 1)
            assert one["text"] == talk[-1] and one["scores"] == {
                "reward": earned, "success": success, "pass_at_1": success, "pass_at_2": success, "turns": turns, "truncated": 0,
            }  # fmt: skip
        solved = [one["scores"]["success"] for one in found["answers"]]
        assert found["scores"]["pass_at_1"] == pytest.approx(sum(solved) / 6)
        assert found["scores"]["pass_at_2"] == pytest.approx(1 - comb(6 - int(sum(solved)), 2) / 15)
        assert found["messages"] == found["answers"][0]["messages"]
    assert len({one["scores"]["turns"] for found in rows[:3] for one in found["answers"]}) > 1
    assert rows[3]["score"] is None and "no game" in rows[3]["reason"] and made[0].record.metrics["unknown_answers"] == 6
    table = read_json(made[0].payload / "scores.json")["policies"]["a"]["metrics"]["game"]
    means = [found["score"] for found in rows[:3]]
    assert table["reward"]["mean"] == pytest.approx(sum(means) / 3) and table["reward"]["low"] <= table["reward"]["mean"]
    shown = read_rows(made[0].path / "evidence" / "samples.jsonl")
    assert shown[0]["messages"] == rows[0]["messages"]


def test_a_function_sees_the_conversation_and_knows_nothing_where_the_environment_failed(tmp_path, policy, asked, files):
    program = tmp_path / "turns.py"
    program.write_text("def reward(prompts):\n    return [float(len(one)) for one in prompts]\n")
    suite = dataset(tmp_path / "suite", "item", [row(number, task="game") for number in (0, 3)])
    config = EVALUATE | {"programs": [{"type": "program", "path": "turns.py", "name": "length", "trusted": True}]}
    made = run_stage(tmp_path / "made", "evaluate", config, files | {"turns.py": program}, policies={"a": policy}, suites={"game": suite})
    played, failed = read_rows(made.payload / "rows.jsonl")
    assert [one["scores"]["length"] for one in played["answers"]] == [len(one["messages"]) for one in played["answers"]]
    assert {one["scores"]["length"] for one in failed["answers"]} == {None} and "no game" in failed["reason"]


def test_a_tool_is_scored_by_the_verifier_of_the_last_answer(tmp_path, policy, asked):
    tool = tmp_path / "tool.py"
    tool.write_text("class Environment:\n    def reset(self): pass\n    def step(self, answer): return 'Well?', None, False\n")
    verifier = {"name": "exact_match", "answer": "a"}
    suite = dataset(tmp_path / "suite", "item", [row(number, task="game") | {"verifier": verifier} for number in range(4)])
    environment = {**PLAYED, "path": "tool.py", "max_turns": 2, "scored_by": "verifier"}
    made = run_stage(
        tmp_path / "made", "evaluate", EVALUATE | {"environment": environment}, {"tool.py": tool}, policies={"a": policy},
        suites={"game": suite},
    )  # fmt: skip
    rows = read_rows(made.payload / "rows.jsonl")
    assert [one["scores"]["turns"] for one in rows] == [2] * 4
    assert [one["score"] for one in rows] == [one["scores"]["success"] for one in rows] == [float(one["text"] == "a") for one in rows]
    with pytest.raises(StageError, match="gave no reward: set `scored_by: verifier`"):
        unscored = EVALUATE | {"environment": {**environment, "scored_by": "reward"}}
        run_stage(tmp_path / "un", "evaluate", unscored, {"tool.py": tool}, policies={"a": policy}, suites={"game": suite})
    facts = dataset(tmp_path / "facts", "item", [row(0, task="game")])
    with pytest.raises(StageError, match="verifier facts, which scores no answer: give them another, or score by rewards of a program"):
        config = EVALUATE | {"environment": environment}
        run_stage(tmp_path / "facts" / "job", "evaluate", config, {"tool.py": tool}, policies={"a": policy}, suites={"game": facts})
    pool = dataset(tmp_path / "pool", "prompt", [row(number) | {"verifier": verifier} for number in range(4)])
    config = SAMPLE | {"environment": environment}
    assert KINDS["sample"].verified(config_of("sample", **config)) == {"prompts"} and not KINDS["sample"].verified(
        config_of("sample", **SAMPLE)
    )
    judged = rows_of(run_stage(tmp_path / "sample", "sample", config, {"tool.py": tool}, policies={"a": policy}, prompts=pool))
    assert [one["score"] for one in judged] == [one["verifier_score"] for one in judged] == [float(one["text"] == "a") for one in judged]


def test_sampled_conversations_are_imitated_whole_and_trained_on_the_assistants_turns(tmp_path, policy, asked, files):
    pool = dataset(tmp_path / "pool", "prompt", [row(number) for number in range(4)])
    made = [
        run_stage(tmp_path / str(size), "sample", SAMPLE | {"chunk_size": size}, files, policies={"a": policy}, prompts=pool)
        for size in (1, 64)
    ]
    judged = made[0]
    assert judged.type == "judgment" and judged.record.content == made[1].record.content
    assert {(one.temperature, one.seed) for call in asked for one in call if one.seed == seed_of(7, "a", "p0", 1)} == {
        (1.0, seed_of(7, "a", "p0", 1))
    }
    rows = rows_of(judged)
    talks = {}
    for one in rows[:18]:
        game = seed_of("environment", 7, one["prompt_id"])
        talk = turns_of(seed_of(7, "a", one["prompt_id"], int(one["id"][-1])), game)
        texts = [message["content"] for message in one["messages"]]
        assert [*texts[1:], one["text"]] == talk and texts[0].endswith(f"Game {game}.")
        turns = (len(talk) + 1) // 2
        assert one["score"] == (1 - 0.25 * (turns - 1) if talk[-1] == "a" else -0.25 * 3) and one["response_length"] == 2 * turns
        talks[one["id"]] = talk
    assert [one["score"] for one in rows[18:]] == [None] * 6 and judged.record.metrics["unscored"] == 6
    failures = read_rows(judged.path / "evidence" / "failures.jsonl")
    assert [one["id"] for one in failures] == [f"p3/a/{index}" for index in range(6)] and "no game" in failures[0]["reason"]

    keep = {"type": "all_above", "min_score": -1.0}
    kept = rows_of(run_stage(tmp_path / "best", "best_answers", {"keep": keep}, judgments=judged))
    prompts = [one["prompt_id"] for one in rows]
    different = {(prompts[place], *talks[one["id"]][::2]) for place, one in enumerate(rows[:18])}
    assert len(kept) == len(different) > len({(prompts[place], one["text"]) for place, one in enumerate(rows[:18])})
    silent = [{"role": "user", "content": "Guess."}, {"role": "assistant", "content": " "}, {"role": "user", "content": "No."}]
    assert noted(0, rows[0] | {"messages": silent, "text": "a"}, "score", {}).blank  # no conversation to train on
    chat = Chat(policy.payload)
    for one in kept:
        ids, mask = chat.training(one["messages"])
        trained = chat.decode([token for token, own in zip(ids, mask, strict=True) if own])
        assert trained == "".join(talks[one["id"]][::2])


def test_what_a_tool_said_is_imitated_and_what_is_no_conversation_is_counted(tmp_path):
    """The environment read the call from the text in a form of its own."""
    between = [
        [{"role": "tool", "content": "= 12"}],
        [{"role": "tool", "content": "= 12"}, {"role": "user", "content": "And?"}],
        [{"role": "user", "content": ""}],
    ]
    start = [{"role": "user", "content": "3 * 4?"}, {"role": "assistant", "content": "<calculate>3*4</calculate>"}]
    rows = [
        {
            "id": f"p{number}/a/0", "prompt_id": f"p{number}", "source": "test", "policy": "a", "policy_content": "c", "on_policy": True,
            "messages": [*start, *said], "text": "12", "finish_reason": "stop", "response_length": 2, "verifier_score": 1.0, "rewards": {},
            "reward": None, "disagreement": None, "score": 1.0,
        }
        for number, said in enumerate(between)
    ]  # fmt: skip
    best = run_stage(tmp_path / "best", "best_answers", {"keep": "best_of_n"}, judgments=dataset(tmp_path / "judged", "judgment", rows))
    assert [one["messages"] for one in rows_of(best)] == [[*start, *between[0], {"role": "assistant", "content": "12"}]]
    assert best.record.metrics["dropped"] == {"no well-formed conversation": 2}
    assert read_json(best.path / "evidence" / "counts.json")["malformed"] == 2


def test_conversations_that_have_no_common_prompt_are_no_pairs(tmp_path):
    config = config_of("sample", **SAMPLE)
    arrived = {"judgments": {"games": PortInput("judgment", config)}}
    assert "whose last answers follow different ones" in str(pair_problem(config_of("pair", strategy="best_vs_worst"), arrived))
    assert unjudged("verifier_score", arrived) == "by verifier_score: judgments games are conversations scored by reward: set by to score"
    assert unjudged("score", arrived) is None and isinstance(config_of("pair", strategy="best_vs_worst"), Pair)


def test_what_cannot_be_played_is_refused_before_an_engine_starts(tmp_path, policy, asked, files):
    suite = dataset(tmp_path / "suite", "item", [row(0, task="game")])
    wide = EVALUATE | {"environment": {**PLAYED, "max_observation": 400}}
    with pytest.raises(StageError, match=r"\+ max_turns 3 x \(max_observation 400 \+ max_tokens 4\) exceed the model's context of 512"):
        run_stage(tmp_path / "wide", "evaluate", wide, files, policies={"a": policy}, suites={"game": suite})
    narrow = EVALUATE | {"environment": {**PLAYED, "max_observation": 3}}
    with pytest.raises(StageError, match=r"tokens after reset, more than the longest prompt's \d+ \+ max_observation 3: raise it"):
        run_stage(tmp_path / "narrow", "evaluate", narrow, files, policies={"a": policy}, suites={"game": suite})
    for kind, fields, message in (
        ("evaluate", EVALUATE | {"sampling": {"temperature": 0.0, "max_tokens": 4}}, "environment.samples is 6 at temperature 0"),
        ("evaluate", EVALUATE | {"environment": {**PLAYED, "pass_at": [2]}}, "pass_at is 2, more than samples 1"),
        ("sample", SAMPLE | {"chunk_size": "continuous"}, "chunk_size is continuous, but the turns"),
    ):
        with pytest.raises(ValueError, match=message):
            config_of(kind, **fields)


def test_engines_beside_each_other_read_conversations_as_one_does(tmp_path, policy, asked, files):
    """Both use the tokenizer of the policy, whose settings change with each text."""
    pool = dataset(tmp_path / "pool", "prompt", [row(number) for number in range(3)])
    config = config_of("sample", **SAMPLE | {"chunk_size": 1, "prompts": {"count": 3}})
    contents = []
    for engines in (1, 2):
        job = a_job(tmp_path / str(engines), engines=engines)
        job.source_files.update(files)
        sample.run(config, {"policies": {"a": policy}, "prompts": {"pool": pool}}, job)
        contents.append([path.read_bytes() for path in sorted((job.out / "payload").iterdir())])
    assert contents[0] == contents[1]


@pytest.mark.slow
@pytest.mark.nightly
@needs_sandbox
def test_a_killed_evaluation_of_a_game_resumes_to_the_bytes_of_a_whole_one(tmp_path, policy, shared_engines):
    """With the game of the manual in its sandbox, and a real engine."""
    game = tmp_path / "guess.py"
    game.write_text(PROGRAMS["guess"].replace("-0.1", "-len(answer) / 40"))  # the policy says no numbers
    environment = {"path": "mine.py", "max_turns": 2, "max_observation": 40, "arguments": {"highest": 9}, "samples": 2}
    fields = EVALUATE | {"environment": environment, "sampling": {"max_tokens": 8}, "chunk_size": 2}
    suite = dataset(tmp_path / "suite", "item", [row(number, task="game") for number in range(4)])
    given, files = {"policies": {"a": policy}, "suites": {"game": suite}}, {"mine.py": game}
    done = shared_engines.run(tmp_path / "whole", "evaluate", fields, given, ONE_THREAD, files=files)
    assert done["ok"], done
    killed_at("answers kept", 1, tmp_path / "job", "evaluate", fields, given, ONE_THREAD, files=files)
    log = tmp_path / "job" / "chunks" / "answers.jsonl"
    kept = log.read_text()
    assert kept.count("\n") == 2 * 2
    again = shared_engines.run(tmp_path / "job", "evaluate", fields, given, ONE_THREAD, files=files)
    assert again["ok"] and again["content"] == done["content"] and log.read_text().startswith(kept)
    rows = read_rows(tmp_path / "job" / "out" / "payload" / "rows.jsonl")
    assert len({row["score"] for row in rows}) > 1 and any(len(one["messages"]) > 1 for found in rows for one in found["answers"])
