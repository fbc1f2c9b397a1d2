"""What a model must prove before a stage trains or scores with it: that it computes here what transformers computes of each document alone.

Log-probabilities (scores, values) of a document must not depend on what lies beside it, nor on whether its prompt is shared, and must
be those of the model's own forward under transformers' plain attention. An architecture for which one of these does not hold is
refused by name, with what to set instead.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from configs.base.problems import PedigreeError
from configs.language.execution import Numerics
from stages.core.batches import Document, Unit, collate, document
from stages.training.logprobs import PolicyModule, RewardModule, ValueModule, body_of

Module = PolicyModule | RewardModule
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Relative to the largest log-probability: far above rounding errors, far below the effect of a prompt that is not attended to."""
MEAN_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.03}
"""The same for the mean over a document, relative to the mean log-probability: other kernels round every token otherwise."""
PAST_WINDOW = 9
"""Tokens of the probed document that do not see its beginning."""
LONGEST_WINDOW = 8192
"""No longer document is probed."""
PROBED = 64
"""Fewest tokens of the probed document, where the model takes so many: a mean over a handful is one token's."""
INSTEAD = "set `packing: false` and `attention: eager` in the execution profile"


class ProbeError(PedigreeError):
    """The model does not compute here what it is; the message says what to set instead."""


class IsolationError(ProbeError):
    """Packed documents of this model attend to each other."""


def probe(module: Module, numerics: Numerics, device: torch.device) -> None:
    """Refuses a model whose results are not its own.

    Raises:
        ProbeError: documents attend to each other, a shared prompt changes the result, transformers computes something else, or
            the model cannot be computed in this form at all.
    """
    try:
        _refuse_leaks(module, numerics, device)
        _refuse_strangers(module, numerics, device)
    except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError) as error:  # of a model that is not made for it
        raise ProbeError(f"{_form(module, numerics)} cannot be computed ({type(error).__name__}: {error}): {INSTEAD}") from error


def _refuse_leaks(module: Module, numerics: Numerics, device: torch.device) -> None:
    """Packs one document behind two others of equal length: its log-probabilities (score, values) must be the same, bit for bit.

    Shapes are equal, so rounding is too, whatever the dtype: any difference is a leak. (Experts are an exception: how many tokens each
    multiplies at once depends on all tokens, so rounding does too.) The same holds for another answer to the same prompt; and sharing
    the prompt must leave the results as they are without sharing, up to rounding.
    """
    vocabulary = _config(module).vocab_size
    probed = _made_up(vocabulary, (5, 6), (11, 9))
    others = [_made_up(vocabulary, (factor, 4), (factor, 7)) for factor in (7, 13)]
    siblings = [_made_up(vocabulary, (5, 6), (factor, 7)) for factor in (7, 13)]
    between = [_last(module, [(other,), (probed,)], 9, numerics, device) for other in others]
    shared = [_last(module, [(sibling, probed)], 9, numerics, device) for sibling in siblings]
    for found, what in ((between, "what stands before a document"), (shared, "another answer to its prompt")):
        gap = float((found[0] - found[1]).abs().max())
        if gap != 0 and not (has_experts(_config(module)) and _is_rounding(module, found[0], found[1])):
            raise IsolationError(
                f"packed documents attend to each other: {what} changes the log-probs or scores of a document by {gap:.3g}; "
                "set `packing: false` in the execution profile, or another attention implementation"
            )
    gap, rounding = float((shared[0] - between[0]).abs().max()), ROUNDING[_dtype(module)]
    if gap > rounding * max(1.0, float(between[0].abs().max())):
        raise IsolationError(
            f"a shared prompt changes the log-probs or scores of its answers by {gap:.3g}: set `attention: sdpa` in the execution profile"
        )


def _refuse_strangers(module: Module, numerics: Numerics, device: torch.device) -> None:
    """One document that is longer than the shortest window of the model, against transformers' eager attention, which has everything
    that a model may ask of it."""
    length = _probed_length(_config(module))
    doc = _made_up(_config(module).vocab_size, (5, 3), (11, length - 3))
    with _noting_calls(module.model) as silent:
        ours = _last(module, [(doc,)], length - 3, numerics, device)
    if silent and not has_experts(_config(module)):  # an expert may have had nothing to do
        raise ProbeError(
            f"{type(module.model).__name__} reads the weights of {', '.join(sorted(silent))} past their adapters, which would have no "
            "effect: name other layers in lora.targets"
        )
    theirs = _by_transformers(module, doc, device)[-len(ours) :]
    if not _is_rounding(module, ours, theirs):
        gap = float((ours - theirs).abs().mean())
        raise ProbeError(
            f"{_form(module, numerics)} is off by {gap:.3g} in the mean from the model's own forward with eager attention: {INSTEAD}"
        )


def _probed_length(config: Any) -> int:
    """Tokens of a document that would notice a window that is not kept."""
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    shortest = min((window for window in windows if window), default=0)
    most = getattr(config, "max_position_embeddings", None) or LONGEST_WINDOW
    if shortest + PAST_WINDOW > min(most, LONGEST_WINDOW):
        return min(PROBED, most)
    return max(shortest + PAST_WINDOW, min(PROBED, most))


def _by_transformers(module: Module, doc: Document, device: torch.device) -> Tensor:
    """What the model's own forward gives for each token but the first, or its one score. Shape (T - 1,) or (1,)."""
    ids = torch.from_numpy(doc.ids)[None].to(device)
    kind = module if isinstance(module, PolicyModule | RewardModule) else module.module  # inside of DeepSpeed's engine
    with torch.no_grad(), _eager(module.model):
        if isinstance(kind, PolicyModule):
            logits_TV = module.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            return logits_TV.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        hidden_1TH = body_of(module.model)[1](input_ids=ids, use_cache=False).last_hidden_state
        scores_T = module.model.score(hidden_1TH)[0, :, 0]
        return scores_T[:-1] if isinstance(kind, ValueModule) else scores_T[-1:]


@contextmanager
def _noting_calls(model: Any) -> Iterator[set[str]]:
    """Names of layers with adapters that have not been called by the end of the block."""
    layers = {name: part for name, part in model.named_modules() if hasattr(part, "lora_A")}
    silent = set(layers)
    hooks = [part.register_forward_hook(lambda *_, name=name: silent.discard(name)) for name, part in layers.items()]
    try:
        yield silent
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _last(module: Module, units: Sequence[Unit], trained: int, numerics: Numerics, device: torch.device) -> Tensor:
    """What the module gives for the last document: one score, or a number per trained token."""
    batch = collate(units, numerics, 0).to(device)
    with torch.no_grad():
        found = module(batch)
    values = found if isinstance(found, Tensor) else found[0]
    return values[-1:] if len(values) == batch.num_documents else values[-trained:]


def _made_up(vocabulary: int, *pieces: tuple[int, int]) -> Document:
    """Prompt and answer, each as (factor, length): ids that depend on nothing else.

    They come from the middle of the vocabulary. Rare and special tokens stand at its ends, where a trained model's activations can be
    so large that bf16 rounds log-probabilities by whole nats.
    """
    first, several = vocabulary // 3, max(1, vocabulary // 3)
    prompt, answer = (tuple(first + factor * place % several for place in range(length)) for factor, length in pieces)
    return document(prompt, answer)


def _config(module: Module) -> Any:
    """Of the part that reads text."""
    return module.model.config.get_text_config()


def has_experts(config: Any) -> bool:
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _is_rounding(module: Module, ours: Tensor, theirs: Tensor) -> bool:
    """Whether results of the same document differ no more than kernels do that round otherwise; NaN is none."""
    return float((ours - theirs).abs().mean()) <= MEAN_ROUNDING[_dtype(module)] * max(1.0, float(theirs.abs().mean()))


def _form(module: Module, numerics: Numerics) -> str:
    return f"{type(module.model).__name__}, {'packed' if numerics.packing else 'padded'} with attention {numerics.attention},"


def _dtype(module: Module) -> torch.dtype:
    return next(module.parameters()).dtype
