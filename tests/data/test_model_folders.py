"""Model folders as users bring them: what does not belong together is told before anything is loaded."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from test_chat import CHATML, save_tokenizer

from pedigree.configs.rows.source_models import SourceModel
from pedigree.data.sources.model_folders import own_template, problem_of

OWN = SourceModel.model_validate({"source": {"type": "folder", "path": "m"}})
NAMED = SourceModel.model_validate({"source": {"type": "folder", "path": "m"}, "chat_template": "tulu"})
MODEL = {"model_type": "llama", "vocab_size": 300, "bos_token_id": 3, "eos_token_id": [2], "pad_token_id": 0}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A complete one; its weights are of no model."""
    save_tokenizer(tmp_path)
    write(tmp_path, "config.json", MODEL)
    write(tmp_path, "generation_config.json", {"eos_token_id": [2, 1], "pad_token_id": 0})
    save_file({"x": np.zeros(4)}, tmp_path / "model.safetensors")
    return tmp_path


def write(folder, name, value):
    (folder / name).write_text(json.dumps(value))


def test_a_complete_folder_has_no_problem_and_needs_no_generation_config(folder):
    assert problem_of(folder, OWN) is None
    (folder / "generation_config.json").unlink()
    assert problem_of(folder, OWN) is None and problem_of(folder, NAMED) is None


def test_a_folder_without_tokenizer_is_refused(folder):
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / file).unlink()
    assert "has no tokenizer (tokenizer.json): copy the tokenizer's files" in str(problem_of(folder, NAMED))


@pytest.mark.parametrize(("rows", "refused"), [(lambda size: 49_152, True), (lambda size: size - 1, True), (lambda size: size + 40, False)])
def test_a_tokenizer_of_another_size_is_refused_and_a_padded_embedding_is_not(folder, rows, refused):
    size = 1 + max(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"].values())
    stated = MODEL | {"vocab_size": rows(size)}
    for config in (stated, {"model_type": "x", "text_config": stated}):
        write(folder, "config.json", config)
        says = f"the tokenizer has {size} tokens, but the model embeds {rows(size)}: they do not match"
        assert (says in str(problem_of(folder, OWN))) == refused


def test_a_special_token_beyond_the_embedding_is_in_no_text(folder):
    """Gemma 3's models of text have none for the token of images; words must have one."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    beyond = 1 + max(tokenizer["model"]["vocab"].values())
    write(folder, "config.json", MODEL | {"vocab_size": beyond})
    for special in (True, False):
        added = {"id": beyond, "content": "<image>", "special": special}
        write(folder, "tokenizer.json", tokenizer | {"added_tokens": [*tokenizer["added_tokens"], added]})
        assert (problem_of(folder, OWN) is None) == special


@pytest.mark.parametrize(
    ("file", "named", "says"),
    [
        ("config.json", {"eos_token_id": 77}, "eos_token_id of config.json is 77, which is the word"),
        ("config.json", {"bos_token_id": 310}, "bos_token_id of config.json is 310, which is no token of its tokenizer"),
        ("generation_config.json", {"eos_token_id": [2, 78]}, "eos_token_id of generation_config.json is 78, which is the word"),
        ("config.json", {"pad_token_id": 310}, "pad_token_id of config.json is 310, which is no token"),
        ("config.json", {"pad_token_id": -1}, None),
        ("config.json", {"pad_token_id": 9}, None),  # some pad with a word, which is never read
        ("config.json", {"bos_token_id": None}, None),
    ],
)
def test_a_tokenizer_of_equal_size_in_which_the_models_special_tokens_are_words_is_another_models(folder, file, named, says):
    write(folder, file, json.loads((folder / file).read_text()) | named)
    found = problem_of(folder, OWN)
    assert found is None if says is None else says in str(found)


def test_special_tokens_may_be_named_in_any_of_the_tokenizers_files(folder):
    """Older tokenizers list them beside tokenizer.json."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    write(folder, "tokenizer.json", tokenizer | {"added_tokens": []})
    tokens = {"eos_token": "<|im_end|>", "bos_token": {"content": "<bos>"}, "pad_token": "<pad>"}
    write(folder, "tokenizer_config.json", {})
    assert "eos_token_id" in str(problem_of(folder, NAMED)) or "bos_token_id" in str(problem_of(folder, NAMED))
    write(folder, "special_tokens_map.json", tokens | {"additional_special_tokens": ["<|im_start|>"]})
    write(folder, "generation_config.json", {})
    assert problem_of(folder, NAMED) is None
    (folder / "special_tokens_map.json").unlink()
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": {"2": {}, "3": {}}})
    assert problem_of(folder, NAMED) is None


@pytest.mark.parametrize(("padding", "refused"), [("!", True), ("Ġpad", True), ("<pad>", False), ("[PAD]", False), ("<|im_end|>", False)])
def test_a_word_is_no_padding(folder, padding, refused):
    """It would be hidden in every text, and a row that has it refused as one that spells out a control token."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for form in (padding, {"content": padding}):
        write(folder, "tokenizer_config.json", settings | {"pad_token": form})
        found = problem_of(folder, OWN)
        assert found is None if not refused else f"its tokenizer pads with {padding!r}, which texts contain: name another" in str(found)


def test_weights_that_are_not_there_are_named(folder):
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1])
    assert "model.safetensors is damaged (" in str(problem_of(folder, OWN))
    (folder / "model.safetensors").unlink()
    assert "has no weights in safetensors (model.safetensors): copy" in str(problem_of(folder, OWN))
    (folder / "model-Q4.gguf").touch()
    assert "only model-Q4.gguf: convert" in str(problem_of(folder, OWN))
    write(folder, "model.safetensors.index.json", {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    (folder / "model-1.safetensors").write_bytes(weights)
    assert "index.json names model-2.safetensors, which the folder lacks" in str(problem_of(folder, OWN))
    (folder / "model-2.safetensors").write_bytes(weights[:40])
    assert "model-2.safetensors is damaged (" in str(problem_of(folder, OWN))
    (folder / "model-2.safetensors").write_bytes(weights)
    assert problem_of(folder, OWN) is None


def test_a_folder_of_something_else_is_told_by_what_it_holds(folder):
    write(folder, "config.json", {"vocab_size": 300})
    assert "config.json has no model_type" in str(problem_of(folder, OWN))
    (folder / "config.json").write_text("{")
    assert "its config.json is not JSON: copy it from the model's origin" in str(problem_of(folder, OWN))
    (folder / "config.json").unlink()
    assert "config.json is missing; it has chat_template.jinja, generation_config.json" in str(problem_of(folder, OWN))
    write(folder, "adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "some/base"})
    assert "it is a PEFT adapter of some/base, not a model: merge it into its base" in str(problem_of(folder, OWN))
    (folder / "adapter_config.json").write_text("[")
    assert "its adapter_config.json is not JSON: copy it from" in str(problem_of(folder, OWN))
    (folder / "adapter_config.json").unlink()
    write(folder, "config.json", MODEL)
    template = (folder / "chat_template.jinja").read_bytes()
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    assert "cannot be read: 'utf-8' codec can't decode" in str(problem_of(folder, OWN))
    (folder / "chat_template.jinja").write_bytes(template)
    (folder / "tokenizer.json").write_text('{"model": 5}')
    assert "tokenizer.json has no vocabulary" in str(problem_of(folder, OWN))


def test_a_base_model_is_asked_for_a_template_by_one_sentence_that_lists_them(folder):
    (folder / "chat_template.jinja").unlink()
    said = "it has no chat template, as base models have none: set chat_template to one of chatml, gemma, llama3, llama3_1, mistral, qwen, "
    assert str(problem_of(folder, OWN)).startswith(said) and problem_of(folder, NAMED) is None


def test_an_own_template_that_is_no_jinja_is_refused(folder):
    (folder / "chat_template.jinja").write_text("{% for message in messages %}\n{{ message.content }")
    assert str(problem_of(folder, OWN)).startswith("its chat template is not Jinja, line 2: unexpected '}': restore the file")
    assert problem_of(folder, NAMED) is None


@pytest.mark.parametrize("form", ["text", "list", "file"])
def test_the_models_own_template_is_found_in_every_form(folder, form):
    assert own_template(folder) == CHATML
    if form != "file":
        (folder / "chat_template.jinja").unlink()
        several = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "other"}]
        write(folder, "tokenizer_config.json", {"chat_template": CHATML if form == "text" else several})
    assert own_template(folder) == CHATML and problem_of(folder, OWN) is None
