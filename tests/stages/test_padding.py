"""Padding is no token of a text: it is found or added when a model is imported."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from models import a_job, config_of, publish
from test_source_model import LLAMA, corpus, llama  # noqa: F401, fixtures
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pedigree.configs.language.execution import Numerics
from pedigree.configs.rows.source_models import TEMPLATES
from pedigree.data.chat.chat import Chat
from pedigree.stages.core.batches import collate, document
from pedigree.stages.job.failures import StageError
from pedigree.stages.source_model import run as source_model
from pedigree.stages.source_model.run import train_tokenizer
from pedigree.stages.training import chat_format, imported_models
from pedigree.stages.training.chat_format import padding
from pedigree.stages.training.models import load_policy

QUESTION = [{"role": "user", "content": "How many rivers are 4 + 1 rivers?"}]


def byte_level(*control, **named):
    """A tokenizer of bytes with these control tokens."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([*control])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def of_words(*words, **named):
    """A tokenizer of whole words, which writes its unknown token for any other."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, named["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


LLAMA_3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>")
META = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
FOUND = {
    "Llama 3": (byte_level(*LLAMA_3, **META), "llama3", "<|reserved_special_token_0|>"),
    "Llama 3.1": (byte_level(*LLAMA_3, "<|finetune_right_pad_id|>", **META), "llama3", "<|finetune_right_pad_id|>"),
    "its own, which is BOS": (byte_level(*LLAMA_3, **META, pad_token="<|begin_of_text|>"), "llama3", "<|reserved_special_token_0|>"),
    "GPT-NeoX": (
        byte_level("<|endoftext|>", "<|padding|>", bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token="<|endoftext|>"),
        "tulu",
        "<|padding|>",
    ),
    "Qwen": (byte_level("<|endoftext|>", "<|im_end|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"), "qwen", "<|endoftext|>"),
    "its own": (byte_level("</s>", "<pad>", "<|pad|>", eos_token="</s>", pad_token="<|pad|>"), "tulu", "<|pad|>"),
    "an unknown token that bytes leave unused": (byte_level("<unk>", "</s>", eos_token="</s>", unk_token="<unk>"), "tulu", "<unk>"),
    "an unknown token that texts contain": (of_words("<unk>", "</s>", "a", eos_token="</s>", unk_token="<unk>"), "tulu", None),
    "its own, which the template writes": (byte_level("</s>", "<bos>", eos_token="</s>", pad_token="<bos>"), "gemma", None),
    "GPT-2": (byte_level("<|endoftext|>", bos_token="<|endoftext|>", eos_token="<|endoftext|>"), "tulu", None),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_padding_of_a_tokenizer_is_no_token_of_its_texts(name):
    tokenizer, template, expected = FOUND[name]
    assert padding(tokenizer, (TEMPLATES / f"{template}.jinja").read_text(), len(tokenizer)) == expected


def embedding(rows):
    """A model of so many rows."""
    config = LlamaConfig(
        vocab_size=rows, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def test_special_tokens_that_no_text_contains_may_be_beyond_the_embedding():
    """As Gemma 3's token for images in its models of text."""
    control = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<image_soft_token>")
    tokenizer = byte_level(*control, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>")
    model, template = embedding(len(tokenizer) - 1), (TEMPLATES / "gemma.jinja").read_text()
    imported_models.refuse(model, tokenizer)
    assert chat_format.adopt(model, tokenizer, template) == []
    assert len(model.get_input_embeddings().weight) == len(tokenizer) - 1 and tokenizer.pad_token == "<pad>"
    chat_format.refuse_words(tokenizer, template, len(tokenizer) - 1)
    with pytest.raises(StageError, match=r"writes <end_of_turn>, which its tokenizer does not have as a token or the model does not embed"):
        chat_format.refuse_words(tokenizer, template, len(tokenizer) - 2)
    with pytest.raises(StageError, match="the tokenizer has 262 tokens, but the model embeds 255"):
        imported_models.refuse(embedding(255), tokenizer)  # a byte is beyond


def test_padding_beyond_the_embedding_is_replaced():
    """A tokenizer got a token for padding, and its model did not. What is added lies behind it; both are embedded as the mean."""
    tokenizer = byte_level("<s>", "</s>", "[PAD]", bos_token="<s>", eos_token="</s>", pad_token="[PAD]")
    model = embedding(len(tokenizer) - 1)
    before = [table.weight.clone() for table in (model.get_input_embeddings(), model.get_output_embeddings())]
    assert chat_format.adopt(model, tokenizer, (TEMPLATES / "tulu.jinja").read_text()) == ["<|pad|>"]
    assert tokenizer.pad_token_id == model.config.pad_token_id == len(tokenizer) - 1 == len(before[0]) + 1
    for old, table in zip(before, (model.get_input_embeddings(), model.get_output_embeddings()), strict=True):
        torch.testing.assert_close(table.weight, torch.cat([old, old.mean(dim=0).expand(2, -1)]))


PADDED_BY = {
    "BOS": ({"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}, True),
    "EOS": (dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|endoftext|>"), False),
}
"""Tokenizers such as Llama 3's, whose conversations begin with BOS, and GPT-NeoX's: there is no token for padding but BOS and the end."""
DIALOGUE = [*QUESTION, {"role": "assistant", "content": "5"}, {"role": "user", "content": "How many rivers are 5 + 1 rivers?"}]


@pytest.fixture(scope="module", params=PADDED_BY)
def imported(request, tmp_path_factory, llama):  # noqa: F811
    folder = tmp_path_factory.mktemp("imported")
    (named, add_bos), given = PADDED_BY[request.param], shutil.copytree(llama.payload, folder / "given")
    trained = train_tokenizer(["How many rivers are 4 + 1 rivers?"], LLAMA["vocabulary"]).backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, **named)
    tokenizer.save_pretrained(given)
    job = a_job(folder / "job")
    job.source_files["given"] = given
    config = config_of("source_model", source={"type": "folder", "path": "given"}, chat_template="tulu", add_bos=add_bos)
    facts = source_model.run(config, {}, job)
    token = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    return SimpleNamespace(payload=job.out / "payload", given=given, facts=facts, marks=job.marks, token=token)


def test_a_token_for_padding_is_added_and_embedded_as_the_mean(imported):
    chat, model = Chat(imported.payload), AutoModelForCausalLM.from_pretrained(imported.payload)
    assert imported.facts["added_tokens"] == ["<|pad|>"]
    assert [mark for mark in imported.marks if "<|pad|> was added" in mark]  # which the terminal and the card show
    ids = {chat.pad_id, chat.tokenizer.pad_token_id, model.config.pad_token_id, model.generation_config.pad_token_id}
    assert ids == {chat.tokenizer.convert_tokens_to_ids("<|pad|>")} and chat.pad_id not in (chat.eos_id, imported.token)
    before = AutoModelForCausalLM.from_pretrained(imported.given).get_input_embeddings().weight
    torch.testing.assert_close(model.get_input_embeddings().weight[chat.pad_id], before[: len(chat.tokenizer) - 1].mean(dim=0))


def test_generate_without_a_mask_sees_the_whole_prompt(imported):
    chat, model = Chat(imported.payload), AutoModelForCausalLM.from_pretrained(imported.payload)
    prompt = torch.tensor([chat.prompt(DIALOGUE)])
    assert imported.token in prompt
    scores = [
        model.generate(prompt, max_new_tokens=1, do_sample=False, output_scores=True, return_dict_in_generate=True, **mask).scores[0]
        for mask in ({}, {"attention_mask": torch.ones_like(prompt)})
    ]
    assert torch.equal(*scores)


def test_a_model_that_pads_with_a_token_of_its_texts_trains_its_embedding(tmp_path, imported):
    """As imported before: config and tokenizer name BOS or EOS, and torch gives that row no gradient."""
    payload = shutil.copytree(imported.payload, tmp_path / "old" / "payload")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(payload), AutoTokenizer.from_pretrained(payload)
    model.config.pad_token_id, model.config.tie_word_embeddings = imported.token, False
    tokenizer.pad_token = "<|endoftext|>"
    model.save_pretrained(payload)
    tokenizer.save_pretrained(payload)
    module, chat = load_policy(publish(tmp_path / "old", "source_model", "policy"), Numerics()), Chat(payload)
    assert chat.pad_id == imported.token
    logps, _ = module(collate([(document(*chat.answer(DIALOGUE, "6")),)], Numerics(), chat.pad_id))
    logps.sum().backward()
    assert module.model.get_input_embeddings().weight.grad[imported.token].norm() > 0


@pytest.mark.parametrize(("add_bos", "told"), [(False, 1), (True, 0)])
def test_a_tokenizer_that_puts_bos_before_texts_whose_template_does_not_is_told(tmp_path, llama, add_bos, told):  # noqa: F811
    """As Mistral's with ChatML: lm-evaluation-harness reads BOS before each rendered prompt, which was not trained."""
    given = shutil.copytree(llama.payload, tmp_path / "given")
    tokenizer = AutoTokenizer.from_pretrained(given)
    tokenizer.bos_token = "<|endoftext|>"
    first = [("<|endoftext|>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", pair="$A $B", special_tokens=first)
    tokenizer.save_pretrained(given)
    job = a_job(tmp_path / "job")
    job.source_files["given"] = given
    source_model.run(config_of("source_model", source={"type": "folder", "path": "given"}, add_bos=add_bos), {}, job)
    chat = Chat(job.out / "payload")
    text = chat.tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    begun = chat.tokenizer(text)["input_ids"] == [tokenizer.bos_token_id, *chat.prompt(QUESTION)]  # the harness adds no second BOS
    assert begun and text.startswith("<|endoftext|>") is add_bos
    assert len([mark for mark in job.marks if "begins texts with '<|endoftext|>'" in mark and "add_bos: true" in mark]) == told
