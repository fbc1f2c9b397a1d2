"""Shape and parameter counts of a transformer from its config.json.

Symbols: L layers, H hidden size, A heads, K key-value heads, D head size, F MLP width, V vocabulary size, E experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

QkNorm = Literal["none", "head", "all"]
"""Norms on queries and keys: none, one of width D shared by all heads (Qwen 3, Gemma 3), or one across all heads (OLMo 2)."""


@dataclass(frozen=True)
class Shape:
    """A standard decoder with RMSNorm and gated MLPs."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Width of a dense layer's MLP."""
    vocabulary: int
    tied: bool = False
    """Whether the output head shares the embedding."""
    norms: int = 2
    """Norms per layer, without those of queries and keys."""
    qk_norm: QkNorm = "none"
    wide_norms: bool = False
    """Whether norms multiply by their scale in fp32 before rounding."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    experts: int = 0
    """Experts per mixture layer; 0 for a dense model."""
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Total width of the shared experts."""
    dense_layers: int = 0
    """Layers of a mixture model with a dense MLP."""
    stated: int | None = None
    """Parameter count from an artifact's record; None: use the formula."""
    softcap: bool = False
    """Whether its attention scores are capped."""
    context: int | None = None
    """Longest sequence that it was made for, in tokens; None if unknown."""
    unscored: str = ""
    """The architecture, if transformers has no reward model for it."""
    linear: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Last names of the linear layers in its body, of a dense model."""

    @property
    def attention(self) -> int:
        """Parameters of one layer's attention: W_q and W_o of H x AD, W_k and W_v of H x KD."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        biases = self.qkv_bias * (queries + 2 * keys) + self.output_bias * self.hidden
        norms = {"none": 0, "head": 2 * self.head_dim, "all": queries + keys}[self.qk_norm]
        return 2 * self.hidden * (queries + keys) + biases + norms

    def mlp(self, width: int) -> int:
        """Parameters of a gated MLP, 3HF."""
        return 3 * self.hidden * width + self.mlp_bias * (2 * width + self.hidden)

    @property
    def embedding(self) -> int:
        """Parameters of the input embedding, VH."""
        return self.vocabulary * self.hidden

    @property
    def mixture_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    def layer(self, experts: int) -> int:
        """Parameters of a mixture layer with `experts` experts and the full router."""
        routed = experts * self.mlp(self.expert_ffn) + self.hidden * self.experts
        shared = self.mlp(self.shared_ffn) + self.hidden if self.shared_ffn else 0  # with its gate
        return self.attention + routed + shared + self.norms * self.hidden

    @property
    def dense_layer(self) -> int:
        return self.attention + self.mlp(self.ffn) + self.norms * self.hidden

    def _body(self, experts: int) -> int:
        mixtures = self.mixture_layers
        return mixtures * self.layer(experts) + (self.layers - mixtures) * self.dense_layer + self.hidden

    @property
    def parameters(self) -> int:
        """Total parameters: L · (attention + MLP + norms) + embeddings (twice if untied) + the last norm."""
        if self.stated is not None:
            return self.stated
        heads = 1 if self.tied else 2
        return heads * self.embedding + self._body(self.experts)

    @property
    def multiplied(self) -> int:
        """Parameters multiplied per token, including active experts and the output head but not the input embedding."""
        return self.embedding + self._body(self.experts_per_token)

    @property
    def width(self) -> int:
        """Width of the MLPs through which a token passes."""
        return self.experts_per_token * self.expert_ffn + self.shared_ffn if self.experts else self.ffn

    @property
    def divided(self) -> tuple[int, int, int, int]:
        """What the ranks of an engine divide, as `unservable` takes it; experts are divided by number, not by width."""
        return self.heads, self.kv_heads, self.head_dim, 0 if self.experts else self.ffn

    @property
    def largest(self) -> int:
        """Parameters of the largest single weight."""
        return max(self.embedding, self.hidden * max(self.ffn, self.heads * self.head_dim))

    def adapters(self, rank: int) -> int:
        """Parameters of LoRA adapters on all linear layers: r · (inputs + outputs) of each (Hu et al. 2021, arXiv 2106.09685, §4.1)."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * (self.hidden + queries) + 2 * (self.hidden + keys)
        width = self.shared_ffn if self.experts else self.ffn  # fused experts get no adapters
        mlp = 3 * (self.hidden + width) if width else 0
        return rank * self.layers * (attention + mlp)


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {"qkv_bias": True},
    "qwen2_moe": {"qkv_bias": True},
    "qwen3": {"qk_norm": "head"},
    "qwen3_moe": {"qk_norm": "head"},
    "olmo2": {"qk_norm": "all", "wide_norms": True},
    "olmo3": {"qk_norm": "all", "wide_norms": True},
    "olmoe": {"qk_norm": "all", "unscored": "olmoe"},
    "gemma": {"wide_norms": True, "tied": True},
    "gemma2": {"norms": 4, "wide_norms": True, "tied": True, "softcap": True},
    "gemma3_text": {"norms": 4, "wide_norms": True, "qk_norm": "head", "tied": True},
    "phi3": {"linear": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")},
    "granite": {"unscored": "granite"},
    "smollm3": {"tied": True},
}
"""`model_type` of transformers → fields of `Shape` that its config.json need not specify, with their defaults in transformers.

tests/pipelines/test_shapes.py compares the parameter counts with transformers."""
EXPERT_WIDTH = {"mixtral": "intermediate_size", "olmoe": "intermediate_size"} | dict.fromkeys(
    ("qwen2_moe", "qwen3_moe"), "moe_intermediate_size"
)
"""`model_type` of a mixture model → config field with the width of an expert."""


def shape_of_config(config: Mapping[str, Any]) -> Shape | None:
    """The shape of a model from its config.json; None if its architecture is not in `FAMILIES` or a field is missing or invalid."""
    config = config.get("text_config") or config
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        return None
    stated: dict[str, Any] = {"qkv_bias": True, "output_bias": True} if config.get("attention_bias") else {}
    if "tie_word_embeddings" in config:
        stated["tied"] = bool(config["tie_word_embeddings"])
    if "attn_logit_softcapping" in config:
        stated["softcap"] = bool(config["attn_logit_softcapping"])
    try:
        hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
        return Shape(
            layers=_number(config, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=_number(config, "num_key_value_heads", heads),
            head_dim=_number(config, "head_dim", hidden // heads),
            ffn=_number(config, "intermediate_size"),
            vocabulary=_number(config, "vocab_size"),
            mlp_bias=bool(config.get("mlp_bias", False)),
            context=_number(config, "max_position_embeddings") if config.get("max_position_embeddings") else None,
            **FAMILIES[kind] | stated | _mixture(config, EXPERT_WIDTH.get(kind)),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _mixture(config: Mapping[str, Any], expert_width: str | None) -> dict[str, Any]:
    """Fields of `Shape` specific to mixture models."""
    named = next((name for name in ("num_experts", "num_local_experts") if config.get(name)), None)
    if named is None or expert_width is None:
        return {}
    shared, dense = "shared_expert_intermediate_size", config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ValueError("mlp_only_layers")
    return {
        "experts": _number(config, named),
        "experts_per_token": _number(config, "num_experts_per_tok"),
        "expert_ffn": _number(config, expert_width),
        "shared_ffn": _number(config, shared) if config.get(shared) else 0,
        "dense_layers": len(dense),
    }


def _number(config: Mapping[str, Any], name: str, otherwise: int | None = None) -> int:
    value = config.get(name)
    value = otherwise if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 32:
        raise ValueError(name)
    return value


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, **parts: Any) -> Shape:
    return Shape(layers, hidden, heads, kv_heads, hidden // heads, ffn, vocabulary, **parts)


def _qwen(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, tied: bool) -> Shape:
    return _llama(layers, hidden, heads, kv_heads, ffn, vocabulary, tied=tied, qkv_bias=True)


def _olmo2(layers: int, hidden: int, heads: int, ffn: int) -> Shape:
    return _llama(layers, hidden, heads, heads, ffn, 100352, qk_norm="all", wide_norms=True)


KNOWN: dict[str, Shape] = {
    "meta-llama/Meta-Llama-3-8B": _llama(32, 4096, 32, 8, 14336, 128256),
    "meta-llama/Llama-3.1-8B": _llama(32, 4096, 32, 8, 14336, 128256),
    "meta-llama/Llama-3.1-70B": _llama(80, 8192, 64, 8, 28672, 128256),
    "meta-llama/Llama-3.2-1B": _llama(16, 2048, 32, 8, 8192, 128256, tied=True),
    "meta-llama/Llama-3.2-3B": _llama(28, 3072, 24, 8, 8192, 128256, tied=True),
    "allenai/tulu-2-7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "allenai/tulu-2-13b": _llama(40, 5120, 40, 40, 13824, 32000),
    "allenai/OLMo-2-0425-1B": _olmo2(16, 2048, 16, 8192),
    "allenai/OLMo-2-1124-7B": _olmo2(32, 4096, 32, 11008),
    "allenai/OLMo-2-1124-13B": _olmo2(40, 5120, 40, 13824),
    "HuggingFaceTB/SmolLM2-135M": _llama(30, 576, 9, 3, 1536, 49152, tied=True),
    "HuggingFaceTB/SmolLM2-360M": _llama(32, 960, 15, 5, 2560, 49152, tied=True),
    "HuggingFaceTB/SmolLM2-1.7B": _llama(24, 2048, 32, 32, 8192, 49152, tied=True),
    "Qwen/Qwen2.5-0.5B": _qwen(24, 896, 14, 2, 4864, 151936, tied=True),
    "Qwen/Qwen2.5-1.5B": _qwen(28, 1536, 12, 2, 8960, 151936, tied=True),
    "Qwen/Qwen2.5-3B": _qwen(36, 2048, 16, 2, 11008, 151936, tied=True),
    "Qwen/Qwen2.5-7B": _qwen(28, 3584, 28, 4, 18944, 152064, tied=False),
    "Qwen/Qwen2.5-14B": _qwen(48, 5120, 40, 8, 13824, 152064, tied=False),
    "Qwen/Qwen2.5-32B": _qwen(64, 5120, 40, 8, 27648, 152064, tied=False),
    "Qwen/Qwen2.5-72B": _qwen(80, 8192, 64, 8, 29568, 152064, tied=False),
}
"""Shapes of hub models by base name, for plans before anything is downloaded."""
PACKAGED = {"smollm2-135m-instruct": KNOWN["HuggingFaceTB/SmolLM2-135M"]}
"""Models of `configs/base/packaged.py`."""
SAME_SHAPE = ("-Instruct", "-instruct", "-SFT", "-DPO", "-RLVR1", "-RLVR", "-Base", "-base")
"""Name suffixes of models trained from the base model of the same name."""
TULU = {"allenai/Llama-3.1-Tulu-3-8B": "meta-llama/Llama-3.1-8B", "allenai/Llama-3.1-Tulu-3.1-8B": "meta-llama/Llama-3.1-8B",
        "allenai/Llama-3.1-Tulu-3-70B": "meta-llama/Llama-3.1-70B"}  # fmt: skip
"""Models with a different name than their base; their vocabulary is padded by a few rows."""


def known_shape(repo: str) -> Shape | None:
    """The shape of a hub model by name, ignoring suffixes such as `-Instruct` and `-SFT`."""
    name = repo
    while True:
        if name in KNOWN or name in TULU:
            return KNOWN[TULU.get(name, name)]
        ending = next((ending for ending in SAME_SHAPE if name.endswith(ending)), None)
        if ending is None:
            return None
        name = name.removesuffix(ending)
