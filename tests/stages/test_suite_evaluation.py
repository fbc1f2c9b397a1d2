"""`evaluate` on suites with forms, with the real engine; and the arithmetic of their scores without one."""

import dataclasses
import json
import threading
from typing import Any

import pytest
from models import dataset, run
from test_suites import ROWS, SHOTS, made
from tiny_models import make
from waiting import deadline

from pedigree.configs.base.frozen import PortInput
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.judging.measuring import Evaluate, evaluate_problem
from pedigree.configs.language.execution import Numerics
from pedigree.configs.methods.training import Sampling
from pedigree.configs.rows.datasets import PrepareData
from pedigree.configs.rows.suite_forms import Form, load_form
from pedigree.data.artifacts.artifacts import Artifact, Record, content_hash, open_artifact, scan, write_json
from pedigree.data.records import records
from pedigree.data.records.records import FORM_FILE
from pedigree.stages import verifiers
from pedigree.stages.evaluate import run as evaluate
from pedigree.stages.evaluate import suite_scores
from pedigree.stages.evaluate.pass_at_k import pass_at_k
from pedigree.stages.evaluate.run import Suite, is_cut_off, refuse_unknown, sampling_of, seed_parts, tasks_of
from pedigree.stages.evaluate.suite_scores import Draws, Task, cut, metrics_of, score_answer, score_choices, score_item, tabulate, task_hash
from pedigree.stages.job.failures import StageError
from pedigree.stages.sampling.sampler import Generation, seed_of
from pedigree.stages.verifiers import sandbox

ONE_THREAD = Numerics(threads=1)
locked = pytest.mark.skipif(sandbox.program() is None, reason="bubblewrap is not installed: apt-get install bubblewrap")
DRAWS = Draws(resamples=100, seed=0)


def suite_of(folder, name: str, rows: list[dict[str, Any]], **changes: Any) -> Artifact:
    """A suite of a form, changed in some of its parts so that a tiny model can answer it."""
    form = load_form(name)
    form = Form.model_validate({**form.model_dump(mode="json"), **changes})
    items = [{"id": f"{name}-{number}", **row} for number, row in enumerate(rows)]
    made = dataset(folder, "item", items)
    write_json(folder / "payload" / FORM_FILE, {"name": name, **form.deciding()})
    return republished(made)


def republished(artifact: Artifact) -> Artifact:
    files = scan(artifact.payload)
    record = Record(**{**artifact.record.model_dump(), "content": content_hash(files), "files": files})
    write_json(artifact.path / "record.json", record.model_dump(mode="json"))
    return open_artifact(artifact.path)


# --- the arithmetic ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stop", "left"),
    [("ab\n```\nx", ["\n```"], "ab"), ("a.b,c", [",", "."], "a"), ("abc", ["x"], "abc"), (".", ["."], ""), ("ab", [], "ab")],
)
def test_an_answer_ends_before_the_first_text_that_ends_it(text, stop, left):
    assert cut(text, stop) == left


def test_exact_and_flexible_forms_are_both_kept_of_every_item():
    (item,) = made("mmlu")
    metrics = metrics_of(load_form("mmlu"))
    row = score_item("p", item | {"id": "i"}, metrics, [score_answer(item, metrics, "I would say the answer is A")])
    assert row["scores"] == {"exact_match_flex": 1, "exact_match": 0} and row["score"] == 1 and row["answer"] == "A"


def test_strict_loose_and_share_of_instructions_are_all_kept():
    rows = [{"prompt": "p", "instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}]
    (item,) = made("ifeval", rows)
    metrics = metrics_of(load_form("ifeval"))
    row = score_item("p", item | {"id": "i"}, metrics, [score_answer(item, metrics, '*"No commas"*')])
    assert row["scores"] == {"prompt_level_loose": 1, "prompt_level_strict": 0, "inst_level_loose": 1, "inst_level_strict": 0.5}
    assert item["weights"] == {"inst_level_loose": 2, "inst_level_strict": 2}


def answers(right: int, wrong: int, unknown: int = 0) -> list[Any]:
    scores = [1.0] * right + [0.0] * wrong + [None] * unknown
    return [{"text": str(n), "answer": None, "scores": {"pass_at_10": one, "pass_at_1": one}, "reason": ""} for n, one in enumerate(scores)]


def test_an_item_of_twenty_programs_is_scored_by_the_unbiased_estimate():
    (item,) = made("humaneval")
    metrics = metrics_of(load_form("humaneval"))
    row = score_item("p", item | {"id": "i"}, metrics, answers(2, 18))
    assert row["scores"] == {"pass_at_10": pytest.approx(1 - 90 / 380), "pass_at_1": pytest.approx(0.1)}
    assert len(row.get("answers", [])) == 20
    unsure = score_item("p", item | {"id": "i"}, metrics, answers(2, 13, unknown=5))
    assert unsure["scores"]["pass_at_10"] == pytest.approx(pass_at_k(15, 2, 10))  # of those that are known
    assert score_item("p", item | {"id": "i"}, metrics, answers(2, 3, unknown=15))["score"] is None  # 5 known answers are no 10


def scored(policy: str, name: str, score: float | None) -> Any:
    row = {"id": name, "task": "t", "policy": policy, "text": "", "answer": None, "score": score, "reason": "r"}
    return row | {"scores": {"score": score}}


def task(form: Form | None = None, **items: dict[str, Any]) -> Task:
    return Task("s", "h" * 64, form, items, metrics_of(form))


def test_averages_over_items_and_over_categories_and_their_differences():
    macro = load_form("mmlu").model_copy(update={"metrics": dict(suite_scores.PLAIN)})
    items = {name: {"category": category} for name, category in {"a": "x", "b": "x", "c": "x", "d": "y"}.items()}
    rows = [scored("p", name, value) for name, value in zip("abcd", (1.0, 1.0, 1.0, 0.0), strict=True)]
    rows += [scored("q", name, value) for name, value in zip("abcd", (1.0, 1.0, 1.0, 1.0), strict=True)]
    means = {}
    for label, form in {"micro": macro.model_copy(update={"average": "micro"}), "macro": macro}.items():
        table = tabulate(rows, ["p", "q"], {"t": task(form, **items)}, [("p", "q")], DRAWS)
        means[label] = table["policies"]["p"]["tasks"]["t"]["mean"], table["differences"][0]["mean"]
        assert table["tasks"]["t"]["average"] == label and table["tasks"]["t"]["hash"] == "h" * 64
        assert table["policies"]["p"]["categories"]["t"] == {"x": 1.0, "y": 0.0}
    assert means == {"micro": (0.75, 0.25), "macro": (0.5, 0.5)}


def test_unknown_scores_are_left_out_and_counted_and_pairs_need_both():
    scores = {"p": (1.0, None, 0.0), "q": (1.0, 1.0, None)}
    rows = [scored(policy, name, score) for policy, own in scores.items() for name, score in zip("abc", own, strict=True)]
    table = tabulate(rows, ["p", "q"], {"t": task(a={}, b={}, c={})}, [("p", "q")], DRAWS)
    assert table["policies"]["p"]["metrics"]["t"]["score"]["unknown"] == 1
    assert table["policies"]["p"]["tasks"]["t"]["n"] == 2 and table["policies"]["p"]["tasks"]["t"]["mean"] == 0.5
    assert table["differences"][0]["n"] == 1 and table["differences"][0]["mean"] == 0
    without = [row for row in rows if row["id"] != "a"]  # no item is known of both
    assert tabulate(without, ["p", "q"], {"t": task(a={}, b={}, c={})}, [("p", "q")], DRAWS)["differences"] == []


def test_too_many_unknown_scores_are_a_failure_that_names_the_reason():
    config = Evaluate.model_validate({"max_unknown": 0.25})
    rows = [scored("p", str(number), None if number < 1 else 1.0) for number in range(4)]
    refuse_unknown(config, rows)
    with pytest.raises(StageError, match=r"2 of 4 answers of p on t are unknown, more than max_unknown 0\.25: e\.g\. r"):
        refuse_unknown(config, [*rows[:3], scored("p", "3", None)])


def test_unknown_answers_are_counted_among_all_samples_and_not_hidden_in_an_items_score():
    (item,) = made("humaneval")
    metrics = metrics_of(load_form("humaneval"))
    rows = [score_item("p", item | {"id": name}, metrics, answers(1, 18, unknown=1)) for name in "ab"]
    assert all(row["score"] is not None for row in rows)
    refuse_unknown(Evaluate.model_validate({"max_unknown": 0.05}), rows)
    with pytest.raises(StageError, match=r"2 of 40 answers of p on humaneval are unknown, more than max_unknown 0: e\.g\. "):
        refuse_unknown(Evaluate.model_validate({"max_unknown": 0.0}), rows)
    metrics = tabulate(rows, ["p"], {"humaneval": task(load_form("humaneval"), a={}, b={})}, [], DRAWS)["policies"]["p"]["metrics"]
    assert {name: (one["unknown"], one["unknown_answers"]) for name, one in metrics["humaneval"].items()} == {
        "pass_at_10": (0, 2), "pass_at_1": (0, 2),
    }  # fmt: skip


def test_a_metric_that_no_item_has_is_a_failure_however_many_unknown_scores_are_allowed():
    (item,) = made("humaneval")
    rows = [score_item("p", item | {"id": "a"}, metrics_of(load_form("humaneval")), answers(1, 8, unknown=11))]
    with pytest.raises(StageError, match="11 of 20 answers of p on humaneval are unknown, so that no item has pass_at_10: "):
        refuse_unknown(Evaluate.model_validate({"max_unknown": 0.9}), rows)


def test_the_reason_of_an_answer_is_that_of_the_metric_whose_score_is_unknown(monkeypatch):
    (item,) = made("mmlu")
    monkeypatch.setattr("pedigree.stages.verifiers.timed_patterns.SEARCH_SECONDS", 0.05)
    slow = {"name": "extracted", "answer": "B", "patterns": [r"((?:a|aa)+)$"]}
    found = score_answer(item | {"others": {"exact_match": slow}}, metrics_of(load_form("mmlu")), "a" * 60 + "! (A)")
    assert found["scores"] == {"exact_match_flex": 1.0, "exact_match": None} and found["answer"] == "A"
    assert found["reason"].startswith("unknown: the pattern")
    first = score_answer(item | {"verifier": slow}, metrics_of(load_form("mmlu")), "a" * 60 + "!")
    assert first["scores"] == {"exact_match_flex": None, "exact_match": 0.0} and first["reason"].startswith("unknown: the pattern")


def test_the_text_of_compared_choices_is_the_one_that_was_taken():
    item = {"verifier": {"name": "choice", "answer": 1, "normalise": "tokens"}, "choices": ["no", "not at all"]}
    found = score_choices(item, suite_scores.PLAIN, [[-2.0], [-1.0, -1.0, -1.0]])
    assert (found["text"], found["answer"], found["scores"]) == ("not at all", "not at all", {"score": 1.0})


class Letters:
    """A chat whose tokens are letters."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def drawn(text: str, ended: str = "stop") -> Generation:
    return Generation([ord(letter) for letter in text], [], ended)  # type: ignore[arg-type]


def suite(form: str | None, *items: dict[str, Any]) -> Suite:
    return Suite("s", list(items), load_form(form) if form else None, Sampling(max_tokens=3), "h" * 64)


def test_an_answer_that_ended_at_its_stop_was_not_cut_off():
    chat: Any = Letters()
    cases = {"a\n```": False, "a\n": True}
    assert {text: is_cut_off(drawn(text, "length"), suite("humaneval"), chat) for text in cases} == cases
    assert is_cut_off(drawn("a", "length"), suite(None), chat) and not is_cut_off(drawn("a"), suite(None), chat)


def test_many_slow_programs_of_one_item_run_side_by_side_and_each_second_there_is_a_sign_of_work(monkeypatch):
    """A watcher ends jobs that are silent for minutes, as long as a few programs may sleep one after the other."""
    side_by_side, beats, seen = threading.Barrier(10), [], threading.Event()

    def slow(item: Any, metrics: Any, text: str) -> Any:
        side_by_side.wait(deadline(20))
        assert seen.wait(deadline(20))
        return {"text": text, "answer": None, "scores": dict.fromkeys(metrics, 1.0), "reason": "right"}

    monkeypatch.setattr(evaluate, "score_answer", slow)
    monkeypatch.setattr(verifiers, "BEAT_SECONDS", 0.05)
    (item,) = made("humaneval")
    given = suite("humaneval", item | {"id": "i"})
    texts = [chr(ord("a") + number) for number in range(given.samples)]
    chat: Any = Letters()
    with evaluate.Scoring(10) as scoring:
        scoring.begin("p", given, [drawn(text) for text in texts], chat)
        (row,) = scoring.rows("p", given, lambda: (beats.append("beat"), len(beats) < 4 or seen.set()))
    assert [answer["text"] for answer in row.get("answers", [])] == texts


def test_what_ends_a_verification_ends_all_that_wait(monkeypatch):
    asked: list[str] = []
    ended = threading.Event()

    def without(item: Any, metrics: Any, text: str) -> Any:
        asked.append(text)
        if text == "b":
            ended.wait(deadline(20))
        raise PedigreeError("none")

    monkeypatch.setattr(evaluate, "score_answer", without)
    chat: Any = Letters()
    (item,) = made("humaneval")
    items = [item | {"id": str(number)} for number in range(50)]
    answers = [drawn("a"), *(drawn("b") for _ in range(50 * 20 - 1))]
    given = suite("humaneval", *items)
    with pytest.raises(PedigreeError, match="none"), evaluate.Scoring(2) as scoring:
        scoring.begin("p", given, answers, chat)
        list(scoring.rows("p", given, lambda: None))
    ended.set()
    for thread in threading.enumerate():
        if thread.name.startswith("programs"):
            thread.join()
    assert len(asked) <= 1 + sandbox.AT_ONCE  # the first, and what the threads had begun


def test_the_hash_of_a_task_is_that_of_form_rows_verifiers_and_settings(monkeypatch):
    form = load_form("gsm8k")
    first = task_hash(form, "r" * 64, ["gsm8k"], sampling={"max_tokens": 5})
    assert first == task_hash(form.model_copy(update={"description": "other words"}), "r" * 64, ["gsm8k"], sampling={"max_tokens": 5})
    others = [
        task_hash(form.model_copy(update={"average": "macro"}), "r" * 64, ["gsm8k"], sampling={"max_tokens": 5}),
        task_hash(form, "s" * 64, ["gsm8k"], sampling={"max_tokens": 5}),
        task_hash(form, "r" * 64, ["gsm8k", "math"], sampling={"max_tokens": 5}),
        task_hash(form, "r" * 64, ["gsm8k"], sampling={"max_tokens": 6}),
        task_hash(None, "r" * 64, ["gsm8k"], sampling={"max_tokens": 5}),
    ]
    monkeypatch.setattr(suite_scores, "version", lambda name: 99)
    others.append(task_hash(form, "r" * 64, ["gsm8k"], sampling={"max_tokens": 5}))
    assert len({first, *others}) == 7


def test_a_task_of_several_suites_has_another_hash_if_one_of_them_has_other_items():
    def hash_of(*hashes: str) -> str:
        suites = [
            dataclasses.replace(suite(None, {"id": f"i{number}", "task": "t", "verifier": {"name": "gsm"}}), label=f"s{number}", hash=one)
            for number, one in enumerate(hashes)
        ]
        return tasks_of(suites)["t"].hash

    assert hash_of("a" * 64) == "a" * 64
    found = {hash_of("a" * 64), hash_of("a" * 64, "b" * 64), hash_of("a" * 64, "c" * 64), hash_of("a" * 64, "b" * 64, "c" * 64)}
    assert len(found) == 4
    assert hash_of("a" * 64, "b" * 64) == hash_of("b" * 64, "a" * 64)  # the order of the suites changes no score


def test_means_over_tasks_are_equal_in_whatever_order_they_are_added():
    means = {"one": (3, 2, 1), "other": (1, 2, 3)}  # of ten items of three tasks
    names = ("x", "y", "z")
    items = {f"{name}{number}": {"id": f"{name}{number}"} for name in names for number in range(10)}
    rows = [
        scored(policy, f"{name}{number}", float(number < right)) | {"task": name}
        for policy, own in means.items()
        for name, right in zip(names, own, strict=True)
        for number in range(10)
    ]
    table = tabulate(rows, [*means], {name: task(**items) for name in names}, [], Draws(100, 0))["policies"]
    assert table["one"]["mean"] == table["other"]["mean"] == pytest.approx(0.2)


def test_the_first_of_several_answers_has_the_seed_of_a_single_one():
    config = Evaluate.model_validate({"seed": 3})
    item = {"task": "t", "id": "i"}
    assert seed_of(*seed_parts(config, item, 0)) == seed_of(3, "t", "i")
    assert len({seed_of(*seed_parts(config, item, index)) for index in range(20)}) == 20


def test_the_forms_sampling_counts_and_may_be_made_shorter():
    config = Evaluate.model_validate({"max_tokens": 7})
    assert sampling_of(config, "s", load_form("humaneval")).model_dump() == {"temperature": 0.8, "top_p": 0.95, "max_tokens": 7}  # type: ignore
    assert sampling_of(Evaluate(), "s", load_form("popqa")).max_tokens == 15  # type: ignore
    assert sampling_of(config, "s", load_form("truthfulqa")) is None
    with pytest.raises(StageError, match="suite s has no form"):
        sampling_of(config, "s", None)


@pytest.mark.parametrize(
    ("config", "forms", "problem"),
    [
        ({}, [None], "suite s0 has no form, so the sampling parameters are undefined: set sampling"),
        ({"sampling": {"max_tokens": 3}}, ["gsm8k"], "remove sampling"),
        (
            {"sampling": {"max_tokens": 3}, "max_tokens": 2},
            [None],
            "only to suites with a form, and there are none: set sampling.max_tokens",
        ),
        ({"sampling": {"max_tokens": 3}}, ["gsm8k", None], None),
        ({"max_tokens": 3}, ["gsm8k"], None),
    ],
)
def test_settings_without_an_effect_are_refused_before_anything_runs(config, forms, problem):
    file = {"type": "files", "path": "x.jsonl"}
    suites = {
        f"s{number}": PortInput(
            "item", PrepareData.model_validate({"record": "item", "task": f"t{number}", "sources": [file], "form": form})
        )
        for number, form in enumerate(forms)
    }
    found = evaluate_problem(Evaluate.model_validate(config), {"suites": suites})
    assert found is None if problem is None else found is not None and problem in found


# --- with the engine ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    from models import publish

    folder = tmp_path_factory.mktemp("policy")
    make(folder / "a" / "payload", context=4096)
    return publish(folder / "a", "source_model", "policy")


@pytest.fixture(scope="module")
def evaluated(policy, tmp_path_factory):
    """Seven kinds of suites by one engine."""
    folder = tmp_path_factory.mktemp("suites")
    many = [{**ROWS["truthfulqa"][0], "question": f"Are {what} birds?"} for what in ("cats", "owls", "bees")]
    letters = [{**ROWS["mmlu_mc"][0], "subject": subject, "answer": number % 4} for number in range(5) for subject in ("colour_theory",)]
    letters = [{**row, "question": f"Which colour is number {number}?"} for number, row in enumerate(letters)]
    shots = [("shot", row) for row in SHOTS["mmlu_mc"]]
    draw = {"temperature": 1.0, "max_tokens": 6, "samples": 12, "stop": ["\n"]}
    suites = {
        "truthfulqa": suite_of(folder / "t", "truthfulqa", made("truthfulqa", many)),
        "mmlu_mc": suite_of(folder / "m", "mmlu_mc", made("mmlu_mc", letters, shots=shots)),
        "drop": suite_of(folder / "d", "drop", made("drop")),
        "gsm8k": suite_of(folder / "g", "gsm8k", made("gsm8k")),
        "minerva_math": suite_of(folder / "a", "minerva_math", made("minerva_math")),
        "humaneval": suite_of(folder / "h", "humaneval", made("humaneval"), draw=draw),
    }
    plain = {"id": "p1", "source": "s", "task": "plain", "messages": [{"role": "user", "content": "Hi"}]}
    plain["verifier"] = {"name": "gsm8k", "answer": "3"}
    suites["plain"] = dataset(folder / "p", "item", [plain])
    config = {"sampling": {"temperature": 0.0, "max_tokens": 4}, "max_tokens": 6, "chunk_size": 8, "resamples": 100, "dtype": "fp32"}
    done = run(folder / "job", "evaluate", config, {"policies": {"one": policy, "two": policy}, "suites": suites}, ONE_THREAD)
    assert done["ok"], done
    payload = folder / "job" / "out" / "payload"
    return done["metrics"], list(records.stream(payload)), json.loads((payload / "scores.json").read_text()), suites


@locked
@pytest.mark.slow
def test_suites_of_all_kinds_are_asked_by_one_engine(evaluated):
    metrics, rows, table, _ = evaluated
    assert {task: entry["samples"] for task, entry in table["tasks"].items()} == {
        "truthfulqa": 1, "mmlu_mc": 1, "drop": 1, "gsm8k": 1, "minerva_math": 1, "humaneval": 12, "plain": 1,
    }  # fmt: skip
    assert (
        metrics["hashes"] == {task: entry["hash"] for task, entry in table["tasks"].items()} and len(set(metrics["hashes"].values())) == 7
    )
    assert metrics["rows"] == len(rows) == 2 * (3 + 5 + 1 + 1 + 1 + 1 + 1)
    assert metrics["unknown"] == 0
    assert all(row["score"] == row["scores"][table["tasks"][row["task"]]["metric"]] for row in rows)
    first, second = ([{**row, "policy": ""} for row in rows if row["policy"] == label] for label in ("one", "two"))
    assert first == second  # equal weights


@locked
@pytest.mark.slow
def test_choices_are_compared_by_the_likelihood_that_transformers_finds_too(evaluated, policy):
    import torch
    from transformers import AutoModelForCausalLM

    from pedigree.data.chat.chat import Chat

    _, rows, table, suites = evaluated
    chat, model = Chat(policy.payload), AutoModelForCausalLM.from_pretrained(policy.payload, dtype=torch.float32)
    items = {item["id"]: item for item in list(records.stream(suites["truthfulqa"].payload))}
    for row in rows:
        if row["task"] != "truthfulqa":
            continue
        item, sums = items[row["id"]], []
        for choice in item["choices"]:
            prompt, said = chat.prompt(item["messages"]), chat.response_ids(choice)
            with torch.no_grad():
                logps = model(torch.tensor([[*prompt, *said]])).logits[0, :-1].log_softmax(-1)[len(prompt) - 1 :]
            sums.append(logps.gather(-1, torch.tensor(said)[:, None]).sum().item())
        assert row["logprobs"] == pytest.approx(sums, abs=1e-2)
        masses = torch.tensor(sums).softmax(0)
        assert row["score"] == pytest.approx((masses[0] + masses[1]).item(), abs=1e-3)
    mean = sum(row["score"] for row in rows if (row["task"], row["policy"]) == ("truthfulqa", "one")) / 3
    assert table["policies"]["one"]["tasks"]["truthfulqa"]["mean"] == pytest.approx(mean)


@locked
@pytest.mark.slow
def test_all_samples_of_an_item_are_kept_cut_at_their_stops_and_different(evaluated):
    _, rows, _, _ = evaluated
    (row,) = [row for row in rows if (row["task"], row["policy"]) == ("humaneval", "one")]
    assert len(row["answers"]) == 12 and len({answer["text"] for answer in row["answers"]}) > 3
    assert all("\n" not in answer["text"] for answer in row["answers"])
    assert set(row["scores"]) == {"pass_at_10", "pass_at_1"} and row["score"] == 0


@pytest.mark.slow
def test_without_a_sandbox_an_evaluation_of_programs_is_refused_before_its_engine_starts(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "program", lambda: None)
    sandbox.require.cache_clear()
    suites = {"humaneval": suite_of(tmp_path / "h", "humaneval", made("humaneval"))}
    done = run(tmp_path / "job", "evaluate", {"dtype": "fp32"}, {"policies": {"one": policy}, "suites": suites}, ONE_THREAD)
    sandbox.require.cache_clear()
    assert not done["ok"] and "apt-get install bubblewrap" in done["message"]
    assert not (tmp_path / "job" / "chunks").exists()
