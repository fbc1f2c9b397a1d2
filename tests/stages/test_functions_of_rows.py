"""A reward function of the project as a scorer of `judge`, `select_rows` and `evaluate`: the same file, the same three values."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from data_lab import publish, rows_of, run_stage
from models import a_job
from pydantic import ValidationError

from pedigree.configs.base.frozen import PortInput
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.base.shrink import MAX_UNKNOWN, Cut, StandIns
from pedigree.configs.judging.measuring import Evaluate, evaluate_problem
from pedigree.configs.judging.scoring import Judge
from pedigree.configs.language.execution import Numerics
from pedigree.configs.language.kinds import KINDS
from pedigree.configs.rows.datasets import PrepareData
from pedigree.stages.evaluate import run as evaluate
from pedigree.stages.evaluate.suite_scores import Draws, tabulate
from pedigree.stages.job.failures import StageError
from pedigree.stages.sampling import functions
from pedigree.stages.sampling.functions import opened
from pedigree.stages.sampling.sampler import Generation
from pedigree.stages.verifiers import sandbox

pytestmark = pytest.mark.skipif(sandbox.program() is None, reason="bubblewrap is not installed: apt-get install bubblewrap")
LONGEST = """
def reward(completions, **columns):
    '''1 for the longest answers to the prompt, else 0; none for an empty one, and an error for "bad".'''
    texts = [one[0]["content"] for one in completions]
    most = max(map(len, texts))
    return [None if not text else "bad" if text == "bad" else len(text) == most for text in texts]

def right(completions, answer, verifier_score, completion_ids):
    assert verifier_score == [None] * len(answer) and all(completion_ids)
    return [float(one[0]["content"] == right) for one, right in zip(completions, answer)]
"""
PROGRAM = {"type": "program", "path": "rewards/longest.py"}
RIGHT = PROGRAM | {"function": "right", "weight": -2.0}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "longest.py").write_text(LONGEST)
    return {"rewards/longest.py": tmp_path / "longest.py"}


def completion(prompt: str, policy: str, text: str, verifier: Any = None) -> dict[str, Any]:
    return {
        "id": f"{prompt}/{policy}/0", "prompt_id": prompt, "source": "s", "messages": [{"role": "user", "content": "?"}],
        "verifier": verifier, "policy": policy, "policy_content": "c", "on_policy": False, "index": 0, "seed": 1, "prompt_ids": [1],
        "response_ids": [5, 2], "logprobs": [-1.0, -1.0], "text": text, "finish_reason": "stop",
    }  # fmt: skip


def test_a_judge_scores_by_functions_which_get_the_answers_of_all_policies_to_a_prompt(tmp_path, files, monkeypatch):
    monkeypatch.setattr(functions, "TOGETHER", 2)  # the prompts' parts are no part of the result
    answers = [("p", "a", "12"), ("q", "a", "7"), ("r", "a", "bad"), ("p", "b", "123"), ("q", "b", ""), ("r", "b", "badder")]
    rows = [completion(prompt, policy, text, {"name": "facts", "answer": "12"}) for prompt, policy, text in answers]
    config = {"programs": [PROGRAM, RIGHT], "max_unscored_share": 0.5}
    made = run_stage(tmp_path / "judge", "judge", config, files, completions=publish(tmp_path / "in", "completion", rows))
    found = {
        row["id"]: (row["programs"]["longest"], row["programs"]["right"], row["score"], row["verifier_score"]) for row in rows_of(made)
    }
    assert found == {
        "p/a/0": (0.0, 1.0, 0.0 - 2.0, None), "p/b/0": (1.0, 0.0, 1.0, None),
        "q/a/0": (1.0, 0.0, 1.0, None), "q/b/0": (None, 0.0, 0.0, None),  # left out is no part of the sum
        "r/a/0": (None, 0.0, None, None), "r/b/0": (1.0, 0.0, 1.0, None),  # unknown is no zero
    }  # fmt: skip
    (failure,) = [json.loads(line) for line in (made.evidence / "failures.jsonl").read_text().splitlines()]
    assert failure == {"id": "r/a/0", "judge": "longest", "reason": 'returned "bad", and a reward is a finite number'}
    metrics = made.record.metrics
    assert (metrics["unscored"], metrics["mean_program/longest"], metrics["mean_program/right"]) == (1, 0.75, 1 / 6)


def conversation(name: str, text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    return {"id": name, "source": "s", "messages": messages, **more}


def test_rows_are_kept_by_the_number_of_a_function(tmp_path, files):
    (tmp_path / "longest.py").write_text(
        "def reward(completions, id):\n    return [float(len(one[0]['content'])) for one in completions]\n"
    )
    data = publish(tmp_path / "in", "conversation", [conversation(str(size), "x" * size) for size in (3, 1, 5, 2)])
    config = {"programs": [PROGRAM], "keep": {"type": "above", "min_score": 3}}
    made = run_stage(tmp_path / "select", "select_rows", config, files, data=data)
    assert [row["id"] for row in rows_of(made)] == ["3", "5"]
    lines = [json.loads(line) for line in (made.evidence / "scores.jsonl").read_text().splitlines()]
    assert [(one["score"], one["programs"]) for one in lines] == [(size, {"longest": size}) for size in (3.0, 1.0, 5.0, 2.0)]


def test_a_function_that_needs_what_rows_lack_is_refused_and_too_many_unknown_rows_end_the_stage(tmp_path, files):
    data = publish(tmp_path / "in", "conversation", [conversation("a", "bad"), conversation("b", "x")])
    config = {"programs": [RIGHT], "keep": {"type": "above", "min_score": 0}}
    with pytest.raises(
        PedigreeError, match=r"missing a required argument: 'answer'; its arguments may be prompts, completions, id, source"
    ):
        run_stage(tmp_path / "lacks", "select_rows", config, files, data=data)
    with pytest.raises(StageError, match=r'1 of 2 rows have no score, more than 10% \(longest: returned "bad"'):
        run_stage(tmp_path / "unknown", "select_rows", config | {"programs": [PROGRAM]}, files, data=data)


def test_a_row_that_every_function_leaves_out_has_no_score_and_a_reason(tmp_path, files):
    (tmp_path / "longest.py").write_text("def reward(completions, id):\n    return [None if name == 'b' else 1.0 for name in id]\n")
    data = publish(tmp_path / "in", "conversation", [conversation("a", "x"), conversation("b", "y")])
    config = {"programs": [PROGRAM], "keep": {"type": "above", "min_score": 0}}
    with pytest.raises(StageError, match=r"1 of 2 rows have no score, more than 10% \(every function left it out\)"):
        run_stage(tmp_path / "bound", "select_rows", config, files, data=data)
    made = run_stage(tmp_path / "made", "select_rows", config | {"max_unscored_share": 0.5}, files, data=data)
    (drop,) = [json.loads(line) for line in (made.evidence / "drops.jsonl").read_text().splitlines()]
    assert (drop["id"], drop["reason"], drop["evidence"]) == ("b", "no score", "every function left it out")


def test_a_trusted_file_is_noted_wherever_it_scores(tmp_path, files):
    data = publish(tmp_path / "in", "conversation", [conversation("a", "x")])
    config = {"programs": [PROGRAM | {"trusted": True}], "keep": {"type": "above", "min_score": 0}}
    made = run_stage(tmp_path / "select", "select_rows", config, files, data=data)
    assert made.record.marks == ("rewards/longest.py ran outside the sandbox (trusted: true)",)


class Spelled:
    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def scored(folder: Path, files: dict[str, Path], programs: list[Any], answers: dict[str, list[str]], verifier: Any) -> dict[str, Any]:
    """The table of scores of policies' answers to items of a task, without an engine."""
    items = [
        {"id": str(number), "source": "s", "task": "t", "messages": [{"role": "user", "content": "?"}], "verifier": verifier}
        for number in range(len(next(iter(answers.values()))))
    ]
    job = a_job(folder / "job", Numerics(threads=2))  # it exists: slow functions are reported there
    job.source_files.update(files)
    config = Evaluate.model_validate({"sampling": {"max_tokens": 3}, "programs": programs})
    suites = evaluate.gather(config, {"suites": {"s": publish(folder / "suite", "item", items)}}, job)
    chat: Any = Spelled()
    rows = []
    with opened(config.programs, (item["verifier"] for item in items), job) as given, evaluate.Scoring(2, given) as scoring:
        for label, texts in answers.items():
            scoring.begin(label, suites[0], [Generation([*map(ord, text)], [], "stop") for text in texts], chat)
            rows += scoring.rows(label, suites[0], lambda: None)
    table = tabulate(rows, [*answers], evaluate.tasks_of(suites), evaluate.comparisons([*answers]), Draws(100, 0))
    return {"table": table, "rows": rows}


def test_a_function_is_a_metric_of_a_suite_with_intervals_and_paired_differences(tmp_path, files):
    (tmp_path / "longest.py").write_text(
        "def reward(completions, answer, verifier_score):\n"
        "    texts = [one[0]['content'] for one in completions]\n"
        "    return [len(text) + score if text != '9' else float('nan') for text, score in zip(texts, verifier_score)]\n"
    )
    answers = {"a": ["4", "44", "9"], "b": ["4", "4", "4"]}
    found = scored(tmp_path, files, [PROGRAM | {"name": "size"}], answers, {"name": "exact_match", "answer": "4"})
    table, metrics = found["table"], found["table"]["policies"]["a"]["metrics"]["t"]
    assert table["tasks"]["t"]["metric"] == "score" and table["policies"]["a"]["tasks"]["t"]["mean"] == pytest.approx(1 / 3)
    assert (metrics["size"]["n"], metrics["size"]["unknown"], metrics["size"]["mean"]) == (2, 1, 2.0)  # 1 + 1 and 2 + 0
    assert [(one.get("metric"), one["n"], one["mean"]) for one in table["differences"]] == [
        (None, 3, pytest.approx(2 / 3)), ("size", 2, 0.0),
    ]  # fmt: skip
    assert table["differences"][1]["low"] <= 0 <= table["differences"][1]["high"]
    assert found["rows"][2]["reason"] == "unknown: size: returned NaN, and a reward is a finite number"


def test_of_items_with_facts_a_function_gives_the_score_and_its_file_is_part_of_the_tasks_hash(tmp_path, files):
    answers, facts = {"a": ["4", "x"], "b": ["4", "4"]}, {"name": "facts", "answer": "4"}
    named = PROGRAM | {"function": "right"}
    found = scored(tmp_path / "one", files, [named], answers, facts)
    assert [row["score"] for row in found["rows"]] == [1.0, 0.0, 1.0, 1.0]
    task = found["table"]["tasks"]["t"]
    assert task["metric"] == "right" and [one["mean"] for one in found["table"]["differences"]] == [0.5]
    (tmp_path / "longest.py").write_text(LONGEST + "\n# edited\n")
    assert scored(tmp_path / "two", files, [named], answers, facts)["table"]["tasks"]["t"]["hash"] != task["hash"]
    with pytest.raises(StageError, match="suite s have the verifier facts, which scores no answer: add programs"):
        scored(tmp_path / "three", files, [], answers, facts)


@pytest.mark.parametrize(
    ("kind", "config", "told"),
    [
        ("judge", {"verifier_weight": 0, "programs": [PROGRAM | {"weight": 0}]}, "the weights of programs are all 0, so no answer gets"),
        ("judge", {"programs": [PROGRAM, PROGRAM]}, "programs has two terms called longest: give one of them another `name`"),
        ("select_rows", {"keep": {"type": "above", "min_score": 0}}, "the weights of programs are all 0, so no row gets a score"),
        ("evaluate", {"programs": [RIGHT]}, "the weight of right is -2, but a metric has none: remove weight"),
    ],
)
def test_functions_without_an_effect_are_refused_with_the_recipe(kind, config, told):
    with pytest.raises(ValidationError, match=told):
        KINDS[kind].config.model_validate(config)


def test_a_suite_that_functions_cannot_score_is_refused_with_the_recipe():
    def problem(form: str | None, name: str) -> str | None:
        suite = {"record": "item", "task": "t", "sources": [{"type": "files", "path": "x.jsonl"}], "form": form}
        sampling = {} if form else {"sampling": {"max_tokens": 3}}
        config = Evaluate.model_validate({"programs": [PROGRAM | {"name": name}], **sampling})
        return evaluate_problem(config, {"suites": {"s": PortInput("item", PrepareData.model_validate(suite))}})

    assert problem("truthfulqa", "mine") == "suite s compares choices, but programs score texts: evaluate it in a stage without programs"
    assert problem(None, "score") == "suite s has a metric score already: give the program another name"
    assert problem("gsm8k", "mine") is None and problem(None, "mine") is None


def test_without_functions_configs_keep_their_identity_and_with_them_their_code_counts():
    for kind in ("judge", "select_rows", "evaluate"):
        config, more = KINDS[kind].config, {"keep": {"type": "above", "min_score": 0}} if kind == "select_rows" else {}
        with_one = config.model_validate({"programs": [PROGRAM], **more})
        without = config.model_construct(**with_one.model_copy(update={"programs": ()}).__dict__)
        assert "programs" not in without.model_dump()
        assert {*KINDS[kind].decided_by(with_one)} - {*KINDS[kind].decided_by(without)} == {
            "stages/verifiers/project_programs.py", "stages/verifiers/reward_programs.py", "stages/verifiers/sandboxed.py",
        }  # fmt: skip


def test_a_rehearsal_allows_a_function_to_know_nothing_of_a_tiny_models_answers():
    config = Judge.model_validate({"programs": [PROGRAM]})
    cut = Cut("r/judge", config, {}, StandIns())
    KINDS["judge"].shrink(cut)
    assert Judge.model_validate(cut.written).max_unscored_share == MAX_UNKNOWN


def test_the_file_of_the_manual_filters_rows_and_scores_answers_by_its_recipe(tmp_path):
    """The other two of its stages need engines; `test_rlvr` and `test_sampling_stages` have such files there."""
    page = (Path(__file__).parents[2] / "docs" / "own-reward.md").read_text()
    stages = yaml.safe_load(re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0])["stages"]
    config = {name: {key: value for key, value in stages[name].items() if key not in ("kind", "in")} for name in ("boxed", "judged")}
    (tmp_path / "mine.py").write_text(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0])
    files, texts = {"rewards/mine.py": tmp_path / "mine.py"}, [r"\boxed{12}", r"\boxed{1}", "12"]
    data = publish(tmp_path / "rows", "conversation", [conversation(text, text) for text in texts])
    found = run_stage(tmp_path / "boxed", "select_rows", config["boxed"], files, data=data)
    assert [row["id"] for row in rows_of(found)] == texts[:2]
    answers = [completion("p", str(number), text, {"name": "gsm", "answer": "12"}) for number, text in enumerate(texts)]
    found = run_stage(tmp_path / "judged", "judge", config["judged"], files, completions=publish(tmp_path / "in", "completion", answers))
    assert [(row["programs"]["mine"], row["score"]) for row in rows_of(found)] == [
        (1.1, 0.5 + 2 * 1.1), (0.1, 2 * 0.1), (0.0, 0.5),
    ]  # fmt: skip
