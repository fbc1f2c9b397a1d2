"""Which architectures our numerics get right: tiny models of random weights, each with what makes it special switched on.

    python -m benchmarks.architectures          # with vLLM, minutes
    python -m benchmarks.architectures --page   # the page alone, from what was measured

Every log-probability is compared with the model's own forward over the document alone, in fp32, with eager attention. What a model
cannot do is refused before anything is trained; nothing may be silently wrong. Writes `benchmarks/results/architectures/` and
`docs/architectures.md`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import RESULTS
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.language.execution import Numerics, Placement
from pedigree.configs.methods.training import Lora, Sampling
from pedigree.stages.core.batches import Document, Unit, collate, document
from pedigree.stages.training import attention
from pedigree.stages.training.adapters import add_adapters, plain_weights
from pedigree.stages.training.logprobs import PolicyModule, RewardModule
from pedigree.stages.training.probe import probe

WINDOW = 6
"""Tokens of a sliding window; the documents of the tests are longer."""
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
TIED = {"tie_word_embeddings": True}
ALTERNATING = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32, "num_key_value_heads": 4}


@dataclass(frozen=True)
class Architecture:
    """How to make a tiny model."""

    name: str
    """`model_type` of transformers."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of its config, in addition to `SIZES` or instead of them; None leaves one out."""
    experts: bool = False

    def config(self, **changes: Any) -> Any:
        """Of transformers."""
        from transformers import CONFIG_MAPPING

        fields = SIZES | self.changes | changes
        return CONFIG_MAPPING[self.name](**{name: value for name, value in fields.items() if value is not None})

    def model(self, kernel: str = "eager", *, scores: bool = False) -> Any:
        """A causal language model, or a sequence classifier with one label, in fp32; equal weights whatever the attention.

        Raises:
            ValueError, KeyError: transformers has no such model, or none with such attention.
        """
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        auto: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            config = self.config(**({"num_labels": 1} if scores else {}))
            model = auto.from_config(config, attn_implementation=kernel, dtype=torch.float32)
            for name, parameter in model.named_parameters():  # a fresh initialisation is nearly uniform over tokens: spread it
                if parameter.dim() > 1 and "norm" not in name:
                    parameter.data.mul_(6.0 if "embed" not in name else 20.0)
                elif "norm" not in name and not name.endswith("bias"):
                    torch.nn.init.normal_(parameter.data)
        return model.eval()


ALL = [
    Architecture("llama"),
    Architecture("mistral", {"sliding_window": WINDOW}),
    Architecture("qwen2"),
    Architecture("qwen3", {"head_dim": 32}),
    Architecture("gemma", TIED | {"head_dim": 32}),
    Architecture("gemma2", TIED | {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": WINDOW, "layer_types": ALTERNATING,
                            "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    Architecture("gemma3_text", TIED | {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": WINDOW, "layer_types": ALTERNATING}),
    Architecture("phi", {"partial_rotary_factor": 0.5}),
    Architecture("phi3", {"sliding_window": WINDOW}),
    Architecture("granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}),
    Architecture("cohere", TIED | {"logit_scale": 0.25, "use_qk_norm": True}),
    Architecture("cohere2", TIED | {"logit_scale": 0.25, "sliding_window": WINDOW, "layer_types": ALTERNATING}),
    Architecture("olmo", {"clip_qkv": 1.0}),
    Architecture("olmo2"),
    Architecture("olmo3", {"sliding_window": WINDOW, "layer_types": ALTERNATING}),
    Architecture("smollm3", {"no_rope_layers": [1, 0]}),
    Architecture("starcoder2", {"sliding_window": WINDOW}),
    Architecture("stablelm", {"use_qkv_bias": True}),
    Architecture("gpt2"),
    Architecture("gpt_neox"),
    Architecture("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}),
    Architecture("nemotron"),
    Architecture("glm", {"head_dim": 32}),
    Architecture("glm4", {"head_dim": 32}),
    Architecture("exaone4", {"sliding_window": WINDOW, "sliding_window_pattern": 2, "layer_types": ALTERNATING}),
    Architecture("ernie4_5", {"head_dim": 32}),
    Architecture("helium", {"head_dim": 32}),
    Architecture("arcee"),
    Architecture("seed_oss", {"head_dim": 32}),
    Architecture("apertus"),
    Architecture("ministral", {"sliding_window": WINDOW, "layer_types": ALTERNATING, "head_dim": 32}),
    Architecture("mixtral", LOCAL_EXPERTS | {"sliding_window": WINDOW}, experts=True),
    Architecture("qwen2_moe", EXPERTS | {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}, experts=True),
    Architecture("qwen3_moe", EXPERTS | {"moe_intermediate_size": 64, "head_dim": 32}, experts=True),
    Architecture("olmoe", EXPERTS, experts=True),
    Architecture("granitemoe", LOCAL_EXPERTS | {"logits_scaling": 4.0, "embedding_multiplier": 3.0}, experts=True),
    Architecture("deepseek_v2", ROUTED | LATENT | {"topk_method": "greedy", "routed_scaling_factor": 1.0}, experts=True),
    Architecture("deepseek_v3", ROUTED | LATENT, experts=True),
    Architecture("gpt_oss", LOCAL_EXPERTS | {"head_dim": 32, "sliding_window": WINDOW, "layer_types": ALTERNATING}, experts=True),
    Architecture("phimoe", LOCAL_EXPERTS | {"sliding_window": WINDOW}, experts=True),
    Architecture("glm4_moe", ROUTED | {"head_dim": 32}, experts=True),
    Architecture("gptj", {"n_positions": 128, "n_embd": 128, "n_layer": 2, "n_head": 4, "rotary_dim": 8}),
    Architecture("bloom", {"n_layer": 2, "n_head": 4}),
    Architecture("mpt", {"d_model": 128, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}),
    Architecture("opt", {"word_embed_proj_dim": 128, "ffn_dim": 192}),
    Architecture("lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    Architecture("falcon_h1", {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_chunk_size": 8}),
    Architecture("qwen3_next", EXPERTS | {"layer_types": ["linear_attention", "full_attention"], "head_dim": 32,
                                          "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
                                          "linear_num_value_heads": 4, "linear_num_key_heads": 2,
                                          "linear_key_head_dim": 8, "linear_value_head_dim": 8}, experts=True),
    Architecture("llama4_text", LOCAL_EXPERTS | {"intermediate_size_mlp": 192, "attention_chunk_size": WINDOW, "head_dim": 32,
                                                 "layer_types": ["chunked_attention", "full_attention"]}, experts=True),
]  # fmt: skip

RIGHT = 1e-4
"""Nats: far above rounding in fp32 (some 1e-6), far below the effect of a window, a cap or a scale."""
RESULT = RESULTS / "architectures" / "outcomes.json"
PAGE = RESULTS.parents[1] / "docs" / "architectures.md"
PADDED = [Numerics(packing=False, attention="sdpa"), Numerics(packing=False, attention="eager")]
PACKED = [Numerics(attention="varlen"), Numerics(attention="sdpa")]
"""The forms to try, best first."""
WRONG = "WRONG"
Cell = dict[str, str]
"""`value`: the cell of the page; `why`: the error message of a form that is refused."""


class Wrong(Exception):
    """A result differs from the model's own, and the probe did not notice."""


@cache
def documents() -> tuple[Document, ...]:
    """Two answers to one prompt and an unrelated document, all longer than a window."""
    random = torch.Generator().manual_seed(3)

    def ids(length: int) -> list[int]:
        return torch.randint(3, 250, (length,), generator=random).tolist()

    prompt = ids(20)
    return document(prompt, ids(20)), document(prompt, ids(13)), document(ids(5), ids(20))


def apart() -> list[Unit]:
    return [(doc,) for doc in documents()]


def together() -> list[Unit]:
    first, second, other = documents()
    return [(first, second), (other,)]


@torch.no_grad()
def own_logps(model: Any) -> Tensor:
    """log π of all trained tokens by the model's own forward, each document alone."""
    found = []
    for doc in documents():
        ids = torch.from_numpy(doc.ids)[None]
        logps_TV = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        found.append(logps_TV.gather(-1, ids[0, 1:, None])[:, 0][torch.from_numpy(doc.trained[1:])])
    return torch.cat(found)


@torch.no_grad()
def own_scores(model: Any) -> Tensor:
    """The score of each document by the classifier's own forward."""
    return torch.cat([model(input_ids=torch.from_numpy(doc.ids)[None], use_cache=False).logits[:, 0] for doc in documents()])


def must_equal(found: Tensor, expected: Tensor) -> None:
    gap = float((found - expected).abs().max())
    if not gap < RIGHT:
        raise Wrong(f"off by {gap:.3g}")


def logps(module: PolicyModule, units: Sequence[Unit], numerics: Numerics) -> Tensor:
    with torch.no_grad():
        return module(collate(units, numerics, 0))[0]


def first_that_works(forms: Sequence[Numerics], attempt: Callable[[Numerics], None], worked: list[Numerics]) -> Cell:
    """The attention of the first form that is not refused, which is added to `worked`; what is refused has to be refused in words."""
    why = []
    for numerics in forms:
        try:
            attempt(numerics)
            worked.append(numerics)
            return {"value": numerics.attention} | ({"why": "; ".join(why)} if why else {})
        except Wrong as error:
            return {"value": WRONG, "why": f"{numerics.attention}: {error}"}
        except (PedigreeError, ValueError, KeyError) as error:  # the latter two while it is loaded: `load_policy` says them as a StageError
            why.append(f"{numerics.attention}: {str(error).splitlines()[0]}")
    return {"value": "no", "why": "; ".join(why)}


def outcome(architecture: Architecture) -> dict[str, Cell]:
    """Column → cell, without vLLM's."""
    attention.register()
    torch.set_num_threads(1)
    expected = own_logps(architecture.model())

    def right(numerics: Numerics, units: Sequence[Unit]) -> None:
        module = PolicyModule(architecture.model(numerics.attention), 16)
        probe(module, numerics, torch.device("cpu"))
        must_equal(logps(module, units, numerics), expected)

    def adapted(numerics: Numerics) -> None:
        """Adapters on every linear layer of the body, with an effect; the merged weights in a plain model give the same."""
        model = architecture.model(numerics.attention)
        add_adapters(model, Lora(rank=2, alpha=4, targets="all-linear"), 0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter.data, std=0.1)
        plain = architecture.model()
        plain.load_state_dict({name: combine() for name, _, combine in plain_weights(model)}, strict=False)
        wanted = own_logps(plain.eval())
        if float((wanted - expected).abs().max()) < 100 * RIGHT:
            raise Wrong("adapters change nothing")
        module = PolicyModule(model, 16)
        probe(module, numerics, torch.device("cpu"))
        must_equal(logps(module, apart(), numerics), wanted)

    def scored(numerics: Numerics) -> None:
        module = RewardModule(architecture.model(numerics.attention, scores=True))
        probe(module, numerics, torch.device("cpu"))
        with torch.no_grad():
            must_equal(module(collate(apart(), numerics, 0)), own_scores(architecture.model(scores=True)))

    worked: list[Numerics] = []
    return {
        "packed": first_that_works(PACKED, lambda numerics: right(numerics, apart()), worked),
        "padded": first_that_works(PADDED, lambda numerics: right(numerics, apart()), worked),
        "shared prompts": first_that_works(PACKED[:1], lambda numerics: right(numerics, together()), []),
        "LoRA": first_that_works(worked[:], adapted, []),
        "reward model": first_that_works(worked[:], scored, []),
    }


# --- vLLM --------------------------------------------------------------------------------------------------------------

ENGINE_S = 300.0
"""Time limit for one engine."""


def by_vllm(architecture: Architecture) -> Cell:
    """The mean gap between vLLM's log-probabilities of the tokens that it sampled, in fp32, and ours for the same tokens."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.architectures", "--sample", architecture.name, "--folder", folder]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=ENGINE_S, check=False)
        except subprocess.TimeoutExpired:
            return {"value": "no", "why": f"no answer within {ENGINE_S:g} s"}
        answer = Path(folder) / "answer.json"
        if not answer.exists():
            said = [line for line in (done.stdout + done.stderr).splitlines() if "Error" in line]
            return {"value": "no", "why": said[-1].strip()[:200] if said else "it has not started"}
        return json.loads(answer.read_text())


def sample(architecture: Architecture, folder: Path) -> None:
    """Sample answers with vLLM, and write how far its log-probabilities are from ours; runs in a separate process."""
    from pedigree.stages.sampling.engines import open_sampler
    from pedigree.stages.sampling.sampler import Request

    attention.register()
    architecture.model().save_pretrained(folder)
    prompts = [doc.ids[:9].tolist() for doc in documents()]
    sampling = Sampling(temperature=1.0, max_tokens=20)
    settings = {"dtype": "fp32", "context": 64, "numerics": Numerics(threads=1), "placement": Placement(sampler_memory_gb=0.1)}
    with open_sampler(folder, inline=False, **settings) as sampler:  # vLLM changes classes of transformers in its process
        found = sampler.generate([Request(prompt, seed) for seed, prompt in enumerate(prompts)], sampling, [])
    units = [(document(prompt, answer.response_ids),) for prompt, answer in zip(prompts, found, strict=True)]
    numerics = Numerics(packing=False, attention="eager")
    ours = logps(PolicyModule(architecture.model("eager"), 1024), units, numerics)
    gap = float((ours - torch.tensor([logp for answer in found for logp in answer.logprobs])).abs().mean())
    (folder / "answer.json").write_text(json.dumps({"value": f"{gap:.0e}" if gap < RIGHT else f"{gap:.2g}"}))


# --- the page ----------------------------------------------------------------------------------------------------------

COLUMNS = ("packed", "padded", "shared prompts", "LoRA", "reward model", "vLLM")
HEAD = """# Architectures

<!-- Written by `python -m benchmarks.architectures`; do not edit. -->

What each architecture can be trained with. Every cell is measured on a tiny model with random weights and with the architecture's special
features enabled: sliding windows shorter than the documents, soft caps, sinks, scaled logits, experts. The log-probabilities of three
documents (for a reward model: their scores) must equal those of the model's own forward pass over each document alone, in fp32 with eager
attention, to 1e-4 nats. A cell names the fastest `attention` of the execution profile that is right; *no* means that the stage refuses
the combination when it starts, before it trains anything. *Shared prompts* are answers to one prompt in one pass over it. *LoRA* has
adapters on all linear layers, and the merged model must give the same. *vLLM* is the mean gap in nats between vLLM's log-probabilities of
the tokens that it samples, in fp32 on a CPU, and ours; an RLVR job measures it again in its first step and fails if it exceeds
`max_logprob_gap`.

Every stage that trains or scores first verifies its model: it packs several documents, shares a prompt, and compares every layer for
these and for one document longer than the model's window with the model's own forward pass in fp32. An architecture that is not listed is
therefore right or refused, too.
"""
TAIL = """
## Mixtures of experts

`sft`, `preference_train` and `rlvr` add the [load-balancing loss](training.md#mixtures-of-experts) of the routers, and show the load of
experts, where transformers defines this loss for the architecture: gpt_oss, granitemoe, mixtral, olmoe, phimoe, qwen2_moe, qwen3_moe and
qwen3_next. The tests compare value and gradient with those of transformers.

deepseek_v2, deepseek_v3, glm4_moe and llama4_text train without it, as in transformers and TRL, and refuse `router_aux_loss_coef`.
DeepSeek-V3 and GLM 4.5 were balanced by a bias per expert, which only selects experts and is updated outside the gradient; here this bias
stays as it is in the payload.
"""


def page(outcomes: dict[str, dict[str, Cell]]) -> str:
    lines = ["", "| architecture | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name in sorted(outcomes):
        lines.append(f"| {name} | " + " | ".join(outcomes[name].get(column, {}).get("value", "") for column in COLUMNS) + " |")
    return HEAD + "\n".join(lines) + "\n" + TAIL


def recorded() -> dict[str, dict[str, Cell]]:
    """Architecture → column → cell, as last measured."""
    return json.loads(RESULT.read_text()) if RESULT.exists() else {}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names, with commas between; the others stay as they were measured")
    parser.add_argument("--page", action="store_true", help="writes the page from what was measured")
    parser.add_argument("--without-vllm", action="store_true", help="leaves vLLM's column as it was measured")
    parser.add_argument("--sample", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    by_name = {architecture.name: architecture for architecture in ALL}
    if asked.sample:
        sample(by_name[asked.sample], asked.folder)
        return
    outcomes = {name: cells for name, cells in recorded().items() if name in by_name}
    for name in () if asked.page else [name for name in asked.only.split(",") if name] or by_name:
        engine = outcomes.get(name, {}).get("vLLM", {}) if asked.without_vllm else by_vllm(by_name[name])
        outcomes[name] = outcome(by_name[name]) | {"vLLM": engine}
        print(name, {column: cell.get("value") for column, cell in outcomes[name].items()}, flush=True)
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps(outcomes, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(outcomes))


if __name__ == "__main__":
    main()
