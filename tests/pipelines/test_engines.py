import json
import re
from pathlib import Path

import pytest
from handmade import project_at

from pedigree.configs.base.document import ConfigError
from pedigree.configs.base.project import Project
from pedigree.configs.language.execution import Execution, Numerics
from pedigree.configs.language.recipe import load_recipe
from pedigree.pipelines.rehearsal.preparing import prepare
from pedigree.pipelines.run import checks, opening

ON_A_GPU = Execution.model_validate({"slots": 1, "numerics": {"device": "cuda", "kernels": "liger"}})
RECIPES = Path(__file__).parents[2] / "configs" / "recipes"


def test_an_engine_that_is_not_installed_is_named_before_anything_runs(monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "vllm" else object())
    graph = load_recipe(RECIPES, "tiny")
    checks.refuse_missing_engines(graph, ["tiny/chat", "tiny/sft"], Execution(slots=1))
    with pytest.raises(ConfigError, match=r"sample_0, rlvr: needs vllm, not installed: run `make setup`"):
        checks.refuse_missing_engines(graph, ["tiny/sft", "tiny/sample_0", "tiny/rlvr"], Execution(slots=1))


def test_a_rehearsal_names_the_packages_that_its_tiny_models_need(tmp_path, monkeypatch):
    monkeypatch.setenv("PEDIGREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(ConfigError, match=r"tiny: base: needs torch, not installed: run `make setup`$"):
        prepare(project_at(tmp_path / "project"), "tiny")


def test_kernels_that_are_not_installed_are_named_for_the_stages_that_compute(monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "liger_kernel" else object())
    graph, addresses = load_recipe(RECIPES, "tiny"), ["tiny/chat", "tiny/sample_0", "tiny/sft"]
    checks.refuse_missing_engines(graph, addresses, Execution(slots=1))
    with pytest.raises(ConfigError, match=r"tiny: sft: needs liger_kernel, not installed: run `make setup`"):
        checks.refuse_missing_engines(graph, addresses, ON_A_GPU)


SPOKEN = """stages:
  people: {kind: prepare_data, record: prompt, sources: [{type: arithmetic, operations: [add], digits: [1], count: 9, seed: 1}]}
  base: {kind: source_model, source: {type: packaged, asset: smollm2-135m-instruct}}
  asked: {kind: synthesize, in: {prompts: people}, method: {type: persona, task: math}, by: &server
    {type: endpoint, base_url: "https://writer.example/v1", model: m}}
  own: {kind: synthesize, in: {prompts: people, writer: base}, method: {type: persona, task: math}, by: {type: policy}}
  said: {kind: sample, in: {prompts: people, policies: [base]}, prompts: {count: 9}, samples_per_prompt: 1,
    sampling: {max_tokens: 8}}
  checked: {kind: judge, in: {completions: said}}
  asked_too: {kind: judge, in: {completions: said}, rating_weight: 1, rating: {by: *server, rubrics: [helpfulness]}}
  rated: {kind: judge, in: {completions: said, judge: base}, rating_weight: 1, rating: {by: {type: policy}, rubrics: [helpfulness]}}
"""


def test_who_asks_a_server_needs_no_engine_and_a_policy_that_rates_does(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "vllm" else object())
    (tmp_path / "made.yaml").write_text(SPOKEN)
    graph = load_recipe(tmp_path, "made")
    with pytest.raises(ConfigError, match=r"made: own, said, rated: needs vllm, not installed"):
        checks.refuse_missing_engines(graph, list(graph.nodes), ON_A_GPU.model_copy(update={"numerics": Numerics()}))


@pytest.mark.parametrize("kind", ["judge", "synthesize"])
def test_engines_that_nobody_opens_need_no_slots(tmp_path, kind):
    """A judge that asks a server takes one slot, whatever the profile says of engines for all stages."""
    narrow = {kind: {"placement": {"slots": 1}}}
    profile = {"slots": 4, "numerics": {"threads": 1}, "placement": {"engines": 4, "slots": 4}, "kinds": narrow}
    (tmp_path / "made.yaml").write_text(SPOKEN)
    (tmp_path / "wide.yaml").write_text(json.dumps(profile))
    with pytest.raises(ConfigError) as refused:
        opening.profile_for(Project(tmp_path), load_recipe(tmp_path, "made"), str(tmp_path / "wide.yaml"))
    opens = {"judge": "rated", "synthesize": "own"}[kind]
    problem = "engines 4, each with tensor_parallel 1 and threads 1, need 4 slots, but placement.slots is 1: raise it, or lower engines"
    assert [problem.message for problem in refused.value.problems] == [f"stage {opens}: {problem}"]


@pytest.mark.parametrize(
    "profile",
    [
        {"slots": 4, "placement": {"engines": 4, "slots": 2}},
        {"slots": 4, "stages": {"sample_0": {"placement": {"engines": 4, "slots": 2}}}},
    ],
)
def test_engines_that_do_not_fit_their_stage_are_a_problem_of_the_profile(tmp_path, profile):
    """Each kind and each stage alone is well: only the recipe says which stage is of which kind."""
    Execution.model_validate(profile)
    (tmp_path / "odd.yaml").write_text(json.dumps(profile))
    graph = load_recipe(RECIPES, "tiny")
    with pytest.raises(ConfigError) as refused:
        opening.profile_for(Project(tmp_path), graph, str(tmp_path / "odd.yaml"))
    told = [problem.message for problem in refused.value.problems]
    problem = "engines 4, each with tensor_parallel 1 and threads 2, need 8 slots, but placement.slots is 2: raise it, or lower engines"
    assert f"stage sample_0: {problem}" in told and not [one for one in told if one.startswith("stage sft")]


def test_asynchronous_engines_without_gpus_of_their_own_are_a_problem_of_the_profile(tmp_path):
    """Those of a synchronous stage share the ranks' GPUs."""
    recipe = (RECIPES / "tiny.yaml").read_text()
    ahead = "algorithm: {type: dapo, correction: {}}\n    replay: recorded\n    asynchronous: {}"
    (tmp_path / "turns.yaml").write_text(recipe)
    (tmp_path / "ahead.yaml").write_text(recipe.replace("algorithm: {type: dapo}", ahead))
    profile = {"slots": 2, "numerics": {"device": "cuda", "kernels": "liger"}, "placement": {"slots": 2}}
    (tmp_path / "split.yaml").write_text(json.dumps(profile | {"kinds": {"rlvr": {"numerics": {"world_size": 2}}}}))
    (tmp_path / "one.yaml").write_text(json.dumps(profile))
    graph, project = load_recipe(tmp_path, "ahead"), Project(tmp_path)
    opening.profile_for(project, graph, str(tmp_path / "one.yaml"))
    opening.profile_for(project, load_recipe(tmp_path, "turns"), str(tmp_path / "split.yaml"))
    with pytest.raises(ConfigError) as refused:
        opening.profile_for(project, graph, str(tmp_path / "split.yaml"))
    assert [problem.message for problem in refused.value.problems] == [
        "stage rlvr: asynchronous engines need separate GPUs: 2 ranks of the trainer and engines 1 with tensor_parallel 1 need 3 slots, "
        "but placement.slots is 2: lower world_size or engines, or raise slots"
    ]


def test_a_policy_that_is_queried_has_gpus_of_its_own_and_must_be_an_input(tmp_path):
    user = "environment: {type: user, by: {type: policy}, instructions: Ask., stop: null, max_turns: 2}\n    "
    recipe = (RECIPES / "tiny.yaml").read_text().replace("algorithm: {type: dapo}", f"{user}algorithm: {{type: dapo}}")
    (tmp_path / "without.yaml").write_text(recipe)
    with pytest.raises(ConfigError, match="stage rlvr: this config requires input 'user': name a stage with output policy"):
        load_recipe(tmp_path, "without")
    (tmp_path / "unasked.yaml").write_text(re.sub("(kind: rlvr\n    in: {)", r"\1user: base, ", (RECIPES / "tiny.yaml").read_text()))
    with pytest.raises(ConfigError, match="the input user is set, but nothing queries it"):
        load_recipe(tmp_path, "unasked")
    (tmp_path / "asked.yaml").write_text(re.sub("(kind: rlvr\n    in: {)", r"\1user: base, ", recipe))
    graph, project = load_recipe(tmp_path, "asked"), Project(tmp_path)
    profile = {"slots": 2, "numerics": {"device": "cuda", "kernels": "liger"}, "placement": {"slots": 1}}
    (tmp_path / "one.yaml").write_text(json.dumps(profile))
    (tmp_path / "two.yaml").write_text(json.dumps(profile | {"placement": {"slots": 2}}))
    opening.profile_for(project, graph, str(tmp_path / "two.yaml"))
    with pytest.raises(ConfigError) as refused:
        opening.profile_for(project, graph, str(tmp_path / "one.yaml"))
    assert [problem.message for problem in refused.value.problems] == [
        "stage rlvr: policies at user need GPUs of their own: 1 of the stage and 1 with tensor_parallel 1 need 2 slots, but "
        "placement.slots is 1: raise slots, or lower world_size or engines"
    ]


def test_numerics_of_a_kind_and_of_a_stage_that_exclude_each_other_are_told_in_words(tmp_path):
    """Each is valid alone; pydantic's own words would show the input and an address of its documentation."""
    compiled = {"reward": {"numerics": {"kernels": "compiled"}}}
    profile = {"slots": 4, "kinds": {"reward_model": {"numerics": {"zero_stage": 3}}}, "stages": compiled}
    Execution.model_validate(profile)
    (tmp_path / "odd.yaml").write_text(json.dumps(profile))
    with pytest.raises(ConfigError) as refused:
        opening.profile_for(Project(tmp_path), load_recipe(RECIPES, "demo"), str(tmp_path / "odd.yaml"))
    (told,) = [problem.message for problem in refused.value.problems if problem.message.startswith("stage reward:")]
    assert told == (
        "stage reward: numerics.kernels compiled requires unsharded weights, but zero_stage is 3: set zero_stage to 2 or less, or kernels "
        "to liger or torch"
    )


def test_numerics_of_a_profile_that_exclude_each_other_are_told_in_words(tmp_path):
    (tmp_path / "odd.yaml").write_text(json.dumps({"slots": 4, "numerics": {"zero_stage": 3, "kernels": "compiled"}}))
    with pytest.raises(ConfigError, match=r"numerics: kernels compiled requires unsharded"):
        opening.load_execution(Project(tmp_path), str(tmp_path / "odd.yaml"))


def test_every_engine_of_a_declaration_is_known():
    graph = load_recipe(RECIPES, "demo")
    checks.refuse_missing_engines(graph, list(graph.nodes), Execution(slots=1))
    assert {node.declaration.engine for node in graph.nodes.values()} == set(checks.ENGINES)


@pytest.mark.parametrize("name", ["huge", "missing/huge.yaml"])
def test_a_profile_that_does_not_exist_is_refused_with_those_that_do(tmp_path, name):
    with pytest.raises(ConfigError, match=r"huge\.yaml: there is no profile 'huge'; available: cpu, gpu, gpu8, ray, slurm$"):
        opening.load_execution(Project(tmp_path), name)
