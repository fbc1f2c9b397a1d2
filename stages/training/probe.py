"""Check before training or scoring that a model computes the same as transformers does for each document alone.

Log-probabilities (scores, values) of a document must not depend on its neighbors in a row, nor on whether its prompt is shared, and must
equal those of the model's own forward with transformers' eager attention. Otherwise the model is rejected, with the settings to use
instead.

bf16 rounds a whole model's log-probabilities by more than most faults change them. So ours o is compared with the truth t, the model's own
forward in fp32 with the same weights, next to what bf16 alone does, the own forward e in the model's dtype; and layer by layer: each layer
of o and e gets as its input what the truth's previous layer gave, so that an error is that of one layer.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.language.execution import Numerics
from pedigree.stages.core.batches import Document, Unit, collate, document
from pedigree.stages.job.failures import MACHINE, is_collective, is_memory, lasting
from pedigree.stages.training.adapters import adapted_layers
from pedigree.stages.training.logprobs import PolicyModule, RewardModule, ValueModule, body_of

Module = PolicyModule | RewardModule
RATIO = 1.25
"""Accepted mean |o - t| over mean |e - t|. On CPUs it is at most 1.03 for all parts of SmolLM2-135M and of the tiny models of
docs/architectures.md, and 1.10 for a layer of experts; a scale of the scores that is off by 2 % gives 1.3 to 3.2 in some attention, by 5 %
2.9 to 7.3, and an answer one position late 7 to 17."""
TOKEN_RATIO = 3.0
"""The same for the tokens with the largest errors, each a mean over a hidden state. A single token of the prompt that the first token of an
answer does not see gives 10 and more, and changes the mean over all tokens by less than rounding does."""
DEVIATIONS = 4.0
"""Standard errors by which it may be larger. ln(mean |x| / mean |y|) over n independent normal errors has a standard deviation of
√(2 (π/2 - 1) / n), about 1/√n."""
ROUNDING = 1e-4
"""Accepted in addition, relative to the mean size: far above rounding in fp32, far below any of these effects."""
PAST_WINDOW = 9
"""Tokens of the probed document that do not see its beginning."""
LONGEST_WINDOW = 8192
"""Maximum tokens of a probed document."""
PROBED = 64
"""Minimum tokens of the probed documents, if the model's context allows: a mean over a few tokens is dominated by one."""
RESULT = "as a whole"
INSTEAD = "set `packing: false` and `attention: eager` in the execution profile"
_OWN = nn.Module.__getattr__
_ONE_AT_A_TIME = threading.Lock()


def probe(module: Module, numerics: Numerics, device: torch.device) -> None:
    """Check a model's results in six forward passes over a few hundred tokens: in fp32 five; with experts three less; with a window of
    hundreds of tokens three more.

    Raises:
        PedigreeError: documents attend to each other, a shared prompt changes the result, transformers' result differs, or the model
            cannot be computed in this form at all.
    """
    numerics = numerics.model_copy(update={"sequence_parallel": 1})  # each rank computes the few tokens alone
    try:
        _refuse_rounded_frequencies(module)
        _refuse_leaks(module, numerics, device)
        for case in cases(_config(module)):
            _refuse_strangers(module, case, numerics, device)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:  # the model or a kernel does not support it
        if is_memory(error) or is_collective(error) or lasting(error) == MACHINE or isinstance(error, torch.AcceleratorError):
            raise
        raise PedigreeError(f"{_form(module, numerics)} cannot be computed ({type(error).__name__}: {error}): {INSTEAD}") from error


def _refuse_rounded_frequencies(module: Module) -> None:
    """Compare rotary frequencies with those of the model's config. In bf16 they rotate late tokens by wrong angles, in all passes alike."""
    for name, part in module.model.named_modules():
        rounded = {key: buffer for key, buffer in part.named_buffers(recurse=False) if key.endswith("inv_freq")}
        fresh = dict(type(part)(part.config).named_buffers()) if rounded and hasattr(part, "config") else {}
        for key, exact in fresh.items():
            if key in rounded and not torch.allclose(rounded[key].cpu().float(), exact, rtol=ROUNDING, atol=0):
                raise PedigreeError(
                    f"{name}.{key} of {type(module.model).__name__} differs from its config's by more than {ROUNDING:g}: load the model in "
                    "fp32 and round only its parameters"
                )


def _refuse_leaks(module: Module, numerics: Numerics, device: torch.device) -> None:
    """Put one document after two others of equal lengths, the second with the same prompt, twice: its log-probabilities (score, values)
    must be bitwise equal.

    Shapes are equal, so rounding is too, in any dtype: any difference is a leak. Experts are an exception: the number of tokens per
    matrix product depends on all tokens, and so does rounding; there the comparison with the truth must do.
    """
    config = _config(module)
    if has_experts(config):
        return
    probed = _made_up(config.vocab_size, (5, 6), (11, 9))
    rows = [[(_made_up(config.vocab_size, (f, 4), (f, 7)),), (_made_up(config.vocab_size, (5, 6), (f, 7)), probed)] for f in (7, 13)]
    _result(module, rows[0], numerics, device)  # on a CPU, torch rounds some cosines otherwise in the first pass of one process of six
    first, second = (_result(module, units, numerics, device)[-1 if _is_scored(module) else -9 :] for units in rows)
    if not torch.equal(first, second):
        raise PedigreeError(
            "packed documents attend to each other: those before a document change its log-probs or scores by "
            f"{float((first - second).abs().max()):.3g}; set `packing: false` in the execution profile, or another attention implementation"
        )


@dataclass(frozen=True)
class Case:
    """Documents that the model computes alone, and our units of the same documents."""

    ids_RT: Tensor
    """The documents, of equal length."""
    units: list[Unit]
    """Beginnings of the documents; what a causal model computes for a beginning does not depend on the rest."""
    places: list[Unit]
    """`units` with the flat place in `ids_RT` of each token in place of its id."""

    @property
    def compared_from(self) -> int:
        """First token of the documents whose hidden states are compared: those of thousands of tokens would need gigabytes."""
        length = self.ids_RT.shape[1]
        return length - PROBED if length > 4 * PROBED else 0


def cases(config: Any) -> list[Case]:
    """Three answers of different lengths to one prompt and a document with another; if the window is long, one document that exceeds it.

    All are longer than the model's shortest window, where its context allows.
    """
    longest = _probed_length(config)
    length = longest if longest <= 4 * PROBED else PROBED
    answers = [_made_up(config.vocab_size, (5, length // 4), (factor, length - length // 4)) for factor in (11, 17, 23)]
    other = _made_up(config.vocab_size, (3, 1), (7, length - 1))
    made = [_case([*answers, other], [[(0, length - length // 4), (1, length), (2, length - length // 8)], [(3, length - 1)]])]
    if longest > length:
        made.append(_case([_made_up(config.vocab_size, (5, longest - PROBED), (11, PROBED))], [[(0, longest), (0, longest - PAST_WINDOW)]]))
    return made


def _case(rows: Sequence[Document], units: Sequence[Sequence[tuple[int, int]]]) -> Case:
    """`units` are (row, length); the documents of a unit share the prompt, whose places are those of the unit's first row."""
    places: list[Unit] = []
    for unit in units:
        numbered = []
        for row, length in unit:
            ids = np.arange(len(rows[row])) + row * len(rows[row])
            ids[: rows[row].prompt_length] += (unit[0][0] - row) * len(rows[row])
            numbered.append(replace(rows[row], ids=ids).cut(length))
        places.append(tuple(numbered))
    ids_RT = torch.from_numpy(np.stack([row.ids for row in rows]))
    return Case(ids_RT, [tuple(rows[row].cut(length) for row, length in unit) for unit in units], places)


@torch.no_grad()
def _refuse_strangers(module: Module, case: Case, numerics: Numerics, device: torch.device) -> None:
    """Compare layers, their parts and the result with the model's own forward with eager attention, which supports every feature."""
    model, dtype, ids_RT = module.model, next(module.parameters()).dtype, case.ids_RT.to(device)
    numbered = collate(case.places, numerics, -1).to(device)
    flat = numbered.input_ids_BT.flatten()
    rows, every = (flat >= 0).nonzero()[:, 0], torch.arange(ids_RT.numel(), device=device)
    places = flat[rows]
    late = places % ids_RT.shape[1] >= case.compared_from
    asked = flat[numbered.last_D] if _is_scored(module) else numbered.targets_N - 1

    def own(handed: dict[str, Tensor] | None) -> Guide:
        with _own_code(model), Guide(model, dtype, every, every, places[late], handed) as guide:
            guide.noted[RESULT] = _own_result(module, ids_RT).flatten()[asked]
        return guide

    with in_fp32(module):
        truth = own(None)
    exact = truth.noted if dtype == torch.float32 else own(truth.handed).noted
    with _noting_calls(model) as silent, Guide(model, dtype, rows, places, rows[late], truth.handed) as ours:
        ours.noted[RESULT] = _result(module, case.units, numerics, device)
    routed = has_experts(_config(module))
    if silent and not routed:  # an expert may get no tokens
        raise PedigreeError(
            f"{type(model).__name__} uses the weights of {', '.join(sorted(silent))} without their adapters, which would have no "
            "effect: set lora.targets to other layers"
        )
    for name, found in ours.noted.items():
        _refuse_difference(f"{_form(module, numerics)} {name}", found, exact[name], truth.noted[name], routed and name in truth.handed)


def _refuse_difference(what: str, ours: Tensor, own: Tensor, truth: Tensor, routed: bool) -> None:
    """Compare two results with the truth, by the mean over tokens; for a layer of experts by the median, because a router close to a tie
    chooses others for a few tokens."""
    middle = torch.median if routed else torch.mean
    off_n, own_off_n = ((given - truth).abs().view(len(truth), -1).mean(-1) for given in (ours, own))
    off, own_off, size = float(middle(off_n)), float(middle(own_off_n)), float(truth.abs().mean())
    most, own_most = float(off_n.max()), float(own_off_n.max())
    close = off <= RATIO * math.exp(DEVIATIONS / math.sqrt(len(truth))) * own_off + ROUNDING * size  # False for NaN
    if close and (routed or truth.ndim == 1 or most <= TOKEN_RATIO * own_most + ROUNDING * float(truth.abs().mean(-1).max())):
        return
    raise PedigreeError(
        f"{what} differs by {off:.3g} on average and {most:.3g} at most (mean size {size:.3g}) from the model's own forward with eager "
        f"attention in fp32, which the model's dtype alone changes by {own_off:.3g} and {own_most:.3g}: {INSTEAD}"
    )


@contextmanager
def in_fp32(module: nn.Module) -> Iterator[None]:
    """Make a forward pass in the block, by the module's own code, compute in fp32 with the weights' values.

    A parameter is widened each time a module's code reads it, and the copy is freed after use: the memory is that of the largest single
    weight, not of a second model. Weights that ZeRO-3 partitions are read while gathered, as without the block, so the block also works
    inside DeepSpeed's engine. Embeddings, and all that follows from them, are fp32 then; buffers stay as they are. The model keeps no
    graph: use it without gradients. Of several threads one at a time is in such a block, because it changes torch's class of modules.
    """
    own, inside = _OWN, {id(part) for part in module.modules()}

    def widened(part: nn.Module, name: str) -> Any:
        found = own(part, name)
        return found.detach().float() if isinstance(found, nn.Parameter) and found.is_floating_point() and id(part) in inside else found

    with _ONE_AT_A_TIME:
        nn.Module.__getattr__ = widened  # pyright: ignore[reportAttributeAccessIssue]
        try:
            with torch.no_grad():
                yield
        finally:
            nn.Module.__getattr__ = own  # pyright: ignore[reportAttributeAccessIssue]


class Guide:
    """In its block, notes what a model's layers and their parts give, and hands each layer's truth to the next one in its place."""

    def __init__(
        self, model: Any, dtype: torch.dtype, rows_N: Tensor, places_N: Tensor, compared_n: Tensor, handed: dict[str, Tensor] | None
    ) -> None:
        """`rows_N`: flat rows of the pass; `places_N`: their places in the case; `compared_n`: rows to note; `handed`: of the truth."""
        self.noted: dict[str, Tensor] = {}
        """What each part and the whole gave, in fp32."""
        self.handed: dict[str, Tensor] = {} if handed is None else handed
        """By layer, in the model's dtype, for each place in the case."""
        self._model, self._dtype, self._is_truth = model, dtype, handed is None
        self._rows_N, self._places_N, self._compared_n = rows_N, places_N, compared_n
        self._hooks: list[Any] = []

    def __enter__(self) -> "Guide":
        for name, part, is_layer in _parts(self._model):
            self._hooks.append(part.register_forward_hook(partial(self._led if is_layer else self._note, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        self.noted[name] = _first(output).flatten(0, -2)[self._compared_n].float()

    def _led(self, name: str, part: nn.Module, given: Any, output: Any) -> Any:
        self._note(name, part, given, output)
        flat = _first(output).flatten(0, -2)
        if self._is_truth:
            self.handed[name] = flat.to(self._dtype)
        truth = self.handed[name][self._places_N].to(flat.dtype)
        led = flat.index_copy(0, self._rows_N, truth).view_as(_first(output))
        return led if isinstance(output, Tensor) else (led, *output[1:])


def _first(output: Any) -> Tensor:
    """The hidden states that a part returns, alone or with others."""
    return output if isinstance(output, Tensor) else output[0]


def _parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module, bool]]:
    """(name, part, whether it is a layer) for layers and what they consist of: norms, attention, MLP, or whatever mixes tokens.

    Experts are left to their layer. Nothing is noted inside a layer that is compiled as a whole.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    for name, part in module.named_children():
        if isinstance(part, GradientCheckpointingLayer):
            yield prefix + name, part, True
            for inner, piece in part.named_children() if "forward" not in vars(part) else ():
                if not _has_expert(piece) and next(piece.parameters(), None) is not None:
                    yield f"{prefix}{name}.{inner}", piece, False
        else:
            yield from _parts(part, f"{prefix}{name}.")


def _has_expert(part: nn.Module) -> bool:
    return any("Expert" in type(inner).__name__ for inner in part.modules())


def _probed_length(config: Any) -> int:
    """Length of a document for which an ignored window changes the result."""
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    shortest = min((window for window in windows if window), default=0)
    most = getattr(config, "max_position_embeddings", None) or LONGEST_WINDOW
    if shortest + PAST_WINDOW > min(most, LONGEST_WINDOW):
        return min(PROBED, most)
    return max(shortest + PAST_WINDOW, min(PROBED, most))


def _own_result(module: Module, ids_RT: Tensor) -> Tensor:
    """Result of the model's own forward, shape (R, T): at each token log π of the next, its value, or the score of what ends there."""
    kind = module if isinstance(module, PolicyModule | RewardModule) else module.module  # inside of DeepSpeed's engine
    if isinstance(kind, PolicyModule):
        logps_RTV = module.model(input_ids=ids_RT, use_cache=False).logits.float().log_softmax(-1)
        return logps_RTV.gather(-1, ids_RT.roll(-1, 1)[..., None])[..., 0]
    hidden_RTH = body_of(module.model)[1](input_ids=ids_RT, use_cache=False).last_hidden_state
    return module.model.score(hidden_RTH)[..., 0]


def _is_scored(module: Module) -> bool:
    """Whether the module gives a score per document instead of a value per trained token."""
    kind = module if isinstance(module, PolicyModule | RewardModule) else module.module
    return isinstance(kind, RewardModule) and not isinstance(kind, ValueModule)


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
def _own_code(model: Any) -> Iterator[None]:
    """Eager attention and no kernel that `fuse` has installed."""
    before, fused = model.config._attn_implementation, [part for part in model.modules() if "forward" in vars(part)]
    forwards = [vars(part).pop("forward") for part in fused]
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        for part, forward in zip(fused, forwards, strict=True):
            part.forward = forward


def _result(module: Module, units: Sequence[Unit], numerics: Numerics, device: torch.device) -> Tensor:
    """The module's result: a score per document, or a value per trained token."""
    with torch.no_grad():
        found = module(collate(units, numerics, 0).to(device))
    return found if isinstance(found, Tensor) else found[0]


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


def _form(module: Module, numerics: Numerics) -> str:
    return f"{type(module.model).__name__}, {'packed' if numerics.packing else 'padded'} with attention {numerics.attention},"
