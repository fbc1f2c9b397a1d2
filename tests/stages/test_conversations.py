"""Answers of several turns: what is asked, what is kept, and what a whole run trains on; the environments are those of the manual."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import a_job, config_of, curve, dataset, killed_at, publish, run
from rollout_lab import engine, roller
from row_reading import read_rows
from test_rlvr import ONE_THREAD, goes_on, needs_sandbox, prompt
from test_source_model import corpus, llama  # noqa: F401, fixtures
from test_templates import sourced  # noqa: F401, a fixture
from tiny_models import make
from transformers import AutoModelForCausalLM

from pedigree.configs.rows.source_models import TEMPLATES
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.chat_template import ChatError
from pedigree.stages.job.failures import StageError
from pedigree.stages.rlvr.run import refuse
from pedigree.stages.sampling.partners import open_environments
from pedigree.stages.sampling.sampler import Generation, Request
from pedigree.stages.verifiers import Verifying

PAGE = (Path(__file__).parents[2] / "docs" / "own-environment.md").read_text()
PROGRAMS = {name: text for name, text in re.findall(r"```python\n# environments/(\w+)\.py\n(.*?)```", PAGE, re.DOTALL)}
PLAN: dict[str, Any] = {
    "algorithm": {"type": "grpo"},
    "steps": 3,
    "prompts_per_step": 2,
    "samples_per_prompt": 2,
    "sampling": {"temperature": 0.8, "max_tokens": 12},
    "max_prompt_length": 90,
    "environment": {"path": "environments/mine.py", "max_turns": 3, "max_observation": 30},
    "reward": {"right": 0, "terms": [{"type": "environment"}]},
    "dtype": "fp32",
    "optimizer": {"learning_rate": 1e-3, "schedule": "constant"},
}


def says(role: str, text: str) -> Any:
    return {"role": role, "content": text}


@pytest.mark.parametrize("name", sorted(TEMPLATES.glob("*.jinja")), ids=lambda path: path.stem)
def test_turns_that_follow_are_what_the_template_makes_of_the_whole_conversation(sourced, name):  # noqa: F811
    """Token by token, for three turns, the answers' own tokens left as they are."""
    chat = Chat(sourced(name.stem, chat_template=name.stem).payload)
    messages, ids = [says("user", "What is 1 + 1?")], []
    ids += chat.prompt(messages)
    for text, said in (("It is 3.", "No."), ("2", "Sure?"), (" Yes, it is.\n", "Well.")):
        ids += [*chat.response_ids(text), chat.eos_id, *chat.following(messages, text, [says("user", said)])]
        messages += [says("assistant", text), says("user", said)]
        if text == text.strip():  # some templates strip earlier answers, which stay as they were sampled
            assert ids == chat.prompt(messages)


def test_a_template_that_changes_what_was_asked_is_refused(sourced):  # noqa: F811
    """Qwen's drops the thoughts of earlier turns, Mistral's moves the system's text to the last question."""
    qwen, mistral = (Chat(sourced(name, chat_template=name).payload) for name in ("qwen", "mistral"))
    with pytest.raises(ChatError, match=r"drop earlier thoughts .*'<think>I see"):
        qwen.following([says("user", "a")], "<think>I see.</think>\n\nb", [says("user", "c")])
    with pytest.raises(ChatError, match="renders a conversation otherwise once more follows"):
        mistral.following([says("system", "s"), says("user", "a")], "b", [says("user", "c")])
    with pytest.raises(ChatError, match="spells out the control token"):
        qwen.following([says("user", "a")], "b", [says("user", "<|im_end|>")])


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    make(folder / "payload")
    end_turns(folder / "payload")
    return publish(folder, "source_model", "policy")


def end_turns(folder: Path) -> None:
    """Train a random model until most of its answers end."""
    chat, model = Chat(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(60):
        answer = ("a", "b c", "d")[step % 3]
        ids, mask = chat.training([*prompt(step % 7, None)["messages"], says("assistant", answer)])
        labels = [token if own else -100 for token, own in zip(ids, mask, strict=True)]
        model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


TALK = """
class Environment:
    def reset(self, id):
        self.turns = 0
        if id == "p1":
            raise OSError("no game")

    def step(self, answer):
        self.turns += 1
        if answer == "long":
            return "very " * 40, 1, False
        if answer == "bad":
            return 1 / 0
        return f"You said {answer}.", self.turns, answer == "end"
"""


def rolled(folder: Path, policy: Any, script: dict[str, list[str]], **fields: Any) -> tuple[list[Any], list[Any]]:
    """(rollouts, requests) of a step in which an engine answers each prompt's samples by the script."""
    (folder / "mine.py").write_text(TALK)
    chat, config, asked = Chat(policy.payload), config_of("rlvr", **(PLAN | fields)), []
    rows = [prompt(0, None), prompt(1, None)]
    prompts = [(row, chat.prompt(row["messages"])) for row in rows]
    job = a_job(folder / "job")
    job.source_files["environments/mine.py"] = folder / "mine.py"

    def answer(place: int, request: Request) -> Generation:
        asking = chat.decode(request.prompt_ids)
        texts = next(texts for begin, texts in script.items() if f" {begin}." in asking)
        ids = chat.response_ids(texts[asking.count("You said")])
        return Generation([*ids, chat.eos_id], [-1.0] * (len(ids) + 1), "stop")

    with Verifying() as verifying, open_environments(config.environment, rows, [chat], {}, job) as environments:
        rolling = replace(roller(verifying, config, [engine(answer, asked)], prompts, chat, job), environments=environments)
        groups = rolling.roll_out(prompts, 0, None)
    requests = [[one.prompt_ids for one in given] for given, _ in asked]
    return [one for group in groups for one in group.rollouts], requests


@needs_sandbox
def test_a_conversation_is_what_was_sampled_and_what_was_said_between(tmp_path, policy):
    rollouts, asked = rolled(tmp_path, policy, {"0": ["a", "b", "end"], "1": ["never heard"]})
    chat = Chat(policy.payload)
    one = rollouts[0]
    assert [len(requests) for requests in asked] == [4, 2, 2]  # prompt 1 has no game, and is asked once
    whole = [says("user", "Say something about 0."), says("assistant", "a"), says("user", "You said a.")]
    whole += [says("assistant", "b"), says("user", "You said b."), says("assistant", "end")]
    assert [*one.prompt_ids, *one.answer.response_ids] == [*chat.prompt(whole[:-1]), *chat.response_ids("end"), chat.eos_id]
    assert asked[2][0] == chat.prompt(whole[:-1])
    sampled = [token for token, own in zip(one.answer.response_ids, one.turns.sampled, strict=True) if own]
    assert sampled == [token for text in ("a", "b", "end") for token in [*chat.response_ids(text), chat.eos_id]]
    assert [logp == -1.0 for logp in one.answer.logprobs] == one.turns.sampled
    assert (one.reward, one.terms, one.text, one.turns.answers) == (6, {"environment": 6}, "end", 3)
    assert one.turns.messages == whole
    config = config_of("rlvr", **PLAN | {"credit": "turn", "reward": {"right": 0, "terms": [{"type": "environment", "weight": 0.5}]}})
    assert replace(one, reward=5.0).turn_rewards(config) == [0.5, 1.0, 3.5]  # what other terms add belongs to the last turn
    lost = rollouts[2]
    assert lost.reward != lost.reward and "no game" in lost.cause and lost.turns.answers == 1


@needs_sandbox
def test_failures_are_unknown_and_what_is_too_long_is_cut(tmp_path, policy):
    rollouts, _ = rolled(tmp_path, policy, {"0": ["a", "bad"], "1": ["x"]})
    assert "ZeroDivisionError" in rollouts[0].cause and rollouts[0].reward != rollouts[0].reward
    cut, _ = rolled(tmp_path / "job", policy, {"0": ["long"], "1": ["x"]}, reward={**PLAN["reward"], "truncated": -2.0})
    assert (cut[0].answer.finish_reason, cut[0].reward, cut[0].turns.answers) == ("length", -2.0, 1)
    tools, _ = rolled(tmp_path / "job" / "job", policy, {"0": ["end"], "1": ["x"]}, reward={"terms": [{"type": "repetition"}], "right": 0})
    assert "reward.terms has no {type: environment}" in tools[0].cause and tools[0].reward != tools[0].reward


def test_contexts_that_cannot_hold_all_turns_are_refused(tmp_path, policy):
    fields = PLAN | {"environment": {**PLAN["environment"], "max_observation": 1000}}
    with pytest.raises(StageError, match=r"max_prompt_length 90 \+ max_turns 3 x max_tokens 12 \+ 2 x max_observation 1000 exceed"):
        refuse(config_of("rlvr", **fields), {"policy": {"sft": policy}}, a_job(tmp_path), 512)
    with pytest.raises(ValueError, match="has the term environment, but there is none with rewards"):
        config_of("rlvr", **{name: value for name, value in PLAN.items() if name != "environment"})
    with pytest.raises(ValueError, match="credit is turn, which grpo, dapo and cispo support, but not dr_grpo"):
        config_of("rlvr", **PLAN | {"credit": "turn", "algorithm": {"type": "dr_grpo"}})
    with pytest.raises(ValueError, match="credit is turn, but answers have one turn without an environment"):
        config_of("rlvr", **PLAN | {"credit": "turn", "environment": None, "reward": {}})
    assert config_of("rlvr", **PLAN).longest_answer == 3 * 12 + 2 * 30


def a_game(policy: Any, folder: Path, steps: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Path]]:
    """Fields, inputs and files of a run in which the policy guesses numbers."""
    game = folder / "guess.py"
    game.write_text(PROGRAMS["guess"].replace("-0.1", "-len(answer) / 40"))  # the policy says no numbers
    environment = {"path": "environments/mine.py", "max_turns": 2, "max_observation": 30, "arguments": {"highest": 9}}
    fields = PLAN | {"environment": environment, "max_logprob_gap": 0.001, "steps": steps, "samples_per_prompt": 4}
    rows = [prompt(number, None) for number in range(6)]
    given = {"policy": {"sft": policy}, "prompts": {"pool": dataset(folder / "pool", "prompt", rows)}}
    return fields, given, {"environments/mine.py": game}


@pytest.mark.slow
@needs_sandbox
def test_a_game_trains_the_policy_on_what_it_sampled(policy, tmp_path):
    fields, given, files = a_game(policy, tmp_path, steps=2)
    done = run(tmp_path / "job", "rlvr", fields | {"credit": "turn"}, given, ONE_THREAD, files=files)
    assert done["ok"], done
    rows = curve(a_job(tmp_path / "job"))
    assert all(row["turns"] > 1 and row["logprob_gap"] < 1e-4 and row["environment_seconds"] > 0 for row in rows), rows
    assert done["metrics"]["updates"] > 0
    shown = read_rows(tmp_path / "job" / "out" / "evidence" / "rollouts.jsonl")
    assert any(len(one) == 4 and one[2] == says("user", "Say a number.") for row in shown for one in row["conversations"])


@pytest.mark.slow
@pytest.mark.nightly
@needs_sandbox
def test_a_killed_run_of_a_game_resumes_to_the_same_weights(policy, tmp_path, shared_engines):
    fields, given, files = a_game(policy, tmp_path, steps=3)
    done = shared_engines.run(tmp_path / "whole", "rlvr", fields, given, ONE_THREAD, files=files)
    assert done["ok"], done
    killed_at("checkpoint renamed", 1, tmp_path / "job", "rlvr", fields, given, ONE_THREAD, files=files, checkpoint_every_steps=1)
    goes_on(shared_engines, tmp_path / "job", fields, given, tmp_path / "whole", files)


def test_the_calculator_of_the_manual_computes_and_forgives():
    namespace: dict[str, Any] = {}
    exec(PROGRAMS["calculator"], namespace)
    one = namespace["Environment"]()
    assert one.step("<calculate>3 * (4 + 5)</calculate>") == ("= 27", None, False)
    assert one.step("<calculate>1 / 0</calculate>")[0] == one.step("<calculate>__import__('os')</calculate>")[0]
    assert one.step("It is 27.") == (None, None, True)
    assert json.dumps(one.step("<calculate>-(2.5)</calculate>")) == '["= -2.5", null, false]'
