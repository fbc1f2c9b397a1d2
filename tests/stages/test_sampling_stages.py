"""`sample` and `evaluate` with the real engine."""

import json
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from models import a_job, dataset, killed_at, publish, run
from row_reading import read_rows
from tiny_models import make, make_policies
from waiting import until

from pedigree.configs.judging.pools import Window
from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.training import Sampling
from pedigree.data.chat.chat import Chat
from pedigree.data.records import records
from pedigree.stages.core.statistics import paired_difference
from pedigree.stages.evaluate import run as evaluate
from pedigree.stages.evaluate.run import comparisons
from pedigree.stages.job.failures import StageError
from pedigree.stages.sample.run import window
from pedigree.stages.sampling import answer_log, generate
from pedigree.stages.sampling.answer_log import AnswerLog
from pedigree.stages.sampling.generate import Ask, request_keys
from pedigree.stages.sampling.sampler import Child, Generation, Request, seed_of

ONE_THREAD = Numerics(threads=1)
NO_ENGINES: Any = SimpleNamespace(expect=lambda _: None)
SAMPLE = {
    "sampling": {"temperature": 1.0, "max_tokens": 12},
    "samples_per_prompt": 3,
    "prompts": {"count": 12, "index": 1},
    "chunk_size": 4,
    "dtype": "fp32",
    "seed": 5,
}


def prompt(number: int, **more):
    messages = [{"role": "user", "content": f"What is {number} + {number % 7}?"}]
    verifier = {"name": "arithmetic", "answer": str(number + number % 7)}
    return {"id": f"p{number}", "source": "test", "messages": messages, "verifier": verifier, **more}


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    return make_policies(tmp_path_factory.mktemp("policies"))


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    return dataset(tmp_path_factory.mktemp("pool"), "prompt", [prompt(number) for number in range(30)])


def test_a_window_is_its_slice_and_one_beyond_the_pool_is_refused():
    rows = [{"id": number} for number in range(10)]
    assert list(window(rows, Window(count=3, index=2))) == [{"id": 6}, {"id": 7}, {"id": 8}]
    with pytest.raises(StageError, match=r"prompts 9 to 12.*the pool has 10.*lower prompts.count"):
        window(rows, Window(count=3, index=3))


ROWS = Path("out/payload/rows-00000.parquet")


@pytest.fixture(scope="module")
def inputs(policies, pool):
    return {"policies": {"a": policies["a"], "b": policies["b"]}, "prompts": {"pool": pool}}


def counted(monkeypatch, method, count):
    """Process of an engine → what it was asked by a method, in every call."""
    asked, own = defaultdict(list), getattr(Child, method)

    def asks(engine, requests, *given):
        asked[engine.pid].append(count(requests))
        return own(engine, requests, *given)

    monkeypatch.setattr(Child, method, asks)
    return asked


@pytest.mark.slow
@pytest.mark.nightly
def test_a_continuous_sample_that_was_killed_asks_only_what_was_not_answered(inputs, tmp_path, monkeypatch, shared_engines):
    config, job = SAMPLE | {"chunk_size": "continuous"}, tmp_path / "job"
    killed_at("answers kept", 40, job, "sample", config, inputs, ONE_THREAD)
    log = job / "chunks" / "answers.jsonl"
    kept = [json.loads(line)[1]["response_ids"] for line in log.read_text().splitlines()]
    assert len(kept) == 41
    with log.open("a") as stream:
        stream.write('["0123456789abcdef", {"response_ids": [1, 2')  # by a power cut

    asked = counted(monkeypatch, "stream", lambda requests: [tuple(one.prompt_ids) for one in requests])
    done = shared_engines.run(job, "sample", config, inputs, ONE_THREAD, engines=2)
    assert done["ok"], done
    shares = [[prompt for call in calls for prompt in call] for calls in asked.values()]
    assert len(shares) == 2 and all(shares) and sum(map(len, shares)) == 72 - 41
    assert done["marks"][0].startswith("41 of 72 answers are those of interrupted attempts")
    rows = list(records.stream(job / "out" / "payload"))
    assert len(rows) == len({row["id"] for row in rows}) == len({row["seed"] for row in rows}) == 72
    said = [row["response_ids"] for row in rows]
    assert all(ids in said for ids in kept)
    assert len(log.read_text().splitlines()) == 72 + 1  # the torn one
    asked.clear()
    assert shared_engines.run(job, "sample", config, inputs, ONE_THREAD)["content"] == done["content"] and not asked


def test_only_answers_to_what_is_asked_now_are_those_of_interrupted_attempts(policies, tmp_path):
    """Other numerics ask under other keys: what was kept under theirs is in nobody's rows."""
    job, written = a_job(tmp_path, ONE_THREAD), json.dumps(asdict(Generation([5], [-1.0], "stop")))
    asks = {
        label: Ask(policies["a"], Chat(policies["a"].payload), [Request([number], 0)], Sampling(max_tokens=4))
        for number, label in ((3, "x"), (4, "y"))
    }
    keys = [key for ask in asks.values() for key in request_keys(ask, "continuous", "fp32", 128, job)]
    (tmp_path / "chunks").mkdir()
    (tmp_path / "chunks" / "answers.jsonl").write_text("".join(f'["{key}", {written}]\n' for key in (*keys, "stale", "staler")))
    made = generate.generate(asks, chunk_size="continuous", dtype="fp32", job=job, ahead=NO_ENGINES)
    assert [[one.response_ids for one in made[label]] for label in asks] == [[[5]], [[5]]]
    (mark,) = job.marks
    assert mark.startswith("2 of 2 answers are those of interrupted attempts")


@pytest.mark.parametrize("chunk_size", [4, "continuous"])
def test_a_context_that_is_too_short_is_found_before_any_policy_answers(tmp_path, chunk_size: Any):
    """Also that of a policy whose engines come last; the message says of whom, and what would fit."""
    asks: dict[str, Any] = {}
    for name, context, layers in (("long", 256, 2), ("short", 128, 3)):
        make(tmp_path / name / "payload", context=context, layers=layers)
        requests = [Request([5] * length, 0) for length in (3, 120)]
        chat: Any = SimpleNamespace(eos_id=2)
        asks[name] = Ask(publish(tmp_path / name, "source_model", "policy"), chat, requests, Sampling(max_tokens=12))
    said = "short: .* 120 tokens and max_tokens is 12, but the model's context is 128: lower max_tokens to 8, drop longer"
    with pytest.raises(StageError, match=said):
        generate.generate(asks, chunk_size=chunk_size, dtype="fp32", job=a_job(tmp_path, ONE_THREAD), ahead=NO_ENGINES)


def test_requests_are_dealt_once_and_those_with_one_prompt_together(tmp_path):
    """What is asked twice, or answered already, is not asked."""
    requests = [Request([prompt], index) for prompt in (3, 4, 5) for index in range(2)] + [Request([6], 0), Request([6], 0)]
    keys = [f"{one.prompt_ids[0]}/{one.seed}" for one in requests]
    ask: Any = SimpleNamespace(requests=requests)

    def dealt(*answered: str) -> list[list[list[str]]]:
        with AnswerLog(a_job(tmp_path, ONE_THREAD)) as log:
            log.keep(dict.fromkeys(answered, ""))
            queues = generate.shares({"x": ask}, {"x": keys}, log, 2)
            return [[[keys[place] for place in batch.places] for batch in queue] for queue in queues]

    assert dealt("3/0", "4/0", "4/1") == [[["3/1", "6/0"]], [["5/0", "5/1"]]]
    assert dealt(*keys) == []


@pytest.mark.slow
@pytest.mark.proves("placement.engines")
def test_a_sample_that_was_killed_goes_on_with_its_chunks_by_two_engines_and_ends_in_the_bytes_of_one(
    inputs, tmp_path, monkeypatch, shared_engines
):
    assert shared_engines.run(tmp_path / "whole", "sample", SAMPLE, inputs, ONE_THREAD)["ok"]

    killed_at("answers kept", 4, tmp_path / "killed", "sample", SAMPLE, inputs, ONE_THREAD)
    log = tmp_path / "killed" / "chunks" / "answers.jsonl"
    finished = log.read_text()
    assert finished.count("\n") == 5 * 4
    asked = counted(monkeypatch, "generate", len)
    done = shared_engines.run(tmp_path / "killed", "sample", SAMPLE, inputs, ONE_THREAD, engines=2)
    assert done["ok"]
    assert len(asked) == 2 and all(asked.values()) and sum(map(sum, asked.values())) == 4 * (18 - 5)  # 2 policies * 36 requests / 4
    assert log.read_text().startswith(finished) and log.read_text().count("\n") == 72

    assert (tmp_path / "killed" / ROWS).read_bytes() == (tmp_path / "whole" / ROWS).read_bytes()
    rows = list(records.stream(tmp_path / "whole" / "out" / "payload"))
    assert [row["id"] for row in rows[:4]] == ["p12/a/0", "p12/a/1", "p12/a/2", "p13/a/0"]
    assert len(rows) == done["metrics"]["rows"] == 2 * 12 * 3 == len({row["seed"] for row in rows})
    assert rows[0]["seed"] == seed_of(5, "a", "p12", 0) < 2**31
    assert all(len(row["logprobs"]) == len(row["response_ids"]) for row in rows)
    same_prompt = [row["text"] for row in rows if row["prompt_id"] == "p12"]
    assert len(set(same_prompt)) > 3  # draws differ, and so do policies


@pytest.mark.slow
def test_evaluate_scores_every_policy_on_every_suite(policies, tmp_path, monkeypatch, shared_engines):
    def constraint(number: int):
        instruction = {"id": "length_constraints:number_words", "relation": "at least", "num_words": 3 + number % 3}
        verifier = {"name": "ifeval", "instructions": [instruction]}
        return prompt(number, verifier=verifier, task="words")

    suites = {
        "sums": dataset(tmp_path / "sums", "item", [prompt(number, task="sums") for number in range(6)]),
        "words": dataset(tmp_path / "words", "item", [constraint(number) for number in range(10)]),
    }
    labels = {"base": policies["a"], "tuned": policies["b"], "again": policies["a"]}
    mine = tmp_path / "mine.py"
    mine.write_text("def reward(completions, source):\n    return [float(len(one[0]['content'])) for one in completions]\n")
    program = {"type": "program", "path": "mine.py", "name": "size", "trusted": True}  # without a sandbox, which may not be installed
    config = {"sampling": {"temperature": 0.0, "max_tokens": 16}, "chunk_size": 8, "resamples": 200, "dtype": "fp32", "programs": [program]}
    order = []

    def noted(*given, own, name):
        if name == "keep" and order.count("keep") == 3:  # the last of four chunks waits for the thread that scores the first ones
            until(lambda: order.count("score") >= 16)
        order.append(name)
        return own(*given)

    for module, name in ((answer_log.AnswerLog, "keep"), (evaluate, "score")):
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, own=own, name=name: noted(*given, own=own, name=name))
    asked = counted(monkeypatch, "generate", len)
    done = shared_engines.run(
        tmp_path / "job", "evaluate", config, {"policies": labels, "suites": suites}, ONE_THREAD, files={"mine.py": mine}
    )
    assert done["ok"], done
    assert len(asked) == 1
    last_made = max(place for place, name in enumerate(order) if name == "keep")
    assert order[:last_made].count("score") >= 16 and order.count("score") == 3 * 16  # beside the engine, which makes the next answers
    assert done["metrics"]["split"] == "dev" and "looks" not in done["metrics"]
    payload = tmp_path / "job" / "out" / "payload"
    rows, table = list(records.stream(payload)), json.loads((payload / "scores.json").read_text())
    assert len(rows) == 3 * 16

    def scores(label, task):
        return [row["score"] for row in rows if (row["policy"], row["task"]) == (label, task)]

    words = table["policies"]["tuned"]["tasks"]["words"]
    assert words["n"] == 10 and words["mean"] == pytest.approx(sum(scores("tuned", "words")) / 10)
    assert words["low"] <= words["mean"] <= words["high"]
    assert table["policies"]["tuned"]["mean"] == pytest.approx((words["mean"] + sum(scores("tuned", "sums")) / 6) / 2)
    assert done["metrics"]["tuned/words"] == words["mean"]
    assert table["policies"]["tuned"]["content"] == policies["b"].record.content
    difference = next(row for row in table["differences"] if (row["candidate"], row["baseline"], row["task"]) == ("tuned", "base", "words"))
    expected = paired_difference(scores("tuned", "words"), scores("base", "words"), resamples=200, seed=0)
    assert (difference["mean"], difference["low"], difference["high"]) == pytest.approx(tuple(expected))
    assert all(row["scores"]["size"] == len(row["text"]) for row in rows)
    sizes = next(row for row in table["differences"] if (row["candidate"], row["task"], row.get("metric")) == ("tuned", "words", "size"))
    means = {label: table["policies"][label]["metrics"]["words"]["size"]["mean"] for label in labels}
    assert sizes["mean"] == pytest.approx(means["tuned"] - means["base"]) and sizes["low"] <= sizes["mean"] <= sizes["high"]
    texts = {label: [row["text"] for row in rows if row["policy"] == label] for label in labels}
    assert texts["base"] == texts["again"] != texts["tuned"]  # equal weights, whatever was loaded in between
    samples = read_rows(tmp_path / "job" / "out" / "evidence" / "samples.jsonl")
    assert [(row["id"], row["policy"]) for row in samples[:4]] == [("p0", "base"), ("p0", "tuned"), ("p0", "again"), ("p1", "base")]
    assert sum(row["task"] == "words" for row in samples) == 8 * 3


def test_each_policy_is_compared_with_the_one_before_and_the_first():
    assert comparisons(["a", "b", "c"]) == [("a", "b"), ("b", "c"), ("a", "c")]
    assert comparisons(["a"]) == []


@pytest.mark.slow
def test_a_prompt_longer_than_the_context_is_named_before_any_engine_starts(policies, tmp_path):
    long = prompt(1, messages=[{"role": "user", "content": "1 " * 300}])
    pool = dataset(tmp_path / "pool", "prompt", [long])
    config = SAMPLE | {"prompts": {"count": 1}}
    done = run(tmp_path / "job", "sample", config, {"policies": {"a": policies["a"]}, "prompts": {"pool": pool}}, ONE_THREAD)
    assert (done["ok"], done["cause"]) == (False, "refused")
    assert "the model's context is 256: drop longer prompts" in done["message"]  # no room for an answer, however short


def test_equal_chunks_of_two_labels_have_equal_keys(policies, tmp_path):
    """Identity of a chunk is what decides its answers."""
    chat, requests = Chat(policies["a"].payload), [Request([3, 4], 1), Request([3, 5], 2)]
    sampling, job = Sampling(max_tokens=4), a_job(tmp_path / "job")

    def keys(policy, sampling, job):
        return request_keys(Ask(policy, chat, requests, sampling), 1, "fp32", 128, job)

    first = keys(policies["a"], sampling, job)
    assert len(set(first)) == 2 and keys(policies["a"], sampling, job) == first
    assert not set(first) & set(keys(policies["b"], sampling, job))
    assert not set(first) & set(keys(policies["a"], Sampling(max_tokens=4, temperature=0.5), job))
    assert not set(first) & set(keys(policies["a"], sampling, a_job(tmp_path / "job", numerics=Numerics(threads=1))))


def test_equal_chunks_of_two_labels_are_generated_once(policies, tmp_path, monkeypatch):
    asked, reported = [], []

    class Engine:
        def generate(self, requests, *_):
            asked.append(len(requests))
            return [Generation([one.seed], [-1.0], "stop") for one in requests]

    monkeypatch.setattr(generate, "open_engines", lambda *_: nullcontext([Engine()]))
    requests, job = [Request([3, 4], seed) for seed in range(5)], a_job(tmp_path / "job")
    monkeypatch.setattr(job, "progress", lambda *given: reported.append(given))
    ask = Ask(policies["a"], Chat(policies["a"].payload), requests, Sampling(max_tokens=4))
    made = generate.generate({"x": ask, "y": ask}, chunk_size=2, dtype="fp32", job=job, ahead=NO_ENGINES)
    assert asked == [2, 2, 1] and reported[-1] == (10, 10)
    assert [[one.response_ids for one in answers] for answers in made.values()] == [[[seed] for seed in range(5)]] * 2


def test_each_architecture_has_an_engine_of_its_own_which_gets_the_weights_of_its_policies(policies, tmp_path, monkeypatch):
    """Each but the first is expected, so that it starts while the one before it works."""
    asks = {label: Ask(policy, Chat(policy.payload), [Request([3, 4], 1)], Sampling(max_tokens=4)) for label, policy in policies.items()}
    expected: list[int] = []
    opened: list[list[str]] = []

    def engine(settings: dict[str, Any], *_: Any) -> Any:
        opened.append([settings["model_folder"]])
        answer = Generation([len(opened)], [-1.0], "stop")
        return nullcontext([SimpleNamespace(load=lambda folder: opened[-1].append(str(folder)), generate=lambda *_: [answer])])

    monkeypatch.setattr(generate, "open_engines", engine)
    job, ahead = a_job(tmp_path / "job"), SimpleNamespace(expect=expected.append)
    made = generate.generate(asks, chunk_size=1, dtype="fp32", job=job, ahead=ahead)  # pyright: ignore[reportArgumentType]
    assert {label: [one.response_ids for one in answers] for label, answers in made.items()} == {"a": [[1]], "b": [[1]], "deep": [[2]]}
    folders = {label: str(policy.payload) for label, policy in policies.items()}
    assert expected == [2] and opened == [[folders["a"], folders["b"]], [folders["deep"]]]
