"""The recipes of Tülu 3 and OLMo 2: the numbers of their sources that people get wrong, and what holds of all four."""

from functools import cache
from itertools import product

import pytest
from projects import CODE

from pedigree.configs.base.document import ConfigError
from pedigree.configs.base.frozen import Frozen
from pedigree.configs.base.hub_names import COMMIT, PIN_ME
from pedigree.configs.base.project import Project
from pedigree.configs.base.published import Published
from pedigree.configs.judging.measuring import Evaluate, Select
from pedigree.configs.judging.pairing import Pair
from pedigree.configs.judging.pools import Sample
from pedigree.configs.judging.scoring import Judge
from pedigree.configs.language.graph import Graph
from pedigree.configs.language.recipe import load_recipe
from pedigree.configs.language.stated_sources import hub_sources
from pedigree.configs.methods.training import PreferenceTrain, RewardModel, Rlvr, Sft
from pedigree.configs.rows.datasets import PrepareData
from pedigree.configs.rows.overlap_criteria import Decontaminate
from pedigree.configs.rows.row_sources import Hub
from pedigree.configs.rows.source_models import SourceModel

RECIPES = Project(CODE).recipes
FLAGSHIP = ("olmo2_1b", "tulu3_8b", "tulu31_8b", "tulu3_8b_onpolicy")


@cache
def graph(name: str) -> Graph:
    return load_recipe(RECIPES, name)


def config(name: str, stage: str) -> Frozen:
    return graph(name).find(stage).config


def optimizer(given: Sft | PreferenceTrain | RewardModel | Rlvr) -> tuple[float, str, float]:
    found = given.optimizer
    return found.learning_rate, found.schedule, found.warmup_ratio


@pytest.mark.parametrize(
    ("recipe", "loss", "rate", "seed", "batch_of_dpo", "rate_of_dpo", "seed_of_dpo"),
    [("olmo2_1b", "mean", 3e-5, 1, 128, 2.5e-6, 111), ("tulu3_8b", "sum", 5e-6, 123, 128, 5e-7, 42)],
)
def test_sft_and_dpo_are_as_published(recipe, loss, rate, seed, batch_of_dpo, rate_of_dpo, seed_of_dpo):
    """docs/olmo2.md:61-88, 99-131; docs/tulu3.md:22-53, 132-161 at e6c3044, the sum at 30d11b4:52."""
    sft, dpo = config(recipe, "sft"), config(recipe, "dpo")
    assert isinstance(sft, Sft) and isinstance(dpo, PreferenceTrain)
    assert (sft.global_batch, sft.epochs, sft.max_length, sft.too_long) == (128, 2, 4096, "truncate")
    assert (sft.loss_reduction, optimizer(sft), sft.seed) == (loss, (rate, "linear", 0.03), seed)
    assert (dpo.loss.type, getattr(dpo.loss, "beta", None), dpo.global_batch, dpo.epochs) == ("dpo_norm", 5, batch_of_dpo, 1)
    assert (optimizer(dpo), dpo.max_length, dpo.too_long, dpo.seed) == ((rate_of_dpo, "linear", 0.1), 2048, "truncate", seed_of_dpo)


@pytest.mark.parametrize(
    ("recipe", "stage", "rate", "schedule", "kl", "batch", "updates", "steps", "truncated", "seed"),
    [
        ("olmo2_1b", "rlvr_1", 5e-7, "constant", ("k3", "loss", 0.01), (48, 16), 2, 2604, 0, 1),
        ("olmo2_1b", "rlvr_2", 5e-7, "constant", ("k3", "loss", 0.01), (48, 16), 2, 2604, 0, 1),
        ("tulu3_8b", "rlvr_ppo", 3e-7, "linear", ("k1", "reward", 0.05), (224, 1), 4, 446, -10, 3),
        ("tulu31_8b", "rlvr_grpo", 5e-7, "constant", ("k3", "loss", 0.01), (48, 16), 2, 1920, 0, 1),
        ("tulu3_8b_onpolicy", "rlvr_ppo", 3e-7, "linear", ("k1", "reward", 0.05), (224, 1), 4, 446, -10, 3),
    ],
)
def test_rlvr_is_as_published(recipe, stage, rate, schedule, kl, batch, updates, steps, truncated, seed):
    """docs/olmo2.md:285-330, 380-424; docs/tulu3.md:313-346, 476-538 at e6c3044; arXiv 2411.15124, table 21."""
    rlvr = config(recipe, stage)
    assert isinstance(rlvr, Rlvr) and rlvr.algorithm.kl
    assert optimizer(rlvr) == (rate, schedule, 0)
    assert (rlvr.algorithm.kl.estimator, rlvr.algorithm.kl.where, rlvr.algorithm.kl.coefficient) == kl
    assert ((rlvr.prompts_per_step, rlvr.samples_per_prompt), rlvr.algorithm.updates, rlvr.steps) == (batch, updates, steps)
    assert (rlvr.reward.right, rlvr.reward.truncated, rlvr.seed) == (10, truncated, seed)
    assert (rlvr.max_prompt_length, rlvr.sampling.max_tokens, rlvr.sampling.temperature) == (2048, 2048, 1)


def test_the_value_model_begins_as_the_reward_model_and_learns_as_fast_as_the_policy():
    reward, node = config("tulu3_8b", "reward"), graph("tulu3_8b").find("rlvr_ppo")
    assert isinstance(reward, RewardModel) and isinstance(node.config, Rlvr) and node.config.algorithm.type == "ppo"
    assert (reward.global_batch, reward.max_length, optimizer(reward)) == (256, 2048, (3e-6, "linear", 0))
    assert [edge.source for edge in node.edges if edge.port == "value"] == ["tulu3_8b/reward"]
    assert node.config.algorithm.critic.optimizer.learning_rate == node.config.optimizer.learning_rate


def test_templates_and_the_first_token():
    for recipe, begins in (("olmo2_1b", True), ("tulu3_8b", False)):
        base = config(recipe, "base")
        assert isinstance(base, SourceModel) and (base.chat_template, base.add_bos, base.dtype) == ("tulu", begins, "bf16")


def test_tulu_31_shares_all_but_the_last_stage():
    """The SFT and DPO models of Tülu 3 8B are used, not trained again, and nobody trains the reward model."""
    nodes = graph("tulu31_8b").nodes
    assert {"tulu3_8b/sft", "tulu3_8b/dpo"} < set(nodes) and not any("reward" in address or "ppo" in address for address in nodes)
    assert {node.name for node in graph("tulu31_8b").own} == {"rlvr_grpo", "scores", "chosen", "unseen_scores"}


def test_the_recipe_that_makes_its_own_preferences_does_it_as_the_paper():
    """§5.2.1: four of a pool, four aspects, the best against a random lower one; table 15: 19 444 of 271 409 on-policy."""
    pool, rated, pairs = (config("tulu3_8b_onpolicy", stage) for stage in ("sampled", "rated", "preferences"))
    assert isinstance(pool, Sample) and isinstance(rated, Judge) and isinstance(pairs, Pair) and pool.on_policy and rated.rating
    assert (pool.policies_per_prompt, pool.on_policy.policies, pool.sampling.temperature) == (4, ("sft",), 1)
    assert pool.on_policy.share == pytest.approx(19_444 / 271_409, abs=0.005)
    assert set(rated.rating.rubrics) == {"helpfulness", "instruction_following", "honesty", "truthfulness"}
    assert pairs.strategy.type == "best_vs_random_lower"
    chosen = config("tulu3_8b_onpolicy", "chosen")
    assert isinstance(chosen, Select) and chosen.task == ("minerva_math", "ifeval")


@pytest.mark.parametrize("name", FLAGSHIP)
def test_unseen_suites_are_for_the_chosen_model_and_all_training_rows_are_clean_of_all_suites(name):
    nodes = graph(name).nodes
    suites = {address: node.config.split for address, node in nodes.items() if isinstance(node.config, PrepareData) and node.config.task}
    for node in nodes.values():
        asked = {edge.source for edge in node.edges if edge.port == "suites"}
        if isinstance(node.config, Evaluate):
            unseen = asked == {suite for suite, split in suites.items() if split == "unseen"}
            assert unseen or asked == {suite for suite, split in suites.items() if split == "dev"}
            assert not unseen or [edge.source for edge in node.edges if edge.port == "policies"] == [f"{name}/chosen"]
        if isinstance(node.config, Decontaminate):
            assert {edge.source for edge in node.edges if edge.port == "benchmarks"} == set(suites)
            assert node.config.turns == ("user",)


@pytest.mark.parametrize("name", FLAGSHIP)
def test_bad_rows_are_a_small_share_and_nothing_moves(name):
    nodes = graph(name).nodes.values()
    sources = [source for node in nodes for source in hub_sources(node.config)]
    assert sources and all(source["revision"] == PIN_ME or COMMIT.fullmatch(source["revision"]) for source in sources)
    assert all(source["max_bad_rows"] <= 0.01 for source in sources if "split" in source)


def test_what_is_published_is_told_with_its_origin():
    for name in FLAGSHIP:
        published = graph(name).published
        assert isinstance(published, Published), name
        assert published.differs and all(sentence.endswith(".") for sentence in published.differs), name
        assert any("arxiv.org" in source.url for source in published.sources), name
        assert any(source.commit and source.commit in source.url for source in published.sources), name


@pytest.mark.parametrize(
    ("recipe", "task", "tolerance"),
    [
        ("olmo2_1b", "gsm8k", 3.9),  # 200 √(2 · 0.521 · 0.479 / 1319)
        ("olmo2_1b", "ifeval", 6.1),  # 200 √(2 · 0.505 · 0.495 / 541)
        ("tulu3_8b", "gpqa", 6.4),  # 200 √(2 · 0.357 · 0.643 / 448)
        ("tulu31_8b", "ifeval", 5.4),  # 200 √(2 · 0.728 · 0.272 / 541)
    ],
)
def test_a_tolerance_is_two_standard_errors_of_the_stage_where_they_are_largest(recipe, task, tolerance):
    published = graph(recipe).published
    assert published and published.scores[task].tolerance == tolerance


def test_a_recipe_inherits_what_it_does_not_publish_itself():
    parent, child = graph("tulu3_8b").published, graph("tulu3_8b_onpolicy").published
    assert parent and child and child.harness == parent.harness and child.hardware == parent.hardware and child.differs != parent.differs


def test_models_that_learn_from_other_pairs_are_not_held_against_published_scores():
    parent, child = graph("tulu3_8b").published, graph("tulu3_8b_onpolicy").published
    assert parent and child
    expected = {task: {"sft": one.of["sft"]} for task, one in parent.scores.items() if "sft" in one.of}
    assert {task: one.of for task, one in child.scores.items()} == expected


# --- what the schema has for them --------------------------------------------------------------------------------------

PARENT = """
execution: cpu
stages:
  base: {kind: source_model, source: {type: packaged, asset: smollm2-135m-instruct}}
  other: {kind: source_model, source: {type: packaged, asset: smollm2-135m-instruct}, dtype: bf16}
"""
BLOCK = """
published:
  sources: [{title: A paper, url: "https://arxiv.org/abs/1"}]
  hardware: {%s: {gpus: 8, gpu: H100, hours: 9}}
"""


def written(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


def test_an_inherited_stage_is_left_out_by_null(tmp_path):
    written(tmp_path, parent=PARENT, child="extends: parent\nstages:\n  other: null\n")
    assert set(load_recipe(tmp_path, "child").nodes) == {"parent/base"}


def test_null_leaves_out_nothing_that_is_not_there(tmp_path):
    written(tmp_path, parent=PARENT, child="extends: parent\nstages:\n  another: null\n", alone=PARENT + "  third: null\n")
    with pytest.raises(ConfigError, match=r"child.yaml:3: .*another is null, which removes an inherited stage: parent has base, other"):
        load_recipe(tmp_path, "child")
    with pytest.raises(ConfigError, match=r"third is null, .*this recipe extends no other"):
        load_recipe(tmp_path, "alone")


def test_a_stage_that_is_left_out_is_missed_by_those_that_read_it(tmp_path):
    reader = "  soup: {kind: merge, in: {policies: [base, other]}, method: {type: slerp, t: 0.5}}\n"
    written(tmp_path, parent=PARENT + reader, child="extends: parent\nstages:\n  other: null\n")
    with pytest.raises(ConfigError, match="'other', which does not exist"):
        load_recipe(tmp_path, "child")


def test_what_is_published_names_stages_and_fields_that_are_there(tmp_path):
    written(tmp_path, good=PARENT + BLOCK % "base", heir="extends: good\nstages:\n  base: null\n")
    assert load_recipe(tmp_path, "good").published == load_recipe(tmp_path, "heir").published  # and nothing names the heir's lack
    changes = (
        ("base:", "bose:", "published: there is no stage 'bose'; available: base, other"),
        ("gpus: 8", "gpus: 0", "published.hardware.base.gpus: .*must be at least 1, not 0"),
        ("https:", "http:", "published.sources.0.url: "),
        ("hours", "hour", "published.hardware.base.hour: unknown key; did you mean hours?"),
        ("hardware:", "scores: {gsm9k: {metric: m, items: 3, of: {base: 1}}}\n  hardware:", "no suite has the task 'gsm9k'"),
    )
    for (old, new, message), text in product(changes, [BLOCK % "base"]):
        written(tmp_path, bad=PARENT + text.replace(old, new))
        with pytest.raises(ConfigError, match=message):
            load_recipe(tmp_path, "bad")


def test_what_is_published_changes_no_stage(tmp_path):
    written(tmp_path, plain=PARENT, told=PARENT + BLOCK % "base")
    plain, told = load_recipe(tmp_path, "plain"), load_recipe(tmp_path, "told")
    assert [node.spec for node in plain.nodes.values()] == [node.spec for node in told.nodes.values()]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"config": []}, "must name one configuration"),
        ({"config": ["a", "a"]}, "several distinct ones"),
        ({"config": ""}, "must name one configuration"),
        ({"config_as": "task"}, "config is not set"),
        ({"config": "main", "config_as": "source", "columns": {"prompt": "problem", "source": "type"}}, "is also in columns"),
        ({"split_as": "source", "columns": {"prompt": "problem", "source": "type"}}, "split_as source is also in columns"),
        ({"config": "main", "config_as": "source", "split_as": "source"}, "are both source"),
    ],
)
def test_configurations_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        Hub.model_validate({"type": "hub", "repo": "a/b", "revision": PIN_ME, "split": "test", **given})


def test_choosing_by_some_tasks_names_each_once():
    assert Select.model_validate({"task": ["a", "b"]}).task == ("a", "b")
    for wrong in ([], ["a", "a"]):
        with pytest.raises(ValueError, match="must name one task or several distinct ones"):
            Select.model_validate({"task": wrong})
