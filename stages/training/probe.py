"""Check before training or scoring that a model computes the same as transformers does for each document alone.

Log-probabilities (scores, values) of a document must not depend on its neighbors in a row, nor on whether its prompt is shared, and must
equal those of the model's own forward with transformers' eager attention. Otherwise the model is rejected, with the settings to use
instead.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.language.execution import Numerics
from pedigree.stages.core.batches import Document, Unit, collate, document
from pedigree.stages.training.adapters import adapted_layers
from pedigree.stages.training.logprobs import PolicyModule, RewardModule, ValueModule, body_of

Module = PolicyModule | RewardModule
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Tolerance relative to the largest log-probability: far above rounding errors, far below the effect of ignoring the prompt."""
MEAN_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.03}
"""Tolerance for the mean over a document, relative to the mean log-probability: different kernels round every token differently."""
PAST_WINDOW = 9
"""Tokens of the probed document that do not see its beginning."""
LONGEST_WINDOW = 8192
"""Maximum tokens of a probed document."""
PROBED = 64
"""Minimum tokens of the probed document, if the model's context allows: a mean over a few tokens is dominated by one."""
INSTEAD = "set `packing: false` and `attention: eager` in the execution profile"


def probe(module: Module, numerics: Numerics, device: torch.device) -> None:
    """Check a model's results.

    Raises:
        PedigreeError: documents attend to each other, a shared prompt changes the result, transformers' result differs, or the model
            cannot be computed in this form at all.
    """
    try:
        _refuse_leaks(module, numerics, device)
        _refuse_strangers(module, numerics, device)
    except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError) as error:  # the model does not support it
        raise PedigreeError(f"{_form(module, numerics)} cannot be computed ({type(error).__name__}: {error}): {INSTEAD}") from error


def _refuse_leaks(module: Module, numerics: Numerics, device: torch.device) -> None:
    """Pack one document after each of two others of equal length: its log-probabilities (score, values) must be bitwise equal.

    Shapes are equal, so rounding is too, in any dtype: any difference is a leak. (Experts are an exception: the number of tokens per
    matrix product depends on all tokens, and so does rounding.) The same holds for another answer to the same prompt. Sharing the prompt
    may change results only by rounding.
    """
    vocabulary = _config(module).vocab_size
    probed = _made_up(vocabulary, (5, 6), (11, 9))
    others = [_made_up(vocabulary, (factor, 4), (factor, 7)) for factor in (7, 13)]
    siblings = [_made_up(vocabulary, (5, 6), (factor, 7)) for factor in (7, 13)]
    between = [_last(module, [(other,), (probed,)], 9, numerics, device) for other in others]
    shared = [_last(module, [(sibling, probed)], 9, numerics, device) for sibling in siblings]
    for found, what in ((between, "the preceding document"), (shared, "another answer to its prompt")):
        gap = float((found[0] - found[1]).abs().max())
        if gap != 0 and not (has_experts(_config(module)) and _is_rounding(module, found[0], found[1])):
            raise PedigreeError(
                f"packed documents attend to each other: {what} changes the log-probs or scores of a document by {gap:.3g}; "
                "set `packing: false` in the execution profile, or another attention implementation"
            )
    gap, rounding = float((shared[0] - between[0]).abs().max()), ROUNDING[_dtype(module)]
    if gap > rounding * max(1.0, float(between[0].abs().max())):
        raise PedigreeError(
            f"a shared prompt changes the log-probs or scores of its answers by {gap:.3g}: set `attention: sdpa` in the execution profile"
        )


def _refuse_strangers(module: Module, numerics: Numerics, device: torch.device) -> None:
    """Compare a document longer than the model's shortest window with transformers' eager attention, which supports every feature."""
    length = _probed_length(_config(module))
    doc = _made_up(_config(module).vocab_size, (5, 3), (11, length - 3))
    with _noting_calls(module.model) as silent:
        ours = _last(module, [(doc,)], length - 3, numerics, device)
    if silent and not has_experts(_config(module)):  # an expert may get no tokens
        raise PedigreeError(
            f"{type(module.model).__name__} uses the weights of {', '.join(sorted(silent))} without their adapters, which would have no "
            "effect: set lora.targets to other layers"
        )
    theirs = _by_transformers(module, doc, device)[-len(ours) :]
    if not _is_rounding(module, ours, theirs):
        gap = float((ours - theirs).abs().mean())
        raise PedigreeError(
            f"{_form(module, numerics)} differs by {gap:.3g} on average from the model's own forward with eager attention: {INSTEAD}"
        )


def _probed_length(config: Any) -> int:
    """Length of a document for which an ignored window changes the result."""
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    shortest = min((window for window in windows if window), default=0)
    most = getattr(config, "max_position_embeddings", None) or LONGEST_WINDOW
    if shortest + PAST_WINDOW > min(most, LONGEST_WINDOW):
        return min(PROBED, most)
    return max(shortest + PAST_WINDOW, min(PROBED, most))


def _by_transformers(module: Module, doc: Document, device: torch.device) -> Tensor:
    """Result of the model's own forward: for each token but the first, shape (T - 1,), or one score, shape (1,)."""
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
    """Names of layers with adapters that were not called in the block."""
    layers = adapted_layers(model)
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
    """The module's result for the last document: one score, or a value per trained token."""
    batch = collate(units, numerics, 0).to(device)
    with torch.no_grad():
        found = module(batch)
    values = found if isinstance(found, Tensor) else found[0]
    return values[-1:] if len(values) == batch.num_documents else values[-trained:]


def _made_up(vocabulary: int, *pieces: tuple[int, int]) -> Document:
    """A deterministic document; prompt and answer are each given as (factor, length).

    The ids come from the middle of the vocabulary. Rare and special tokens are at its ends, where a trained model's activations can be
    so large that bf16 rounds log-probabilities by whole nats.
    """
    first, several = vocabulary // 3, max(1, vocabulary // 3)
    prompt, answer = (tuple(first + factor * place % several for place in range(length)) for factor, length in pieces)
    return document(prompt, answer)


def _config(module: Module) -> Any:
    """Config of the part that processes text."""
    return module.model.config.get_text_config()


def has_experts(config: Any) -> bool:
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _is_rounding(module: Module, ours: Tensor, theirs: Tensor) -> bool:
    """Whether results of the same document differ only by rounding; False for NaN."""
    return float((ours - theirs).abs().mean()) <= MEAN_ROUNDING[_dtype(module)] * max(1.0, float(theirs.abs().mean()))


def _form(module: Module, numerics: Numerics) -> str:
    return f"{type(module.model).__name__}, {'packed' if numerics.packing else 'padded'} with attention {numerics.attention},"


def _dtype(module: Module) -> torch.dtype:
    return next(module.parameters()).dtype
