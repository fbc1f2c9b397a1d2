"""`sample` and `evaluate` with the real engine."""

import json
import shutil
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from models import a_job, alive, dataset, killed_at, publish, run
from row_reading import read_rows
from tiny_models import make, make_policies

from pedigree.configs.judging.pools import Window
from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.training import Sampling
from pedigree.data.records import records
from pedigree.stages.core.statistics import paired_difference
from pedigree.stages.evaluate import run as evaluate
from pedigree.stages.evaluate.run import comparisons
from pedigree.stages.job.failures import StageError
from pedigree.stages.sample.run import window
from pedigree.stages.sampling import chunks, continuous
from pedigree.stages.sampling.continuous import _deal
from pedigree.stages.sampling.sampler import Child, Generation, Request, seed_of

ONE_THREAD = Numerics(threads=1)
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


@pytest.fixture(scope="module")
def kept():
    """Engines that are open, with their settings, for all tests that take `shared_engines`."""
    engines: list[tuple[Child, dict[str, Any]]] = []
    yield engines
    for engine, _ in engines:
        engine.close()


def of_each_engine(settings):
    """What cannot change once it is open."""
    return settings | {"model_folder": None, "placement": settings["placement"] | {"engines": None}}


@pytest.fixture
def shared_engines(kept, monkeypatch):
    """Jobs in this process are given engines that are open already, of one architecture: a start takes ten seconds."""

    @contextmanager
    def opened(settings, count, ahead):
        for process in filter(None, [ahead.take() for _ in range(count)]):
            process.kill()
            process.communicate()
        while len(kept) < count:
            kept.append((Child(settings), settings))
        for engine, own in kept[:count]:
            assert of_each_engine(settings) == of_each_engine(own)
            engine.load(Path(settings["model_folder"]))
        yield [engine for engine, _ in kept[:count]]

    monkeypatch.setattr(chunks, "open_engines", opened)


def counted(monkeypatch, method, count):
    """Process of an engine → what it was asked by a method, in every call."""
    asked, own = defaultdict(list), getattr(Child, method)

    def asks(engine, requests, *given):
        asked[engine.pid].append(count(requests))
        return own(engine, requests, *given)

    monkeypatch.setattr(Child, method, asks)
    return asked


@pytest.mark.slow
def test_a_continuous_sample_that_was_killed_asks_only_what_was_not_answered(inputs, tmp_path, monkeypatch, shared_engines):
    config, job = SAMPLE | {"chunk_size": "continuous"}, tmp_path / "job"
    killed_at("answer kept", 40, job, "sample", config, inputs, ONE_THREAD)
    log = job / "chunks" / "answers.jsonl"
    kept = [json.loads(line)[1]["response_ids"] for line in log.read_text().splitlines()]
    assert len(kept) == 41
    with log.open("a") as stream:
        stream.write('["0123456789abcdef", {"response_ids": [1, 2')  # by a power cut

    asked = counted(monkeypatch, "stream", lambda requests: [tuple(one.prompt_ids) for one in requests])
    done = run(job, "sample", config, inputs, ONE_THREAD, engines=2)
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
    assert run(job, "sample", config, inputs, ONE_THREAD)["content"] == done["content"] and not asked


def test_only_answers_to_what_is_asked_now_are_those_of_interrupted_attempts(tmp_path, monkeypatch):
    """Other numerics ask under other keys: what was kept under theirs is in nobody's rows."""
    written = json.dumps(asdict(Generation([5], [-1.0], "stop")))
    (tmp_path / "chunks").mkdir()
    (tmp_path / "chunks" / "answers.jsonl").write_text("".join(f'["{key}", {written}]\n' for key in ("mine", "stale", "staler")))
    monkeypatch.setattr(continuous, "by_architecture", lambda asks: [[label] for label in asks])
    monkeypatch.setattr(continuous, "context_of", lambda asks: 128)
    monkeypatch.setattr(continuous, "_keys", lambda ask, *_: ["mine"] * len(ask.requests))
    asks: Any = {label: SimpleNamespace(chat=None, requests=[Request([label], 0)], sampling=None) for label in (3, 4)}
    job = a_job(tmp_path, ONE_THREAD)
    made = continuous.generate_continuously(asks, dtype="fp32", job=job, ahead=SimpleNamespace(expect=lambda _: None))  # pyright: ignore
    assert [[one.response_ids for one in made[label]] for label in asks] == [[[5]], [[5]]]
    (mark,) = job.marks
    assert mark.startswith("2 of 2 answers are those of interrupted attempts")


@pytest.mark.parametrize("chunk_size", [4, "continuous"])
def test_a_context_that_is_too_short_is_found_before_any_policy_answers(tmp_path, chunk_size):
    """Also that of a policy whose engines come last; the message says of whom, and what would fit."""
    asks: dict[str, Any] = {}
    for name, context, layers in (("long", 256, 2), ("short", 128, 3)):
        make(tmp_path / name / "payload", context=context, layers=layers)
        requests = [Request([5] * length, 0) for length in (3, 120)]
        chat: Any = SimpleNamespace(eos_id=2)
        asks[name] = chunks.Ask(publish(tmp_path / name, "source_model", "policy"), chat, requests, Sampling(max_tokens=12))
    given: Any = {"dtype": "fp32", "job": a_job(tmp_path, ONE_THREAD), "ahead": SimpleNamespace(expect=lambda _: None)}
    said = "short: .* 120 tokens and max_tokens is 12, but the model's context is 128: lower max_tokens to 8, drop longer"
    with pytest.raises(StageError, match=said):
        if chunk_size == "continuous":
            continuous.generate_continuously(asks, **given)
        else:
            chunks.generate(asks, chunk_size=chunk_size, **given)


def test_requests_are_dealt_once_and_those_with_one_prompt_together():
    """What is asked twice, or answered already, is not asked."""
    chat, sampling = SimpleNamespace(), Sampling(max_tokens=4)
    requests = [Request([prompt], index) for prompt in (3, 4, 5) for index in range(2)] + [Request([6], 0), Request([6], 0)]
    keys = [f"{one.prompt_ids[0]}/{one.seed}" for one in requests]
    ask: Any = SimpleNamespace(chat=chat, requests=requests, sampling=sampling)
    dealt = _deal({"x": ask}, {"x": keys}, {"3/0": "answered", "4/0": "too", "4/1": "as well"}, 2)
    assert [[list(share.keys) for share in shares] for shares in dealt] == [[["3/1", "6/0"]], [["5/0", "5/1"]]]
    assert [list(share.requests) for shares in dealt for share in shares] == [[requests[1], requests[6]], requests[4:6]]
    assert _deal({"x": ask}, {"x": keys}, dict.fromkeys(keys, "answered"), 2) == []


@pytest.mark.slow
@pytest.mark.proves("placement.engines")
def test_a_sample_that_was_killed_goes_on_with_its_chunks_by_two_engines_and_ends_in_the_bytes_of_one(
    inputs, tmp_path, monkeypatch, shared_engines
):
    assert run(tmp_path / "whole", "sample", SAMPLE, inputs, ONE_THREAD)["ok"]

    killed_at("chunk generated", 5, tmp_path / "killed", "sample", SAMPLE, inputs, ONE_THREAD)
    finished = {file: file.stat().st_mtime_ns for file in (tmp_path / "killed" / "chunks").iterdir()}
    assert len(finished) == 5
    asked = counted(monkeypatch, "generate", len)
    done = run(tmp_path / "killed", "sample", SAMPLE, inputs, ONE_THREAD, engines=2)
    assert done["ok"]
    assert len(asked) == 2 and all(asked.values()) and sum(map(sum, asked.values())) == 4 * (18 - 5)  # 2 policies * 36 requests / 4
    assert {file: file.stat().st_mtime_ns for file in finished} == finished

    assert (tmp_path / "killed" / ROWS).read_bytes() == (tmp_path / "whole" / ROWS).read_bytes()
    rows = list(records.stream(tmp_path / "whole" / "out" / "payload"))
    assert [row["id"] for row in rows[:4]] == ["p12/a/0", "p12/a/1", "p12/a/2", "p13/a/0"]
    assert len(rows) == done["metrics"]["rows"] == 2 * 12 * 3 == len({row["seed"] for row in rows})
    assert rows[0]["seed"] == seed_of(5, "a", "p12", 0) < 2**31
    assert all(len(row["logprobs"]) == len(row["response_ids"]) for row in rows)
    same_prompt = [row["text"] for row in rows if row["prompt_id"] == "p12"]
    assert len(set(same_prompt)) > 3  # draws differ, and so do policies


@pytest.mark.slow
def test_evaluate_scores_every_policy_on_every_suite(policies, tmp_path, monkeypatch):
    def constraint(number: int):
        instruction = {"id": "length_constraints:number_words", "relation": "at least", "num_words": 3 + number % 3}
        verifier = {"name": "ifeval", "instructions": [instruction]}
        return prompt(number, verifier=verifier, task="words")

    suites = {
        "sums": dataset(tmp_path / "sums", "item", [prompt(number, task="sums") for number in range(6)]),
        "words": dataset(tmp_path / "words", "item", [constraint(number) for number in range(10)]),
    }
    labels = {"base": policies["a"], "tuned": policies["b"], "other": policies["deep"], "again": policies["a"]}
    config = {"sampling": {"temperature": 0.0, "max_tokens": 16}, "chunk_size": 8, "resamples": 200, "dtype": "fp32"}
    order = []
    for module, name in ((chunks, "write_text"), (evaluate, "score")):
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, own=own, name=name: (order.append(name), own(*given))[1])
    asked = counted(monkeypatch, "generate", len)
    done = run(tmp_path / "job", "evaluate", config, {"policies": labels, "suites": suites}, ONE_THREAD)
    assert done["ok"], done
    assert len(asked) == 2 and not any(map(alive, asked))
    last_made = max(place for place, name in enumerate(order) if name == "write_text")
    assert order[:last_made].count("score") >= 16 and order.count("score") == 4 * 16  # beside the engine, which makes the next answers
    assert done["metrics"]["split"] == "dev" and "looks" not in done["metrics"]
    payload = tmp_path / "job" / "out" / "payload"
    rows, table = list(records.stream(payload)), json.loads((payload / "scores.json").read_text())
    assert len(rows) == 4 * 16

    def scores(label, task):
        return [row["score"] for row in rows if (row["policy"], row["task"]) == (label, task)]

    words = table["policies"]["tuned"]["tasks"]["words"]
    assert words["n"] == 10 and words["mean"] == pytest.approx(sum(scores("tuned", "words")) / 10)
    assert words["low"] <= words["mean"] <= words["high"]
    assert table["policies"]["tuned"]["mean"] == pytest.approx((words["mean"] + sum(scores("tuned", "sums")) / 6) / 2)
    assert done["metrics"]["tuned/words"] == words["mean"]
    assert table["policies"]["other"]["content"] == policies["deep"].record.content
    difference = next(row for row in table["differences"] if (row["candidate"], row["baseline"], row["task"]) == ("other", "base", "words"))
    expected = paired_difference(scores("other", "words"), scores("base", "words"), resamples=200, seed=0)
    assert (difference["mean"], difference["low"], difference["high"]) == pytest.approx(tuple(expected))
    texts = {label: [row["text"] for row in rows if row["policy"] == label] for label in labels}
    assert texts["base"] == texts["again"] != texts["tuned"] != texts["other"]  # equal weights, whatever was loaded in between
    samples = read_rows(tmp_path / "job" / "out" / "evidence" / "samples.jsonl")
    assert [(row["id"], row["policy"]) for row in samples[:5]] == [
        ("p0", "base"), ("p0", "tuned"), ("p0", "other"), ("p0", "again"), ("p1", "base"),
    ]  # fmt: skip
    assert sum(row["task"] == "words" for row in samples) == 8 * 4


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


def test_equal_chunks_of_two_labels_are_generated_once(policies, pool, tmp_path):
    """Identity of a chunk is what decides its answers: a copy of a policy under another label asks for the same files."""
    from models import a_job

    from pedigree.data.chat.chat import Chat
    from pedigree.stages.sampling.chunks import Ask, _cut

    shutil.copytree(policies["a"].path, tmp_path / "copy")
    chat, requests = Chat(policies["a"].payload), [Request([3, 4], 1), Request([3, 5], 2)]
    sampling, job = Sampling(max_tokens=4), a_job(tmp_path / "job")

    def files(policy, sampling, job):
        return [chunk.file for chunk in _cut("x", Ask(policy, chat, requests, sampling), 1, "fp32", 128, job)]

    first = files(policies["a"], sampling, job)
    assert len(set(first)) == 2 and files(policies["a"], sampling, job) == first
    assert not set(first) & set(files(policies["b"], sampling, job))
    assert not set(first) & set(files(policies["a"], Sampling(max_tokens=4, temperature=0.5), job))
    assert not set(first) & set(files(policies["a"], sampling, a_job(tmp_path / "job", numerics=Numerics(threads=1))))


def test_as_many_engines_are_expected_as_there_are_architectures(policies, tmp_path):
    """So that each but the first starts while the one before it works."""
    from models import a_job

    from pedigree.data.chat.chat import Chat
    from pedigree.stages.sampling.chunks import Ask, _cut

    job, sampling = a_job(tmp_path / "job"), Sampling(max_tokens=4)
    asks = {label: Ask(policy, Chat(policy.payload), [Request([3, 4], 1)], sampling) for label, policy in policies.items()}
    for label, ask in asks.items():
        (chunk,) = _cut(label, ask, 1, "fp32", 128, job)
        chunk.file.parent.mkdir(exist_ok=True)
        chunk.file.write_text("[]")
    expected: list[int] = []
    ahead = SimpleNamespace(expect=expected.append)
    made = chunks.generate(asks, chunk_size=1, dtype="fp32", job=job, ahead=ahead)
    assert {label: list(answers) for label, answers in made.items()} == {"a": [], "b": [], "deep": []}
    assert expected == [2]
