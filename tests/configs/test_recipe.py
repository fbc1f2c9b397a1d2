"""Hazards of recipe files: each ends in an error that names file, line, value and remedy, or in the graph that was meant."""

import pytest
from chain_lab import CHAIN, PREFERENCES, ROUNDS, SUMS, Recipes

from pedigree.configs.language.graph import Graph
from pedigree.configs.language.recipe import load_recipes
from pedigree.configs.language.recipe_files import recipe_names, score_tolerance
from pedigree.configs.methods.training import PreferenceTrain, Sft


def sources_of(graph: Graph, name: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for edge in graph.find(name).edges:
        found.setdefault(edge.port, []).append(edge.source)
    return found


def test_a_chain_loads_with_types_and_numbers(chain):
    graph = chain.load("chain")
    assert list(graph.nodes) == [f"chain/{name}" for name in ("suite", "raw", "clean", "base", "sft", "scores")]
    assert [node.output for node in graph.nodes.values()] == ["item", "conversation", "conversation", "policy", "policy", "scores"]
    config = graph.find("sft").config
    assert isinstance(config, Sft) and config.optimizer.learning_rate == 0.0001
    assert graph.execution == "cpu" and graph.description == "from rows to scores"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "    max_length: 32\n",
            "    max_length: 32\n    lr: 1\n",
            "chain.yaml:12: stage sft: lr: unknown key; instead of lr write `optimizer: {learning_rate: ...}`",
        ),
        ("{learning_rate: 1e-4}", "{learning_rate: 1e-4, lr: 1}", "chain.yaml:12: stage sft: optimizer.lr: unknown key"),
        ("{learning_rate: 1e-4}", "{learning_rate: 2.0}", "must be at most 1, not 2.0"),
        ("global_batch: 4", "global_batch: '4'", "chain.yaml:10: stage sft: global_batch: must be a whole number, not '4': write 4"),
        ("    global_batch: 4\n", "", "chain.yaml:7: stage sft: global_batch: required, but missing: add it"),
        ("    max_length: 32\n", "    max_length: 32\n    max_length: 64\n", "chain.yaml:12: duplicate key 'max_length'"),
        ("kind: sft", "kind: sfft", "chain.yaml:8: stage sft: kind 'sfft' is not one of best_answers, "),
        (
            "kind: sft",
            "kind: dpo",
            "reward_model, rlvr, sample, select, select_prompts, select_rows, sft, source_model, synthesize: write kind: "
            "preference_train with loss: {type: dpo}",
        ),
        ("kind: sft", "knd: sft", "chain.yaml:8: stage sft: knd: unknown key; did you mean kind?"),
        ("    kind: sft\n", "", "chain.yaml:7: stage sft: kind is missing: write one of best_answers, "),
        ("in: {policy: base", "inputs: {policy: base", "chain.yaml:9: stage sft: inputs: unknown key; did you mean in?"),
        (
            "    in: {policy: base, data: [clean]}\n",
            "",
            "chain.yaml:7: stage sft: input 'policy' and 'data' are missing: name a stage with output policy, and one with conversation",
        ),
        ("policy: base, ", "polcy: base, ", "chain.yaml:9: stage sft: no input 'polcy'; inputs of sft: policy, data; did you mean policy?"),
        ("stages:\n", "stage:\n", "chain.yaml:2: stage: unknown key; did you mean stages?"),
        ("description:", "execution: [cpu]\ndescription:", "chain.yaml:1: execution: must be text, not ['cpu']"),
        ("description:", "reproduce: 1\ndescription:", "chain.yaml:1: reproduce: must be a mapping, not 1: write its fields in braces"),
        ("  sft:\n", "  Sft:\n", "stage name 'Sft' must match"),
        ("policy: base", "policy: bose", "chain.yaml:9: stage sft: input 'policy' names 'bose', which does not exist; available: suite, "),
        ("policy: base, ", "", "chain.yaml:9: stage sft: input 'policy' is missing: name a stage with output policy"),
        ("policy: base", "polcy: base, policy: base", "chain.yaml:9: stage sft: no input 'polcy'; inputs of sft: policy, data"),
        ("policy: base", "policy: raw", "stage sft: input 'policy' is raw of type conversation; it must be policy"),
        ("policy: base", "policy: [base, base]", "input 'policy' has a duplicate label: base, base"),
        ("policy: base", "policy: {a: base, b: base}", "input 'policy' takes one stage, not 2"),
        ("policies: [sft]", "policies: []", "stage scores: input 'policies' is missing: name a stage with output policy"),
        ("policies: [sft]", "policies:", "stage scores: input 'policies' is missing"),
        ("in: {corpus: [clean]}, ", "", "stage base: this config requires input 'corpus'"),
        ("heads: 2", "heads: 3", "hidden 16 must be a multiple of heads 3"),
        ("data: raw", "data: clean", "chain.yaml:5: stage clean: stages form a cycle: clean -> clean"),
        ("data: raw", "data: scores", "stages form a cycle: "),
        ("description:", "descripton: x\ndescription:", "chain.yaml:1: descripton: unknown key; did you mean description?"),
        ("data: [clean]", "data: [raw]", "stage sft: trains on chain/raw, which is not decontaminated against chain/suite"),
    ],
)
def test_one_mistake_is_one_problem_with_its_line(recipes, old, new, problem):
    assert CHAIN.count(old) >= 1
    recipes.write("chain", CHAIN.replace(old, new, 1))
    found = [text for text in recipes.problems("chain") if "trains on" in problem or "trains on" not in text]
    assert len(found) == 1 and problem in found[0], found


def test_a_mistake_in_rounds_is_told_once(recipes):
    recipes.write("chain", CHAIN + PREFERENCES + ROUNDS.replace("{type: dpo}", "{type: dpoo}"))
    assert "stage dpo_1: loss: type 'dpoo' is not one of dpo, " in recipes.problem("chain")


def test_a_stage_behind_a_broken_one_is_not_blamed(recipes):
    recipes.write("chain", CHAIN.replace("kind: source_model", "kind: sourcemodel"))
    assert recipes.problem("chain").startswith("chain.yaml:6: stage base: kind 'sourcemodel'")


def test_all_problems_come_at_once_in_the_order_of_the_file(recipes):
    text = CHAIN.replace("digits: [1]", "digits: []", 1).replace("global_batch: 4", "global_batch: 0")
    recipes.write("chain", text.replace("max_tokens: 4", "max_token: 4"))
    found = recipes.problems("chain")
    assert [int(problem.split(":")[1]) for problem in found] == [3, 10, 16]
    assert [problem.split(": ")[1] for problem in found] == ["stage suite", "stage sft", "stage scores"]


def test_a_reward_model_is_no_policy(recipes):
    recipes.write("chain", CHAIN + PREFERENCES + "  more:\n    kind: sample\n    in: {policies: [sft, reward], prompts: prompts}\n"
                  f"    sampling: {{max_tokens: 4}}\n    samples_per_prompt: 1\n    prompts: {{count: 4}}\n"
                  f"  prompts: {{kind: prepare_data, record: prompt, sources: [{SUMS}]}}\n")  # fmt: skip
    assert recipes.problem("chain") == "chain.yaml:27: stage more: input 'policies' is reward of type reward_model; it must be policy"


def test_a_malformed_recipe_does_not_touch_the_good_ones(chain):
    chain.write("broken", "stages: [\n")
    assert recipe_names(chain.folder) == ["broken", "chain"]
    assert len(chain.load("chain").nodes) == 6
    assert chain.problem("broken").startswith("broken.yaml:2: not valid YAML")


def test_an_unknown_recipe_names_those_there_are(chain):
    assert chain.problem("chian") == "chian.yaml: there is no recipe 'chian'; available: chain; did you mean chain?"


def test_a_stage_in_place_of_a_recipe_is_told_how_to_select_it(chain):
    assert chain.problem("chain/sft") == (
        "chain/sft: is a stage: name the recipe, chain; run, plan and pull select stages with `--only sft` or `--until sft`"
    )
    assert chain.problem("chain+12345678/sft").startswith("chain+12345678/sft: is a stage: name the recipe, chain+12345678;")


def test_a_recipe_by_path_is_the_same_recipe(chain):
    assert set(chain.load(str(chain.folder / "chain.yaml")).nodes) == set(chain.load("chain").nodes)


# Rounds


def test_rounds_are_unrolled_each_with_its_own_stages(recipes):
    recipes.write("chain", CHAIN + ROUNDS)
    graph = recipes.load("chain")
    rounds = [name for name in (node.name for node in graph.nodes.values()) if name.endswith(("_1", "_2"))]
    assert sorted(rounds) == sorted(f"{stage}_{index}" for stage in ("sample", "judge", "pair", "dpo") for index in (1, 2))
    assert sources_of(graph, "sample_1") == {"policies": ["chain/sft"], "prompts": ["chain/prompts"]}
    assert sources_of(graph, "sample_2") == {"policies": ["chain/dpo_1"], "prompts": ["chain/prompts"]}
    assert sources_of(graph, "dpo_2") == {"policy": ["chain/dpo_1"], "preferences": ["chain/pair_2"], "reference": ["chain/sft"]}
    assert [graph.find(f"sample_{i}").config.model_dump()["prompts"]["index"] for i in (1, 2)] == [1, 2]
    assert sources_of(graph, "best")["candidates"] == ["chain/sft", "chain/dpo_2"]


def dpo_stages(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes.values() if node.name.startswith("dpo_")]


def test_who_extends_a_recipe_changes_its_rounds_in_their_group(recipes):
    recipes.write("chain", CHAIN + ROUNDS)
    child = "extends: chain\nstages:\n  online: {%s}\n"
    recipes.write("fewer", child % "rounds: 1")
    fewer = recipes.load("fewer")
    assert dpo_stages(fewer) == ["dpo_1"] and sources_of(fewer, "best")["candidates"] == ["chain/sft", "chain/dpo_1"]
    recipes.write("more", child % "rounds: 3, stages: {dpo: {max_length: 77}}")
    more = recipes.load("more")
    assert dpo_stages(more) == ["dpo_1", "dpo_2", "dpo_3"]
    assert {more.find(name).config.model_dump()["max_length"] for name in dpo_stages(more)} == {77}
    assert dpo_stages(recipes.load("fewer", "online.rounds=2")) == ["dpo_1", "dpo_2"]
    recipes.write("as_it_was", "extends: chain\nstages: {}\n")
    assert dpo_stages(recipes.load("as_it_was", "online.rounds=3")) == ["dpo_1", "dpo_2", "dpo_3"]
    recipes.write("without", "extends: chain\nstages:\n  online: null\n  best: {in: {candidates: [sft]}}\n")
    assert not dpo_stages(recipes.load("without"))


def test_a_label_of_null_removes_an_inherited_input(recipes):
    recipes.write("chain", CHAIN + ROUNDS.replace("candidates: [sft, online]", "candidates: {first: sft, last: online}"))
    recipes.write("child", "extends: chain\nstages:\n  best: {in: {candidates: {last: null}}}\n")
    assert sources_of(recipes.load("child"), "best")["candidates"] == ["chain/sft"]
    recipes.write("none", "extends: chain\nstages:\n  best: {in: {candidates: {first: null, last: null}}}\n")
    assert "input 'candidates' is missing" in recipes.problem("none")


def test_data_and_reference_of_other_rounds_are_named_explicitly(recipes):
    text = ROUNDS.replace("rounds: 2", "rounds: 3")
    recipes.write("chain", CHAIN + text.replace("[pair], reference: sft", "[pair@all], reference: dpo@$round-2"))
    graph = recipes.load("chain")
    found = [(given["preferences"], given["reference"]) for given in (sources_of(graph, f"dpo_{index}") for index in (1, 2, 3))]
    assert found == [
        (["chain/pair_1"], ["chain/sft"]),
        (["chain/pair_1", "chain/pair_2"], ["chain/sft"]),
        (["chain/pair_1", "chain/pair_2", "chain/pair_3"], ["chain/dpo_1"]),
    ]


def test_a_name_that_says_its_own_round_changes_no_identity(recipes):
    recipes.write("chain", CHAIN + ROUNDS)
    specs = {name: node.spec for name, node in recipes.load("chain").nodes.items()}
    explicit = ROUNDS.replace("policy: previous, preferences: [pair]", "policy: dpo@$round-1, preferences: [pair@$round]")
    assert explicit != ROUNDS
    recipes.write("chain", CHAIN + explicit)
    assert {name: node.spec for name, node in recipes.load("chain").nodes.items()} == specs


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("[pair]", "[pair@$round-1]", "chain.yaml:33: stage dpo_1: input 'preferences' names 'pair@$round-1' in round 1 is round 0"),
        ("[pair]", "[pear@all]", "chain.yaml:33: stage dpo_1: input 'preferences' names 'pear@all': pear is not a stage of this group"),
        (
            "[pair]",
            "[pair@1..$round-1]",
            "chain.yaml:33: stage dpo_1: input 'preferences' is missing: name a stage with output preference",
        ),
        ("reference: sft", "reference: dpo@all", "stages form a cycle: dpo_1 -> dpo_1"),
        ("[sft, online]", "[sft, dpo@1]", "chain.yaml:38: stage best: input 'candidates' names 'dpo@1', which does not exist; available: "),
    ],
)
def test_a_round_that_is_not_there_is_one_problem_with_its_line(recipes, old, new, problem):
    assert ROUNDS.count(old) == 1
    recipes.write("chain", CHAIN + ROUNDS.replace(old, new))
    assert problem in recipes.problems("chain")[0]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("{policies: [sft]}", "merge takes at least 2 policies, not 1: add more under `policies`"),
        ("{policies: [base, sft, online]}, method: {type: slerp}", "slerp takes exactly 2 policies, not 3: remove some"),
        (
            "{policies: [base, sft]}, method: {type: linear, weights: {base: 1}}",
            "method.weights lacks sft: the policies are base, sft; give each a weight",
        ),
        (
            "{policies: [base, sft]}, method: {type: linear, weights: {base: 1, nobody: 1}}",
            "method.weights names 'nobody', which is not an input and lacks sft: the policies are base, sft;",
        ),
        ("{policies: [base, sft]}, method: {type: linear, weights: {base: -1.0, sft: 1}}", "weight of base is -1.0, but must be a finite"),
        ("{policies: [base, sft]}, method: {type: linear, weights: {base: 0, sft: 0}}", "all weights are 0: give at least one a weight"),
    ],
)
def test_a_merge_that_cannot_be_is_refused_with_its_line(recipes, body, problem):
    recipes.write("chain", CHAIN + ROUNDS + f"  soup: {{kind: merge, in: {body}}}\n")
    found = recipes.problem("chain")
    assert found.startswith("chain.yaml:39: stage soup: ") and problem in found


@pytest.mark.parametrize("rounds", ["0", "-1", "two", "1.5", "true"])
def test_rounds_must_be_a_positive_whole_number(recipes, rounds):
    recipes.write("chain", CHAIN + ROUNDS.replace("rounds: 2", f"rounds: {rounds}"))
    assert recipes.problems("chain")[0].startswith("chain.yaml:20: group online: rounds is ")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("    first: sft\n", "", "chain.yaml:19: group online must have exactly `rounds`, `first` and `stages`"),
        ("first: sft", "first: stf", "input 'policies' names 'stf', which does not exist"),
        ("      judge: {kind: judge, in: {completions: sample}}\n", "      judge: 3\n", "chain.yaml:29: stage judge must be a mapping"),
        ("      pair:", "      Pair:", "chain.yaml:30: stage name 'Pair' must match"),
        ("  best:", "  dpo_1:", "chain.yaml:38: two stages are named dpo_1, one of them in a group of rounds: rename one"),
    ],
)
def test_a_mistake_in_a_group_is_found(recipes, old, new, problem):
    recipes.write("chain", CHAIN + ROUNDS.replace(old, new))
    assert problem in recipes.problems("chain")[0]


def test_an_override_reaches_a_group_before_it_is_unrolled(recipes):
    recipes.write("chain", CHAIN + ROUNDS)
    graph = recipes.load("chain", "online.rounds=3", "online.stages.dpo.loss.beta=0.5")
    own = {node.name for node in graph.own}
    assert {"dpo_1", "dpo_2", "dpo_3"} <= own
    for index in (1, 2, 3):
        config = graph.find(f"dpo_{index}").config
        assert isinstance(config, PreferenceTrain) and config.loss.beta == 0.5


def test_an_override_reaches_one_round_alone(recipes):
    recipes.write("chain", CHAIN + ROUNDS)
    graph = recipes.load("chain", "dpo_2.optimizer.learning_rate=1e-6")
    assert {node.name for node in graph.own} == {"dpo_2", "best"}


# Variants, extension, references


def test_a_variant_owns_the_changed_stage_and_all_below_it_and_nothing_else(chain):
    base, variant = chain.load("chain"), chain.load("chain", "sft.optimizer.learning_rate=1e-3")
    assert variant.recipe.startswith("chain+") and len(variant.recipe) == len("chain+") + 8
    assert {node.name for node in variant.own} == {"sft", "scores"}
    shared = {address for address in variant.nodes if address.startswith("chain/")}
    assert shared == {f"chain/{name}" for name in ("suite", "raw", "clean", "base")}
    assert variant.nodes["chain/base"].spec == base.nodes["chain/base"].spec
    assert variant.overrides == {"sft.optimizer.learning_rate": 0.001}


def test_a_variant_is_named_after_what_it_changes_not_after_the_order(chain):
    one = chain.load("chain", "sft.epochs=2", "sft.seed=3").recipe
    assert chain.load("chain", "sft.seed=3", "sft.epochs=2").recipe == one
    assert chain.load("chain", "sft.seed=3", "sft.epochs=3").recipe != one


def test_an_override_that_says_what_stands_there_changes_nothing(chain):
    assert chain.load("chain", "sft.global_batch=4").own == []


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("sft", "--set: 'sft' must be STAGE.FIELD=VALUE, e.g. "),
        ("epochs=2", "--set: 'epochs=2' must be STAGE.FIELD=VALUE, e.g. "),
        (
            "stf.epochs=2",
            "--set: stf.epochs: recipe chain has no stage 'stf': it has suite, raw, clean, base, sft, scores; did you mean sft?",
        ),
        ("sft.epochs=[", "--set: 'sft.epochs=[': not valid YAML: "),
        ("sft.epoch=2", "chain.yaml:7: stage sft: epoch: unknown key; did you mean epochs?"),
        ("sft.epochs=0", "chain.yaml:7: stage sft: epochs: must be at least 1, not 0"),
        ("sft.optimizer.learning_rate=fast", "stage sft: optimizer.learning_rate: must be a number, not 'fast'"),
    ],
)
def test_an_override_that_cannot_be_says_so(chain, override, problem):
    assert problem in chain.problem("chain", override)


def test_an_extension_shares_what_it_does_not_change(chain):
    chain.write("longer", "extends: chain\nstages:\n  sft: {epochs: 3}\n")
    graph = chain.load("longer")
    assert {node.name for node in graph.own} == {"sft", "scores"}
    config = graph.find("longer/sft").config
    assert isinstance(config, Sft) and (config.epochs, config.global_batch) == (3, 4)
    assert [found.recipe for found in load_recipes(chain.folder, "longer")] == ["chain", "longer"]


def test_an_extension_runs_by_the_profile_of_its_parent_unless_it_has_its_own(chain):
    chain.write("big", "extends: chain\nexecution: gpu8\nstages: {}\n")
    chain.write("bigger", "extends: big\nstages: {sft: {epochs: 3}}\n")
    chain.write("small", "extends: big\nexecution: cpu\nstages: {sft: {epochs: 3}}\n")
    assert [chain.load(name).execution for name in ("big", "bigger", "small")] == ["gpu8", "gpu8", "cpu"]


@pytest.mark.parametrize(
    ("texts", "circle"),
    [
        ({"a": "extends: a\n"}, "a -> a"),
        ({"a": "extends: b\n", "b": "extends: a\n"}, "a -> b -> a"),
    ],
)
def test_recipes_that_extend_each_other_in_a_circle(recipes, texts, circle):
    for name, text in texts.items():
        recipes.write(name, text)
    assert recipes.problem("a").endswith(f"recipes extend each other in a cycle: {circle}")


def test_a_stage_of_another_recipe_is_used_not_copied(chain):
    chain.write("more", "stages:\n  again:\n    kind: sft\n    in: {policy: chain/sft, data: [chain/clean]}\n"
                "    global_batch: 4\n    max_length: 32\n    optimizer: {learning_rate: 1e-4}\n")  # fmt: skip
    graph = chain.load("more")
    assert [node.address for node in graph.own] == ["more/again"]
    assert sources_of(graph, "again") == {"policy": ["chain/sft"], "data": ["chain/clean"]}
    assert set(graph.nodes) == {"more/again", *(f"chain/{name}" for name in ("suite", "raw", "clean", "base", "sft"))}


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("nowhere/sft", "there is no recipe 'nowhere'"),
        ("chain/sftt", "recipe chain has no stage 'sftt'"),
        ("user/more", "recipes refer to each other in a cycle: user -> user"),
    ],
)
def test_a_reference_into_the_void(chain, reference, problem):
    chain.write("user", f"stages:\n  more:\n    kind: pair\n    in: {{judgments: {reference}}}\n")
    found = chain.problem("user")
    assert found.startswith("user.yaml:4: stage more: input 'judgments': ") and problem in found


# The gate on decontamination, and the unseen suite


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("data: [clean]}\n    global_batch", "data: [raw]}\n    global_batch"),  # never checked
        ("data: [clean]}\n    global_batch", "data: [clean, raw]}\n    global_batch"),  # checked in part
    ],
)
def test_nothing_trains_on_rows_that_were_not_decontaminated(recipes, old, new):
    recipes.write("chain", CHAIN.replace(old, new))
    assert recipes.problem("chain") == (
        "chain.yaml:9: stage sft: trains on chain/raw, which is not decontaminated against chain/suite: "
        "put a `decontaminate` stage with that benchmark before it"
    )


def test_a_suite_that_is_reported_later_counts_too(recipes):
    recipes.write("chain", CHAIN + f"  other: {{kind: prepare_data, record: item, task: more, sources: [{SUMS}]}}\n"
                  "  scores_2: {kind: evaluate, in: {policies: [sft], suites: [other]}, sampling: {max_tokens: 4}}\n")  # fmt: skip
    assert "trains on chain/clean, which is not decontaminated against chain/other" in recipes.problem("chain")


def test_generated_rows_are_as_clean_as_their_prompts(recipes):
    text = CHAIN + ROUNDS
    recipes.write("chain", text)
    recipes.load("chain")
    recipes.write("chain", text.replace("prompts: prompts}\n        sampling", "prompts: prompts_raw}\n        sampling"))
    found = recipes.problems("chain")
    assert [problem.split(",")[0].split(": ", 1)[1] for problem in found] == [
        "stage dpo_1: trains on chain/pair_1",
        "stage dpo_2: trains on chain/pair_2",
    ]


@pytest.mark.parametrize(
    ("body", "port"),
    [
        ("a: {kind: prepare_data, record: prompt, sources: [{type: leaks, count: 1, seed: 1}]}", "leak_from"),
        ("a: {kind: judge, in: {completions: sample_1}, reward_weight: 0.5}", "reward_models"),
    ],
)
def test_a_config_that_needs_an_optional_input_says_so(recipes, body, port):
    recipes.write("chain", CHAIN + ROUNDS + f"  {body}\n")
    assert f"stage a: this config requires input '{port}'" in recipes.problem("chain")


RATE = "optimizer: {learning_rate: 1e-4}"
RL = "kind: rlvr, steps: 1, prompts_per_step: 2, samples_per_prompt: 2, sampling: {max_tokens: 4}, max_prompt_length: 8"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "{kind: judge, in: {completions: sample_1, reward_models: [rm]}, reward_weight: 1.0, ensemble: {type: worst_case}}",
            "ensemble worst_case needs at least 2 reward models, not 1 (rm): add some, or remove ensemble",
        ),
        (
            "{kind: judge, in: {completions: sample_1, reward_models: [rm]}}",
            "reward_models is rm, but reward_weight is 0: raise it, or remove the input",
        ),
        ("{kind: overoptimization, in: {judgments: judge_1}}", "judgments judge_1 contains no rewards, because its reward_weight is 0"),
        (
            f"{{{RL}, in: {{policy: sft, prompts: prompts, reference: base}}, algorithm: {{type: dapo}}, {RATE}}}",
            "dapo has no kl: set algorithm.kl",
        ),
        (
            f"{{{RL}, in: {{policy: sft, prompts: prompts, value: rm}}, algorithm: {{type: grpo}}, {RATE}}}",
            "grpo has no value model: use algorithm ppo",
        ),
    ],
)
def test_an_input_that_nobody_would_read_is_refused(recipes, body, message):
    reward = f"  rm: {{kind: reward_model, in: {{policy: sft, preferences: [pair_1]}}, global_batch: 2, max_length: 16, {RATE}}}\n"
    recipes.write("chain", CHAIN + ROUNDS + reward + f"  a: {body}\n")
    assert message in recipes.problem("chain") and "stage a: " in recipes.problem("chain")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("{type: dpo, beta: .inf}", "loss.dpo.beta: must be a finite number, not inf"),
        ("{type: dpoo}", "loss: type 'dpoo' is not one of dpo, dpo_norm, rpo, "),
        ("{beta: 0.1}", "loss: `type` is missing: write {type: ...}"),
        ("dpo", "loss: must be a mapping, not 'dpo': write {type: dpo, ...}"),
    ],
)
def test_a_loss_that_is_none_says_what_to_write(recipes, loss, message):
    recipes.write("chain", CHAIN + PREFERENCES + PREFERENCE.replace("{type: LOSS}", loss).replace("REFERENCE", "sft"))
    assert message in recipes.problem("chain")


PREFERENCE = """\
  cached: {kind: reference_logprobs, in: {policy: sft, preferences: [pairs]}, max_length: 32}
  rounded: {kind: reference_logprobs, in: {policy: sft, preferences: [pairs]}, max_length: 32, dtype: fp32}
  bf16_head: {kind: reference_logprobs, in: {policy: sft, preferences: [pairs]}, max_length: 32, head: model}
  dpo:
    kind: preference_train
    in: {policy: sft, preferences: [pairs], reference: REFERENCE}
    loss: {type: LOSS}
    global_batch: 4
    max_length: 32
    optimizer: {learning_rate: 1e-4}
"""


@pytest.mark.parametrize(
    ("reference", "loss", "message"),
    [
        ("base", "simpo", "stage dpo: the loss simpo uses no reference: remove the input `reference`"),
        ("cached", "orpo", "stage dpo: the loss orpo uses no reference: remove the input `reference`"),
        ("rounded", "dpo", "stage dpo: `reference` has dtype fp32 but the training bf16, so rounding would look like"),
        ("bf16_head", "dpo", "stage dpo: `reference` has head model but the training fp32, so rounding would look like"),
        ("cached", "kto", "stage dpo: kto estimates its KL on mismatched prompts and answers"),
        ("pairs", "dpo", "input 'reference' is pairs of type preference; it must be logprobs or policy"),
    ],
)
def test_a_reference_that_a_loss_cannot_use_is_refused(recipes, reference, loss, message):
    recipes.write("chain", CHAIN + PREFERENCES + PREFERENCE.replace("REFERENCE", reference).replace("LOSS", loss))
    assert message in recipes.problem("chain")


@pytest.mark.parametrize(("reference", "loss"), [("cached", "dpo"), ("base", "kto"), ("null", "simpo")])
def test_a_reference_is_a_policy_cached_or_left_out(recipes, reference, loss):
    recipes.write("chain", CHAIN + PREFERENCES + PREFERENCE.replace("REFERENCE", reference).replace("LOSS", loss))
    given = sources_of(recipes.load("chain"), "dpo")
    assert given.get("reference", ["chain/null"]) == [f"chain/{reference}"]


def test_the_tolerance_of_a_recipe_is_no_part_of_any_stage(recipes, tmp_path):
    recipes.write("chain", CHAIN)
    specs = [node.spec for node in recipes.load("chain").nodes.values()]
    assert score_tolerance(recipes.folder, "chain") is None
    recipes.write("chain", CHAIN.replace("stages:", "reproduce: {score_tolerance: 0.02}\nstages:", 1))
    assert [node.spec for node in recipes.load("chain").nodes.values()] == specs
    recipes.write("longer", "extends: chain\nstages: {}\n")
    assert [score_tolerance(recipes.folder, name) for name in ("chain", "chain+1a2b3c4d", "longer", "none")] == [0.02, 0.02, 0.02, None]
    (tmp_path / "elsewhere.yaml").write_text("extends: longer\nreproduce: {score_tolerance: 0.5}\nstages: {}\n")
    assert score_tolerance(recipes.folder, str(tmp_path / "elsewhere.yaml")) == 0.5


@pytest.mark.parametrize("value", ["{score_tolerance: 2}", "{score_tolerance: -0.1}", "{tolerance: 0.1}", "0.02"])
def test_a_tolerance_that_is_none_is_a_problem_with_its_line(recipes, value):
    recipes.write("chain", CHAIN.replace("stages:", f"reproduce: {value}\nstages:", 1))
    assert all("chain.yaml:2: reproduce" in problem for problem in recipes.problems("chain"))


MEASURED = (
    CHAIN
    + f"""\
  more: {{kind: prepare_data, in: {{tokenizer: MODEL}}, record: conversation, sources: [{SUMS}], filters: [{{type: tokens, max: 99}}]}}
"""
)


def test_tokens_are_counted_by_a_model_from_outside_of_rows_that_training_sees(recipes: Recipes):
    recipes.write("good", MEASURED.replace("MODEL", "base"))
    assert [edge.port for edge in recipes.load("good").find("more").edges] == ["tokenizer"]
    for text, said in (
        (MEASURED.replace("in: {tokenizer: MODEL}, ", ""), "this config requires input 'tokenizer'"),
        (MEASURED.replace("MODEL", "sft"), "sft has the tokenizer of its base model: use that `source_model`"),
        (MEASURED.replace("MODEL", "raw"), "input 'tokenizer' is raw of type conversation; it must be policy"),
        (MEASURED.replace("MODEL", "base").replace("max: 99", "min: 9, max: 5"), "min 9 exceeds max 5 tokens"),
        (MEASURED.replace("MODEL", "base").replace(", max: 99", ""), "the filter `tokens` has no bounds"),
        (
            MEASURED.replace("MODEL}, record: conversation", "base}, record: item, task: t"),
            "which a suite is not used for: remove it",
        ),
    ):
        recipes.write("bad", text)
        (problem,) = recipes.problems("bad")
        assert said in problem


def test_rows_that_were_only_measured_by_a_model_are_not_checked_because_of_it(recipes: Recipes):
    """What the tokenizer was made of was decontaminated; the rows that it counted were not."""
    recipes.write("bad", MEASURED.replace("MODEL", "base").replace("{policy: base, data: [clean]}", "{policy: base, data: [more]}"))
    (problem,) = recipes.problems("bad")
    assert "trains on bad/more, which is not decontaminated against bad/suite" in problem
