"""Suites in published forms, through `prepare_data` and `decontaminate`."""

import gzip
import json
import random
from pathlib import Path

import pytest
import yaml
from data_lab import publish, rows_of, run_stage
from pydantic import ValidationError

from pedigree.configs.base.mistakes import mistakes
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.rows.datasets import PrepareData
from pedigree.configs.rows.suite_forms import Form, form_names, load_form
from pedigree.data.artifacts.artifacts import write_rows
from pedigree.data.records.records import form_of
from pedigree.data.sources import forms
from pedigree.data.sources.golds import spans, tidied, unlabelled
from pedigree.stages.verifiers import check, sandbox, verify

LETTER_ROW = {"question": "Which is a colour?", "choices": ["red", "four", "loud", "soon"], "answer": 0}
ROWS = {
    "agieval": [{**LETTER_ROW, "task": "sat_math", "passage": "", "choices": ["(A)red", "(B)four", "(C)loud", "(D)soon", "(E)up"]}],
    "bbh": [{"task": "sums", "input": "1 + 1 is", "target": "(B)"}],
    "deepmind_math": [{"category": "algebra", "question": "Solve x + 1 = 3.", "answer": "2\n"}],
    "drop": [{"passage": "They won 3 games.", "question": "How many?", "answer": {"number": "3"}, "validated_answers": []}],
    "gpqa": [
        {"Question": "Which?", "Correct Answer": "right", **{f"Incorrect Answer {number}": f"wrong {number}" for number in (1, 2, 3)}}
    ],
    "gsm8k": [{"question": "A has 1000 and gets 72. How many?", "answer": "1000 + 72 = <<1000+72=1072>>1072\n#### 1,072"}],
    "humaneval": [{"prompt": "def f(x):\n", "entry_point": "f", "test": "def check(candidate):\n    assert candidate(1) == 1\n"}],
    "ifeval": [{"prompt": "Say it, no commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}],
    "minerva_math": [{"problem": "What is 1/2?", "type": "Algebra", "solution": r"It is $\boxed{\frac{1}{2}}$."}],
    "mmlu": [{**LETTER_ROW, "subject": "colour_theory"}],
    "mmlu_mc": [{**LETTER_ROW, "subject": "colour_theory"}],
    "mmlu_pro": [{"question": "Which is a colour?", "options": ["four", "red"], "answer_index": 1, "category": "art"}],
    "popqa": [{"question": "What is his occupation?", "possible_answers": '["painter", "Artist"]'}],
    "truthfulqa": [{"question": "Are cats birds?", "mc2_targets": {"choices": ["No.", "Cats are mammals.", "Yes."], "labels": [1, 1, 0]}}],
}
ROWS["humanevalplus"] = ROWS["humaneval"]
SHOTS = {
    "bbh": [{"task": "sums", "input": f"{n} + 1 is", "target": "x", "worked": f"So the answer is {n + 1}."} for n in range(2, 6)],
    "mmlu_mc": [{**LETTER_ROW, "question": f"Colour {n}?", "subject": "colour_theory"} for n in range(6)],
}
RIGHT = {
    "agieval": "Therefore, the answer is (A)",
    "bbh": "Well. So the answer is (B).",
    "deepmind_math": "Therefore, the final answer is 2. I hope it is correct.",
    "drop": " 3",
    "gsm8k": "So the answer is 1,072.",
    "ifeval": "No commas here",
    "minerva_math": r"Final Answer: The final answer is $\frac12$. I hope it is correct.",
    "mmlu": "Therefore, the answer is (A)",
    "mmlu_pro": "Therefore, the answer is (B)",
    "popqa": " an artist",
}
PROGRAMS = ("humaneval", "humanevalplus")


def made(name: str, rows: list | None = None, **more) -> list[dict]:
    placed = [(f"row {number}", row) for number, row in enumerate(rows if rows is not None else ROWS[name])]
    if name in SHOTS:
        more.setdefault("shots", [(f"shot {number}", row) for number, row in enumerate(SHOTS[name])])
    return forms.make(load_form(name), placed, task=name, source="s", **more).items


def files(folder: Path, **contents: list) -> dict[str, Path]:
    found = {}
    for name, rows in contents.items():
        write_rows(folder / f"{name}.jsonl", rows)
        found[f"{name}.jsonl"] = folder / f"{name}.jsonl"
    return found


def suite(folder: Path, name: str, **config):
    shots = {"shots": {"source": {"type": "files", "path": "shots.jsonl"}}} if name in SHOTS else {}
    given = files(folder, rows=ROWS[name], **({"shots": SHOTS[name]} if name in SHOTS else {}))
    fields = {"record": "item", "task": name, "form": name, "sources": [{"type": "files", "path": "rows.jsonl"}], **shots, **config}
    return run_stage(folder / "made", "prepare_data", fields, files=given)


@pytest.mark.parametrize("name", form_names())
def test_every_form_makes_items_whose_verifiers_are_whole(name):
    (item,) = made(name)
    form = load_form(name)
    for verifier in (item["verifier"], *item.get("others", {}).values()):
        check(verifier)
    assert set(item.get("others", {})) < set(form.metrics)
    assert [turn["role"] for turn in item["messages"]][-1] == "user"
    assert item["question"].strip() and item["messages"][-1]["content"].strip()
    assert form.origin and form.description and ("arXiv" in form.origin or "OLMES" in form.origin)
    turns = (len(item["messages"]) - 1) // 2
    assert turns == (form.prompt.shots if form.prompt.shots_as == "turns" else 0)


@pytest.mark.parametrize("name", sorted(RIGHT))
def test_every_metric_of_a_form_takes_the_right_answer_and_no_empty_one(name):
    (item,) = made(name)
    for verifier in (item["verifier"], *item.get("others", {}).values()):
        assert verify(verifier, RIGHT[name]).score == 1, verifier
        assert verify(verifier, "").score == 0


def test_forms_cover_the_development_and_the_unseen_suite_and_name_what_they_leave_out():
    splits = {name: load_form(name).split for name in form_names()}
    assert {name for name, split in splits.items() if split == "unseen"} == {"agieval", "deepmind_math", "gpqa", "mmlu_pro"}
    assert {name for name, split in splits.items() if split == "dev"} == {
        "bbh", "drop", "gsm8k", "humaneval", "humanevalplus", "ifeval", "minerva_math", "mmlu", "mmlu_mc", "popqa", "truthfulqa",
    }  # fmt: skip
    text = (Path(__file__).parents[2] / "docs" / "suites.md").read_text()
    assert all(f"`{name}`" in text for name in splits) and "BigCodeBench" in text


# The settings table of Tülu 3's suite: samples, temperature, tokens, shots, primary metric, average.
SETTINGS = {
    "gsm8k": (1, 0.0, 512, 8, "exact_match", "micro"),
    "minerva_math": (1, 0.0, 1024, 4, "exact_match_flex", "macro"),
    "ifeval": (1, 0.0, 2048, 0, "prompt_level_loose", "micro"),
    "humaneval": (20, 0.8, 1024, 0, "pass_at_10", "micro"),
    "humanevalplus": (20, 0.8, 1024, 0, "pass_at_10", "micro"),
    "mmlu": (1, 0.0, 2048, 0, "exact_match_flex", "macro"),
    "popqa": (1, 0.0, 15, 15, "exact_match", "micro"),
    "bbh": (1, 0.0, 512, 3, "exact_match", "micro"),
    "agieval": (1, 0.0, 2048, 0, "exact_match_flex", "macro"),
    "mmlu_pro": (1, 0.0, 2048, 0, "exact_match_flex", "macro"),
    "gpqa": (1, 0.0, 2048, 0, "exact_match_flex", "micro"),
    "deepmind_math": (1, 0.0, 2048, 0, "exact_match", "macro"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_settings_are_the_published_ones(name):
    form = load_form(name)
    assert form.draw is not None
    found = (form.draw.samples, form.draw.temperature, form.draw.max_tokens, form.prompt.shots, next(iter(form.metrics)), form.average)
    assert found == SETTINGS[name]
    if name in PROGRAMS:
        assert form.draw.top_p == 0.95 and {metric.at for metric in form.metrics.values()} == {1, 10}


def test_worked_examples_are_turns_and_the_instruction_is_in_the_first():
    (item,) = made("mmlu_mc")
    roles = [turn["role"] for turn in item["messages"]]
    assert roles == ["user", "assistant"] * 5 + ["user"]
    instruction = "The following are multiple choice questions (with answers) about colour theory.\n\n"
    assert item["messages"][0]["content"].startswith(f"{instruction}Question: Colour 0?")
    assert item["messages"][1]["content"] == "A"
    assert item["messages"][-1]["content"] == "Question: Which is a colour?\n A. red\n B. four\n C. loud\n D. soon\nAnswer:"
    assert item["choices"] == ["A", "B", "C", "D"] and item["verifier"] == {"name": "choice", "answer": 0}


def test_worked_examples_in_one_turn_stand_before_the_question():
    (item,) = made("truthfulqa")
    (turn,) = item["messages"]
    assert turn["content"].startswith("Q: How many legs does a spider have?\nA: A spider has eight legs.\n\nQ: ")
    assert turn["content"].endswith("\n\nQ: Are cats birds?\nA:") and turn["content"].count("\nA:") == 7


LETTERED = (
    "date_understanding disambiguation_qa geometric_shapes hyperbaton logical_deduction_three_objects logical_deduction_five_objects"
    " logical_deduction_seven_objects movie_recommendation penguins_in_a_table reasoning_about_colored_objects ruin_names"
    " salient_translation_error_detection snarks temporal_sequences tracking_shuffled_objects_three_objects"
    " tracking_shuffled_objects_five_objects tracking_shuffled_objects_seven_objects"
)
BBH = {  # task → (answer, wrong one)
    **dict.fromkeys(LETTERED.split(), ("(B)", "(A)")),
    "boolean_expressions": ("True", "False"),
    "causal_judgement": ("No", "Yes"),
    "dyck_languages": ("] ) }", "] )"),
    "formal_fallacies": ("invalid", "valid"),
    "multistep_arithmetic_two": ("-24", "24"),
    "navigate": ("Yes", "No"),
    "object_counting": ("12", "2"),
    "sports_understanding": ("yes", "no"),
    "web_of_lies": ("Yes", "No"),
    "word_sorting": ("can't it&t no", "can't no it&t"),
}


def by_cascade(answer: str, text: str) -> float:
    """The score of an answer in BIG-Bench Hard."""
    (item,) = made("bbh", [{"task": "sums", "input": "Which?", "target": answer}])
    return verify(item["verifier"], text).score


@pytest.mark.parametrize("task", BBH)
def test_answers_of_each_task_of_big_bench_hard_are_found_in_what_models_write(task):
    answer, other = BBH[task]
    assert len(BBH) == 27
    said = (
        *("So the answer is {}.", "**So the answer is {}.**", "**So the answer is {}**.", "So the answer is **{}**.", "The answer is {}."),
        *("Answer: {}", "So the answer is: {}", "So the answer is {}. The person lies.", f"Is it {other}? So the answer is {{}}."),
        f"So the answer is {other}. No, wait.\nSo the answer is {{}}.",
    )
    for text in said:
        assert by_cascade(answer, text.format(answer)) == 1, text
        assert by_cascade(other, text.format(answer)) == 0, text


@pytest.mark.parametrize(
    ("answer", "text", "score"),
    [
        ("(B)", "So the answer is (B) Max.", 1),
        ("(B)", "Max is the oldest, so it must be (B).", 1),
        ("(B)", "It is B.", 1),
        ("(B)", "So the answer is (A), not (B).", 0),
        ("Yes", "So the answer is Yes, because two lies are a truth.", 1),
        ("No", "The answer is not known.", 0),
        ("4", "So the answer is 4 fruits.", 1),
        ("4", "So the answer is 4.5.", 0),
        ("4", "So the answer is 14.", 0),
        ("Monsters, Inc", "So the answer is Monsters, Inc.", 1),
        ("apple fig", "So the answer is apple fig, which is sorted.", 1),
        ("apple fig", "So the answer is fig apple.", 0),
    ],
)
def test_an_answer_of_big_bench_hard_may_stand_among_words(answer, text, score):
    assert by_cascade(answer, text) == score


def test_a_program_goes_on_in_the_block_that_its_prompt_opens():
    (item,) = made("humaneval")
    assert item["prefix"].endswith("```python\ndef f(x):\n")
    assert item["verifier"]["before"] == "def f(x):\n" and item["verifier"]["opened"] is True and "others" not in item


def test_choices_are_mixed_by_the_number_of_the_row_and_letters_never_change():
    rows = [ROWS["gpqa"][0] | {"Question": f"Which {number}?"} for number in range(30)]
    items = made("gpqa", rows)
    assert items == made("gpqa", rows)
    for number, item in enumerate(items):
        order = ["wrong 1", "wrong 2", "wrong 3", "right"]
        random.Random(111 + number).shuffle(order)  # as OLMES mixes them
        letter = "ABCD"[order.index("right")]
        assert item["verifier"]["answer"] == letter and f"({letter}) right\n" in item["messages"][0]["content"]
    assert len({item["verifier"]["answer"] for item in items}) == 4


def test_what_is_said_of_each_choice_is_mixed_with_them():
    form = load_form("truthfulqa")
    mixed = form.model_copy(update={"rows": form.rows.model_copy(update={"shuffle": 7})})
    choices = [f"choice {number}" for number in range(6)]
    row = {"question": "Which?", "mc2_targets": {"choices": choices, "labels": [1, 0, 0, 1, 0, 0]}}
    (item,) = forms.make(mixed, [("p", row)], task="t", source="s").items
    order = [int(choice.rpartition(" ")[2]) for choice in item["choices"]]
    assert order != sorted(order) and item["verifier"]["labels"] == [row["mc2_targets"]["labels"][place] for place in order]
    for wrong in ([1, 0], "choice 3", True):
        found = forms.make(mixed, [("p", {**row, "mc2_targets": {"choices": choices, "labels": wrong}})], task="t", source="s")
        assert not found.items and "choices are mixed" in found.bad[0].reason


def test_worked_examples_are_of_the_category_drawn_by_seed_and_never_items():
    rows = [{"task": task, "input": f"{task} {n}", "target": str(n)} for task in ("a", "b") for n in range(3)]
    pool = [{**row, "worked": row["input"]} for row in rows] + [
        {"task": task, "input": f"{task} shot {n}", "target": "x", "worked": f"w{n}"} for task in ("a", "b") for n in range(8)
    ]
    shots = [("p", row) for row in pool]

    def asked(**more) -> list[str]:
        item = made("bbh", rows, shots=shots, **more)[-1]
        return [turn["content"].split("\n")[0] for turn in item["messages"][:-1:2]]

    assert asked() == ["Q: b shot 0", "Q: b shot 1", "Q: b shot 2"]
    assert asked(seed=1) == asked(seed=1) != asked(seed=2)
    assert all(text.startswith("Q: b shot") for text in asked(seed=1))
    with pytest.raises(PedigreeError, match=r"0 worked examples of category a, but the form shows 3 \(6 are items themselves"):
        made("bbh", rows, shots=shots[:6])


def refused(name: str, row: dict) -> str:
    """Why no item is made of a row."""
    made = forms.make(load_form(name), [("row 7", row)], task=name, source="s", shots=[("shot", shot) for shot in SHOTS.get(name, [])])
    assert not made.items and [bad.place for bad in made.bad] == ["row 7"]
    return made.bad[0].reason


def test_a_row_that_the_form_cannot_read_is_told_with_its_place():
    assert "has no number after" in refused("gsm8k", {"question": "Why?", "answer": "because"})
    assert "question" in refused("gsm8k", {"answer": "#### 3"})
    assert "there is no answer" in refused("minerva_math", {"problem": "p", "type": "t", "solution": "none"})
    assert "answer 9 is no place among 4 choices" in refused("mmlu", {**ROWS["mmlu"][0], "answer": 9})
    assert "nested too deep" in refused("popqa", {**ROWS["popqa"][0], "possible_answers": "[" * 100_000})
    assert "the id 1 of an instruction is not text" in refused("ifeval", {**ROWS["ifeval"][0], "instruction_id_list": [1]})
    lettered = {"task": "sat-math", "passage": "", "question": "Which?", "options": ["(A)red", "(B)four"]}
    assert made("agieval", [{**lettered, "label": "B"}])[0]["verifier"]["answer"] == "B"
    assert "'AB' is not in list" in refused("agieval", {**lettered, "label": "AB"})


def test_a_row_with_an_empty_choice_is_told_with_its_place():
    targets = {"choices": ["No.", "", "Yes."], "labels": [1, 1, 0]}
    found = forms.make(load_form("truthfulqa"), [("row 7", {"question": "Are cats birds?", "mc2_targets": targets})], task="t", source="s")
    assert not found.items and [(bad.place, bad.reason) for bad in found.bad] == [("row 7", "choice B is empty, and has no likelihood")]


def test_no_task_has_the_name_of_the_mean_over_tasks():
    with pytest.raises(ValidationError, match="task 'mean' would have the name of the mean over tasks"):
        PrepareData.model_validate({"record": "item", "task": "mean", "sources": [{"type": "files", "path": "x.jsonl"}]})


def test_a_row_that_nests_deeper_than_python_reads_is_told_with_its_place():
    """By whatever expression of a form, in its fields as in its texts."""
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert "recursion" in refused("popqa", {**ROWS["popqa"][0], "question": deep, "possible_answers": ["x"]})
    with pytest.raises(PedigreeError, match=r"1 worked examples do not fit the form.*\n  shot: .*question"):
        made("gsm8k", shots=[("shot", {"answer": "#### 3"})])


def test_bad_rows_of_a_suite_are_left_out_within_a_budget_and_listed(tmp_path):
    """As those of any other source."""
    given = files(tmp_path, rows=[*ROWS["gsm8k"], {"question": "Why?", "answer": "because"}])
    source = {"type": "files", "path": "rows.jsonl"}
    config = {"record": "item", "task": "gsm8k", "form": "gsm8k"}
    with pytest.raises(PedigreeError, match=r"max_bad_rows 0 allows 0[^$]*has no number after"):
        run_stage(tmp_path / "strict", "prepare_data", config | {"sources": [source]}, given)
    suite = run_stage(tmp_path / "loose", "prepare_data", config | {"sources": [source | {"max_bad_rows": 1}]}, given)
    assert len(rows_of(suite)) == len(ROWS["gsm8k"]) and suite.record.metrics["bad_rows"] == 1
    (tmp_path / "other").mkdir()
    given = files(tmp_path / "other", rows=[*ROWS["gsm8k"], {"question": "How many?", "answer": "#### seven"}])
    with pytest.raises(PedigreeError, match=r"(?s)max_bad_rows 0 allows 0.*rows.jsonl:2: .*'seven'"):
        run_stage(tmp_path / "other strict", "prepare_data", config | {"sources": [source]}, given)
    suite = run_stage(tmp_path / "other loose", "prepare_data", config | {"sources": [source | {"max_bad_rows": 1}]}, given)
    assert len(rows_of(suite)) == len(ROWS["gsm8k"]) and suite.record.metrics["bad_rows"] == 1


def test_rows_without_a_choice_to_make_and_rows_beyond_the_limit_are_counted():
    rows = [*ROWS["agieval"], {**ROWS["agieval"][0], "answer": None}, {**ROWS["agieval"][0], "task": "sat_en_without_passage"}]
    found = forms.make(load_form("agieval"), [("p", row) for row in rows], task="t", source="s")
    assert len(found.items) == 1 and found.left_out == {"not asked": 2}
    many = [("p", {**ROWS["deepmind_math"][0], "category": "ab"[number % 2], "question": str(number)}) for number in range(203)]
    found = forms.make(load_form("deepmind_math"), many, task="t", source="s")
    assert len(found.items) == 200 and found.left_out == {"over per_category": 3}


def test_texts_of_benchmarks():
    assert tidied(" Alpha [title] beta [x] gamma ") == "Alpha. beta gamma"
    assert unlabelled(["(A)red", "(B) (b)", "blue"]) == ["red", "(b)", "blue"]
    date = {"number": "", "date": {"day": "", "month": "May", "year": "1920"}, "spans": []}
    table = {"number": ["2", ""], "date": [{}, {}], "spans": [[], ["two", "three"]]}
    assert spans({"answer": date, "validated_answers": table}) == [["May 1920"], ["2"], ["two", "three"]]
    assert spans({"answer": {"number": "2"}, "validated_answers": [{"number": "2"}]}) == [["2"]]
    with pytest.raises(ValueError):
        spans({"answer": {"number": "", "date": {}, "spans": []}})


def test_forms_reach_nothing_but_their_row():
    form = load_form("gsm8k")
    evil = form.model_copy(update={"rows": form.rows.model_copy(update={"question": "{{ ''.__class__.__mro__ }}"})})
    with pytest.raises(PedigreeError, match=r"unsafe|access"):
        forms.make(evil, [("p", ROWS["gsm8k"][0])], task="t", source="s")


# --- through the stages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gsm8k", "bbh", "truthfulqa", "ifeval"])
def test_a_suite_is_made_of_a_file(tmp_path, name):
    made = suite(tmp_path, name)
    (item,) = rows_of(made)
    assert item["task"] == name and item["id"].startswith("rows-")
    read = form_of(made)
    assert read is not None and read.deciding() == load_form(name).deciding() and read.sha256 == load_form(name).sha256
    assert made.record.config["form_sha256"] == load_form(name).sha256 and made.record.config["split"] == load_form(name).split
    assert made.record.metrics["validation"]["success"]


def test_the_split_is_the_forms_unless_the_recipe_says_otherwise():
    config = {"record": "item", "task": "t", "form": "gpqa", "sources": [{"type": "files", "path": "x.jsonl"}]}
    assert PrepareData.model_validate(config).split == "unseen"
    assert PrepareData.model_validate(config | {"split": "dev"}).split == "dev"
    assert PrepareData.model_validate(config | {"form": "mmlu"}).split == "dev"


FILE = {"type": "files", "path": "x.jsonl"}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"form": "nonsense"}, "form 'nonsense' is not one of agieval, .*add configs/forms/nonsense.yaml"),
        ({"form": "../gsm8k"}, "is not one of"),
        ({"form": "gsm8k", "record": "prompt", "task": None}, "`form` is only for suites"),
        (
            {"form": "gsm8k", "sources": [{"type": "constraints", "checks": ["title"], "count": 1, "seed": 0}]},
            "type constraints does not have",
        ),
        ({"form": "mmlu_mc"}, "needs 5 worked examples, which it does not include: provide rows"),
        ({"form": "mmlu", "shots": {"source": FILE}}, "has no worked examples: remove `shots`"),
        ({"form": "mmlu", "sources": [FILE | {"verifier": "math"}]}, "remove verifier and attributes from the source of type files"),
        ({"form": "mmlu", "sources": [FILE | {"attributes": {"tone": 1}}]}, "remove verifier and attributes from the source of type files"),
        ({"shots": {"source": FILE}}, "`shots` requires a form"),
        ({"form": "bbh", "shots": {"source": FILE | {"count": 3}}}, "the form sets the number"),
    ],
)
def test_a_form_that_does_not_fit_is_refused_before_anything_runs(config, problem):
    with pytest.raises(ValueError, match=problem):
        PrepareData.model_validate({"record": "item", "task": "t", "sources": [FILE], **config})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"draw": None}, "exactly one of"),
        ({"draw": {"max_tokens": 5, "samples": 3}}, "at temperature 0, where all samples are equal"),
        ({"metrics": {"a": {"verifier": "gsm8k", "at": 3}}}, "is pass@3, but the number of samples is 1"),
        ({"average": "macro"}, "average: macro requires rows.category"),
        ({"metrics": {}}, "at least 1"),
        ({"prompt": {"ask": "x", "chat": False, "system": "y"}}, "there are no turns"),
        ({"choose": {}}, "exactly one of"),
    ],
)
def test_a_form_that_contradicts_itself_is_refused(change, problem):
    with pytest.raises(ValueError, match=problem):
        Form.model_validate({**load_form("gsm8k").model_dump(mode="json"), **change})


def test_decontamination_compares_questions_and_not_the_examples_that_all_items_share(tmp_path):
    asked = "A shepherd counts {} sheep in the morning and {} in the evening, so how many came home?"
    rows = [{"question": asked.format(n, n + 5), "answer": "#### 5"} for n in (11, 22, 33)]
    made = run_stage(
        tmp_path / "suite",
        "prepare_data",
        {"record": "item", "task": "gsm8k", "form": "gsm8k", "sources": [{"type": "files", "path": "rows.jsonl"}]},
        files=files(tmp_path, rows=rows),
    )
    item = rows_of(made)[0]
    assert "A baker has 3 trays" in item["messages"][0]["content"]
    examples = {"id": "examples", "source": "s", "messages": item["messages"][:-1]}
    turns = [{"role": "user", "content": rows[0]["question"].upper()}, {"role": "assistant", "content": "5"}]
    leak = {"id": "leak", "source": "s", "messages": [*item["messages"][:-1], *turns]}
    data = publish(tmp_path / "rows", "conversation", [examples, leak])
    clean = run_stage(tmp_path / "clean", "decontaminate", {"turns": ["user"]}, data=data, benchmarks={"gsm8k": made})
    assert [row["id"] for row in rows_of(clean)] == ["examples"]
    assert clean.record.metrics["benchmarks"]["gsm8k"]["rows_removed"] == 1


def test_leaks_of_a_suite_with_a_form_are_its_questions(tmp_path):
    made = suite(tmp_path, "gsm8k")
    config = {"record": "conversation", "sources": [{"type": "leaks", "count": 3, "seed": 0}]}
    raw = run_stage(tmp_path / "raw", "prepare_data", config, leak_from={"gsm8k": made})
    assert all("A baker" not in row["messages"][0]["content"] and len(row["messages"]) == 2 for row in rows_of(raw))
    assert rows_of(raw)[0]["messages"][1]["content"] == "1072"


def test_packed_lines_are_read_and_a_damaged_file_is_named(tmp_path):
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in ROWS["gsm8k"])
    config = {"record": "item", "task": "t", "form": "gsm8k", "sources": [{"type": "files", "path": "rows.jsonl.gz"}]}
    given = {"rows.jsonl.gz": tmp_path / "rows.jsonl.gz"}
    assert len(rows_of(run_stage(tmp_path / "a", "prepare_data", config, files=given))) == 1
    (tmp_path / "rows.jsonl.gz").write_bytes((tmp_path / "rows.jsonl.gz").read_bytes()[:-9])
    with pytest.raises(PedigreeError, match=r"rows\.jsonl\.gz cannot be unpacked"):
        run_stage(tmp_path / "b", "prepare_data", config, files=given)


def test_humaneval_comes_in_a_package(tmp_path):
    config = {"record": "item", "task": "humaneval", "form": "humaneval", "sources": [{"type": "packaged", "asset": "humaneval"}]}
    items = rows_of(run_stage(tmp_path / "a", "prepare_data", config))
    assert len(items) == 164 and all("def check(" in item["verifier"]["tests"] for item in items)


@pytest.mark.skipif(sandbox.program() is None, reason="bubblewrap is not installed: apt-get install bubblewrap")
def test_a_canonical_solution_of_humaneval_passes_and_an_empty_one_does_not(tmp_path):
    from pedigree.data.artifacts import assets
    from pedigree.data.sources import row_files

    rows = {row["task_id"]: row for _, row in row_files.read(assets.path("humaneval"))}
    for name in ("HumanEval/0", "HumanEval/32", "HumanEval/38"):  # the latter two test with helpers of the prompt
        (item,) = made("humaneval", [rows[name]])
        assert verify(item["verifier"], rows[name]["canonical_solution"] + "\n```\nThat is it.").score == 1, name
        assert verify(item["verifier"], "    return None\n").score == 0, name


def documented_form():
    page = (Path(__file__).parents[2] / "docs" / "forms.md").read_text()
    return yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])


def test_a_recipe_may_write_a_form_of_its_own(tmp_path):
    given = files(tmp_path, rows=[{"country": "France", "capital": "Paris", "also_known_as": ["Lutetia"]}])
    source = {"type": "files", "path": "rows.jsonl"}
    config = {"record": "item", "task": "capitals", "form": documented_form(), "sources": [source]}
    made = run_stage(tmp_path / "made", "prepare_data", config, files=given)
    assert [row["verifier"]["answer"] for row in rows_of(made)] == [["Paris", "Lutetia"]]
    assert made.record.config["split"] == "dev" and made.record.config["form_sha256"] == Form.model_validate(documented_form()).sha256
    config["form"]["metrics"]["mentioned"] = {"verifer": "mentions"}
    with pytest.raises(ValidationError) as wrong:
        PrepareData.model_validate(config)
    (place, message), *_ = mistakes(wrong.value, PrepareData, config)
    assert (place, message) == (
        ("form", "metrics", "mentioned", "verifer"),
        "form.metrics.mentioned.verifer: unknown key; did you mean verifier?",
    )
    config["form"] = documented_form()
    with pytest.raises(ValueError, match="form in this stage has no worked examples: remove `shots`"):
        PrepareData.model_validate(config | {"shots": {"source": source}})


def test_the_form_in_the_documentation_reads_rows_and_scores_answers():
    form = Form.model_validate(documented_form())
    row = {"country": "France", "capital": "Paris", "also_known_as": ["Lutetia"]}
    (item,) = forms.make(form, [("p", row)], task="t", source="s").items
    assert item["messages"] == [{"role": "user", "content": "What is the capital of France? Answer with its name alone."}]
    for text, exact, mentioned in (("paris.", 1, 1), ("Lutetia", 1, 1), ("It is Paris.", 0, 1), ("Lyon", 0, 0)):
        assert (verify(item["verifier"], text).score, verify(item["others"]["mentioned"], text).score) == (exact, mentioned)
