"""Give a model a chat template, with tokens for the ends of turns and for padding.

Transformers treats every occurrence of the padding token as padding: its embedding gets no gradient, `generate` without a mask ignores
it, and scores are read before it. So neither the end of a turn nor BOS can be padding.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import GenerationConfig

from pedigree.configs.base.frozen import canonical_json
from pedigree.configs.rows.source_models import OWN, SourceModel, named, shipped_templates, template_text
from pedigree.data.chat.chat_template import CONTROL, PROBE, end_of_turn, variables_of
from pedigree.data.sources.model_folders import choice
from pedigree.stages.job.failures import StageError

ADDED = "<|pad|>"
NAMED = ("<|endoftext|>", "<|finetune_right_pad_id|>", "<|pad|>", "<pad>", "[PAD]", "<PAD>", "<|PAD|>", "<|padding|>", "<｜▁pad▁｜>")
"""Padding tokens of Llama 3, Phi, Gemma, GPT-NeoX, DeepSeek and others, and the end of a pretraining document, which no conversation
contains."""
RESERVED = re.compile(r"<\|?(?:reserved_special_token|reserved_token|reserved|extra|dummy|unused|special)_?\d+\|?>|\[control_\d+\]", re.I)
"""Unused tokens, reserved by vocabularies."""
UNKNOWN = "\U0010fffd"
"""A character in no vocabulary, for which a tokenizer without bytes writes its unknown token."""


def chat_template(config: SourceModel, tokenizer: Any, own: str | None, files: Mapping[str, Path]) -> str:
    """The configured template, which may be among the stage's source files, with the defaults of its arguments and, with `add_bos`, the BOS
    token prepended.

    Raises:
        StageError: the model has no template, the file is no template, the template ignores an argument, or with `add_bos` the tokenizer
            has no BOS token or the template already begins with it.
    """
    try:
        template = own if config.chat_template == OWN else template_text(config.chat_template, files)
    except ValueError as error:
        raise StageError(str(error)) from error
    if not template:
        raise StageError(f"{named(config.source)}: {choice()}")
    known = variables_of(template) if config.template_arguments else set()
    unread = sorted(config.template_arguments.keys() - known)
    if unread:
        reads = ", ".join(sorted(known)) or "none"
        raise StageError(f"template_arguments: the template {config.chat_template} does not use {', '.join(unread)} (it uses {reads})")
    defaults = "".join(default_of(name, value) for name, value in sorted(config.template_arguments.items()))
    return defaults + (with_bos(config, tokenizer, template) if config.add_bos else template)


def default_of(name: str, value: Any) -> str:
    """Jinja code that sets a template variable unless the caller does. JSON without null and NaN is valid Jinja."""
    return f"{{% if {name} is not defined %}}{{% set {name} = {canonical_json(value)} %}}{{% endif %}}"


def with_bos(config: SourceModel, tokenizer: Any, template: str) -> str:
    """The template with the BOS token prepended."""
    tokenizer.bos_token = tokenizer.bos_token or tokenizer.eos_token  # OLMo's tokenizer has one token for both
    if tokenizer.bos_token is None:
        raise StageError("add_bos is true, but the tokenizer has neither a BOS nor an EOS token: remove add_bos")
    if template.lstrip().startswith(("{{ bos_token", "{{- bos_token", f"{{{{ '{tokenizer.bos_token}'")):
        raise StageError(f"add_bos is true, but the template {config.chat_template} already begins with the BOS token: remove add_bos")
    return "{{ bos_token }}" + template


def refuse_words(tokenizer: Any, template: str, rows: int) -> None:
    """Refuse a model's own template if the control tokens that it writes are words to its tokenizer, or the model does not embed them.

    Markers of a template whose turns end with the EOS token may be words.
    """
    end = end_of_turn(template, special_tokens(tokenizer))
    if end is None:
        return
    text = tokenizer.apply_chat_template(PROBE, chat_template=template, tokenize=False)
    vocabulary = tokenizer.get_vocab()
    written = sorted({end, *CONTROL.findall(text)})
    read = {token: tokenizer(token, add_special_tokens=False)["input_ids"] for token in written}
    words = [token for token, ids in read.items() if ids != [vocabulary.get(token)] or ids[0] >= rows]
    if words:
        raise StageError(
            f"the model's own chat template writes {', '.join(words[:3])}, which its tokenizer does not have as a token or the model does "
            "not embed: one of them is another model's; restore its files, or set chat_template to one whose tokens are added, of "
            f"{', '.join(shipped_templates())}"
        )


def adopt(model: Any, tokenizer: Any, template: str, own: bool = False) -> list[str]:
    """Set a chat template, and the same end-of-turn and padding tokens in tokenizer, model and generation config.

    Nothing is added for the model's own template.

    Returns:
        the template's tokens, and the one for padding, that were added to the tokenizer; each is embedded as the mean of the others.
    """
    end = end_of_turn(template, special_tokens(tokenizer) if own else ())
    added = [] if end is None else add_tokens(model, tokenizer, sorted({end} if own else {end, *CONTROL.findall(template)}))
    tokenizer.eos_token = end or tokenizer.eos_token
    pad = padding(tokenizer, template, rows_of(model))
    if pad is None:
        pad = ADDED
        added += add_tokens(model, tokenizer, [pad])
    tokenizer.pad_token = pad
    tokenizer.chat_template = template
    model.config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sampling_of(model.generation_config),
    )
    return added


def add_tokens(model: Any, tokenizer: Any, tokens: list[str]) -> list[str]:
    """Add control tokens to tokenizer and model; return those that were missing."""
    vocabulary, known = tokenizer.get_vocab(), rows_of(model)
    lacking = [token for token in tokens if token not in vocabulary]
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens], special_tokens=True)
    ids = tokenizer.convert_tokens_to_ids(tokens)
    new = sorted({*tokenizer.convert_tokens_to_ids(lacking), *(range(known, len(tokenizer)) if max(ids, default=0) >= known else ())})
    if new and new[-1] >= known:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
        if embedding is not None and new:
            with torch.no_grad():
                embedding.weight[new] = embedding.weight[: min(known, len(vocabulary))].mean(dim=0)
    return lacking


def sampling_of(generation: GenerationConfig) -> dict[str, Any]:
    """Default sampling values of vLLM and transformers, in a form that transformers saves."""
    given = {name: value for name, value in generation.to_diff_dict().items() if value is not None}
    values = {name: given[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in given}
    if values.get("temperature") == 0:
        values = {}
    elif values or given.get("do_sample"):
        values["do_sample"] = True
    if "repetition_penalty" in given:
        values["repetition_penalty"] = given["repetition_penalty"]
    return values


def special_tokens(tokenizer: Any) -> list[str]:
    return [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]


def rows_of(model: Any) -> int:
    """Rows of the embedding."""
    return model.config.get_text_config().vocab_size


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
