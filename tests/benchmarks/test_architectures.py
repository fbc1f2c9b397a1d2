"""The table of architectures says what is so."""

import pytest

from benchmarks.architectures import ALL, PAGE, WRONG, outcome, page, recorded

DAILY = {"llama", "gemma2", "gpt2", "qwen3_moe", "deepseek_v3", "gpt_oss", "bloom"}
"""A plain one, windows and caps, learned positions, experts, latent attention, sinks, and one without positions."""


@pytest.mark.parametrize(
    "architecture", [pytest.param(one, marks=[] if one.name in DAILY else pytest.mark.nightly, id=one.name) for one in ALL]
)
def test_an_architecture_is_right_or_refused_as_the_table_says(architecture):
    found = {column: cell["value"] for column, cell in outcome(architecture).items()}
    told = {column: cell["value"] for column, cell in recorded()[architecture.name].items() if column != "vLLM"}
    assert WRONG not in found.values() and found == told, "run `python -m benchmarks.architectures --without-vllm`"


def test_the_page_is_current():
    assert PAGE.read_text() == page(recorded()), "run `python -m benchmarks.architectures --page`"


def test_at_least_25_are_right_packed_with_shared_prompts_and_as_vllm_computes_them():
    told = recorded()
    whole = [name for name in told if told[name]["packed"]["value"] == told[name]["shared prompts"]["value"] == "varlen"]
    agreed = [name for name in whole if told[name]["vLLM"]["value"] != "no"]
    assert len(whole) >= 25 and len(agreed) >= 20
    assert {architecture.name for architecture in ALL if architecture.experts} & set(agreed)
