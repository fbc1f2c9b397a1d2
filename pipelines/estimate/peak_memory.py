"""Peak memory of a rank in bytes, term by term: each function implements one formula of `formulas.md`, which names its source.

Symbols: Ψ parameters, Ψ_t trained parameters, R ranks, e bytes of the compute dtype (2 or 4), T tokens of one pass; L, H, A, K, D, F, V
as in `shapes`. DeepSpeed's behavior beyond the paper (fp32 gradients, buckets, a flat copy) follows the code of version 0.19.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pedigree.configs.base.frozen import Dtype, HeadPrecision
from pedigree.configs.language.execution import Numerics
from pedigree.pipelines.estimate.shapes import Shape

GIB = 1 << 30
SIZES: dict[Dtype, int] = {"bf16": 2, "fp32": 4}
BUCKET = 500_000_000
"""Elements of DeepSpeed's `reduce_bucket_size` (its default)."""
LIVE = 1_000_000_000
"""Maximum elements that ZeRO-3 keeps gathered: `stage3_max_live_parameters`, and `sub_group_size` of its update."""
RUNTIME = {"cuda": 1 * GIB, "cpu": GIB * 3 // 4}
"""Bytes of a process before any tensor: CUDA context, workspaces, and communicators (an assumption), or libraries on a CPU."""
BLOCK = 16
"""Tokens per block of vLLM's KV cache."""
LOGIT_ROWS = {"cuda": 1024, "cpu": 128}
"""Rows of logits in fp32 at the same time (`stages.training.logprobs._blocks`)."""


@dataclass(frozen=True)
class Trained:
    """One model under an optimizer."""

    shape: Shape
    dtype: Dtype
    trained: int
    """Ψ_t: all parameters, or those of adapters and a head."""
    finer: bool = False
    """Whether the stored weights have more precision than bf16."""

    @property
    def size(self) -> int:
        return SIZES[self.dtype]

    @property
    def parameters(self) -> int:
        return max(self.shape.parameters, self.trained)


def weights(model: Trained, numerics: Numerics) -> int:
    """Weights in the compute dtype."""
    if numerics.zero_stage < 3:
        return model.size * model.parameters
    gathered = min(model.parameters, LIVE) if numerics.world_size > 1 else 0
    return model.size * (-(-model.parameters // numerics.world_size) + gathered)


def gradients(model: Trained, numerics: Numerics) -> int:
    """Gradients, accumulated in fp32 over all micro-batches of a step; offloaded together with the optimizer state."""
    arriving = model.size * min(model.shape.largest, model.trained)
    if numerics.offload_optimizer:
        return arriving
    if numerics.zero_stage >= 2:
        return 4 * -(-model.trained // numerics.world_size) + arriving
    copied = 4 * -(-model.trained // numerics.world_size) if model.dtype == "fp32" and numerics.zero_stage == 1 else 0
    return 4 * model.trained + copied + arriving


def optimizer(model: Trained, numerics: Numerics) -> int:
    """fp32 weights and Adam's two moments; none if offloaded to host memory."""
    if numerics.offload_optimizer:
        return 0
    if numerics.zero_stage == 0:
        return 8 * model.trained
    return 12 * -(-model.trained // numerics.world_size)


def buckets(model: Trained, numerics: Numerics) -> int:
    """Gradient reduction buckets. A GPU allocates whole buckets, under ZeRO-2 two (one is filled while the other is reduced), in which the
    largest weight fits; on a CPU only the written part takes memory."""
    twice = numerics.zero_stage == 2 and numerics.device == "cuda"
    bucket = max(BUCKET, min(model.shape.largest, model.trained)) if twice else BUCKET
    filled = min(model.trained, bucket)
    whole = bucket if numerics.device == "cuda" else filled
    if numerics.zero_stage == 3:
        return 4 * whole + 4 * filled
    if numerics.zero_stage == 2 or numerics.offload_optimizer or (numerics.zero_stage == 1 and model.dtype == "fp32"):
        return (1 + twice) * model.size * whole + (4 * filled if model.dtype == "bf16" else 0)
    return 0


def at_rest(model: Trained, numerics: Numerics) -> dict[str, int]:
    """Terms of one model between two steps on a GPU: gathered weights and gradients that DeepSpeed allocates anew are released."""
    stage, shared = numerics.zero_stage, -(-model.trained // numerics.world_size)
    kept = 0 if numerics.offload_optimizer else {1: 4 * model.trained, 3: 4 * shared}.get(stage, 0)
    sharded = -(-model.parameters // numerics.world_size) if stage == 3 else model.parameters
    return {
        "weights": model.size * sharded,
        "gradients": kept,
        "optimizer": optimizer(model, numerics),
        "buckets": 4 * BUCKET if stage == 3 else 0,
    }


def layer_activations(shape: Shape, numerics: Numerics, size: int) -> int:
    """Bytes that one layer saves per token for the backward pass.

    A norm saves its input in fp32 (4H; in fp32 that is the input itself), the normalized value (eH; fp32 in some models), and its output
    (eH). Attention saves queries, keys, values, output, and one sum per head, and on a CPU in bf16 also the output in fp32. A gated MLP
    saves both branches, the activation, and the product (4eF). Fused kernels save only a norm's input and output, and recompute the
    activation.
    """
    fused = numerics.kernels != "torch"
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    normalized = 4 if shape.wide_norms else size
    norm = 4 + (2 * size * hidden if fused else (4 + normalized + size) * hidden)
    qk_norms = 0 if shape.qk_norm == "none" else (size if fused else 4 + normalized) * (queries + keys)
    twice = 4 * queries if numerics.device == "cpu" and size == 2 else 0
    attention = size * (2 * queries + 2 * keys) + 4 * shape.heads + twice
    branches = 3 if fused else 4
    routed = shape.experts_per_token * 2 * size * hidden + 8 * shape.experts  # none in a dense model
    return shape.norms * norm + qk_norms + attention + branches * size * shape.width + routed


def activations(shape: Shape, numerics: Numerics, size: int, tokens: int) -> int:
    """Activations that a forward pass over `tokens` saves for the backward pass."""
    layer = layer_activations(shape, numerics, size)
    head = (4 + 2 * size) * shape.hidden + 2 * size * shape.head_dim + 24  # the last norm, rotary angles, ids
    kept = shape.layers * size * shape.hidden + layer if numerics.gradient_checkpointing else shape.layers * layer
    return tokens * (kept + head)


def score_matrices(shape: Shape, numerics: Numerics, size: int, tokens: int, longest: float, trained: bool = True) -> dict[str, int]:
    """Scores of attention that is computed by whole matrices: for each pair of a query and a key the softmax in fp32, with `eager` in bf16
    also rounded, and the tanh of a soft cap. `eager` pairs the tokens of a row, `varlen` those of a document, and only soft caps on CPUs:
    flash attention and, on GPUs, flex attention store none. `longest`: tokens of a document."""
    eager, width = numerics.attention == "eager", size if numerics.attention == "eager" else 4
    if not eager and not (numerics.shares_prompts and shape.softcap and numerics.device == "cpu"):
        return {}
    each = 4 + (2 if eager and size == 2 else 0) + (width if shape.softcap else 0)
    layers = shape.layers if trained and not numerics.gradient_checkpointing else 1
    keys = tokens if eager and numerics.packing else int(min(tokens, longest))
    return {"score_matrices": layers * shape.heads * tokens * keys * each}


def working(shape: Shape, size: int, tokens: int) -> int:
    """Gradients of the current layer in the backward pass; a forward pass alone needs the same for intermediate values."""
    return tokens * size * (3 * shape.width + 2 * shape.hidden)


def logits(shape: Shape, numerics: Numerics, size: int, tokens: int, head: HeadPrecision = "model", trained: bool = False) -> int:
    """A chunk of logits with its gradient, a block of it in fp32 with the log-softmax intermediates, and the head's gradient beyond the
    incoming one that `gradients` counts, or its fp32 copy."""
    wide = 4 if head == "fp32" else size
    chunk = min(numerics.logprob_chunk, tokens)
    block = min(chunk, LOGIT_ROWS[numerics.device])
    if trained:
        copies = 4 + wide - size if chunk < tokens or wide > size else 0
    else:
        copies = 4 if wide > size and numerics.device == "cpu" else 0
    return shape.vocabulary * (2 * wide * chunk + 12 * block + copies * shape.hidden)


def kv_bytes_per_token(shape: Shape, size: int, tensor_parallel: int = 1) -> int:
    """Of one engine rank: keys and values of its share of the key heads, at least one."""
    return 2 * shape.layers * -(-shape.kv_heads // tensor_parallel) * shape.head_dim * size


def kv_cache(shape: Shape, size: int, requests: int, context: int, tensor_parallel: int = 1) -> int:
    """KV cache blocks of a chunk of requests at full length, plus vLLM's reserved block."""
    blocks = requests * -(-context // BLOCK) + 1
    return blocks * BLOCK * kv_bytes_per_token(shape, size, tensor_parallel)


def training(model: Trained, numerics: Numerics, tokens: int, scores: bool = False, head: HeadPrecision = "model") -> dict[str, int]:
    """All terms of one model during a training step; `scores`: it has a scalar head instead of the vocabulary head."""
    found = {
        "weights": weights(model, numerics),
        "gradients": gradients(model, numerics),
        "optimizer": optimizer(model, numerics),
        "buckets": buckets(model, numerics),
        "activations": activations(model.shape, numerics, model.size, tokens),
        "working": working(model.shape, model.size, tokens),
    }
    whole = model.trained == model.parameters
    return found if scores else found | {"logits": logits(model.shape, numerics, model.size, tokens, head, whole)}


def inference(
    shape: Shape, numerics: Numerics, size: int, tokens: int, scores: bool = False, head: HeadPrecision = "model"
) -> dict[str, int]:
    """Forward passes of a frozen model in torch."""
    found = {"weights": size * shape.parameters, "working": working(shape, size, tokens)}
    return found if scores else found | {"logits": logits(shape, numerics, size, tokens, head)}


def loading(model: Trained, numerics: Numerics) -> int:
    """Device memory while loading: the whole model, plus a flat copy for ZeRO-1 in bf16; for ZeRO-3 one parameter after another."""
    if numerics.zero_stage == 3:
        return model.size * (-(-model.parameters // numerics.world_size) + min(model.shape.largest, model.parameters))
    flat = 2 if model.dtype == "bf16" and numerics.zero_stage == 1 and not numerics.offload_optimizer else 1
    return flat * model.size * model.parameters


def host(model: Trained, numerics: Numerics) -> int:
    """Host memory per rank: weights in fp32 while loading, or the state offloaded by `offload_optimizer`."""
    arriving = read(model.parameters, model.dtype, model.finer)
    arriving += model.size * model.parameters if model.finer and model.dtype == "bf16" else 0
    offloaded = 16 * -(-model.trained // numerics.world_size) if numerics.offload_optimizer else 0
    return max(arriving, offloaded)


def read(parameters: int, dtype: Dtype, finer: bool) -> int:
    """Host memory of weights as they are read: bf16 ones are pages of their file, until they are computed in fp32."""
    return 4 * parameters if finer or dtype == "fp32" else 0


def total(terms: Mapping[str, int]) -> int:
    return sum(terms.values())
