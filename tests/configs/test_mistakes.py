"""What a user reads about a wrong key: only that key, once, with the name that was meant or the name that it has here."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from pedigree.configs.base.document import read_document
from pedigree.configs.base.mistakes import mistakes
from pedigree.configs.base.other_names import ELSEWHERE
from pedigree.configs.language.kinds import KINDS
from pedigree.configs.rows import source_models
from pedigree.configs.rows.suite_forms import FORMS, Form

SFT = {"global_batch": 4, "max_length": 32, "optimizer": {"learning_rate": 1e-4}}
ROWS = {"record": "conversation", "sources": [{"type": "files", "path": "rows.jsonl"}]}
ADD = {"type": "arithmetic", "operations": ["add"], "digits": [1], "count": 4, "seed": 1}
RL = {
    "steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2, "sampling": {"max_tokens": 8}, "max_prompt_length": 8,
    "optimizer": {"learning_rate": 1e-4}, "algorithm": {"type": "grpo"},
}  # fmt: skip


def told(kind, body):
    with pytest.raises(ValidationError) as caught:
        KINDS[kind].config.model_validate(body)
    return mistakes(caught.value, KINDS[kind].config, body, kind)


def without(body, name):
    return {key: value for key, value in body.items() if key != name}


MISSPELLED = [
    ("sft", {**without(SFT, "max_length"), "max_lenght": 32}, ("max_lenght",), "max_lenght: unknown key; did you mean max_length?"),
    ("sft", {**SFT, "optimizer": {"learning_rat": 1}}, ("optimizer", "learning_rat"), "unknown key; did you mean learning_rate?"),
    ("sft", {**SFT, "lora": {"rank": 1, "alpha": 1, "target": 1}}, ("lora", "target"), "unknown key; did you mean targets?"),
    ("prepare_data", {**ROWS, "sources": [{"type": "aritmetic"}]}, ("sources", 0), "did you mean arithmetic?"),
    ("prepare_data", {**ROWS, "filters": [{"type": "exact_duplicate"}]}, ("filters", 0), "did you mean exact_duplicates?"),
    (
        "prepare_data", {**ROWS, "sources": [ADD, {**without(ADD, "digits"), "digit": [1]}]}, ("sources", 1, "digit"),
        "sources.1.arithmetic.digit: unknown key; did you mean digits?",
    ),
    ("rlvr", {**RL, "algorithm": {"type": "grop"}}, ("algorithm",), "did you mean grpo?"),
    (
        "rlvr", {**RL, "algorithm": {"type": "grpo", "kl": {"coeficient": 0.1}}}, ("algorithm", "kl", "coeficient"),
        "unknown key; did you mean coefficient?",
    ),
    ("rlvr", {**RL, "sampling": {"max_token": 8}}, ("sampling", "max_token"), "unknown key; did you mean max_tokens?"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "body", "place", "expected"), MISSPELLED)
def test_a_misspelled_name_is_told_once_with_the_nearest_one_at_any_depth(kind, body, place, expected):
    ((found, message),) = told(kind, body)
    assert found == place and message.endswith(expected)


OTHER = [
    ("sft", {**SFT, "per_device_train_batch_size": 2}, "global_batch"),
    ("sft", {**SFT, "gradient_accumulation_steps": 2}, "global_batch"),
    ("sft", {**SFT, "num_train_epochs": 2}, "`epochs`"),
    ("sft", {**SFT, "learning_rate": 2}, "`optimizer: {learning_rate: ...}`"),
    ("sft", {**without(SFT, "max_length"), "max_seq_length": 2}, "`max_length`"),
    ("sft", {**SFT, "lora": {"lora_r": 16, "rank": 1, "alpha": 1}}, "`lora: {rank: ...}`"),
    ("rlvr", {**RL, "num_generations": 2}, "`samples_per_prompt`"),
    ("rlvr", {**RL, "beta": 2}, "kl: {coefficient: ...}"),
    ("sft", {**without(SFT, "global_batch"), "per_device_train_batch_size": 2}, "`global_batch`"),
    ("sft", {**without(SFT, "optimizer"), "learning_rate": 2}, "`optimizer: {learning_rate: ...}`"),
    ("source_model", {"model_name_or_path": "a/b"}, "`source`"),
    ("rlvr", {**RL, "max_prompt_token_length": 2}, "`max_prompt_length`"),
    ("rlvr", {**RL, "actor_rollout_ref": {}}, "`kind: rlvr`"),
]


@pytest.mark.parametrize(("kind", "body", "expected"), OTHER)
def test_a_name_of_another_trainer_is_told_with_its_name_here(kind, body, expected):
    ((_, message),) = told(kind, body)
    assert expected in message and "; fields of" not in message


def test_a_name_that_the_stage_has_under_no_other_is_told_with_the_fields_that_it_has():
    ((_, message),) = told("source_model", {"source": {"type": "packaged", "asset": "smollm2-135m-instruct"}, "learning_rate": 1})
    assert "fields of source_model: source, " in message and "`optimizer: {learning_rate: ...}` in a stage that has it" in message


def test_an_unknown_key_beside_a_missing_one_is_told_with_what_is_required():
    ((_, message),) = told("prepare_data", {**ROWS, "sources": [{"type": "files", "folder": "rows.jsonl"}]})
    assert message.startswith("sources.0.files.folder: unknown key; its fields: ") and "path (required)" in message


def test_where_no_name_is_near_all_are_listed():
    ((_, message),) = told("prepare_data", {**ROWS, "filters": [{"type": "tokens", "xyz": 1}]})
    assert message == "filters.0.tokens.xyz: unknown key; its fields: type, min, max"


ONE_LINE = [
    ({"sources": [{"type": "files", "path": "rows.jsonl", "max_bad_rows": "many"}]}, "must be a number, not 'many'"),
    ({"filters": [{"type": "values", "column": "x", "min": [1]}]}, "must be a number or text, not [1]"),
    ({"filters": [{"type": "exact_duplicates"}, 3]}, "must be a mapping, not 3: write {type: ...} with one of max_characters, "),
    ({"sources": {"type": "files"}}, 'sources: must be a list, not {"type": "files"}: write it in brackets'),
    ({"sources": []}, "sources: must be at least 1 in length, not 0"),
    ({"sources": [{}]}, "sources.0: `type` is missing: write {type: ...} with one of arithmetic, "),
    ({"sources": [{"type": None}]}, "sources.0: type null is not one of arithmetic, "),
    ({"sources": [{"type": "packaged", "asset": {}}]}, "sources.0.packaged.asset: must be text, not {}"),
    ({"record": "conversations"}, "not 'conversations'; did you mean conversation?"),
    (
        {"sources": [{"type": "hub", "repo": "a/b", "revision": "pin me", "split": [1]}]},
        "sources.0.hub.split.0: must be text, not 1: quote it",
    ),
]


@pytest.mark.parametrize(("more", "expected"), ONE_LINE)
def test_a_value_that_fits_no_member_of_a_union_is_told_on_one_line(more, expected):
    (one,) = told("prepare_data", ROWS | more)
    assert expected in one[1]


SCALARS = [
    ({"lora": {"rank": 3, "alpha": 2.0, "rslora": "no"}}, "not 'no': write false"),
    ({"global_batch": "1_000"}, "not '1_000': write 1000"),
    ({"global_batch": 1e3}, "not 1000.0: write 1000"),
    ({"global_batch": "4O"}, "must be a whole number, not '4O'"),
    ({"lora": {"rank": 3, "alpha": 2.0, "targets": 3}}, "must be 'all-linear' or a list, not 3"),
]


@pytest.mark.parametrize(("more", "expected"), SCALARS)
def test_a_scalar_of_another_type_is_told_with_what_to_write(more, expected):
    ((_, message),) = told("sft", SFT | more)
    assert message.endswith(expected)


def test_the_page_for_users_of_other_trainers_shows_the_same_names():
    shown = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE.partition("## Names of other trainers")[2], re.MULTILINE))
    assert shown == ELSEWHERE


PAGE = (Path(__file__).parents[2] / "docs" / "from-trl.md").read_text()
NOT_HERE = [
    line.split(" | ")
    for line in PAGE.partition("## Not here")[2].partition("\n## ")[0].splitlines()
    if line.startswith("| ") and "`" in line
]
"""Names of settings, why they are not here and what to do instead."""


@pytest.mark.parametrize("row", NOT_HERE, ids=lambda row: row[0].split("`")[1])
def test_what_is_not_here_is_told_with_its_reason_where_a_recipe_writes_it(row):
    names = re.findall(r"`(?:\w+\()?(\w+)", row[0])
    assert names and row[1]
    for name in [name for name in names if name != "adafactor"]:  # a value of `optim`
        for kind, body in (
            ("sft", {**SFT, name: 1}),
            ("rlvr", {**RL, name: 1}),
            ("sft", {**SFT, "lora": {"rank": 1, "alpha": 1, name: 1}}),
        ):
            ((_, message),) = told(kind, body)
            assert ELSEWHERE[name] in message and "did you mean" not in message


WRITTEN_EVERY_DAY = [
    "eval_strategy", "evaluation_strategy", "eval_steps", "load_best_model_at_end", "metric_for_best_model", "max_steps", "use_dora",
    "lora_dropout", "neftune_noise_alpha", "adamw_8bit", "load_in_4bit", "report_to", "dataset_text_field", "assistant_only_loss",
    "completion_only_loss", "chat_template", "total_episodes", "adam_beta1",
]  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN_EVERY_DAY)
def test_what_users_of_trl_write_every_day_is_on_the_page_and_told_or_a_field(name):
    assert re.search(rf"\b{name}\b", PAGE)
    assert name in ELSEWHERE or name in KINDS["sft"].config.model_fields or name == "adamw_8bit"


@pytest.mark.parametrize("name", ["chat_template", "template", "dataset_text_field"])
def test_a_name_whose_place_is_another_stage_is_told_with_that_stage(name):
    for kind, body in (("sft", SFT), ("rlvr", RL)):
        ((_, message),) = told(kind, {**body, name: "x"})
        assert message.endswith(f"unknown key; instead of {name} write {ELSEWHERE[name]}")
        assert "in a stage that has it" not in message and "`kind: " in message


PATHS = sorted({name for text in ELSEWHERE.values() for name in re.findall(r"`(\w+)`|(?<=\{)(\w+):", text) for name in name if name})


def test_every_name_that_is_advised_exists(root):
    """As a field of a kind, a kind, or a setting of a profile."""
    known = "\n".join(path.read_text() for path in [*(root / "docs" / "stages").glob("*.md"), root / "docs" / "profiles.md"])
    assert not {name for name in PATHS if name not in KINDS and not re.search(rf"\b{name}\b", known)}


WRONG_JINJA = [
    (("rows", "question"), "a\n{{ row.question }", "rows.question: not a Jinja template, line 2: "),
    (("rows", "answer"), "answer | ", "rows.answer: not a Jinja expression, line 1: "),
    (("prompt", "ask"), "{% if question %}", "prompt.ask: not a Jinja template, line 1: "),
    (("prompt", "ask"), "a\n{{ a | up }}", "prompt.ask: not a Jinja template, line 2: No filter named 'up'"),
]


@pytest.mark.parametrize(("place", "text", "expected"), WRONG_JINJA)
def test_wrong_jinja_of_a_form_is_told_with_its_field_and_line(place, text, expected):
    form = read_document(FORMS / "gsm8k.yaml").value
    form[place[0]] = form[place[0]] | {place[1]: text}
    with pytest.raises(ValidationError) as caught:
        Form.model_validate(form)
    ((found, message),) = mistakes(caught.value, Form, form)
    assert found == place and message.startswith(expected)


def test_what_is_neither_the_name_of_a_form_nor_a_form_is_told_in_plain_words():
    ((_, message),) = told("prepare_data", {"record": "item", "task": "t", "sources": [{"type": "files", "path": "x.jsonl"}], "form": 5})
    assert message == "form: must be text or a mapping, not 5"


def test_wrong_jinja_of_a_chat_template_is_told_with_its_file_and_line(tmp_path, monkeypatch):
    monkeypatch.setattr(source_models, "TEMPLATES", tmp_path)
    text = "{% for one in messages %}{% generation %}\n{{ one.content | nothing }}{% endgeneration %}{% endfor %}"
    (tmp_path / "mine.jinja").write_text(text)
    with pytest.raises(ValidationError, match=r"mine.jinja is not a Jinja template, line 2: No filter named 'nothing'"):
        source_models.SourceModel.model_validate({"source": {"type": "folder", "path": "m"}, "chat_template": "mine"})


def test_a_template_of_the_project_that_is_named_without_its_path_is_told_how_to_be_named():
    given = {"source": {"type": "folder", "path": "m"}, "chat_template": "house"}
    with pytest.raises(ValidationError, match=r"'house' is not one of own, .*: for a template of your own write its path in the project"):
        source_models.SourceModel.model_validate(given)
    named = source_models.SourceModel.model_validate(given | {"chat_template": "mine/house.jinja"})
    assert named.files == ("mine/house.jinja",) and named.chat_template_sha256 is None
