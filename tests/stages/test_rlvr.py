"""RLVR with both real engines."""

import json
import math
import os
import signal
from collections import Counter
from collections.abc import Collection
from concurrent.futures import wait
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
from engine_lab import Pool
from models import a_job, config_of, curve, dataset, killed_at, publish, run_job, start_job
from rollout_lab import engine, roller
from row_reading import read_rows
from tiny_models import make
from waiting import deadline, until

from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.reward_terms import Reward
from pedigree.data.artifacts.artifacts import sha256_file
from pedigree.data.chat.chat import Chat
from pedigree.pipelines.jobs.processes import processes_of
from pedigree.stages.job.failures import StageError
from pedigree.stages.rlvr import handover
from pedigree.stages.rlvr.handover import rollout_sampler
from pedigree.stages.rlvr.rewarding import reward
from pedigree.stages.rlvr.rolling import Rollout, reward_numbers, score_of
from pedigree.stages.rlvr.run import refuse, usable_prompts
from pedigree.stages.sampling import engines
from pedigree.stages.sampling.sampler import Child, Generation, Request
from pedigree.stages.verifiers import Verifying, sandbox, verify_each

ONE_THREAD = Numerics(threads=1)
needs_sandbox = pytest.mark.skipif(sandbox.program() is None, reason="bubblewrap is not installed: apt-get install bubblewrap")
FIELDS = {
    "algorithm": {"type": "dcpo", "kl": {"coefficient": 0.05}, "updates_per_rollout": 2},
    "steps": 4,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "sampling": {"temperature": 0.8, "max_tokens": 12},
    "max_prompt_length": 60,
    "max_logprob_gap": 0.001,
    "dtype": "fp32",
    "optimizer": {"learning_rate": 1e-3, "schedule": "constant"},
    "seed": 3,
}
PPO = {
    **FIELDS,
    "steps": 3,
    "algorithm": {
        "type": "ppo",
        "critic": {"optimizer": {"learning_rate": 1e-3}, "warmup_steps": 1},
        "kl": {"estimator": "k1", "where": "reward", "coefficient": 0.05, "adaptive": {}},
        "inner_epochs": 2,
        "correction": {},
    },
}
"""Two engines, a coefficient that adapts, whitening over ranks."""
WORDS = {"name": "ifeval", "instructions": [{"id": "length_constraints:number_words", "relation": "less than", "num_words": 3}]}
"""The policy's random text has one to four words: unequal rewards in most groups."""


def prompt(number: int, verifier=WORDS, text: str = "Say something about"):
    messages = [{"role": "user", "content": f"{text} {number}."}]
    return {"id": f"p{number}", "source": "test", "messages": messages, "verifier": verifier}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    make(folder / "payload")
    return publish(folder, "source_model", "policy")


@pytest.fixture(scope="module")
def inputs(policy, tmp_path_factory):
    rows = [prompt(number) for number in range(10)]
    return {"policy": {"sft": policy}, "prompts": {"pool": dataset(tmp_path_factory.mktemp("pool"), "prompt", rows)}}


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory, shared_engines):
    """A run that nobody interrupted: (folder, done.json)."""
    folder = tmp_path_factory.mktemp("whole") / "job"
    done = shared_engines.run(folder, "rlvr", FIELDS, inputs, ONE_THREAD, checkpoint_every_steps=1)
    assert done["ok"], done
    return folder, done


def weights(folder: Path) -> str:
    return sha256_file(folder / "out" / "payload" / "model.safetensors")


@pytest.mark.slow
def test_sampler_and_trainer_agree_after_every_load(whole, policy):
    folder, done = whole
    rows = curve(a_job(folder))
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    # fp32, temperature 0.8: any stale weight, cached prefix or missing temperature is off by far more
    assert all(row["logprob_gap"] < 1e-4 for row in rows)
    assert rows[0]["kl_k3"] == pytest.approx(0, abs=1e-6) and rows[-1]["kl_k3"] > 1e-5  # the policy has moved, the reference has not
    assert all(row["grad_norm"] > 0 and row["ratio_max"] > 1 for row in rows)  # the second update is off-policy
    assert {"reward", "score_ifeval", "kept_groups", "entropy", "response_length", "truncated", "grad_norm"} <= rows[0].keys()
    assert weights(folder) != sha256_file(policy.payload / "model.safetensors")
    assert done["metrics"]["update_norm"] > 0 and done["metrics"]["trained_tokens"] == sum(row["trained_tokens"] for row in rows) > 0
    assert done["metrics"]["updates"] == sum(row["updates"] for row in rows) >= 4 and not (folder / "weights").exists()
    shown = read_rows(folder / "out" / "evidence" / "rollouts.jsonl")
    assert [row["step"] for row in shown] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert all(len(row["answers"]) == len(row["rewards"]) == 4 for row in shown)


def kill_after(step: int, folder: Path, numerics: Numerics, fields: dict, inputs, victim: str) -> None:
    """Starts the job and kills its engine or one of its ranks, once a checkpoint of the step is there."""
    process = start_job(folder, "rlvr", fields, inputs, numerics, checkpoint_every_steps=1)
    until(lambda: (folder / "checkpoints" / f"step-{step:06d}").exists(), 300, alive=lambda: process.poll() is None)
    words = {
        "engine": ["pedigree.stages.sampling.vllm_engine", str(process.pid)],
        "rank": ["-u", "-m", "pedigree.stages", str(folder)],
    }
    of_it = "\0".join(["", *words[victim], ""]).encode()

    def is_it(pid: int) -> bool:
        with suppress(OSError):  # one that has just ended
            return of_it in b"\0" + Path(f"/proc/{pid}/cmdline").read_bytes()
        return False

    os.kill(next(filter(is_it, processes_of(folder))), signal.SIGKILL)
    assert process.wait(timeout=deadline(120)) == 1
    told = folder / "done.json"
    assert not told.exists() or json.loads(told.read_text())["cause"] in ("lost_engine", "collective")
    told.unlink(missing_ok=True)


def goes_on(
    pool: Pool,
    folder: Path,
    fields: dict,
    inputs,
    undisturbed: Path,
    files: dict[str, Path] | None = None,
    resumed_from: Collection[str] = ("step-000002",),
) -> None:
    """To the end of a job that nobody interrupted, from one of these checkpoints."""
    done = pool.run(folder, "rlvr", fields, inputs, ONE_THREAD, files=files, checkpoint_every_steps=1)
    assert done["ok"], done
    assert done["resumed_from"] in resumed_from
    assert weights(folder) == weights(undisturbed)
    assert done["metrics"] == json.loads((undisturbed / "done.json").read_text())["metrics"]
    evidence = Path("out/evidence/rollouts.jsonl")
    assert (folder / evidence).read_bytes() == (undisturbed / evidence).read_bytes()


@pytest.mark.slow
@needs_sandbox
def test_a_killed_run_resumes_to_the_same_weights(inputs, tmp_path, shared_engines):
    """All that a checkpoint holds: a value model, a coefficient that adapts, the position in the order of prompts, which dynamic sampling
    moves as far as a step needed, and the prompts set aside, among them all that a step trained on. A function of the project rewards by
    prompt, and one answer of each never."""
    mine = tmp_path / "mine.py"
    mine.write_text(
        "def reward(completions, completion_ids, id, letter):\n"
        "    shares = [c[0]['content'].count(letter) / len(ids) for c, ids in zip(completions, completion_ids)]\n"
        "    return [*shares[:-1], float('nan')]\n"
    )
    terms = [{"type": "program", "path": "rewards/mine.py", "arguments": {"letter": "a"}}, {"type": "overlong", "buffer": 6, "weight": 0.5}]
    algorithm = PPO["algorithm"] | {"resampling": {"max_batches": 3, "batch_multiplier": 1.5}}
    fields = PPO | {"algorithm": algorithm, "samples_per_prompt": 3, "reward": {"terms": terms}}  # 2 with a reward, often of the same score
    fields |= {"no_resampling_pass_rate": 0.3}
    many = [prompt(number) for number in range(24)]  # fewer than are drawn
    given, files = inputs | {"prompts": {"pool": dataset(tmp_path / "pool", "prompt", many)}}, {"rewards/mine.py": mine}
    done = shared_engines.run(tmp_path / "whole", "rlvr", fields, given, ONE_THREAD, files=files)
    assert done["ok"], done
    rows = curve(a_job(tmp_path / "whole"))
    assert all(row["reward_mine"] > 0 and row["reward_overlong"] < 0 for row in rows)
    assert [row["missing_rewards"] for row in rows] == [4 + row["resampled_prompts"] for row in rows]
    assert [row["updates"] > 0 for row in rows] == [False, True, True] and rows[2]["kl_coefficient"] != rows[0]["kl_coefficient"]
    assert done["metrics"]["resampled_prompts"] == sum(row["resampled_prompts"] for row in rows) > 0
    assert done["metrics"]["generated_batches"] == sum(row["generated_batches"] for row in rows) > 3
    assert 4 <= rows[0]["set_aside_prompts"] < rows[1]["set_aside_prompts"]
    shown = read_rows(tmp_path / "whole" / "out" / "evidence" / "rollouts.jsonl")
    assert len({row["step"] for row in shown}) > 1 and len({row["id"] for row in shown}) == len(shown)  # no prompt in two steps
    for row in shown:
        sums = [a + 0.5 * b for a, b in zip(row["terms"]["mine"][:2], row["terms"]["overlong"], strict=False)]
        assert {round(reward - one, 6) for reward, one in zip(row["rewards"], sums, strict=False)} <= {0, 1}  # the verifier's score
    killed_at("checkpoint renamed", 1, tmp_path / "job", "rlvr", fields, given, ONE_THREAD, files=files, checkpoint_every_steps=1)
    goes_on(shared_engines, tmp_path / "job", fields, given, tmp_path / "whole", files)


@pytest.mark.slow
def test_a_run_killed_while_it_samples_trains_on_the_recorded_answers(whole, inputs, tmp_path, shared_engines):
    """All 16 answers of the third step are recorded. Batches this small run together either way, so the result is that of chunks."""
    recorded = FIELDS | {"replay": "recorded"}
    killed_at("answers kept", 47, tmp_path / "job", "rlvr", recorded, inputs, ONE_THREAD, checkpoint_every_steps=1)
    assert len((tmp_path / "job" / "rollouts" / "step-000002" / "answers.jsonl").read_text().splitlines()) == 16
    either = ("step-000001", "step-000002")  # the kill may come before the second is written
    goes_on(shared_engines, tmp_path / "job", recorded, inputs, whole[0], resumed_from=either)
    assert not (tmp_path / "job" / "rollouts").exists()


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_whose_engine_was_killed_resumes_to_the_same_weights(whole, inputs, tmp_path, shared_engines):
    kill_after(2, tmp_path / "job", ONE_THREAD, FIELDS, inputs, "engine")
    either = ("step-000002", "step-000003")  # the kill may come once the third step is sampled
    goes_on(shared_engines, tmp_path / "job", FIELDS, inputs, whole[0], resumed_from=either)


@pytest.mark.slow
@pytest.mark.nightly
def test_one_killed_rank_of_two_in_bf16_changes_nothing(inputs, tmp_path):
    fields, two = {**PPO, "dtype": "bf16", "max_logprob_gap": 0.2}, Numerics(threads=1, world_size=2)
    undisturbed = run_job(tmp_path / "whole", "rlvr", fields, inputs, two)
    assert undisturbed["ok"], undisturbed
    kill_after(1, tmp_path / "job", two, fields, inputs, "rank")
    done = run_job(tmp_path / "job", "rlvr", fields, inputs, two, checkpoint_every_steps=1)
    assert done["content"] == undisturbed["content"] and done["metrics"] == undisturbed["metrics"]
    rows = curve(a_job(tmp_path / "job"))
    assert [row["updates"] for row in rows] == [0, 2, 2] and rows[0]["kl_k2"] == 0 < rows[2]["kl_k2"]


@pytest.mark.slow
@pytest.mark.nightly
def test_an_inline_sampler_gives_the_same_weights(whole, inputs, tmp_path):
    done = run_job(tmp_path / "job", "rlvr", FIELDS, inputs, ONE_THREAD, sampler_process="inline")
    assert done["ok"], done
    assert weights(tmp_path / "job") == weights(whole[0])


@pytest.mark.slow
def test_two_ranks_with_two_engines_see_the_same_rollouts_and_take_the_same_step(whole, inputs, tmp_path):
    """Each engine answers every other prompt; stale weights in one of them would show as a gap."""
    fields, numerics = FIELDS | {"steps": 2, "replay": "recorded"}, Numerics(threads=1, world_size=2)
    done = run_job(tmp_path / "job", "rlvr", fields, inputs, numerics, engines=2, slots=2)
    assert done["ok"], done
    folder, _ = whole
    ours, theirs = (read_rows(place / "out" / "evidence" / "rollouts.jsonl")[:2] for place in (tmp_path / "job", folder))
    assert ours == theirs
    two, one = curve(a_job(tmp_path / "job")), curve(a_job(folder))
    for name in ("reward", "kept_groups", "grad_norm", "entropy", "response_length"):  # one denominator over all ranks
        assert two[0][name] == pytest.approx(one[0][name], rel=1e-4), name
    assert two[0]["updates"] > 0 and two[1]["logprob_gap"] < 1e-4
    assert all(1 <= row["slowdown"] <= 2 for row in two) and "slowdown" not in one[0]


@pytest.mark.slow
@pytest.mark.nightly
def test_remax_asks_for_a_greedy_answer_to_each_prompt(inputs, tmp_path, shared_engines):
    done = shared_engines.run(tmp_path / "job", "rlvr", FIELDS | {"steps": 2, "algorithm": {"type": "remax"}}, inputs, ONE_THREAD)
    assert done["ok"], done
    rows = curve(a_job(tmp_path / "job"))
    assert all(row["logprob_gap"] < 1e-4 and row["grad_norm"] > 0 for row in rows)
    assert all(0 <= 4 * row["greedy_reward"] <= 4 and 4 * row["greedy_reward"] % 1 == 0 for row in rows)  # of four prompts, 0 or 1 each


def test_no_signal_at_all_fails_the_stage(inputs, tmp_path, monkeypatch):
    """Whatever the sampler answers, and here it always answers the same."""
    loaded = [0]
    always = engine(lambda *_: Generation([5, 2], [-5.0, -5.0], "stop", loaded[-1]), update=lambda part: loaded.append(part.version))
    monkeypatch.setattr(handover, "open_sampler", lambda *_, **__: nullcontext(always))
    hopeless = [prompt(number, verifier={"name": "arithmetic", "answer": "123456789"}) for number in range(8)]
    given = inputs | {"prompts": {"pool": dataset(tmp_path / "pool", "prompt", hopeless)}}
    done = models.run(tmp_path / "job", "rlvr", FIELDS | {"steps": 2, "max_logprob_gap": 100.0}, given, ONE_THREAD)
    assert (done["ok"], done["cause"]) == (False, "refused")
    assert "none of 2 steps had a group with unequal rewards (mean reward 0.000)" in done["message"]
    rows = curve(a_job(tmp_path / "job"))
    assert [row["informative_groups"] for row in rows] == [0, 0] and all(row["kept_groups"] == 4 for row in rows)  # the KL has a gradient


def test_prompts_that_no_answer_solves_are_trained_on_with_the_hint_that_solves_them(inputs, policy, tmp_path, monkeypatch):
    """Without hints these prompts end the stage without a signal, as above."""
    chat, loaded, said = Chat(policy.payload), [0], Counter[str]()

    def answer(place: int, request: Request) -> Generation:
        asked = chat.decode(request.prompt_ids)
        said[asked] += 1
        right = "Hint: It is 7." in asked and said[asked] % 2
        ids = [*chat.response_ids("7" if right else "12"), chat.eos_id]
        return Generation(ids, [-5.0] * len(ids), "stop", loaded[-1])

    always = engine(answer, update=lambda part: loaded.append(part.version))
    monkeypatch.setattr(handover, "open_sampler", lambda *_, **__: nullcontext(always))
    verifier = {"name": "arithmetic", "answer": "7", "hints": ["Count.", "It is 7."]}
    given = inputs | {"prompts": {"pool": dataset(tmp_path / "pool", "prompt", [prompt(number, verifier) for number in range(8)])}}
    fields = FIELDS | {"steps": 2, "max_logprob_gap": 100.0, "hints": {}, "max_prompt_length": 120}
    done = models.run(tmp_path / "job", "rlvr", fields, given, ONE_THREAD)
    assert done["ok"], done
    rows, shown = curve(a_job(tmp_path / "job")), read_rows(tmp_path / "job" / "out" / "evidence" / "rollouts.jsonl")
    assert [(row["reward"], row["hopeless_groups"], row["hinted_groups"], row["informative_groups"]) for row in rows] == [(0, 4, 4, 4)] * 2
    assert all(row["grad_norm"] > 0 for row in rows) and done["metrics"]["hinted_groups"] == 8
    assert all(row["id"].endswith("/hint-2") and row["messages"][-1]["content"].endswith("\n\nHint: It is 7.") for row in shown)


@pytest.mark.parametrize("ahead", [False, True])
def test_failed_groups_train_on_a_stored_success_and_a_resumed_run_replays_the_same(inputs, policy, tmp_path, monkeypatch, ahead):
    """Half of the answers are right by the first weights, and none by later ones. Rolled out ahead, two steps have the first weights."""
    chat, loaded, fails_at = Chat(policy.payload), [0], [math.inf]

    def answer(place: int, request: Request) -> Generation:
        if loaded[-1] >= fails_at[0]:
            raise StageError("lost")
        text = "7" if loaded[-1] == 0 and request.seed % 2 else "12"
        ids = [*chat.response_ids(text), chat.eos_id]
        return Generation(ids, [-5.0] * len(ids), "stop", loaded[-1])

    always = engine(answer, update=lambda part: loaded.append(part.version))
    monkeypatch.setattr(handover, "open_sampler", lambda *_, **__: nullcontext(always))
    monkeypatch.setattr(handover, "WarmEngines", lambda *_: nullcontext())
    monkeypatch.setattr(handover, "open_engines", lambda *_: nullcontext([always]))
    rows = [prompt(number, {"name": "arithmetic", "answer": "7"}) for number in range(4)]
    given = inputs | {"prompts": {"pool": dataset(tmp_path / "pool", "prompt", rows)}}
    fields = FIELDS | {"algorithm": {"type": "grpo", "kl": None, "correction": {}}, "max_logprob_gap": 100.0, "replay_successes": True}
    fields |= {"replay": "recorded", "asynchronous": {"in_flight": False}} if ahead else {}

    def run(folder: Path) -> dict[str, Any]:
        loaded[:] = [0]
        return models.run(folder, "rlvr", fields, given, ONE_THREAD, checkpoint_every_steps=1)

    done, fails_at[0] = run(tmp_path / "whole"), 2 if ahead else 3  # as the last step begins
    assert done["ok"] and done["metrics"]["replayed_answers"] == 4 * (2 if ahead else 3), done
    found = curve(a_job(tmp_path / "whole"))
    assert [(row["reward"] > 0, row["replayed_answers"], row["informative_groups"]) for row in found[-2:]] == [(False, 4, 4)] * 2
    assert [row.get("replay_staleness") for row in found] == [None, *([None, 2, 3] if ahead else [1, 2, 3])]
    assert all(row["grad_norm"] > 0 for row in found)
    assert not run(tmp_path / "job")["ok"]
    lost, fails_at[0] = fails_at[0], math.inf
    again = run(tmp_path / "job")
    assert again["ok"] and again["resumed_from"] == f"step-00000{lost}" and again["metrics"] == done["metrics"], again
    assert weights(tmp_path / "job") == weights(tmp_path / "whole")


@pytest.mark.slow
def test_a_sampler_that_keeps_its_weights_is_refused_at_the_next_step_where_log_probs_cannot_tell(
    inputs, tmp_path, monkeypatch, shared_engines
):
    """At this learning rate an update moves them by less than the bound of the gap."""
    monkeypatch.setattr(Child, "update", lambda self, part: None)
    fields = FIELDS | {"optimizer": {"learning_rate": 1e-7, "schedule": "constant"}, "max_logprob_gap": 0.1}
    done = shared_engines.run(tmp_path / "job", "rlvr", fields, inputs, ONE_THREAD)
    assert (done["ok"], done["cause"]) == (False, "refused")
    said = "answers of step 2 were sampled with weights after 0 updates, but the trainer has made 2: the sampler did not load"
    assert said in done["message"] and len(curve(a_job(tmp_path / "job"))) == 1


def rollout(number: float, finish: str = "stop", verifier=WORDS) -> Rollout:
    return Rollout(prompt(1, verifier), [3], Generation([4, 2], [-1.0, -1.0], finish), "x", number, number, {})


def test_a_missing_reward_is_no_zero():
    right, unknown = verify_each([(WORDS, "two words"), ({"name": "nobody"}, "x")])
    assert score_of(prompt(1), right) == 1.0
    missing = score_of(prompt(1), unknown)
    assert missing != missing  # NaN
    rollouts = [rollout(1.0), rollout(missing), rollout(1.0, "length"), rollout(0.0, verifier={"name": "gsm", "answer": "1"})]
    numbers = reward_numbers(rollouts)
    assert numbers["reward"] == pytest.approx(2 / 3) and numbers["missing_rewards"] == 1
    assert (numbers["score_ifeval"], numbers["score_gsm"], numbers["truncated"]) == (1.0, 0.0, 0.25)


class Watched(Verifying):
    """Keeps what it has begun."""

    def __init__(self):
        super().__init__()
        self.begun = []

    def begin(self, verifier, text):
        self.begun.append(super().begin(verifier, text))
        return self.begun[-1]


def test_answers_are_verified_while_the_engine_generates_others_and_each_is_a_sign_of_work(tmp_path, monkeypatch):
    """The engine gives its next answer only when the one before has its verdict, so a verdict after all answers would never come."""
    job, told, before_the_next = a_job(tmp_path), [], []
    monkeypatch.setattr(job, "doing", lambda *said: told.append(said))
    config = config_of("rlvr", **(FIELDS | {"samples_per_prompt": 3}))
    with Watched() as verifying:

        def answer(*_: Any) -> Generation:
            before_the_next.append(len(wait(verifying.begun, deadline(20)).done))
            return Generation([1], [-5.0], "stop")

        chat: Any = SimpleNamespace(eos_id=2, decode=lambda ids: "two words")
        rolling = roller(verifying, config, [engine(answer)], [], chat, job)
        one, other = rolling.roll_out([(prompt(1), [1]), (prompt(2), [1])], 0, None)
    assert before_the_next == [0, 1, 2, 3, 4, 5]
    assert [rollout.prompt["id"] for rollout in (*one.rollouts, *other.rollouts)] == ["p1"] * 3 + ["p2"] * 3
    assert all(rollout.score == 1 for rollout in (*one.rollouts, *other.rollouts))
    assert told == [("sampling",), *(("verifying", number) for number in range(6))]


def test_tulus_rewards_are_ten_for_a_right_answer_and_minus_ten_for_one_without_an_end():
    tulu, usual = Reward(right=10, truncated=-10), Reward()
    answers = [(1.0, "stop"), (0.5, "stop"), (0.0, "stop"), (1.0, "length"), (float("nan"), "length")]
    assert [reward(*one, tulu) for one in answers] == [10, 5, 0, -10, -10]
    assert [reward(*one, usual) for one in answers[:4]] == [1, 0.5, 0, 1]
    assert math.isnan(reward(float("nan"), "stop", tulu)) and math.isnan(reward(*answers[4], usual))


def test_long_prompts_and_those_without_verifier_are_dropped_and_counted(policy, tmp_path):
    config = config_of("rlvr", **FIELDS)
    rows = [*(prompt(number) for number in range(4)), prompt(90, text="word " * 40), prompt(91, verifier=None)]
    job = a_job(tmp_path / "job")
    kept, dropped = usable_prompts(rows, Chat(policy.payload), config, job)
    assert [row["id"] for row, _ in kept] == ["p0", "p1", "p2", "p3"]
    assert dropped == {"longer than max_prompt_length": 1, "no verifier": 1}
    assert [drop["id"] for drop in read_rows(job.evidence / "drops.jsonl")] == ["p90", "p91"]
    assert job.marks == ["2 of 6 prompts were dropped (longer than max_prompt_length: 1, no verifier: 1)"]
    with pytest.raises(StageError, match=r"2 of 6 prompts .* refuse_dropped 0\.3: raise max_prompt_length"):
        usable_prompts(rows, Chat(policy.payload), config.model_copy(update={"refuse_dropped": 0.3}), job)
    with pytest.raises(StageError, match=r"3 of 5 prompts are usable.*a step requires 4.*raise max_prompt_length"):
        usable_prompts(rows[1:], Chat(policy.payload), config, job)


@pytest.mark.proves("placement.sampler_process")
def test_the_sampler_has_a_process_of_its_own_unless_it_is_inline(policy, tmp_path, monkeypatch):
    """What is opened: engines themselves take seconds."""
    opened: list[str] = []
    for kind in ("Child", "Inline"):

        def opening(*_, kind=kind):
            opened.append(kind)
            return SimpleNamespace(close=lambda: None)

        monkeypatch.setattr(engines, kind, opening)
    monkeypatch.setattr(engines, "start", lambda numerics: None)
    config = config_of("rlvr", **FIELDS)
    for where in ("own", "inline"):
        with rollout_sampler(policy.payload, config, a_job(tmp_path / where, sampler_process=where)):
            pass
    assert opened == ["Child", "Inline"]


def test_what_cannot_work_together_is_refused_before_any_model_is_loaded(policy, tmp_path):
    config, given, job = config_of("rlvr", **FIELDS), {"policy": {"p": policy}}, a_job(tmp_path / "job")
    with pytest.raises(StageError, match=r"250 \+ max_tokens 12 exceed the policy's context of 256"):
        refuse(config_of("rlvr", **(FIELDS | {"max_prompt_length": 250})), given, job, 256)
    for two, numerics, count in (("world_size", Numerics(world_size=2), 1), ("engines", Numerics(), 2)):
        with pytest.raises(StageError, match=f"inline requires {two} 1, not 2"):
            refuse(config, given, a_job(tmp_path / two, numerics=numerics, sampler_process="inline", engines=count), 256)
    beside = config_of("rlvr", **(FIELDS | {"replay": "recorded", "asynchronous": {"max_staleness": 0}}))
    with pytest.raises(StageError, match="asynchronous requires a sampler beside the trainer"):
        refuse(beside, given, a_job(tmp_path / "inline", sampler_process="inline"), 256)
    for port, sizes in (("reference", {"vocab_size": 5}), ("teacher", {"vocab_size": None, "text_config": {"vocab_size": 5}})):
        other = make(tmp_path / port / "payload") / "config.json"
        other.write_text(json.dumps(json.loads(other.read_text()) | sizes))
        with pytest.raises(StageError, match=rf"the {port} has a vocabulary of 5 and the policy one of \d+: use one of the same base"):
            refuse(config, given | {port: {"r": publish(tmp_path / port, "source_model", "policy")}}, job, 256)
    other = make(tmp_path / "value" / "payload") / "tokenizer.json"
    read = json.loads(other.read_text())
    names = {number: token for token, number in read["model"]["vocab"].items()}
    read["model"]["vocab"] |= {names[100]: 101, names[101]: 100}
    other.write_text(json.dumps(read))
    with pytest.raises(StageError, match=r"the value has another tokenizer than the policy: token 100 is .* in it and .* in the policy"):
        refuse(config, given | {"value": {"r": publish(tmp_path / "value", "source_model", "policy")}}, job, 256)
