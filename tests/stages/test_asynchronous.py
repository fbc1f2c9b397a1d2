"""Asynchronous RLVR with real engines."""

import json
from pathlib import Path
from typing import Any

import pytest
from models import a_job, curve, dataset, killed_at, publish, run_job
from row_reading import read_rows
from test_rlvr import FIELDS, ONE_THREAD, prompt, weights
from tiny_models import make

from pedigree.configs.language.execution import Numerics
from pedigree.data.chat.chat import Chat

RECORDED = FIELDS | {"replay": "recorded", "prompts_per_step": 2}
AHEAD = RECORDED | {"algorithm": FIELDS["algorithm"] | {"correction": {}}, "asynchronous": {}}
"""All prompts of a step are shown."""


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return curve(a_job(folder))


def trained(folder: Path) -> list[tuple[int, str]]:
    """(step, prompt) of all that was trained on."""
    return [(row["step"], row["id"]) for row in read_rows(folder / "out" / "evidence" / "rollouts.jsonl")]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Any:
    folder = tmp_path_factory.mktemp("inputs")
    make(folder / "policy" / "payload")
    rows = [prompt(number) for number in range(10)]
    return {
        "policy": {"sft": publish(folder / "policy", "source_model", "policy")},
        "prompts": {"pool": dataset(folder / "pool", "prompt", rows)},
    }


@pytest.fixture(scope="module")
def in_turn(inputs, tmp_path_factory, shared_engines) -> Path:
    folder = tmp_path_factory.mktemp("in_turn") / "job"
    assert shared_engines.run(folder, "rlvr", RECORDED, inputs, ONE_THREAD)["ok"]
    return folder


@pytest.mark.slow
def test_without_staleness_the_bits_are_those_of_the_synchronous_run(in_turn, inputs, tmp_path, shared_engines):
    done = shared_engines.run(tmp_path / "job", "rlvr", RECORDED | {"asynchronous": {"max_staleness": 0}}, inputs, ONE_THREAD)
    assert done["ok"], done
    assert weights(tmp_path / "job") == weights(in_turn)
    assert done["metrics"] == json.loads((in_turn / "done.json").read_text())["metrics"]
    for rows in (rows_of(tmp_path / "job"), rows_of(in_turn)):
        assert all(0 <= row[name] <= 1 for row in rows for name in ("trainer_idle", "sampler_idle"))
    assert all(row["staleness"] == 0 for row in rows_of(tmp_path / "job"))


@pytest.mark.slow
def test_one_step_off_policy_each_step_has_the_weights_of_the_step_before_the_last(in_turn, inputs, tmp_path, shared_engines):
    """Between steps, so that the schedule does not depend on times: a second run has the same bits."""
    fields = AHEAD | {"asynchronous": {"in_flight": False}}
    for name in ("job", "again"):
        done = shared_engines.run(tmp_path / name, "rlvr", fields, inputs, ONE_THREAD)
        assert done["ok"], done
    rows = rows_of(tmp_path / "job")
    assert [row["staleness"] for row in rows] == [0, *(row["updates"] for row in rows[:-1])] and rows[-2]["updates"] > 0
    assert rows[0]["logprob_gap"] < 1e-4 and rows[2]["logprob_gap"] > 1e-3  # beyond its bound: answers of other weights
    assert weights(tmp_path / "job") == weights(tmp_path / "again") != weights(in_turn)


@pytest.mark.slow
@pytest.mark.parametrize(("point", "passes"), [("answers kept", 21), pytest.param("checkpoint written", 1, marks=pytest.mark.nightly)])
def test_a_run_killed_while_it_samples_or_trains_loses_no_prompt_and_trains_on_each_answer_once(
    in_turn, inputs, tmp_path, shared_engines, point, passes
):
    folder = tmp_path / "job"
    killed_at(point, passes, folder, "rlvr", AHEAD, inputs, ONE_THREAD, checkpoint_every_steps=1)
    recorded = {
        int(log.parent.name.removeprefix("step-")): [json.loads(line)[1] for line in log.read_text().splitlines()]
        for log in folder.glob("rollouts/step-*/answers.jsonl")
    }
    assert max(recorded) > 0
    done = shared_engines.run(folder, "rlvr", AHEAD, inputs, ONE_THREAD, checkpoint_every_steps=1)
    assert done["ok"], done
    assert trained(folder) == trained(in_turn) and len(set(trained(folder))) == 8  # the prompts of every step, each once
    chat = Chat(inputs["policy"]["sft"].payload)
    rows = read_rows(folder / "out" / "evidence" / "rollouts.jsonl")
    for step, answers in recorded.items():
        used = [text for row in rows if row["step"] == step + 1 for text in row["answers"]]
        left = [text for text in used if text not in [chat.decode(one["response_ids"]) for one in answers]]
        assert len(used) == 8 and len(left) <= 8 - len(answers)
    assert done["metrics"]["trained_tokens"] == sum(row["trained_tokens"] for row in rows_of(folder))


@pytest.mark.slow
@pytest.mark.nightly
def test_two_ranks_train_while_two_engines_sample(inputs, tmp_path):
    reward = {"right": 0, "terms": [{"type": "repetition", "ngram": 1}]}  # long answers never have less than three words
    fields = AHEAD | {"asynchronous": {"max_staleness": 2}, "sampling": {"temperature": 0.8, "max_tokens": 60}, "reward": reward}
    placement = {"engines": 2, "slots": 2}
    done = run_job(tmp_path / "job", "rlvr", fields, inputs, Numerics(threads=1, world_size=2), **placement)
    assert done["ok"], done
    rows = rows_of(tmp_path / "job")
    assert rows[0]["staleness"] == 0 and any(row["staleness"] > 0 for row in rows)
    assert len(set(trained(tmp_path / "job"))) == 8
