"""Parameters by formula: against what the models' publishers state, and against transformers' own count."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pedigree.configs.base.packaged import ASSETS
from pedigree.pipelines.estimate.facts import hub_cache
from pedigree.pipelines.estimate.shapes import FAMILIES, KNOWN, PACKAGED, Shape, known_shape, shape_of_config

PUBLISHED = {
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "allenai/tulu-2-7b": 6_738_415_616,
    "allenai/tulu-2-13b": 13_015_864_320,
    "allenai/OLMo-2-0425-1B": 1_484_916_736,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/OLMo-2-1124-13B": 13_716_198_400,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
}
"""As the files of the hub count them."""
SMALL = {
    "vocab_size": 512, "hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
MIXTURE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize("name", KNOWN)
def test_the_table_has_as_many_parameters_as_the_publishers_say(name):
    assert KNOWN[name].parameters == PUBLISHED[name]


def test_every_packaged_model_has_a_shape():
    assert {name for name, asset in ASSETS.items() if asset.member.endswith(".gguf")} == set(PACKAGED)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_familys_parameters_are_those_that_transformers_makes(kind):
    mixture = MIXTURE if kind in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe") else {}
    config = AutoConfig.for_model(kind, **SMALL, **mixture)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    shape = shape_of_config(config.to_dict())
    assert shape is not None and shape.parameters == counted


def test_biases_and_untied_heads_are_read_from_the_config():
    config = {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    shape = shape_of_config(config)
    assert shape is not None and shape.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("told", "expected"), [({}, True), ({"attn_logit_softcapping": 50.0}, True), ({"attn_logit_softcapping": None}, False)]
)
def test_scores_are_capped_where_the_config_says(told, expected):
    shape = shape_of_config({"model_type": "gemma2", **SMALL, **told})
    assert shape is not None and shape.softcap is expected


@pytest.mark.parametrize(
    "config",
    [{}, {"model_type": "mamba", **SMALL}, {"model_type": "llama"}, {"model_type": "llama", **SMALL, "hidden_size": "a"}, {"model_type": 3},
     {"model_type": "llama", **SMALL, "num_attention_heads": 0}, {"model_type": "llama", **SMALL, "vocab_size": 1 << 40}],
)  # fmt: skip
def test_what_is_not_understood_is_unknown_and_no_error(config):
    assert shape_of_config(config) is None


def test_models_trained_from_a_known_one_have_its_shape():
    for name in ("allenai/Llama-3.1-Tulu-3-8B-SFT", "meta-llama/Llama-3.1-8B-Instruct", "allenai/Llama-3.1-Tulu-3.1-8B"):
        assert known_shape(name) == KNOWN["meta-llama/Llama-3.1-8B"]
    assert known_shape("allenai/OLMo-2-0425-1B-RLVR1") == KNOWN["allenai/OLMo-2-0425-1B"]
    assert known_shape("somebody/Llama-3.1-8B") is None


def test_a_tokens_way_through_a_mixture_meets_its_experts_alone():
    # one layer: attention 4·64·64 = 16,384; an expert 3·64·32 = 6,144, two of eight; router 64·8 = 512; norms 2·64
    # and once: the last norm 64, the head 100·64
    shape = Shape(1, 64, 4, 4, 16, 128, 100, tied=True, experts=8, experts_per_token=2, expert_ffn=32)
    assert shape.multiplied == 16_384 + 2 * 6_144 + 512 + 128 + 64 + 6_400
    assert shape.parameters == shape.multiplied + 6 * 6_144


def test_the_hubs_cache_is_where_the_library_has_it(tmp_path):
    assert hub_cache({"HF_HOME": str(tmp_path)}) == tmp_path / "hub"
    assert hub_cache({"HF_HOME": "/a", "HF_HUB_CACHE": str(tmp_path)}) == tmp_path


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_local_experts": "8"}, {"num_local_experts": -8}, {"num_local_experts": True}, {"num_experts_per_tok": None},
        {"shared_expert_intermediate_size": "64"}, {"shared_expert_intermediate_size": [64]}, {"mlp_only_layers": 3},
        {"mlp_only_layers": "all"}, {"mlp_only_layers": {"0": 1}},
    ],
)  # fmt: skip
def test_a_mixture_whose_config_is_malformed_has_no_shape(wrong):
    config = SMALL | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    assert shape_of_config(config) is not None and shape_of_config(config | wrong) is None
