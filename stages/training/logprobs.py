"""Log-probabilities and scores of documents, shared by all trainers.

Invariants, each with a test:
- packed documents do not attend to each other: attention `varlen` computes each one separately (`stages/training/attention.py`); for other
  attention, transformers isolates them by restarting `position_ids`, but only without an attention mask and without a KV cache
  (`use_cache=False`); `stages/training/probe.py` verifies it for each model before training;
- log-softmax is computed in fp32, and with head `fp32` the logits too: in bf16 they are off by 2e-2 per token, more than many DPO margins;
- logits are divided by the sampling temperature first;
- logits come from the model's own forward, which may scale or cap them or change hidden states before its head: it runs with
  the hidden states of trained positions in place of its body;
- logits exist only for trained positions, `chunk` tokens at a time, so that no tensor has the size of the batch times the vocabulary;
- a pass calls the output head once, for all chunks, and sums its gradient over them in fp32.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from pedigree.configs.base.frozen import HeadPrecision
from pedigree.stages.core.batches import MicroBatch
from pedigree.stages.training import attention
from pedigree.stages.training.sequence_parallel import OwnTokens, slice_of

EntropyGradient = tuple[Tensor, Tensor]
"""(entropies, their gradient over T), each of shape (n,)."""


@dataclass(frozen=True)
class RowKernels:
    """Forward and backward of the log-softmax over some rows of logits, shape (n, V), in fp32."""

    forward: Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor, Tensor]]
    """(logits, targets, T, whether to compute entropies) → (log π of the targets, log Σ exp(logits / T), entropies), each of shape (n,)."""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, float, EntropyGradient | None], Tensor]
    """(logits, targets, log Σ exp, gradient of log π over T, T, that of the entropies) → gradient of the logits, in their dtype."""


def rows_forward(logits_NV: Tensor, targets_N: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    scaled = _scaled(logits_NV, temperature)
    all_logps = scaled.log_softmax(-1)
    targets = targets_N[:, None]
    logps_N = all_logps.gather(-1, targets)[:, 0]
    normalizers_N = scaled.gather(-1, targets)[:, 0] - logps_N
    entropies_N = -all_logps.exp().mul_(all_logps).sum(-1) if entropy else torch.zeros_like(logps_N)
    return logps_N, normalizers_N, entropies_N


def rows_backward(
    logits_NV: Tensor,
    targets_N: Tensor,
    normalizers_N: Tensor,
    weights_N: Tensor,
    temperature: float,
    entropies: EntropyGradient | None = None,
) -> Tensor:
    """Gradient of Σ w log π_t + g H: w (1[v = target] - π_v) - g π_v (log π_v + H), over T."""
    logps, weight = _scaled(logits_NV, temperature).sub_(normalizers_N[:, None]), weights_N[:, None]
    factor = -weight
    if entropies is not None:
        entropies_N, gradients_N = entropies
        factor = (logps + entropies_N[:, None]).mul_(-gradients_N[:, None]).sub_(weight)
    return logps.exp_().mul_(factor).scatter_add_(-1, targets_N[:, None], weight).to(logits_NV.dtype)


def _scaled(logits_NV: Tensor, temperature: float) -> Tensor:
    """logits / T in fp32, in newly allocated memory."""
    scaled = logits_NV.to(torch.float32, copy=True)
    return scaled if temperature == 1 else scaled.div_(temperature)


class PolicyModule(nn.Module):
    """A causal language model that returns log-probabilities of trained tokens instead of logits."""

    model: Any

    def __init__(self, model: Any, chunk: int, head: HeadPrecision = "model") -> None:
        super().__init__()
        self.model = model
        self.chunk, self.head = chunk, head
        self.rows = RowKernels(rows_forward, rows_backward)
        output = head_of(model)[1]
        output.forward = MethodType(_head_or_work, output)

    def forward(
        self, batch: MicroBatch, temperature: float = 1.0, entropy: bool = False, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(log π(y_t), entropy of π(· | y_<t)) for each trained token, both fp32 of shape (N,).

        The entropy is zero unless requested, and has a gradient only with `entropy_gradient`.
        """
        seen = _body_outputs(self.model, batch)
        own = OwnTokens.of(batch, batch.places_N)
        hidden_NH, targets_N = seen.last_hidden_state.flatten(0, 1)[own.places], own.choose(batch.targets_N)
        head = _Head(head_of(self.model)[1], self.head == "fp32")

        def token_logps(hidden_nH: Tensor, targets_n: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
            logits_nV = _own_logits(self.model, type(seen)(last_hidden_state=hidden_nH[None]), head)
            return _TokenLogps.apply(logits_nV, targets_n, temperature, entropy, entropy_gradient, self.rows)  # pyright: ignore

        def work(hidden_NH: Tensor) -> tuple[Tensor, Tensor]:
            graph = torch.is_grad_enabled() and hidden_NH.requires_grad
            settings = (self.chunk, entropy or entropy_gradient, entropy_gradient, graph)
            return _Chunks.apply(hidden_NH, targets_N, *head.weights, head, token_logps, *settings)  # pyright: ignore

        logps_N, entropies_N = head_of(self.model)[1](hidden_NH, work=work)
        return own.whole(logps_N), own.whole(entropies_N)


def _head_or_work(head: nn.Linear, input: Tensor, work: Callable[[Tensor], Any] | None = None) -> Any:
    """Forward of an output head that can run a whole pass over chunks. ZeRO-3 gathers a module's weights for its forward pass and again
    for its backward pass, and prefetches them only if each pass calls the same modules: chunk by chunk it would gather the head up to
    twice per chunk, and a number of chunks that changes would end all prefetching."""
    return nn.Linear.forward(head, input) if work is None else work(input)


class _Head(nn.Module):
    """Stand-in for a model's output head in one pass. Sums the gradients of its weights over chunks in fp32; autograd would in bf16."""

    def __init__(self, own: nn.Linear, wide: bool) -> None:
        super().__init__()
        self._own, self.wide = (own,), wide
        self.sums: list[Tensor | None] = [None, None]

    @property
    def weights(self) -> tuple[Tensor, Tensor | None]:
        return self._own[0].weight, self._own[0].bias

    def forward(self, hidden: Tensor) -> Tensor:
        return _HeadProduct.apply(hidden, *self.weights, self)  # pyright: ignore[reportReturnType]

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """left · right; with `wide`, of the same operands in fp32. GPUs add products of bf16 in fp32 and can return that sum; a gradient of
        logits is rounded to bf16 there, as it is with a bf16 head."""
        if not self.wide:
            return left @ right
        if right.is_cuda and right.dtype == torch.bfloat16:
            return torch.mm(left.to(right.dtype), right, out_dtype=torch.float32)
        return left.float() @ right.float()

    def add(self, place: int, gradient: Tensor) -> None:
        total = self.sums[place]
        self.sums[place] = gradient.float() if total is None else total.add_(gradient)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_own"][0], name)


class _HeadProduct(torch.autograd.Function):
    """x Wᵀ + b; the gradients of W and b go to the sums of `head`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: _Head) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.head = head
        if not head.wide:
            return nn.functional.linear(hidden, weight, bias)
        logits = head.product(hidden.flatten(0, -2), weight.t()).view(*hidden.shape[:-1], len(weight))
        return logits if bias is None else logits + bias

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (hidden,), (grad,), head = ctx.saved_tensors, grad_outputs, ctx.head
        (weight, bias), grad_NV = head.weights, grad.flatten(0, -2)
        if weight.requires_grad:
            head.add(0, head.product(grad_NV.t(), hidden.flatten(0, -2)))
        if bias is not None and bias.requires_grad:
            head.add(1, grad_NV.sum(0, dtype=torch.float32))
        return head.product(grad_NV, weight).to(hidden.dtype).view_as(hidden), None, None, None


class _Chunks(torch.autograd.Function):
    """Log-probabilities and entropies of hidden states, a chunk at a time. The backward pass recomputes all chunks but the last."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        targets_N: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: _Head,
        token_logps: Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]],
        chunk: int,
        entropy: bool,
        entropy_gradient: bool,
        graph: bool,
    ) -> tuple[Tensor, Tensor]:
        pieces = max(1, -(-len(targets_N) // chunk))
        ctx.save_for_backward(hidden_NH, targets_N)
        ctx.head, ctx.token_logps, ctx.pieces, ctx.last, ctx.entropy = head, token_logps, pieces, None, entropy_gradient
        found = []
        for place, (hidden, targets) in enumerate(zip(hidden_NH.tensor_split(pieces), targets_N.tensor_split(pieces), strict=True)):
            last = graph and place == pieces - 1
            hidden = hidden.detach().requires_grad_(last)
            with torch.set_grad_enabled(last):
                found.append(token_logps(hidden, targets, entropy))
            if last:
                ctx.last = hidden, found[-1]
        logps_N, entropies_N = (torch.cat([values.detach() for values in each]) for each in zip(*found, strict=True))
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies_N)
        return logps_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, targets_N = ctx.saved_tensors
        wanted = 1 + ctx.entropy  # outputs with a gradient
        parts = [tensor.tensor_split(ctx.pieces) for tensor in (hidden_NH, targets_N, *grad_outputs[:wanted])]
        gradients = []
        for hidden, targets, *weights in reversed(list(zip(*parts, strict=True))):
            if ctx.last is None:
                hidden = hidden.detach().requires_grad_()
                with torch.enable_grad():
                    found = ctx.token_logps(hidden, targets, ctx.entropy)
            else:
                (hidden, found), ctx.last = ctx.last, None
            gradients += torch.autograd.grad(found[:wanted], hidden, weights)
        sums = [total if total is None else total.to(weight.dtype) for total, weight in zip(ctx.head.sums, ctx.head.weights, strict=True)]
        return torch.cat(gradients[::-1]), None, *sums, *[None] * 6


class _TokenLogps(torch.autograd.Function):
    """log softmax(logits / T) at the targets, in fp32, one block of rows at a time: no tensor of the size of the logits is stored besides
    the logits.

    ∂ log π_t / ∂ logit_v = (1[v = target] - π_v) / T; ∂ H / ∂ logit_v = -π_v (log π_v + H) / T.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        targets_N: Tensor,
        temperature: float,
        entropy: bool,
        entropy_gradient: bool,
        kernels: RowKernels,
    ) -> tuple[Tensor, Tensor]:
        logps_N = logits_NV.new_empty(len(targets_N), dtype=torch.float32)
        normalizers_N, entropies_N = torch.empty_like(logps_N), torch.empty_like(logps_N)
        for rows in _blocks(logits_NV):
            found = kernels.forward(logits_NV[rows], targets_N[rows], temperature, entropy)
            logps_N[rows], normalizers_N[rows], entropies_N[rows] = found
        ctx.temperature, ctx.kernels, ctx.entropy = temperature, kernels, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies_N)
        ctx.save_for_backward(logits_NV, targets_N, normalizers_N, entropies_N)
        return logps_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        weights_N, *gradients = (gradient / ctx.temperature for gradient in grad_outputs[: 1 + ctx.entropy])
        logits_NV, targets_N, normalizers_N, entropies_N = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        for rows in _blocks(logits_NV):
            given = (logits_NV[rows], targets_N[rows], normalizers_N[rows], weights_N[rows], ctx.temperature)
            entropies = [(entropies_N[rows], gradient_N[rows]) for gradient_N in gradients]
            grad_NV[rows] = ctx.kernels.backward(*given, *entropies)
        return grad_NV, *[None] * 5


def _blocks(logits_NV: Tensor) -> list[slice]:
    """Blocks of rows that are converted to fp32 together."""
    rows = 128 if logits_NV.device.type == "cpu" else 1024
    return [slice(start, start + rows) for start in range(0, len(logits_NV), rows)]


class ScoreHead(nn.Linear):
    """A linear head computed in fp32 regardless of the body's dtype."""

    def forward(self, input: Tensor) -> Tensor:  # named as in nn.Linear
        return nn.functional.linear(input.float(), self.weight.float())


class RewardModule(nn.Module):
    """A sequence classifier with one label, read at each document's last token."""

    model: Any

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        head = model.score
        model.score = ScoreHead(head.in_features, 1, bias=False, dtype=head.weight.dtype)
        model.score.weight = head.weight

    def forward(self, batch: MicroBatch) -> Tensor:
        """Scores of shape (D,), fp32."""
        own = OwnTokens.of(batch, batch.last_D)
        return own.whole(self.model.score(_hidden(self.model, batch).flatten(0, 1)[own.places])[:, 0])


class ValueModule(RewardModule):
    """A sequence classifier with one label, read before each trained token: the value of the state in which the token was sampled."""

    def forward(self, batch: MicroBatch) -> Tensor:
        """Values of shape (N,), fp32."""
        hidden_NH = _hidden(self.model, batch).flatten(0, 1)[batch.places_N]
        return self.model.score(hidden_NH)[:, 0]


def body_of(model: Any) -> tuple[str, Any]:
    """Name and module of the part of a transformers model that computes hidden states from ids."""
    body = model.base_model if model.base_model is not model else model.model
    return next((name, part) for name, part in model.named_children() if part is body)


def head_of(model: Any) -> tuple[str, Any]:
    """Name and module of a causal language model's output head."""
    head = model.get_output_embeddings()
    return next((name, part) for name, part in model.named_children() if part is head)


class _Given(nn.Module):
    """Stand-in for a model's body that returns precomputed outputs."""

    def __init__(self, body: Any, answer: Any) -> None:
        super().__init__()
        self._body, self.answer = (body,), answer

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.answer

    def __getattr__(self, name: str) -> Any:
        return self if name == "decoder" else getattr(self.__dict__["_body"][0], name)  # OPT calls `decoder` directly


def _own_logits(model: Any, seen: Any, head: _Head) -> Tensor:
    """Run the model's own forward on hidden states of shape (1, N, H), with this head; returns logits of shape (N, V)."""
    (body_name, body), (head_name, _) = body_of(model), head_of(model)
    twin = copy.copy(model)  # shares all modules, and through them the parameters
    twin._modules = model._modules | {body_name: _Given(body, seen), head_name: head}
    return type(model).forward(twin, use_cache=False).logits[0]


def _hidden(model: Any, batch: MicroBatch) -> Tensor:
    return _body_outputs(model, batch).last_hidden_state


def _body_outputs(model: Any, batch: MicroBatch) -> Any:
    kernel = model.config._attn_implementation
    if (kernel == attention.NAME) != (batch.spans is not None):
        raise ValueError(f"the model was loaded with attention {kernel!r}, but the batch is for another: use the same numerics for both")
    routed = getattr(model, "router_logits", None) is not None  # see `stages/training/router_loss.py`
    together = batch.spans.sequence_parallel if batch.spans else 1
    seen = body_of(model)[1](
        input_ids=slice_of(batch.input_ids_BT, together),
        position_ids=slice_of(batch.position_ids_BT, together),
        attention_mask=batch.attention_mask_BT,
        use_cache=False,
        **({"spans": batch.spans} if batch.spans is not None else {}),
        **({"output_router_logits": True} if routed else {}),
    )
    if routed:
        model.router_logits = seen.router_logits
    return seen
