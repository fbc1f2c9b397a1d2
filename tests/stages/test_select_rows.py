"""Rows that models score: which stay, what is told of the others, and that what was scored once is kept."""

import gc
import json
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_lab import chat_server, say
from models import a_job, config_of, dataset, killed_at, publish, run
from row_reading import read_rows
from tiny_models import make_reward_model

from pedigree.configs.language.execution import Numerics
from pedigree.data.artifacts.artifacts import Artifact
from pedigree.data.records import records
from pedigree.stages.job.failures import StageError
from pedigree.stages.judge import run as judge
from pedigree.stages.sampling import frozen_copies, rewards
from pedigree.stages.select_rows import run as select_rows

ONE_THREAD = Numerics(threads=1)
ABOVE_ALL = {"type": "above", "min_score": -1e6}


def row(number: int, text: str, **more: Any) -> dict[str, Any]:
    question = {"role": "user", "content": f"What is {number} + 1?"}
    messages = [question, {"role": "assistant", "content": text}]
    return {"id": f"r{number}", "source": "test", "messages": messages, **more}


def some_rows(count: int = 12) -> list[dict[str, Any]]:
    return [row(number, "ha " * (number % 7) + str(number + 1)) for number in range(count)]


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    found = {}
    for seed, (label, mean, std) in enumerate((("a", 0.5, 2.0), ("b", -0.3, 0.5))):
        folder = tmp_path_factory.mktemp(label)
        make_reward_model(folder / "payload", seed=seed, mean=mean, std=std)
        found[label] = publish(folder, "reward_model", "reward_model")
    return found


def selected(folder: Path, rows: list[Any], artifact_type: str = "conversation", ports: Any = None, **config: Any) -> Any:
    """(metrics, rows that stay, evidence by name)."""
    job = a_job(folder / "job", ONE_THREAD, endpoint_retries=0)
    inputs = {"data": {"d": dataset(folder / "data", artifact_type, rows)}} | (ports or {})
    metrics = select_rows.run(config_of("select_rows", **config), inputs, job)
    evidence = {path.name: path for path in job.evidence.iterdir()}
    return metrics, list(records.stream(job.out / "payload")), evidence


def test_rows_are_scored_as_judge_scores_answers_in_their_context(tmp_path: Path, members: dict[str, Artifact]) -> None:
    """The same text after the same turns has the score of a completion; an answer that was cut off has that of one, too."""
    rows = some_rows(6)
    rows[2]["messages"] = [*rows[1]["messages"], *rows[2]["messages"]]
    rows[3]["messages"][-1]["finish_reason"] = "length"
    scoring = {"reward_weight": 0.5, "ensemble": {"type": "uncertainty_weighted", "weight": 2.0}}
    ports = {"reward_models": members}
    _, _, evidence = selected(tmp_path / "select", rows, ports=ports, keep=ABOVE_ALL, **scoring)
    completions = [
        {
            "id": f"{one['id']}/x/0", "prompt_id": one["id"], "source": "test", "messages": one["messages"][:-1], "verifier": None,
            "policy": "x", "policy_content": "c", "on_policy": False, "index": 0, "seed": 1, "prompt_ids": [1], "response_ids": [5],
            "logprobs": [-1.0], "text": one["messages"][-1]["content"],
            "finish_reason": one["messages"][-1].get("finish_reason", "stop"),
        }
        for one in rows
    ]  # fmt: skip
    job = a_job(tmp_path / "judge", ONE_THREAD)
    inputs = {"completions": {"c": dataset(tmp_path / "completions", "completion", completions)}} | ports
    judge.run(config_of("judge", verifier_weight=0.0, **scoring), inputs, job)
    expected = list(records.stream(job.out / "payload"))
    found = read_rows(evidence["scores.jsonl"])
    assert [one["score"] for one in found] == pytest.approx([one["score"] for one in expected], abs=1e-5)
    assert [one["rewards"] for one in found] == [pytest.approx(one["rewards"], abs=1e-5) for one in expected]
    assert len({one["score"] for one in found}) == 6  # the context counts, and the missing end


def test_the_best_share_stays_unchanged_and_in_order_and_every_row_is_told_whatever_the_parts(
    tmp_path: Path, members: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = some_rows(11)
    rows[0]["messages"][-1]["train"] = True
    config = {"ports": {"reward_models": members}, "reward_weight": 1.0, "keep": {"type": "top_share", "share": 0.3}}
    metrics, kept, evidence = selected(tmp_path / "whole", rows, **config)
    lines = read_rows(evidence["scores.jsonl"])
    assert [one["id"] for one in lines] == [one["id"] for one in rows]
    best = sorted(lines, key=lambda one: -one["score"])[:4]  # 0.3 of 11 are 3.3
    assert kept == [one for one in rows if one["id"] in {one["id"] for one in best}]
    drops = read_rows(evidence["drops.jsonl"])
    assert {one["id"] for one in drops} == {one["id"] for one in lines if not one["kept"]} and len(drops) == 7
    assert {one["reason"] for one in drops} == {"outside the top share"}
    counts = json.loads(evidence["counts.json"].read_text())
    scores = sorted(one["score"] for one in lines)
    assert counts["scores"]["p50"] == scores[5] and counts["scores"]["max"] == scores[-1] and counts["kept_scores"]["min"] == scores[-4]
    assert (counts["read"], counts["kept"], counts["drops"]) == (11, 4, {"outside the top share": 7})
    assert metrics["rows"] == 4 and metrics["lowest_kept"] == best[-1]["score"] and metrics["sources"] == {"test": 4}
    monkeypatch.setattr(rewards, "PART", 4)
    _, of_parts, other = selected(tmp_path / "parts", rows, **config)
    assert of_parts == kept
    assert [one["score"] for one in read_rows(other["scores.jsonl"])] == pytest.approx([one["score"] for one in lines], abs=1e-5)


def test_a_preference_is_scored_by_its_best_answer() -> None:
    talk = row(3, "ha 4")
    answers = [{"text": "ha 4", "score": 1.0}, {"text": "no", "score": 0.0}]
    pair = {**talk, "messages": talk["messages"][:1], "answers": answers, "strength": None}
    assert select_rows.answer_of(pair) == select_rows.answer_of(talk)
    cut_off = pair | {"answers": [answers[0] | {"finish_reason": "length"}, answers[1]]}
    assert select_rows.answer_of(cut_off)["finish_reason"] == "length"


def test_an_answer_that_calls_tools_has_no_reward_and_is_read_whole_by_language_models(
    tmp_path: Path, members: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, asked = {"role": "call", "content": '{"name": "look", "arguments": {"a": 1}}'}, []
    rows = some_rows(4)
    rows[1]["messages"] += [call, call]  # after words
    rows[2]["messages"][1:] = [call]

    def rated(chats: Any, handler: Any, body: Any) -> None:
        asked.append(chats.text(body))
        say(handler, "Rating: 3")

    models = {"ports": {"reward_models": {"a": members["a"]}}, "reward_weight": 1.0, "max_unscored_share": 0.5}
    _, kept, evidence = selected(tmp_path / "rewards", rows, keep=ABOVE_ALL, **models)
    assert [one["id"] for one in kept] == ["r0", "r3"]
    reason = "a: the answer calls tools, for which a reward model that reads texts has no form"
    assert [one.get("problem") for one in read_rows(evidence["scores.jsonl"])] == [None, reason, reason, None]
    with chat_server(rated) as chats:
        by = {"type": "endpoint", "base_url": chats.base_url, "model": "judge"}
        _, kept, _ = selected(tmp_path / "ratings", rows, rating={"rubrics": ["honesty"], "by": by}, rating_weight=1.0, keep=ABOVE_ALL)
    assert kept == rows
    assert sum(f"ha 2\n{call['content']}\n{call['content']}" in text for text in asked) == 1  # what is said in the turn belongs to it


def rated_by_question(chats: Any, handler: Any, body: Any) -> None:
    number = int(re.search(r"What is (\d+) \+ 1", chats.text(body))[1])  # pyright: ignore[reportOptionalSubscript]
    say(handler, "I would rather not say." if number == 3 else f"Well.\nRating: {1 + number % 5}")


def test_what_a_language_model_cannot_rate_is_dropped_with_the_reason_up_to_a_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with chat_server(rated_by_question) as chats:
        by = {"type": "endpoint", "base_url": chats.base_url, "model": "judge"}
        config = {"rating": {"rubrics": ["honesty"], "by": by}, "rating_weight": 1.0, "keep": {"type": "above", "min_score": 4.0}}
        metrics, kept, evidence = selected(tmp_path / "a", some_rows(10), **config)
        with pytest.raises(StageError, match=r"1 of 10 rows have no score, more than 9% \(rating/honesty: no line states a rating\)"):
            selected(tmp_path / "b", some_rows(10), max_unscored_share=0.09, **config)
        with pytest.raises(StageError, match=r"0 rows < min_rows 1 of 10 \({'below min_score': 9, 'no score': 1}\): lower keep.min_score"):
            selected(tmp_path / "c", some_rows(10), **{**config, "keep": {"type": "above", "min_score": 5.5}})
    assert [one["id"] for one in kept] == ["r4", "r8", "r9"]
    assert metrics["dropped"] == {"below min_score": 6, "no score": 1} and metrics["unscored"] == 1
    assert metrics["ratings"]["honesty"]["counts"] == {"1": 2, "2": 2, "3": 2, "4": 1, "5": 2}
    (unrated,) = [one for one in read_rows(evidence["drops.jsonl"]) if one["reason"] == "no score"]
    assert unrated == {"id": "r3", "source": "test", "reason": "no score", "evidence": "rating/honesty: no line states a rating"}
    line = read_rows(evidence["scores.jsonl"])[4]
    assert line["ratings"] == {"honesty": {"rating": 5, "text": "Well.\nRating: 5"}} and line["score"] == 5.0


def test_rows_that_a_model_cannot_read_end_the_stage_before_the_others_are_looked_at(
    tmp_path: Path, members: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewards, "PART", 4)
    asked = []
    read = rewards.FrozenRewardModel.rewards
    monkeypatch.setattr(rewards.FrozenRewardModel, "rewards", lambda self, answers, tell: asked.append(1) or read(self, answers, tell))
    rows = [row(number, "1" * 400) for number in range(3)] + some_rows(17)[3:]
    with pytest.raises(StageError, match=r"3 of 17 rows have no score, more than 10% \(a: prompt and answer have \d+ tokens, .* context"):
        selected(tmp_path, rows, ports={"reward_models": members}, reward_weight=1.0, keep=ABOVE_ALL)
    assert len(asked) == 1


@pytest.mark.parametrize("whole", [True, False])
def test_no_reward_model_is_in_memory_when_the_next_model_is_asked(
    tmp_path: Path, members: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """Nor where somebody stops asking before all is said."""
    loaded: list[weakref.ref[torch.nn.Module]] = []
    returned: list[tuple[torch.device, list[bool]]] = []
    load = rewards.load_reward_model

    def noted(*args: Any) -> Any:
        module = load(*args)
        loaded.append(weakref.ref(module))
        return module

    def given_back(device: torch.device) -> None:
        returned.append((device, [one() is None for one in loaded]))

    monkeypatch.setattr(rewards, "load_reward_model", noted)
    monkeypatch.setattr(frozen_copies, "give_back", given_back)
    monkeypatch.setattr(rewards, "PART", 4)

    def missing(label: str, reasons: dict[int, str]) -> None:
        if not whole:
            raise StageError("enough")

    answers = [select_rows.answer_of(one) for one in some_rows(9)]
    gc.disable()
    try:
        rewards.ask_all(members, answers, "fp32", a_job(tmp_path, ONE_THREAD), missing)
    except StageError:
        assert not whole
    finally:
        gc.enable()
    assert returned == [(torch.device("cpu"), [True] * number) for number in ((1, 2) if whole else (1,))]


def test_what_torch_keeps_of_a_gpu_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append(1))
    for name in ("cpu", "cuda"):
        frozen_copies.give_back(torch.device(name))
    assert called == [1]


@pytest.mark.parametrize("text", ["[]", "null", '{"mean": null, "std": 1.0}', "{", '{"mean": 0.0}', '{"mean": "a", "std": 1.0}'])
def test_statistics_that_are_none_are_told_with_the_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / "reward_stats.json").write_text(text)
    with pytest.raises(StageError, match=r"no usable reward_stats\.json .*train it with a `reward_model` stage"):
        rewards.reward_statistics(tmp_path)


@pytest.mark.nightly
def test_a_job_that_was_killed_scores_nothing_twice_and_ends_in_the_same_bytes(tmp_path: Path, members: dict[str, Artifact]) -> None:
    """It dies before the second reward model's rewards are kept; the next attempt asks this one alone."""
    args: Any = (
        "select_rows",
        {"reward_weight": 1.0, "keep": {"type": "top_share", "share": 0.5}},
        {"data": {"d": dataset(tmp_path / "data", "conversation", some_rows())}, "reward_models": members},
        ONE_THREAD,
    )
    killed_at("answers kept", 0, tmp_path / "job", *args)
    log = tmp_path / "job" / "chunks" / "answers.jsonl"
    first = log.read_text()
    assert run(tmp_path / "job", *args)["ok"] and run(tmp_path / "whole", *args)["ok"]
    assert log.read_text().startswith(first) and log.read_text().count("\n") == 2 * first.count("\n")
    for name in ("payload/rows-00000.parquet", "evidence/scores.jsonl"):
        assert (tmp_path / "job" / "out" / name).read_bytes() == (tmp_path / "whole" / "out" / name).read_bytes()


@pytest.mark.nightly
def test_another_machine_goes_on_with_what_was_scored_and_said(
    tmp_path: Path, members: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one fails when all is asked; rewards and replies lie side by side in the store, and neither is taken for the other."""
    inputs = {"data": {"d": dataset(tmp_path / "data", "conversation", some_rows(3))}, "reward_models": members}

    def scored(folder: Path, least: float) -> int:
        keep = {"type": "above", "min_score": least}
        config = config_of("select_rows", reward_weight=1.0, rating=rating, rating_weight=1.0, keep=keep)
        with a_job(folder, ONE_THREAD, checkpoint_url=f"file://{tmp_path}/shared") as job:
            return select_rows.run(config, inputs, job)["rows"]

    with chat_server(rated_by_question) as chats:
        rating = {"rubrics": ["honesty"], "by": {"type": "endpoint", "base_url": chats.base_url, "model": "judge"}}
        with pytest.raises(StageError, match="0 rows < min_rows 1 of 3"):
            scored(tmp_path / "lost", 1e6)
        monkeypatch.setattr(rewards.FrozenRewardModel, "rewards", None)
        assert scored(tmp_path / "elsewhere", -1e6) == 3 and len(chats.bodies) == 3


def test_scorers_that_nobody_asks_are_refused() -> None:
    with pytest.raises(ValueError, match="reward_weight, rating_weight and the weights of programs are all 0, so no row gets a score"):
        config_of("select_rows", keep=ABOVE_ALL)
    with pytest.raises(ValueError, match="ensemble worst_case has no effect, because reward_weight is 0"):
        config_of("select_rows", keep=ABOVE_ALL, ensemble={"type": "worst_case"})
