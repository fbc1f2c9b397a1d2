"""Texts in bulk give the very ids that the tokenizer gives one by one, over tokenizers, templates, languages and oddities."""

import random
from pathlib import Path

import numpy as np
import pytest
from sweeps import nightly_after
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pedigree.configs.rows.source_models import TEMPLATES
from pedigree.data.artifacts import assets
from pedigree.data.chat import encoding
from pedigree.data.chat.chat import PROBE, Chat
from pedigree.data.chat.documents import Conversations, Pairs, tokenised
from pedigree.data.chat.encoding import Encoder, EncodingMismatch

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern):
    cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def digits():
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])


def gpt2():
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


FORMS = {
    "gpt2": (gpt2, None),
    "smollm2": (digits, None),
    "llama3": (lambda: split(LLAMA3), None),
    "qwen2": (lambda: split(QWEN2), normalizers.NFC),
    "o200k": (lambda: split(O200K), None),
}
OTHERS = {
    "no pattern": (lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), None),
    "two patterns": (lambda: pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"), digits()]), None),
    "small letters": (gpt2, normalizers.Lowercase),
}

U2 = np.dtype("<u2")
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
    return [*texts, *PIECES, *encoding.PROBES, every, "a" * 500, " " * 300, "ab1 " * 100]


def made(folder: Path, form, template="chatml") -> Chat:
    """A BPE of the form, with special tokens and two that are not: one of them begins as the other."""
    pre, normalizer = (FORMS | OTHERS)[form]
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
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>", bos_token="<bos>")
    fast.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    fast.save_pretrained(folder)
    return Chat(folder)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    known = {}

    def of(form):
        if form not in known:
            known[form] = made(tmp_path_factory.mktemp("tokenizer"), form)
        return known[form]

    return of


def refuse_own(*_):
    raise AssertionError("the tokenizer was asked")


@pytest.mark.parametrize("form", [*FORMS, *OTHERS])
@pytest.mark.parametrize("plain", [False, True])
def test_ids_are_the_tokenizers_own(chats, form, plain):
    chat = chats(form)
    encoder = Encoder(chat, U2)
    assert (encoder._words is not None) == (form in FORMS)
    texts = random_texts(150)
    found = encoder.encode((text, plain) for text in texts)
    for text in texts:
        assert list(found[text, plain]) == chat.text_ids(text, plain), repr(text)
    again = encoder.encode((text, plain) for text in texts)
    assert {key: list(ids) for key, ids in again.items()} == {key: list(ids) for key, ids in found.items()}


@pytest.mark.parametrize("form", FORMS)
def test_common_texts_are_cut_here_and_the_tokenizer_is_not_asked(chats, form, monkeypatch):
    encoder = Encoder(chats(form), U2)
    monkeypatch.setattr(encoder, "own", lambda texts, _: refuse_own() if texts else [])
    marked = "<|im_start|>user\nHi<|im_end|>"
    code = "def f(x):\n\treturn x"
    texts = ["What is 12 + 34?\n\n  It's 46.", code, "\u4f60\u597d\u3002 \u00fcber \u0441\u043b\u043e\u0432\u043e \U0001f600", marked]
    assert len(encoder.encode((text, False) for text in texts)) == 4


def test_a_character_that_unicode_did_not_know_goes_to_the_tokenizer(chats, monkeypatch):
    encoder, asked = Encoder(chats("llama3"), U2), []
    real = encoder.own
    monkeypatch.setattr(encoder, "own", lambda texts, plain: (asked.extend(texts), real(texts, plain))[1])
    encoder.encode([("known \u00fc", False), ("a \u0378 b", False)])
    assert asked == ["a \u0378 b"]


def test_what_would_be_normalised_goes_to_the_tokenizer(chats, monkeypatch):
    encoder, asked = Encoder(chats("qwen2"), U2), []
    real = encoder.own
    monkeypatch.setattr(encoder, "own", lambda texts, plain: (asked.extend(texts), real(texts, plain))[1])
    encoder.encode([("\u00e9", False), ("e\u0301", False)])
    assert asked == ["e\u0301"]


def test_a_wrong_pattern_is_found_out_before_it_is_used(chats, monkeypatch):
    """The one that broke 43 of 6,000 rows: where spaces stand before a digit that was cut out, they stand at an end."""
    monkeypatch.setattr(encoding, "GPT2_AFTER_DIGITS", encoding.GPT2.replace(r" ?\p{N}+", r"\p{N}"))
    assert Encoder(chats("smollm2"), U2)._words is None


def test_a_wrong_id_is_found_by_the_proof(chats, monkeypatch):
    encoder = Encoder(chats("gpt2"), U2)
    encoder.prove([("What is this?", True)])
    monkeypatch.setattr(type(encoder._words), "__missing__", lambda *_: b"\5\0")
    with pytest.raises(EncodingMismatch, match="Never seen"):
        encoder.prove([("Never seen", True)])


def test_the_cache_of_words_is_bounded(chats, monkeypatch):
    monkeypatch.setattr(encoding, "MOST_WORDS", 100)
    chat = chats("gpt2")
    encoder = Encoder(chat, U2)
    assert encoder._words is not None
    for number in range(40):
        text = " ".join(f"w{'x' * number}{letter}" for letter in "abcdefghijklmnopqrst")
        assert list(encoder.encode([(text, True)])[text, True]) == chat.text_ids(text, True)
        assert len(encoder._words) <= 100 + 20


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


@pytest.mark.parametrize("form", ["gpt2", "smollm2", "qwen2", "two patterns"])
@pytest.mark.parametrize("train_on", ["assistant", "last_turn", "all"])
def test_documents_in_bulk_are_those_of_the_chat(chats, form, train_on):
    chat, rows = chats(form), list(conversations(90))
    expected = []
    for row in rows:
        ids, mask = chat.training(row["messages"], train_on)
        end = len(mask) - mask[::-1].index(True) if True in mask else len(mask)
        expected.append((ids[:end], mask[:end]))
    assert unpacked(tokenised(rows, Conversations(train_on), Encoder(chat, U2))) == expected


def test_pairs_in_bulk_are_those_of_the_chat(chats):
    chat, draw = chats("llama3"), random.Random(2)
    texts = random_texts(100, seed=9)
    asked = [text for text in texts if "<|im_" not in text]
    rows = [
        {
            "messages": [{"role": "user", "content": draw.choice(asked)}], "chosen": draw.choice(texts), "rejected": draw.choice(texts),
            "ended": (True, draw.random() < 0.5),
        }
        for _ in range(60)
    ]  # fmt: skip
    expected = []
    for row in rows:
        for side, ended in zip(("chosen", "rejected"), row["ended"], strict=True):
            prompt, answer = chat.answer(row["messages"], row[side], ended=ended)
            expected.append((prompt + answer, [False] * len(prompt) + [True] * len(answer)))
    assert unpacked(tokenised(rows, Pairs("all"), Encoder(chat, np.dtype("<u4"))), "<u4") == expected


@pytest.mark.slow
@pytest.mark.parametrize("step", nightly_after(1, [61, 3]))
def test_every_character_of_the_basic_plane_is_told_right_or_left_to_the_tokenizer(step):
    """SmolLM2's own tokenizer."""
    from pedigree.stages.source_model.run import gguf_tokenizer

    tokenizer = gguf_tokenizer(assets.path("smollm2-135m-instruct"))
    tokenizer.chat_template = (TEMPLATES / "chatml.jinja").read_text()
    chat = Chat.__new__(Chat)
    chat.tokenizer, chat.eos_id = tokenizer, tokenizer.eos_token_id
    encoder = Encoder(chat, U2)
    assert encoder._words is not None
    codes = [*range(0x20, 0x250), *range(0x250, 0x10000, step)]
    texts = [f"a {chr(code)}b {chr(code)}{chr(code)}1 '{chr(code)}" for code in codes if not 0xD800 <= code < 0xE000]
    found = encoder.encode((text, True) for text in texts)
    own = encoder.own(texts, True)
    assert [list(found[text, True]) for text in texts] == [list(ids) for ids in own]


def unpacked(packed, dtype="<u2"):
    documents, place = [], 0
    for length, count, _ in packed.index_D3.tolist():
        size = np.dtype(dtype).itemsize
        ids = np.frombuffer(packed.data, dtype, length, place)
        bits = np.frombuffer(packed.data, np.uint8, -(-length // 8), place + length * size)
        mask = np.unpackbits(bits, count=length).astype(bool).tolist()
        assert sum(mask[1:]) == count
        documents.append((ids.tolist(), mask))
        place += -(-(length * size + len(bits)) // size) * size
    assert place == len(packed.data)
    return documents


def test_the_probe_conversation_is_unharmed(tmp_path):
    """Under each template that this tokenizer can bear."""
    for template in ("chatml", "tulu"):
        chat = made(tmp_path / template, "llama3", template)
        (found,) = unpacked(tokenised([{"messages": PROBE}], Conversations("all"), Encoder(chat, U2)))
        assert found[0] == chat.training(PROBE, "all")[0]
