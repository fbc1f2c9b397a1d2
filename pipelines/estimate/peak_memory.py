"""Peak memory of a rank in bytes, term by term: each function implements one formula, with its source.

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
class Formula:
    """A row of docs/plan.md."""

    term: str
    formula: str
    source: str


FORMULAS = (
    Formula(
        "weights",
        "eΨ; ZeRO-3: eΨ/R + e·min(Ψ, 10⁹) gathered (none with a single rank)",
        "Rajbhandari et al. 2019, arXiv 1910.02054, §5; `stage3_max_live_parameters`",
    ),
    Formula(
        "gradients",
        "4Ψ_t, plus a copy of 4Ψ_t/R with ZeRO-1 in fp32; 4Ψ_t/R from ZeRO-2; none with `offload_optimizer`; + eW, "
        "the incoming gradient of the largest weight",
        "arXiv 1910.02054, §5.2; in fp32, because micro-batches are accumulated in fp32",
    ),
    Formula(
        "optimizer",
        "12Ψ_t/R: fp32 weights, two moments; ZeRO-0 (fp32 only): 8Ψ_t; none with `offload_optimizer`",
        "arXiv 1910.02054, §3.1 (K = 12), §5.1",
    ),
    Formula(
        "buckets",
        "ZeRO-2: 4·B + 4·min(Ψ_t, B), in fp32 8·B, and B at least W; ZeRO-1 with `offload_optimizer`: 2·B + 4·min(Ψ_t, B), in fp32 4·B; "
        "ZeRO-1 in fp32: 4·B; ZeRO-3: 4·B + 4·min(Ψ_t, B); otherwise none; on a CPU min(Ψ_t, B) instead of B, and ZeRO-2 as ZeRO-1",
        "DeepSpeed 0.19, `reduce_bucket_size` B = 5·10⁸ elements",
    ),
    Formula(
        "activations",
        "T · (L·a + head); a = 2·norm + e(2AD + 2KD) + 4A + 4eF, norm = 4 + (4 + 2e)H, head = (4 + 2e)H + 2eD + 24; "
        "fused kernels: norm = 4 + 2eH, 3eF; on a CPU in bf16 a + 4AD; checkpointed: T · (L·eH + a + head); other "
        "norms and experts: `layer_activations`",
        "counted as in Korthikanti et al. 2022, arXiv 2205.05198, §4, for RMSNorm, grouped queries, SwiGLU, "
        "no dropout, and attention that does not store scores",
    ),
    Formula("working", "T · e(3F + 2H): gradients of the current layer", "the backward pass of a gated MLP"),
    Formula(
        "logits",
        "2hVc + 12Vb, h = e, or 4 with `head: fp32`: c = `logprob_chunk` tokens, b of them in fp32; trained: + (4 + h - e)VH, the "
        "head's gradient of a chunk and its sum over chunks in fp32 (none with one chunk and h = e); frozen on a CPU with h > e: + 4VH, "
        "its fp32 copy",
        "`stages/training/logprobs.py`",
    ),
    Formula(
        "reference",
        "eΨ, eΨ/R with ZeRO-3; nothing with adapters if it is the policy before training",
        "`stages/training/reference.py`, `fixed_policy`",
    ),
    Formula("teacher", "eΨ of the teacher, eΨ/R with ZeRO-3", "`stages/training/reference.py`, `fixed_policy`"),
    Formula(
        "value_model",
        "PPO's value model in addition to the policy: weights, gradients, optimizer, and buckets, with a scalar head; its "
        "activations do not overlap with the policy's",
        "`stages/training/policy_update.py`",
    ),
    Formula(
        "reward_models",
        "of `rlvr`, on GPUs only in `rollouts`: eΨ and `working` of the largest one, since one scores after the other; their weights "
        "stay in host memory; `runtime` of each copy with a process of its own; on a CPU eΨ of all in addition",
        "`stages/rlvr/model_rewards.py`",
    ),
    Formula(
        "sampler",
        "vLLM takes `gpu_memory_utilization` of the GPU: eΨ/P, adapters, 2 GiB, and the rest as KV cache, P = `tensor_parallel`; in "
        "`rlvr` on GPUs 2 GiB while it sleeps",
        "vLLM 0.32, `gpu_worker.py`",
    ),
    Formula(
        "rollouts",
        "in `rlvr` on GPUs: `sampler` with what the trainer keeps between steps: weights without those gathered, optimizer, gradients "
        "with ZeRO-1 and 3, buckets of 4·B with ZeRO-3, the same of a value model, the reference, and a reward model",
        "`stages/rlvr/handover.py`",
    ),
    Formula(
        "KV cache",
        "2·L·K·D·e per token, for a whole chunk of requests, or for one request if `continuous`",
        "Kwon et al. 2023, arXiv 2309.06180, §2; `stages/sampling/vllm_engine.py`, `_check_cache`",
    ),
    Formula(
        "loading",
        "eΨ on the device, 2eΨ with ZeRO-1 in bf16 without `offload_optimizer`; with ZeRO-3 eΨ/R and the largest parameter",
        "DeepSpeed 0.19, `_configure_distributed_model`; `stages/training/trainer.py`, `_engine_of`",
    ),
    Formula(
        "host",
        "per rank while loading 4Ψ in fp32, 4Ψ + eΨ if the stored weights are finer than bf16, else nothing: bf16 weights are pages of "
        "their file, which the ranks share; or 16Ψ_t/R with `offload_optimizer` if larger; the same again for an offloaded value model; "
        "+ eΨ per node for the weights of a sleeping sampler",
        "`stages/training/models.py`, `stages/training/trainer.py`, `stages/rlvr/handover.py`",
    ),
)


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
