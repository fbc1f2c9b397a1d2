"""Suites beside the stages that train and choose: an unseen one measures the end alone, and shares nothing with rows."""

import pytest
from chain_lab import CHAIN, ROUNDS, SUMS

from pedigree.configs.language.suites import looks

OTHER_SUMS = SUMS.replace("seed: 1", "seed: 7")
SECRET = f"  secret: {{kind: prepare_data, record: item, task: secret, split: unseen, sources: [{OTHER_SUMS}]}}\n"
FINAL = "  final: {kind: evaluate, in: {policies: [base, best], suites: [secret]}, sampling: {max_tokens: 4}}\n"
UNSEEN = (CHAIN + ROUNDS).replace("benchmarks: [suite]", "benchmarks: [suite, secret]") + SECRET + FINAL


def test_an_unseen_suite_measures_what_was_chosen_and_the_base(recipes):
    recipes.write("chain", UNSEEN)
    graph = recipes.load("chain")
    assert looks(graph.nodes) == {"chain/secret": [("chain/final", "chain/base"), ("chain/final", "chain/best")]}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[base, best]", "[base, sft]", "chain/sft is not frozen: the unseen suite chain/secret takes only models of frozen kinds"),
        ("suites: [secret]", "suites: [secret, suite]", "stage final: chain/secret is an unseen suite and chain/suite a dev suite"),
        ("suites: [suite]", "suites: [secret]", "stage scores: chain/sft is not frozen: the unseen suite chain/secret"),
        ("suites: [suite]", "suites: [secret]", "stage best: chain/scores scores the unseen suite chain/secret"),
        ("benchmarks: [suite, secret]", "benchmarks: [suite]", "trains on chain/clean, which is not decontaminated against chain/secret"),
        ("record: conversation,", "record: conversation, in: {leak_from: [secret]},", "stage raw: plants items of the unseen suite"),
        (
            "benchmarks: [suite, secret]}",
            "benchmarks: [suite, secret]}, waivers: [{benchmark: secret, items: all, because: x}]",
            "keeps rows that overlap with the unseen suite chain/secret",
        ),
        ("seed: 7", "seed: 1", "stage raw: makes conversation rows from the same arithmetic source, which the unseen suite chain/secret"),
        ("seed: 7", "seed: 1", "stage suite: is a dev suite from the same arithmetic source, which the unseen suite chain/secret also"),
        ("record: conversation,", "record: conversation, split: unseen,", "split: unseen is only for suites"),
        (FINAL, FINAL.replace("sampling", "split: unseen, sampling"), "stage final: split: unknown key"),
    ],
)
def test_nothing_is_trained_tuned_or_chosen_by_an_unseen_suite(recipes, old, new, message):
    recipes.write("chain", UNSEEN.replace(old, new))
    assert message in "\n".join(recipes.problems("chain"))


@pytest.mark.parametrize("rows", ["asset: ifeval", "asset: ifeval, count: 3, seed: 4"])
def test_an_unseen_suite_shares_no_file_with_rows_or_with_a_dev_suite(recipes, rows):
    """Two draws of one file may hold the same rows."""
    ifeval = "{type: packaged, asset: ifeval, count: 5}"
    text = UNSEEN.replace(OTHER_SUMS, ifeval)
    recipes.write("chain", text)
    recipes.load("chain")
    recipes.write("chain", text.replace(SUMS, f"{{type: packaged, {rows}}}", 1))
    assert "stage suite: is a dev suite from the packaged source ifeval, which the unseen suite chain/secret" in recipes.problem("chain")


@pytest.mark.parametrize(
    ("rows", "shares"),
    [
        ("split: [train, test]", True),
        ("split: test, columns: {prompt: text}, max_bad_rows: 3", True),
        ("split: train", False),
        ("split: test, config: other", False),
        ("split: test, config: [other, another]", False),
    ],
)
def test_an_unseen_suite_shares_no_split_with_rows(recipes, rows, shares):
    for commit in ("a" * 40, "b" * 40):  # another one has most of the same rows
        unseen, dev = (f"{{type: hub, repo: lab/sums, revision: {what}}}" for what in (f"{'a' * 40}, split: test", f"{commit}, {rows}"))
        recipes.write("chain", UNSEEN.replace(OTHER_SUMS, unseen).replace(SUMS, dev, 1))
        if shares:
            assert "stage suite: is a dev suite from the hub source lab/sums, which the unseen suite" in recipes.problem("chain")
        else:
            recipes.load("chain")


@pytest.mark.parametrize(("configs", "shares"), [("[a, b]", True), ("b, config_as: part, split_as: kind", True), ("[c, d]", False)])
def test_an_unseen_suite_shares_no_configuration_with_rows(recipes, configs, shares):
    place = f"type: hub, repo: lab/sums, revision: {'a' * 40}, split: test"
    recipes.write("chain", UNSEEN.replace(OTHER_SUMS, f"{{{place}, config: [b, e]}}").replace(SUMS, f"{{{place}, config: {configs}}}", 1))
    if shares:
        assert "stage suite: is a dev suite from the hub source lab/sums, which the unseen suite chain/secret" in recipes.problem("chain")
    else:
        recipes.load("chain")


PUBLISHED = """description: A suite in its published form.
stages:
  secret: {kind: prepare_data, record: item, task: gsm8k, form: gsm8k, split: unseen, SHOTS sources: [{type: files, path: test.jsonl}]}
  other: {kind: prepare_data, record: item, task: bbh, form: bbh, shots: {source: {type: files, path: shots.jsonl}}, sources: [ROWS]}
  rows: {kind: prepare_data, record: conversation, sources: [{type: files, path: train.jsonl}]}
"""
PUBLISHED = PUBLISHED.replace("SHOTS ", "shots: {source: {type: files, path: train.jsonl}, seed: 1}, ")
PUBLISHED = PUBLISHED.replace("ROWS", "{type: files, path: bbh.jsonl}")


def test_worked_examples_are_an_input_and_may_be_training_rows_but_no_unseen_items(recipes):
    recipes.write("published", PUBLISHED)
    graph = recipes.load("published")
    assert graph.nodes["published/other"].files == ("shots.jsonl", "bbh.jsonl")
    assert graph.nodes["published/secret"].files == ("train.jsonl", "test.jsonl")
    recipes.write("published", PUBLISHED.replace("shots.jsonl", "test.jsonl"))
    problem = "stage other: is a dev suite from the files source test.jsonl, which the unseen suite published/secret"
    assert problem in recipes.problem("published")


def test_what_does_not_go_with_a_form_is_refused_with_its_line(recipes):
    recipes.write("published", PUBLISHED.replace("form: bbh", "form: nonsense"))
    problem = recipes.problem("published")
    assert "published.yaml:4: stage other: " in problem and "form 'nonsense' is not one of agieval, bbh" in problem
    scores = "  base: {kind: source_model, source: {type: packaged, asset: smollm2-135m-instruct}}\n  scores: {kind: evaluate, "
    scores += "in: {policies: [base], suites: [other]}, sampling: {max_tokens: 4}}\n"
    recipes.write("published", PUBLISHED + scores)
    assert "all suites have forms (other), which define the sampling parameters: remove sampling" in recipes.problem("published")


def test_a_suite_of_another_recipe_stays_what_it_is(recipes):
    recipes.write("chain", UNSEEN)
    again = "again: {kind: evaluate, in: {policies: [chain/sft], suites: [chain/secret]}, sampling: {max_tokens: 4}}"
    recipes.write("other", f"stages:\n  {again}\n")
    assert "stage again: chain/sft is not frozen: the unseen suite chain/secret" in "\n".join(recipes.problems("other"))
