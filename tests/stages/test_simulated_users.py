"""Simulated users: what they are told and see, what becomes of conversations without their replies, and that replies are asked for once."""

from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, cast

import pytest
from chat_lab import Chats, chat_server, say, send
from data_lab import run_stage
from models import a_job, config_of, curve, dataset, killed_at, run
from rollout_lab import engine, roller
from row_reading import read_rows
from test_conversations import PLAN, says
from test_played_environments import EVALUATE, SAMPLE, Engine, asked, policy  # noqa: F401, fixtures
from test_rlvr import ONE_THREAD, goes_on, prompt
from waiting import deadline

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.shrink import Cut, StandIns
from pedigree.configs.language.kinds import KINDS
from pedigree.configs.methods.environment_programs import SimulatedUser
from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.chat.chat import Chat
from pedigree.data.records import records
from pedigree.stages.job.failures import EngineLost, StageError
from pedigree.stages.job.job import Job
from pedigree.stages.sampling.answer_log import AnswerLog
from pedigree.stages.sampling.partners import GREETING, SimulatedUsers, open_environments
from pedigree.stages.sampling.policy_servers import server_of
from pedigree.stages.sampling.sampler import Generation, Request, seed_of
from pedigree.stages.verifiers import Verifying

TOLD = "You want to know $answer, for $$5. Say ###STOP### when you know it."


def user(base_url: str = "http://127.0.0.1:1/v1", **fields: Any) -> dict[str, Any]:
    by = {"type": "endpoint", "base_url": base_url, "model": "user"}
    return {"type": "user", "by": by, "instructions": TOLD, "max_turns": 3, "max_observation": 40, **fields}


def row(number: int, **more: Any) -> dict[str, Any]:
    return {**prompt(number, {"name": "exact_match", "answer": "a"}), **more}


def last(body: dict[str, Any]) -> str:
    return body["messages"][-1]["content"]


def echo(chats: Chats, handler: Any, body: dict[str, Any]) -> None:
    """Replies by what the policy said last."""
    text = last(body)
    if text == "refuse":
        send(handler, 400, b"no")
    elif text == "long":
        say(handler, "Well, I", finish_reason="length")
    else:
        say(handler, "###STOP###" if text == "end" else f"You said {text}.")


def simulated(config: SimulatedUser, job: Job, log: AnswerLog) -> SimulatedUsers:
    return SimulatedUsers(config, server_of(config.by, "user", {}, job), [], job, log)


def test_the_user_sees_the_conversation_from_its_side(tmp_path: Path) -> None:
    row_messages: list[Any] = [says("system", "Help."), says("user", "b"), says("assistant", "c"), says("user", "d")]
    with chat_server(echo) as chats, AnswerLog(job := a_job(tmp_path)) as log:
        users = simulated(SimulatedUser.model_validate(user(chats.base_url)), job, log)
        talk, begun = users.reset(row(0, messages=row_messages), 7)
        assert begun.result()[:3] == (None, None, False)  # the prompt is asked as it is
        assert users.step(talk, "e").result(deadline(20))[:3] == ([says("user", "You said e.")], None, False)
        assert users.step(talk, "end").result(deadline(20))[2]
        told = says("system", "You want to know a, for $5. Say ###STOP### when you know it.")
        seen = [told, GREETING, says("assistant", "b"), says("user", "c"), says("assistant", "d"), says("user", "e")]
        assert [body["messages"] for body in chats.bodies] == [seen, [*seen, says("assistant", "You said e."), says("user", "end")]]
        assert [body["seed"] for body in chats.bodies] == [seed_of(7, 6), seed_of(7, 8)]
        other, _ = users.reset(row(0, messages=row_messages), 7)
        assert users.step(other, "e").result(deadline(20))[0] == [says("user", "You said e.")] and len(chats.bodies) == 2
        users.step(other, "f").result(deadline(20))
        assert users.step(other, "g").result()[2] and len(chats.bodies) == 3  # max_turns: no reply would be read
        users.close()


def test_a_user_that_opens_gets_the_prompt_and_says_the_first_message(tmp_path: Path) -> None:
    row_messages: list[Any] = [says("system", "Help."), says("user", "What is 2 + 2?")]
    config = SimulatedUser.model_validate(user(opens=True, instructions="Ask: $prompt", stop=None))
    with chat_server(echo) as chats, AnswerLog(job := a_job(tmp_path)) as log:
        users = simulated(config.model_copy(update={"by": config.by.model_copy(update={"base_url": chats.base_url})}), job, log)
        talk, begun = users.reset(row(0, messages=row_messages), 7)
        first = "You said Hi! How can I help you today?."
        assert begun.result(deadline(20))[0] == [says("system", "Help."), says("user", first)]
        assert users.step(talk, "4").result(deadline(20))[0] == [says("user", "You said 4.")]
        seen = [says("system", "Ask: What is 2 + 2?"), GREETING]
        assert [body["messages"] for body in chats.bodies] == [seen, [*seen, says("assistant", first), says("user", "4")]]
        users.close()
    with chat_server(lambda chats, handler, body: say(handler, "###STOP###")) as chats, AnswerLog(job := a_job(tmp_path / "b")) as log:
        users = simulated(SimulatedUser.model_validate(user(chats.base_url, opens=True)), job, log)
        assert "ended the conversation before it began" in users.reset(row(0), 7)[1].result(deadline(20))
        users.close()


@pytest.fixture
def rolled(tmp_path: Path, policy: Artifact) -> Any:  # noqa: F811
    """Rolls out two prompts, of which each sample answers by a script."""

    def roll_out(base_url: str, script: dict[str, list[str]], **placed: Any) -> list[Any]:
        chat, rows = Chat(policy.payload), [row(0), row(1)]
        config = config_of("rlvr", **PLAN | {"environment": user(base_url), "reward": {}})
        prompts = [(one, chat.prompt(one["messages"])) for one in rows]

        def answer(place: int, request: Request) -> Generation:
            asking = chat.decode(request.prompt_ids)
            texts = next(texts for begin, texts in script.items() if f" {begin}." in asking)
            ids = [*chat.response_ids(texts[asking.count("You said")]), chat.eos_id]
            return Generation(ids, [-1.0] * len(ids), "stop")

        job = a_job(tmp_path / "job", **placed)
        with Verifying() as verifying, open_environments(config.environment, rows, [chat], {}, job) as environments:
            rolling = replace(roller(verifying, config, [engine(answer)], prompts, chat, job), environments=environments)
            return [one for group in rolling.roll_out([prompts[0], prompts[1]], 0, None) for one in group.rollouts]

    return roll_out


def test_verifiers_score_the_last_answer_and_what_has_no_reply_is_unknown(rolled: Any) -> None:
    with chat_server(echo) as chats:
        one, _, lost, _ = rolled(chats.base_url, {"0": ["b", "c", "a"], "1": ["refuse"]})
        assert (one.reward, one.text, one.turns.answers) == (1.0, "a", 3)
        said = [message["content"] for message in one.turns.messages]
        assert said == ["Say something about 0.", "b", "You said b.", "c", "You said c.", "a"]
        assert sum(one.turns.sampled) < len(one.answer.response_ids)  # what the user says is context alone
        assert lost.reward != lost.reward and lost.cause.startswith("the simulated user gave no reply: status 400: no")
        one, _, cut, _ = rolled(chats.base_url, {"0": ["b", "end"], "1": ["long"]})
        assert (one.reward, one.text) == (0.0, "end")
        assert cut.reward != cut.reward and "exceeds environment.sampling.max_tokens 256: raise it" in cut.cause
        assert [last(body) for body in chats.bodies].count("b") == 1  # for both answers, and when the step is repeated


def test_a_server_that_is_down_ends_the_attempt(tmp_path: Path) -> None:
    begun = Event()

    def fail(chats: Chats, handler: Any, body: dict[str, Any]) -> None:
        assert begun.wait(deadline(20))
        send(handler, 500, b"")

    with chat_server(fail) as chats, AnswerLog(job := a_job(tmp_path, endpoint_retries=0)) as log:
        users = simulated(SimulatedUser.model_validate(user(chats.base_url)), job, log)
        waiting = [users.step(users.reset(row(0), seed)[0], "b") for seed in range(6)]
        begun.set()
        with pytest.raises(EngineLost, match=r"lost engine: the model at .* and a plain question unanswered"):
            waiting[-1].result(deadline(20))
        users.close()


class Unlike:
    """A server whose second reply to a question would be another one, by another model."""

    def __init__(self) -> None:
        self.first: dict[str, int] = {}
        self.model = "user-1"

    def __call__(self, chats: Chats, handler: Any, body: dict[str, Any]) -> None:
        question = str(body)
        self.first[question] = self.first.get(question, 0) + 1
        said = "###STOP###" if body["seed"] % 5 == 0 else f"No{body['seed'] % 7}."
        say(handler, said if self.first[question] == 1 else "What?", model=self.model)


@pytest.mark.parametrize("kind", ["evaluate", "sample"])
def test_conversations_are_measured_and_a_resumed_stage_asks_nothing_twice(tmp_path, policy, asked, monkeypatch, kind):  # noqa: F811
    """The first attempt ends in the second chunk, between two turns."""
    port, record = ("suites", "item") if kind == "evaluate" else ("prompts", "prompt")
    rows = [row(number, **({"task": "game"} if kind == "evaluate" else {})) for number in range(4)]
    given = {"policies": {"a": policy}, port: {"game": dataset(tmp_path / "rows", record, rows)}}
    fields = EVALUATE | {"chunk_size": 6} if kind == "evaluate" else SAMPLE | {"chunk_size": 6}
    more = {"samples": 6, "pass_at": [1, 2]} if kind == "evaluate" else {}
    stream, ends = Engine.stream, [False]

    def lost(self: Engine, *given: Any, **more: Any) -> None:
        if ends[0] and len(asked) == 5:
            raise EngineLost("lost engine")
        stream(self, *given, **more)

    monkeypatch.setattr(Engine, "stream", lost)
    with chat_server(act := Unlike()) as chats:
        fields = fields | {"environment": user(chats.base_url, instructions="Say ###STOP###.", **more)}
        whole = run(tmp_path / "whole", kind, fields, given, ONE_THREAD)
        assert whole["ok"], whole
        questions, act.first = act.first, {}
        asked.clear()
        ends[0] = True
        assert not run(tmp_path / "job", kind, fields, given, ONE_THREAD)["ok"] and 0 < len(act.first) < len(questions)
        ends[0], act.model = False, "user-2"
        done = run(tmp_path / "job", kind, fields, given, ONE_THREAD)
        assert done["ok"] and done["content"] == whole["content"] and act.first == questions
        assert done["marks"] == ["user simulated by 2 models: user-1, user-2"] and not whole["marks"]
    payload = tmp_path / "job" / "out" / "payload"
    if kind == "sample":
        talks = [*records.stream(payload, ("messages", "text", "score"))]
    else:
        talks = [answer for one in read_rows(payload / "rows.jsonl") for answer in one["answers"]]
    texts = {message["content"] for talk in talks for message in talk["messages"]}
    assert any(text.startswith("No") for text in texts) and "###STOP###" not in texts
    assert len({len(talk["messages"]) for talk in talks}) > 1
    right = [float(talk["text"] == "a") for talk in talks]
    assert right == [talk["score"] if kind == "sample" else talk["scores"]["success"] for talk in talks] and len({*right}) == 2


@pytest.mark.slow
@pytest.mark.nightly
def test_a_killed_run_with_a_user_resumes_to_the_same_weights(tmp_path, policy, shared_engines):  # noqa: F811
    """After a checkpoint; the replies of before are in the log."""
    (tmp_path / "mine.py").write_text("def reward(completions):\n    return [-len(one[0]['content']) / 40 for one in completions]\n")
    files, pool = {"mine.py": tmp_path / "mine.py"}, dataset(tmp_path / "pool", "prompt", [row(number) for number in range(6)])
    given = {"policy": {"sft": policy}, "prompts": {"pool": pool}}
    with chat_server(act := Unlike()) as chats:
        environment = user(chats.base_url, instructions="Ask for $prompt, then say ###STOP###.", opens=True, max_turns=2)
        reward = {"right": 0, "terms": [{"type": "program", "path": "mine.py", "trusted": True}]}
        fields = PLAN | {"environment": environment, "reward": reward, "max_logprob_gap": 0.001, "samples_per_prompt": 4}
        done = shared_engines.run(tmp_path / "whole", "rlvr", fields, given, ONE_THREAD, files=files)
        assert done["ok"] and all(one["turns"] > 1 and one["missing_rewards"] < 8 for one in curve(a_job(tmp_path / "whole"))), done
        questions, act.first = act.first, {}
        killed_at("checkpoint renamed", 1, tmp_path / "job", "rlvr", fields, given, ONE_THREAD, files=files, checkpoint_every_steps=1)
        goes_on(shared_engines, tmp_path / "job", fields, given, tmp_path / "whole", files)
        assert act.first == questions and {*act.first.values()} == {1}


def test_users_that_cannot_be_told_or_scored_are_refused(tmp_path: Path, policy: Artifact) -> None:  # noqa: F811
    with pytest.raises(ValueError, match="does not contain stop '###STOP###': say when to reply with it, or set `stop: null`"):
        SimulatedUser.model_validate(user(instructions="Ask."))
    with pytest.raises(ValueError, match=r"has a `\$` that begins no name: write `\$\$`"):
        SimulatedUser.model_validate(user(instructions="Pay $5 or say ###STOP###."))
    lacks = SimulatedUser.model_validate(user(instructions="$goal ###STOP###"))
    with pytest.raises(PedigreeError, match=r"names \$goal, but prompt p1 has only answer, prompt: use one of these"):
        SimulatedUsers(lacks, cast(Any, None), [row(1)], a_job(tmp_path / "a"), cast(Any, None))
    with pytest.raises(ValueError, match="has the term environment, but there is none with rewards"):
        config_of("rlvr", **PLAN | {"environment": user()})
    facts = dataset(tmp_path / "facts", "item", [row(0, task="game", verifier={"name": "facts", "answer": "a"})])
    with pytest.raises(StageError, match="verifier facts, which scores no answer: give them another"):
        run_stage(tmp_path / "b", "evaluate", EVALUATE | {"environment": user()}, policies={"a": policy}, suites={"game": facts})


@pytest.mark.parametrize("kind", ["rlvr", "evaluate", "sample"])
def test_a_rehearsal_asks_its_own_server_and_takes_few_turns(kind: str) -> None:
    plan = {"rlvr": PLAN | {"reward": {}}, "evaluate": EVALUATE, "sample": SAMPLE}[kind]
    config = config_of(kind, **plan | {"environment": user(max_turns=9)})
    cut = Cut("a", config, {"suites": {}}, StandIns(judge_url="http://127.0.0.1:2/v1"))
    KINDS[kind].shrink(cut)
    assert (cut.get("environment.by.base_url"), cut.get("environment.max_turns")) == ("http://127.0.0.1:2/v1", 2)
    assert type(config_of(kind, **cut.written)) is type(config)
