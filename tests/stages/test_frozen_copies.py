"""Frozen models in several processes: each has a GPU of its own, values do not depend on the process, and a dead one ends the attempt."""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from models import a_job, config_of, dataset, publish, tiny_policy
from tiny_models import make_reward_model
from witness import Witness

from pedigree.configs.language.execution import Numerics
from pedigree.stages.job.failures import EngineLost, StageError
from pedigree.stages.reference_logprobs import run as reference_logprobs
from pedigree.stages.sampling import rewards
from pedigree.stages.sampling.answer_log import AnswerLog
from pedigree.stages.sampling.frozen_copies import Part, copies_of, in_parts

ON_GPUS = Numerics(device="cuda", threads=1)


def parts(*rows: str) -> list[Part]:
    return [Part([f"{row}/0", f"{row}/1"], [row, row.upper()]) for row in rows]


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,8")


def test_parts_are_shared_by_processes_with_a_gpu_each_and_no_part_is_computed_twice(tmp_path: Path, visible: None) -> None:
    job, told = a_job(tmp_path, ON_GPUS, engines=2, slots=2), list[int]()
    found = [value for part in in_parts(Witness, parts("a", "b", "c", "d", "e", "f"), job, told.append) for value in part]
    assert [value[0] for value in found] == ["a", "A", "b", "B", "c", "C", "d", "D", "e", "E", "f", "F"]
    assert {value[2] for value in found} == {"4", "7"} and len({value[1] for value in found} - {os.getpid()}) == 2
    assert {value[3] for value in found} == {1} and os.environ["CUDA_VISIBLE_DEVICES"] == "4,7,8"
    assert told == sorted(told) and told[-1] == 12
    again = [value for part in in_parts(Witness, parts("a", "b", "c", "d", "e", "f"), job, told.append) for value in part]
    assert again == found


def test_copies_rest_between_batches_and_are_the_same_processes_afterwards(tmp_path: Path, visible: None) -> None:
    job = a_job(tmp_path, ON_GPUS, engines=2, slots=2)
    with AnswerLog(job) as log, closing(copies_of(Witness, job)) as copies:
        used = []
        for batch in (parts("a", "b"), parts("c", "d")):
            used.append({value[1] for part in copies.values(iter(batch), log, print) for value in part})
            copies.rest()
    assert used[0] == used[1] and len(used[0]) == 2


def test_a_process_that_dies_loses_its_part_only(tmp_path: Path, visible: None) -> None:
    job = a_job(tmp_path, ON_GPUS, engines=2, slots=2)
    with pytest.raises(EngineLost, match=r"process \d+ of r/s ended with -9"):
        list(in_parts(Witness, parts("a", "die"), job, print))
    kept = [value for part in in_parts(Witness, parts("a"), job, print) for value in part]
    assert os.getpid() not in {value[1] for value in kept}, "the part that was finished is in the log"
    with pytest.raises(StageError, match="the model cannot read this: use another"):
        list(in_parts(Witness, parts("refuse"), job, print))


def test_too_few_gpus_are_told_before_a_model_is_loaded(tmp_path: Path, visible: None) -> None:
    job = a_job(tmp_path, ON_GPUS, engines=4, slots=4)
    with pytest.raises(StageError, match=r"engine 4 needs GPU 4 of the job, which has 3"):
        list(in_parts(Witness, parts("a", "b", "c", "d"), job, print))


def answers(count: int) -> list[dict[str, Any]]:
    asked = [{"role": "user", "content": "What is 1 + 1?"}]
    return [{"id": f"r{number}", "messages": asked, "text": "ha " * (number % 5) + "2", "finish_reason": "stop"} for number in range(count)]


def test_rewards_have_the_same_bits_in_two_processes_and_this_one_loads_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_reward_model(tmp_path / "model" / "payload", seed=0, mean=0.5, std=2.0)
    model = publish(tmp_path / "model", "reward_model", "reward_model")
    monkeypatch.setattr(rewards, "PART", 3)

    def asked(name: str, **placement: int) -> Any:
        job = a_job(tmp_path / name, Numerics(threads=1), **placement)
        return rewards.ask_all({"m": model}, answers(8), "fp32", job, lambda label, reasons: None)["m"].raw

    expected = asked("one")
    monkeypatch.setattr(rewards, "load_reward_model", None)
    assert asked("two", engines=2, slots=2) == expected and len(set(expected)) >= 5


def test_log_probabilities_have_the_same_bits_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy(tmp_path / "policy")
    told = [{"text": one["text"], "score": 1.0} for one in answers(5)]
    rows = [
        {
            "id": f"p{number}",
            "source": "test",
            "messages": answers(1)[0]["messages"],
            "answers": told[number : number + 2],
            "strength": None,
        }
        for number in range(4)
    ]
    inputs = {"policy": {"p": policy}, "preferences": {"d": dataset(tmp_path / "data", "preference", rows)}}

    def made(name: str, **placement: int) -> bytes:
        job = a_job(tmp_path / name, Numerics(threads=1), **placement)
        reference_logprobs.run(config_of("reference_logprobs", max_length=96, dtype="fp32"), inputs, job)
        return (job.out / "payload" / "rows.jsonl").read_bytes()

    expected = made("one")
    monkeypatch.setattr(reference_logprobs, "load_policy", None)
    assert made("two", engines=2, slots=2) == expected and expected.count(b"logp") == 5
