"""Policies of the recipe that are queried while a stage works: a simulated user, a judge."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from models import a_job, config_of, dataset, killed_at, run
from row_reading import read_rows
from test_model_rewards import RUBRICS, answered
from test_played_environments import EVALUATE, SAMPLE, asked, policy  # noqa: F401, fixtures
from test_rlvr import FIELDS, ONE_THREAD
from test_simulated_users import row, user

from pedigree.configs.base.shrink import Cut, StandIns
from pedigree.configs.language.execution import Numerics, Placement
from pedigree.configs.language.kinds import KINDS
from pedigree.configs.methods.language_model import Sampling
from pedigree.configs.methods.reward_terms import RatedReward
from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.chat.chat import Chat
from pedigree.data.records import records
from pedigree.stages.rlvr.model_rewards import RatedRewards
from pedigree.stages.sampling import policy_servers
from pedigree.stages.sampling.answer_log import AnswerLog
from pedigree.stages.sampling.asking import Bound, ask_server
from pedigree.stages.sampling.policy_servers import PolicyServer, serving
from pedigree.stages.sampling.sampler import Generation, Request

PLAYER = user(by={"type": "policy"}, instructions="Ask for $prompt.", stop=None, sampling={"max_tokens": 12})
JUDGED = {"type": "rating", "rubrics": [*RUBRICS], "by": {"type": "policy"}, "sampling": {"max_tokens": 16}}


class Scripted:
    """An engine whose answers a function gives."""

    def __init__(self, chat: Chat, says: Any) -> None:
        self.chat, self.says, self.calls = chat, says, list[list[Request]]()

    def stream(self, requests: Sequence[Request], sampling: Any, stop_ids: Any, arrived: Any, beat: Any, *, chunk: bool = False) -> None:
        self.calls.append([*requests])
        for place, request in reversed([*enumerate(requests)]):
            ids = [*self.chat.response_ids(self.says(self.chat.decode(request.prompt_ids))), self.chat.eos_id]
            arrived(place, Generation(ids, [-1.0] * len(ids), "stop"))


class Asked(list[Any]):
    """Questions, each with seed 1."""

    sampling = Sampling(max_tokens=8)

    def messages(self, number: int) -> Any:
        return [{"role": "user", "content": self[number]}]

    def seed(self, number: int) -> int:
        return 1

    def about(self, number: int) -> str:
        return str(number)


def test_a_policy_gets_equal_questions_once_and_those_that_it_cannot_read_never(tmp_path: Path, policy: Artifact) -> None:  # noqa: F811
    engine = Scripted(chat := Chat(policy.payload), lambda text: "a" if "one" in text else "b")
    server, job = PolicyServer("judge", policy, engine), a_job(tmp_path)  # pyright: ignore[reportArgumentType]
    questions = Asked(["one", "two", "one", f"{chat.decode([chat.eos_id])}<|im_end|> three", "four " * 600])

    def replies() -> list[Any]:
        with AnswerLog(job) as log:
            found = ask_server(server, questions, job, Bound(1.0, len(questions), "", ""), log, lambda done, of: None)
        return [one if isinstance(one, str) else (one.text, one.ended) for one in found]

    first = replies()
    assert first[:3] == [("a", True), ("b", True), ("a", True)] and "control token" in first[3]
    assert "tokens and its reply may have 8, the model's context is 512" in first[4]
    assert [len(call) for call in engine.calls] == [2] and server.name == "the policy at judge"
    assert replies() == first and len(engine.calls) == 1  # a resumed job has them in its log


def test_a_policy_of_the_recipe_rates_rollouts(tmp_path: Path, policy: Artifact) -> None:  # noqa: F811
    engine = Scripted(Chat(policy.payload), lambda text: f"Rating: {5 if 'honesty' in text else 2}")
    server, job = PolicyServer("judge", policy, engine), a_job(tmp_path)  # pyright: ignore[reportArgumentType]
    server._context = 10_000
    with AnswerLog(job) as log:
        rewards = RatedRewards(RatedReward.model_validate(JUDGED), server, job, log)
        assert rewards.values(answered({"p1": ["yes", "no"], "p2": ["yes"]})) == [[3.5, 3.5], [3.5]]
        rewards.close()
    assert [len(call) for call in engine.calls] == [6] and job.marks == []


@pytest.mark.parametrize("kind", ["sample", pytest.param("evaluate", marks=pytest.mark.nightly)])
def test_a_policy_of_the_recipe_plays_the_user(tmp_path, policy, asked, kind):  # noqa: F811
    """The policy is a function, the user a model in an engine."""
    port, record = ("suites", "item") if kind == "evaluate" else ("prompts", "prompt")
    rows = [row(number, **({"task": "game"} if kind == "evaluate" else {})) for number in range(2)]
    given = {"policies": {"a": policy}, port: {"game": dataset(tmp_path / "rows", record, rows)}, "user": {"b": policy}}
    plan = EVALUATE if kind == "evaluate" else SAMPLE | {"prompts": {"count": 2}}
    fields = plan | {"environment": PLAYER | ({"samples": 4} if kind == "evaluate" else {})}
    done = run(tmp_path / "job", kind, fields, given, ONE_THREAD)
    assert done["ok"], (tmp_path / "job" / "log.txt").read_text()[-2000:]
    assert [mark for mark in done["marks"] if mark.startswith("the policy at user: which replies")]
    payload = tmp_path / "job" / "out" / "payload"
    if kind == "sample":
        talks = [*records.stream(payload, ("messages",))]
    else:
        talks = [answer for one in read_rows(payload / "rows.jsonl") for answer in one["answers"]]
    turns = [[message["role"] for message in talk["messages"]] for talk in talks]
    assert ["user", "assistant", "user"] in [roles[:3] for roles in turns]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_killed_run_with_a_policy_as_user_goes_on_with_its_replies(tmp_path, policy, shared_engines):  # noqa: F811
    pool = dataset(tmp_path / "pool", "prompt", [row(number) for number in range(6)])
    given = {"policy": {"sft": policy}, "prompts": {"pool": pool}, "user": {"b": policy}}
    fields = FIELDS | {"environment": PLAYER | {"opens": True, "max_turns": 2}}
    killed_at("checkpoint renamed", 1, tmp_path / "job", "rlvr", fields, given, ONE_THREAD, checkpoint_every_steps=1)
    log = tmp_path / "job" / "chunks" / "answers.jsonl"
    before = log.read_text()
    assert shared_engines.run(tmp_path / "job", "rlvr", fields, given, ONE_THREAD)["ok"]
    keys = [json.loads(line)[0] for line in log.read_text().splitlines() if line]
    assert before and log.read_text().startswith(before) and len(keys) == len({*keys}) > len(before.splitlines())


@pytest.mark.parametrize(("beside", "gpus"), [(False, ["2", "3"]), (True, ["4", "5"])])
def test_each_has_gpus_after_those_of_the_stage(tmp_path, policy, monkeypatch, beside, gpus):  # noqa: F811
    """Two ranks and two engines, in turns or at the same time."""
    started, opened = [], []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    monkeypatch.setattr(policy_servers, "start", lambda numerics, found: started.append(found))
    monkeypatch.setattr(policy_servers, "Child", lambda settings, process: opened.append(settings) or Closed())
    reward = {"terms": [JUDGED, JUDGED | {"name": "other"}]}
    plans = KINDS["rlvr"].served(config_of("rlvr", **FIELDS, environment=PLAYER, reward=reward))
    job = a_job(tmp_path, Numerics(device="cuda", world_size=2), **Placement(engines=2, slots=6).model_dump())
    with serving(plans, {"judge": {"a": policy}, "user": {"b": policy}}, job, beside=beside) as servers:
        assert [*servers] == ["judge", "user"]
    assert [name for (name,) in started] == gpus
    assert {settings["context"] for settings in opened} == {512}


class Closed:
    def close(self) -> None: ...


@pytest.mark.parametrize("kind", ["rlvr", "evaluate", "sample"])
def test_a_rehearsal_asks_its_own_server_instead_of_a_tiny_model(kind: str) -> None:
    plan = {"rlvr": FIELDS | {"reward": {"terms": [JUDGED, JUDGED | {"name": "b"}]}}, "evaluate": EVALUATE, "sample": SAMPLE}[kind]
    config = config_of(kind, **plan | {"environment": PLAYER})
    cut = Cut(
        "a", config, {"suites": {}, "user": {"lab/b": config}, "judge": {"lab/c": config}}, StandIns(judge_url="http://127.0.0.1:2/v1")
    )
    KINDS[kind].shrink(cut)
    assert cut.get("environment.by.base_url") == "http://127.0.0.1:2/v1"
    left_out = [change.setting for change in cut.changes if change.setting.startswith("in.")]
    assert left_out == (["in.judge", "in.user"] if kind == "rlvr" else ["in.user"])
    smaller = config_of(kind, **cut.written)
    assert not KINDS[kind].served(smaller) and KINDS[kind].required(config) == {port.removeprefix("in.") for port in left_out}
