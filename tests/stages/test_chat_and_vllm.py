"""What vLLM makes of a conversation with the templates and tokenizers that we ship: the ids that we train on, and the same end."""

import copy
import os
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sweeps import nightly_after, nightly_unless
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing

from pedigree.configs.rows.source_models import TEMPLATES, RandomLlama
from pedigree.data.artifacts import assets
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.chat_template import ChatError
from pedigree.stages.source_model.run import gguf_tokenizer, random_llama, train_tokenizer
from pedigree.stages.training.chat_format import adopt

pytestmark = pytest.mark.slow  # vLLM alone takes its time to be imported
LLAMA = RandomLlama(type="random_llama", layers=1, hidden=64, heads=2, kv_heads=1, ffn=32, vocabulary=400, context=2048)
TEXTS = [
    "What is 17 + 25?\n\n\n",
    "  two  spaces\tand\r\nlines ",
    "naïve №5 – “日本” 🙂",
    "\n\n1. first\n 2. second",
    "user\nassistant\n",
    "<|im_ end|> <s >",
]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


PROMPTS = [
    *([user(text)] for text in TEXTS),
    *([{"role": "system", "content": text}, user("Hello.")] for text in TEXTS),
    *([user("Hello."), {"role": "assistant", "content": text.lstrip()}, user(text)] for text in TEXTS),
]


@cache
def trained() -> Any:
    return train_tokenizer([*TEXTS, "assistant\n\n system user\n\n\n"] * 3, LLAMA.vocabulary)


def beginning_with_bos() -> Any:
    """As Llama's: its tokenizer puts a BOS before every text."""
    tokenizer = train_tokenizer([*TEXTS, "<|bos|>"] * 3, LLAMA.vocabulary)
    tokenizer.add_special_tokens({"bos_token": "<|bos|>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", tokenizer.bos_token_id)]
    )
    return tokenizer


LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How tokenizers of Llama 3 split a text (its tokenizer.json)."""


def splitting_as_llama_3() -> Any:
    """Empty lines stay together before a word, where GPT-2's split takes their last character to it."""
    tokenizer = train_tokenizer([*TEXTS, "assistant\n\n system user\n\n\n"] * 3, LLAMA.vocabulary)
    split = Split(Regex(LLAMA_3), behavior="isolated")
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    return tokenizer


TOKENIZERS = {
    "trained": trained,
    "with BOS": beginning_with_bos,
    "packaged": cache(lambda: gguf_tokenizer(assets.path("smollm2-135m-instruct"))),
    "Llama 3": splitting_as_llama_3,
}
HEADERS_END_IN_EMPTY_LINES = {"llama3", "llama3_1"}
"""Templates that only tokenizers that split as Llama 3's can be trained with."""
DAILY = {
    *(f"chatml, {name}" for name in TOKENIZERS),
    "smollm3, trained",
    "gemma, with BOS",
    "llama3, Llama 3",
}
"""Template and tokenizer: the other pairs are tried nightly."""


@pytest.fixture(
    scope="module",
    params=nightly_unless(
        DAILY,
        (
            f"{template.stem}, {name}"
            for template in sorted(TEMPLATES.glob("*.jinja"))
            for name in TOKENIZERS
            if name == "Llama 3" or template.stem not in HEADERS_END_IN_EMPTY_LINES
        ),
    ),
)
def folder(request, tmp_path_factory) -> Path:
    return sourced(tmp_path_factory.mktemp("model"), *request.param.split(", "))


def sourced(made: Path, template: str, name: str) -> Path:
    """A model as `source_model` leaves it."""
    tokenizer = copy.deepcopy(TOKENIZERS[name]())  # it gets the template's tokens
    model = random_llama(LLAMA, tokenizer)
    adopt(model, tokenizer, (TEMPLATES / f"{template}.jinja").read_text())
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def served(folder) -> Any:
    """What `vllm.LLM(folder)` renders and stops with, without its engine."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm import EngineArgs, SamplingParams
    from vllm.renderers import ChatParams
    from vllm.renderers.registry import renderer_from_config

    config = EngineArgs(model=str(folder), enforce_eager=True, dtype="float32").create_engine_config()
    renderer = renderer_from_config(config)

    def ids(messages: list[dict[str, str]]) -> list[int]:
        params = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "continue_final_message": False, "tools": None})
        _, prompts = renderer.render_chat([messages], params)
        return list(prompts[0]["prompt_token_ids"])

    params = SamplingParams(**config.model_config.get_diff_sampling_param())
    params.update_from_generation_config(config.model_config.try_get_generation_config(), renderer.get_eos_token_id())
    return SimpleNamespace(ids=ids, ends=params.all_stop_token_ids | {renderer.get_eos_token_id()})


@pytest.mark.parametrize("name", sorted(TOKENIZERS.keys() - {"Llama 3"}))
@pytest.mark.parametrize("template", nightly_after(1, sorted(HEADERS_END_IN_EMPTY_LINES)))
def test_a_template_whose_headers_the_tokenizer_splits_otherwise_before_an_answer_is_refused(template, name, tmp_path):
    """vLLM would ask with other tokens than are trained."""
    with pytest.raises(ChatError, match="other tokens for a conversation cut at its turns"):
        Chat(sourced(tmp_path, template, name))


def test_a_prompt_is_the_same_ids(folder, served):
    chat = Chat(folder)
    for messages in PROMPTS:
        assert chat.prompt(messages) == served.ids(messages), messages
        bos = chat.tokenizer.bos_token_id
        assert bos is None or chat.prompt(messages)[:2] != [bos, bos]


def test_an_earlier_answer_that_begins_with_white_space_keeps_the_tokens_it_was_given_with(folder, served):
    """vLLM's server reads its text anew, across the border, and may find other tokens; here it stays what was sampled and is trained.
    The text is the same."""
    chat = Chat(folder)
    messages = [user("Hello."), {"role": "assistant", "content": "\n\nYes."}, user("Go on.")]
    prompt, again = chat.prompt(messages), served.ids(messages)
    assert chat.tokenizer.decode(prompt) == chat.tokenizer.decode(again)
    asked, answered = chat.answer(messages[:1], "\n\nYes.")
    sampled = asked + answered
    assert prompt[: len(sampled)] == chat.training(messages)[0][: len(sampled)] == sampled


def test_an_answer_ends_where_vllm_stops(folder, served):
    chat = Chat(folder)
    for text in TEXTS:
        _, answer = chat.answer(PROMPTS[0], text)
        assert served.ends == {chat.eos_id}
        assert [place for place, token in enumerate(answer) if token in served.ends] == [len(answer) - 1]


def test_a_control_token_in_a_message_is_refused_where_vllm_would_take_it_for_one(folder, served):
    """Served elsewhere, such a text forges turns; so nothing here is trained on it, sampled from it or scored by it."""
    chat = Chat(folder)
    for token in {"<|im_end|>", "<|im_start|>", "<|endoftext|>", chat.tokenizer.bos_token or "<|im_end|>"}:
        messages = [user(f"Say {token} twice.")]
        assert chat.tokenizer.convert_tokens_to_ids(token) in served.ids(messages)
        for refused in (chat.prompt, chat.training):
            with pytest.raises(ChatError, match="spells out the control token"):
                refused(messages)
