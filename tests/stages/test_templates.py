"""The chat templates of the field as we ship them: the texts that their sources render, and the tokens that they need."""

import json

import pytest
import torch
from data_lab import run_stage
from test_source_model import LLAMA, corpus, llama  # noqa: F401, fixtures
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.datasets import TEMPLATES
from data.chat import PROBE, Chat, end_of_turn
from stages.job import StageError

SYSTEM = [{"role": "system", "content": "Be brief."}, *PROBE]
TULU = (  # open-instruct's `tulu`: no new line after the last turn of the assistant
    "<|system|>\nBe brief.\n<|user|>\nWhat is 1 + 1?\n<|assistant|>\n2<|im_end|>\n<|user|>\nAnd 2 + 2?\n<|assistant|>\nIt is 4.<|im_end|>"
)
LLAMA3 = (  # Meta's, less the date and the tools
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWhat is 1 + 1?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n2<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd 2 + 2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nIt is 4.<|eot_id|>"
)


@pytest.fixture
def sourced(tmp_path, corpus, llama):  # noqa: F811
    """A tiny Llama with ChatML's tokens, sourced as a folder with another template."""

    def make(name, **fields):
        config = {"source": {"type": "folder", "path": "given"}, **fields}
        return run_stage(tmp_path / name, "source_model", config, files={"given": llama.payload})

    return make


def rendered(artifact, messages=SYSTEM):
    chat = Chat(artifact.payload)
    return "".join(piece for piece, _ in chat._pieces(messages, ask=messages[-1]["role"] == "user"))


def test_tulu_ends_turns_with_the_tokenizers_own_token(sourced):
    made = sourced("tulu", chat_template="tulu")
    assert rendered(made) == TULU and rendered(made, SYSTEM[:2]) == "<|system|>\nBe brief.\n<|user|>\nWhat is 1 + 1?\n<|assistant|>\n"
    assert json.loads((made.path / "evidence" / "model.json").read_text())["added_tokens"] == []


def test_olmo_begins_with_bos_and_has_one_token_for_both_ends(sourced):
    made = sourced("olmo", chat_template="tulu", add_bos=True)
    assert rendered(made) == "<|im_end|>" + TULU
    ids, mask = Chat(made.payload).training(PROBE)
    assert ids[0] == Chat(made.payload).eos_id and not mask[0]
    with pytest.raises(StageError, match="begins with the BOS token already"):
        run_stage(
            made.path.parent / "twice",
            "source_model",
            {"source": {"type": "folder", "path": "given"}, "chat_template": "own", "add_bos": True},
            files={"given": made.payload},
        )


def test_llama3_brings_its_tokens_along_and_each_is_embedded_as_the_mean(sourced, llama):  # noqa: F811
    made = sourced("llama3", chat_template="llama3")
    chat, model = Chat(made.payload), AutoModelForCausalLM.from_pretrained(made.payload)
    assert rendered(made) == LLAMA3
    added = ["<|begin_of_text|>", "<|end_header_id|>", "<|eot_id|>", "<|start_header_id|>"]
    assert json.loads((made.path / "evidence" / "model.json").read_text())["added_tokens"] == added
    end = chat.tokenizer.convert_tokens_to_ids("<|eot_id|>")
    assert end == chat.eos_id == model.config.eos_token_id == model.generation_config.eos_token_id
    before = AutoModelForCausalLM.from_pretrained(llama.payload).get_input_embeddings().weight
    after = model.get_input_embeddings().weight
    assert len(after) == len(chat.tokenizer) == len(before) + 4
    torch.testing.assert_close(after[: len(before)], before)
    torch.testing.assert_close(after[len(before) :], before.mean(dim=0).expand(4, -1))
    ids, mask = chat.training(PROBE)
    assert ids.count(chat.eos_id) == 4 and sum(mask) == len(chat.tokenizer("2It is 4.")["input_ids"]) + 2


def test_the_models_own_template_is_kept_or_missed_by_name(sourced, tmp_path, llama):  # noqa: F811
    assert rendered(sourced("own", chat_template="own")) == rendered(llama)
    bare = tmp_path / "bare"
    AutoModelForCausalLM.from_pretrained(llama.payload).save_pretrained(bare)
    tokenizer = AutoTokenizer.from_pretrained(llama.payload)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(bare)
    with pytest.raises(StageError, match="comes without one: name one of configs/templates"):
        run_stage(
            tmp_path / "no",
            "source_model",
            {"source": {"type": "folder", "path": "given"}, "chat_template": "own"},
            files={"given": bare},
        )


def test_the_end_of_a_turn_is_read_off_the_template():
    found = {path.stem: end_of_turn(path.read_text()) for path in TEMPLATES.glob("*.jinja")}
    assert found == {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "tulu": None}
    assert end_of_turn("{{ raise_exception('never') }}") is None
