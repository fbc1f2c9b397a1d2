"""What a recipe may say of pools of policies and of judges, told when it is loaded."""

import re

import pytest

from pedigree.configs.base.document import ConfigError
from pedigree.configs.language.recipe import load_recipe

RECIPE = """\
stages:
  rows: {kind: prepare_data, record: conversation, sources: [{type: arithmetic, operations: [add], digits: [1], count: 9, seed: 1}]}
  prompts: {kind: prepare_data, record: prompt, sources: [{type: arithmetic, operations: [add], digits: [1], count: 9, seed: 2}]}
  a: {kind: source_model, source: {type: packaged, asset: smollm2-135m-instruct}}
  b: {kind: source_model, source: {type: packaged, asset: smollm2-135m-instruct}, add_bos: true}
  c: {kind: source_model, source: {type: packaged, asset: smollm2-135m-instruct}, dtype: bf16}
  pool:
    {kind: sample, in: {policies: [a, b, c], prompts: prompts}, sampling: {max_tokens: 4}, samples_per_prompt: 1, prompts: {count: 4}POOL}
  rated: {kind: judge, in: {completions: poolINPUT}, JUDGE}
"""
RATED = "rating_weight: 1.0, rating: {rubrics: [honesty], by: {type: policy}}"
SERVER = "rating_weight: 1.0, rating: {rubrics: [honesty], by: {type: endpoint, base_url: 'https://judge.example/v1', model: m}}"


def load(folder, pool="", given=", judge: a", judge=RATED):
    text = RECIPE.replace("POOL", f", {pool}" if pool else "").replace("INPUT", given).replace("JUDGE", judge)
    (folder / "pools.yaml").write_text(text)
    return load_recipe(folder, "pools")


@pytest.mark.parametrize(
    "pool",
    [
        "policies_per_prompt: 3",
        "policies_per_prompt: 2, on_policy: {policies: [a], share: 0.5}",
        "policies_per_prompt: 3, on_policy: {policies: [a], share: 1.0}",
        "policies_per_prompt: 1, on_policy: {policies: [a, b], share: 0.5}",
        "on_policy: {policies: [a]}",
    ],
)
def test_a_pool_that_can_be_drawn_from_is_taken(tmp_path, pool):
    assert load(tmp_path, pool).find("pool").output == "completion"


@pytest.mark.parametrize(
    ("pool", "problem"),
    [
        ("policies_per_prompt: 4", "policies_per_prompt is 4, but the input policies has 3: lower it, or add policies"),
        ("policies_per_prompt: 0", "must be at least 1, not 0"),
        ("on_policy: {policies: [d]}", "on_policy.policies names d, but the input policies has a, b, c"),
        ("on_policy: {policies: []}", "must be at least 1 in length, not 0"),
        ("on_policy: {policies: [a], share: 0.5}", "without policies_per_prompt, because all policies answer every prompt"),
        ("policies_per_prompt: 3, on_policy: {policies: [a], share: 0.5}", "needs 3 policies that are not on_policy, but the input"),
        ("policies_per_prompt: 3, on_policy: {policies: [a, b], share: 1.0}", "needs 2 policies that are not on_policy"),
    ],
)
def test_a_pool_that_cannot_is_refused_with_its_numbers(tmp_path, pool, problem):
    with pytest.raises(ConfigError, match=problem) as raised:
        load(tmp_path, pool)
    assert re.search(r"pools\.yaml:[78]: stage pool", str(raised.value))


@pytest.mark.parametrize(
    ("given", "judge", "problem"),
    [
        ("", RATED, "this config requires input 'judge': name a stage with output policy"),
        (", judge: a", SERVER, "judge is a, but is not used"),
        (", judge: a", "verifier_weight: 1.0", "judge is a, but is not used"),
        (", judge: rows", RATED, "input 'judge' is rows of type conversation; it must be policy"),
        ("", RATED.replace("honesty", "kindness"), "rubric 'kindness' is not one of helpfulness"),
        ("", SERVER.replace("https:", "ftp:"), "is not http://HOST:PORT/PATH"),
        ("", SERVER.replace("judge.example", "me:s3cretword@judge.example"), "a password in a URL"),
        ("", SERVER.replace("model: m", "model: m, key: sk-s3cretword0123456789abc"), "an API key"),
    ],
)
def test_a_judge_that_cannot_be_is_refused_and_no_secret_repeated(tmp_path, given, judge, problem):
    with pytest.raises(ConfigError, match=problem) as raised:
        load(tmp_path, given=given, judge=judge)
    assert "s3cret" not in str(raised.value)


def test_who_rates_and_with_which_words_decides_the_stage(tmp_path):
    specs = [load(tmp_path).find("rated").spec, load(tmp_path, given=", judge: b").find("rated").spec]
    for change in (("judge.example", "other.example"), ("model: m", "model: n"), ("[honesty]", "[truthfulness]")):
        specs.append(load(tmp_path, given="", judge=SERVER.replace(*change)).find("rated").spec)
    specs.append(load(tmp_path, given="", judge=SERVER).find("rated").spec)
    assert len(set(specs)) == len(specs)
