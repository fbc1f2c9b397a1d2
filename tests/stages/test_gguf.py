"""The tokenizer that comes out of a GGUF file against llama.cpp's rules, by an implementation of its own."""

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from gguf import GGUFReader, GGUFWriter

from pedigree.data.artifacts import assets
from pedigree.data.chat.chat import Chat
from pedigree.stages.job.failures import StageError
from pedigree.stages.source_model.run import PRE_TOKENIZERS, gguf_tokenizer

FIRST, THEN = r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
"""llama.cpp, src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM: each cuts what the one before it left."""

SPLITS = {
    "What is 17 + 25?": ["What", " is", " ", "1", "7", " +", " ", "2", "5", "?"],
    "x =  42": ["x", " =", "  ", "4", "2"],
    "a\n\n1. b": ["a", "\n\n", "1", ".", " b"],
    "    return x1+10\n": ["   ", " return", " x", "1", "+", "1", "0", "\n"],
    "3.14e-5": ["3", ".", "1", "4", "e", "-", "5"],
    "isn't 2nd  ": ["isn", "'t", " ", "2", "nd", "  "],
    "x²½Ⅳ٣": ["x", "²", "½", "Ⅳ", "٣"],
    "\t\t7": ["\t\t", "7"],
}
"""Derived by hand: a number is a piece of its own, and white space before it stays together."""
CODE = "def f(a1, b=2):\n\n    # 3 lines\n\treturn [a1  * 10**6,   0x1F]  \n\n\n99 bottles\r\n  - 1\n  - 22\n"
TEXTS = [*SPLITS, CODE, "1,000,000 people  in 1984 \n 5", " 12", "\u00a07", "日本 2024年", "a " * 5 + "  9" * 5, "naïve café №5 🙂 100%"]


def cut(pattern: str, text: str) -> list[str]:
    pieces, cursor = [], 0
    for found in regex.finditer(pattern, text):
        pieces += [text[cursor : found.start()], found[0]]
        cursor = found.end()
    return [piece for piece in (*pieces, text[cursor:]) if piece]


@pytest.mark.parametrize("text", SPLITS)
def test_a_text_is_cut_as_it_was_when_the_merges_were_learned(text):
    assert [piece for outer in cut(FIRST, text) for piece in cut(THEN, outer)] == SPLITS[text], "the oracle and the hand disagree"
    pieces = [text[start:end] for _, (start, end) in PRE_TOKENIZERS["smollm"]().pre_tokenize_str(text)]
    assert pieces == SPLITS[text]


@cache
def fields() -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    """(ids of the vocabulary, ranks of the merges) of the packaged model."""
    reader = GGUFReader(assets.path("smollm2-135m-instruct"))
    tokens, merges = (reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    return {token: place for place, token in enumerate(tokens)}, {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}


def byte_letters() -> dict[int, str]:
    """GPT-2's letter for each byte (Radford et al. 2019, encoder.py)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + place) for place, byte in enumerate(others)}


def reference_ids(text: str) -> list[int]:
    ids, ranks = fields()
    found = []
    for piece in (piece for outer in cut(FIRST, text) for piece in cut(THEN, outer)):
        parts = [byte_letters()[byte] for byte in piece.encode()]
        while len(parts) > 1:
            rank, place = min((ranks.get(pair, 1 << 30), place) for place, pair in enumerate(pairwise(parts)))
            if rank == 1 << 30:
                break
            parts[place : place + 2] = ["".join(parts[place : place + 2])]
        found += [ids[part] for part in parts]
    return found


@pytest.mark.slow
def test_the_packaged_tokenizer_gives_the_ids_of_the_original_also_once_it_is_stored(tmp_path):
    tokenizer = gguf_tokenizer(assets.path("smollm2-135m-instruct"))
    tokenizer.chat_template = (Path(__file__).parents[2] / "configs" / "templates" / "chatml.jinja").read_text()
    tokenizer.save_pretrained(tmp_path)
    stored = Chat(tmp_path).tokenizer
    for text in TEXTS:
        expected = reference_ids(text)
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == expected, text
        assert stored(text, add_special_tokens=False)["input_ids"] == expected, text
        assert stored.decode(expected) == text


@pytest.mark.parametrize("pre", ["llama-bpe", "smollm2", None])
def test_a_tokenizer_that_cuts_texts_otherwise_is_refused_by_name(tmp_path, pre):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(StageError, match=rf"m\.gguf has tokenizer\.ggml\.pre {pre!r}, which is not supported \(supported: smollm\)"):
        gguf_tokenizer(tmp_path / "m.gguf")
