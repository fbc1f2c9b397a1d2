"""Choose a padding token that no text contains.

Transformers takes every padding token for padding: its embedding gets no gradient, `generate` without a mask does not see it, and a score
is read before it. So neither the end of a turn nor BOS can be padding.
"""

import re
from collections.abc import Iterator
from typing import Any

ADDED = "<|pad|>"
NAMED = ("<|endoftext|>", "<|finetune_right_pad_id|>", "<|pad|>", "<pad>", "[PAD]", "<PAD>", "<|PAD|>", "<|padding|>", "<｜▁pad▁｜>")
"""Tokens for padding, and the end of a pretraining document, which no conversation contains. Those of Llama 3, Phi, Gemma, GPT-NeoX,
DeepSeek and others."""
RESERVED = re.compile(r"<\|?(?:reserved_special_token|reserved_token|reserved|extra|dummy|unused|special)_?\d+\|?>|\[control_\d+\]", re.I)
"""Tokens that vocabularies hold for later use."""
UNKNOWN = "\U0010fffd"
"""A character that no vocabulary has: a tokenizer without bytes writes its unknown token for it."""


def padding(tokenizer: Any, template: str, rows: int) -> str | None:
    """The tokenizer's own padding token, or another, that is in no text and within the `rows` of the embedding; None if there is none."""
    in_texts = {tokenizer.eos_token, tokenizer.bos_token}
    unknown = tokenizer.unk_token
    if unknown is not None and tokenizer.unk_token_id in tokenizer(UNKNOWN, add_special_tokens=False)["input_ids"]:
        in_texts.add(unknown)
    candidates = (token for token in _candidates(tokenizer) if tokenizer.convert_tokens_to_ids(token) < rows)
    return next((token for token in candidates if token not in in_texts and token not in template), None)


def _candidates(tokenizer: Any) -> Iterator[str]:
    """Tokens of the vocabulary, in order of preference."""
    vocabulary = tokenizer.get_vocab()
    yield from (token for token in (tokenizer.pad_token, *NAMED, tokenizer.unk_token) if token in vocabulary)
    yield from sorted(filter(RESERVED.fullmatch, vocabulary), key=vocabulary.__getitem__)
