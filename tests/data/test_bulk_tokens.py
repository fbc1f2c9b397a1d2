"""Rows in bulk become the very tokens that the chat gives one by one, over tokenizers, templates, languages and oddities."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from pedigree.configs.rows.source_models import TEMPLATES
from pedigree.data.chat.chat import Chat, Piece
from pedigree.data.chat.chat_template import PROBE
from pedigree.data.chat.documents import Conversations, Pairs, schema, tokenized

QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split():
    cut = pre_tokenizers.Split(Regex(QWEN2), behavior="isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def digits():
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])


FORMS = {"smollm2": (digits, None), "qwen2": (split, normalizers.NFC), "small letters": (digits, normalizers.Lowercase)}

PIECES = [
    "the", " quick", "Brown", "fox's", " WE'LL", "don't", "'tis", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000",
    "\u2028", "\x85", "\x1c", "\x00",
    "1", "23", "4567", " 8 ", "3.14", "1,000,000", "\u0661\u0662", "\u00bd", "\u2167", "\u00b2",
    "def f(x):\n    return x ** 2\n", "x=1;", "{'a': [1, 2]}", "<html>", "https://a.b/c?d=e", "```", "--", "...", "!?", "_", "$", "/",
    "\\n",
    "na\u00efve", "\u00fcber", "\u4f60\u597d\u4e16\u754c", "\u3002", "\u3053\u3093\u306b\u3061\u306f", "\uc548\ub155",
    "\u0441\u043b\u043e\u0432\u043e", "\u0645\u0631\u062d\u0628\u0627", "\u05e9\u05dc\u05d5\u05dd",
    "\u0939\u093f\u0928\u094d\u0926\u0940", "\u0e44\u0e17\u0e22", "e\u0301", "\u1e9e", "\u017f", "'\u017f", "\u212a", "\u01c5",
    "\u02b0", "\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "\u200d", "\ufeff",
    "\u2019s", "\u2014", "\u00ab", "\U00020000", "\U0001d7d8", "\u0378", "\U0001fadc", "\ufffd", "\ue000",
    "<|im_end|>", "<|im_start|>", "<|", "|>", "<tool>", "<tool_call>", "<to", "im_end",
]  # fmt: skip


def random_texts(count, seed=0):
    draw = random.Random(seed)
    texts = ["".join(draw.choice(PIECES) for _ in range(draw.randrange(1, 30))) for _ in range(count)]
    every = "".join(chr(draw.randrange(0x20, 0x3000)) for _ in range(300))
    return [*texts, *PIECES, every, "a" * 500, " " * 300, "ab1 " * 100]


def byte_level(form):
    """A BPE of the form, with special tokens and two that are not: one of them begins as the other."""
    pre, normalizer = FORMS[form]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre(), decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<pad>", "<|im_start|>", "<|im_end|>", "<bos>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(random_texts(200, seed=1), trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("<tool_call>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>", bos_token="<bos>")


def in_python():
    """Of transformers, without the tokenizers library."""
    tokens: list[Any] = [AddedToken(text, special=True) for text in ("<pad>", "<|im_end|>", "<|im_start|>", "<unk>")]
    pad, end, start, unknown = tokens
    made = ByT5Tokenizer(extra_ids=0, eos_token=end, pad_token=pad, unk_token=unknown)
    made.add_tokens([start], special_tokens=True)
    return made


def made(folder: Path, form, template="chatml") -> Chat:
    tokenizer = in_python() if form == "python" else byte_level(form)
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    tokenizer.save_pretrained(folder)
    return Chat(folder)


@pytest.fixture(scope="module", params=[*FORMS, "python"])
def chat(tmp_path_factory, request):
    return made(tmp_path_factory.mktemp("tokenizer"), request.param)


def test_ids_are_those_of_each_text_alone(chat):
    pieces = [Piece(text, plain, False, False) for text in random_texts(150) for plain in (False, True)]
    found = chat.bulk_ids(pieces)
    for piece in pieces:
        assert found[piece] == chat.text_ids(piece.text, piece.plain), piece
    assert chat.bulk_ids([]) == {}


def conversations(count):
    """Of one to three questions, some cut off, some with text that looks like control tokens of others."""
    draw, texts = random.Random(5), [text for text in random_texts(200, seed=3) if "<|im_" not in text]
    for number in range(count):
        messages = [{"role": "system", "content": draw.choice(texts)}] * (number % 2)
        for _ in range(1 + number % 3):
            messages += [{"role": "user", "content": draw.choice(texts)}, {"role": "assistant", "content": draw.choice(texts)}]
        if number % 5 == 0:
            messages[-1] = {**messages[-1], "finish_reason": "length"}
        yield {"messages": messages}


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_documents_in_bulk_are_those_of_the_chat(chat, train_on):
    rows, expected = list(conversations(45)), []
    for row in rows:
        ids, mask = chat.training(row["messages"], train_on)
        end = len(mask) - mask[::-1].index(True) if True in mask else len(mask)
        expected.append((ids[:end], mask[:end]))
    assert unpacked(tokenized(rows, Conversations(train_on), chat, schema(chat.highest_id))) == expected


def test_pairs_in_bulk_are_those_of_the_chat(chat):
    draw, texts = random.Random(2), random_texts(100, seed=9)
    asked = [text for text in texts if "<|im_" not in text]
    rows = [
        {
            "messages": [{"role": "user", "content": draw.choice(asked)}], "chosen": draw.choice(texts), "rejected": draw.choice(texts),
            "ended": (True, draw.random() < 0.5),
        }
        for _ in range(30)
    ]  # fmt: skip
    expected = []
    for row in rows:
        for side, ended in zip(("chosen", "rejected"), row["ended"], strict=True):
            prompt, answer = chat.answer(row["messages"], row[side], ended=ended)
            expected.append((prompt + answer, [False] * len(prompt) + [True] * len(answer)))
    assert unpacked(tokenized(rows, Pairs("all"), chat, schema(1 << 17))) == expected


def unpacked(batch):
    documents = []
    for row in batch.to_pylist():
        mask = np.unpackbits(np.frombuffer(row["trained_bits"], np.uint8), count=len(row["ids"])).astype(bool).tolist()
        assert sum(mask[1:]) == row["num_trained"]
        documents.append((row["ids"], mask))
    return documents


def test_the_probe_conversation_is_unharmed(tmp_path):
    """Under each template that this tokenizer can bear."""
    for template in ("chatml", "tulu"):
        chat = made(tmp_path / template, "qwen2", template)
        (found,) = unpacked(tokenized([{"messages": PROBE}], Conversations("all"), chat, schema(chat.highest_id)))
        assert found[0] == chat.training(PROBE, "all")[0]
