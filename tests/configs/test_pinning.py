"""`pin me` in a recipe's text: found wherever YAML lets it stand, and replaced without touching anything else."""

import pytest
import yaml

from pedigree.configs.base.document import ConfigError, Loader
from pedigree.configs.language.pinning import open_revisions, pinned
from pedigree.configs.rows.row_sources import Hub
from pedigree.configs.rows.source_models import HubModel

A, B = "a" * 40, "b" * 40
RECIPE = """\
# The data of the paper.
stages:
  raw:
    kind: prepare_data
    sources:
      - {type: hub, repo: lab/rows, revision: pin me, split: train}   # 939,343 rows
      - &more
        type: hub
        repo: "lab/more"
        revision: 'pin me'  # moves often
        split: [one, two]
      - {type: hub, repo: lab/known, revision: COMMIT, split: train}
      - {<<: *more, repo: lab/others, revision: "pin me"}
  again: {kind: prepare_data, sources: [*more]}
  base:
    kind: source_model
    source: {type: hub, repo: lab/model,
             revision: pin me}
    note: pin me
""".replace("COMMIT", "c" * 40)


def test_every_open_revision_is_found_with_its_repository_and_line():
    found = [(one.line, one.repo, one.is_dataset) for one in open_revisions(RECIPE, "r.yaml")]
    assert found == [(6, "lab/rows", True), (10, "lab/more", True), (13, "lab/others", True), (18, "lab/model", False)]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_nothing_but_the_values_changes(line_end):
    text = RECIPE.replace("\n", line_end)
    first, *_, last = open_revisions(text, "r.yaml")
    written = pinned(text, {first: A, last: B})
    before, after = text.split(line_end), written.split(line_end)
    changed = {number: line for number, line in enumerate(after, start=1) if line != before[number - 1]}
    assert len(before) == len(after) and changed == {
        6: f"      - {{type: hub, repo: lab/rows, revision: {A}, split: train}}   # 939,343 rows",
        18: f"             revision: {B}}}",
    }


def test_quotes_go_and_what_yaml_would_take_for_a_number_gets_them():
    commits = dict(zip(open_revisions(RECIPE, "r.yaml"), (A, "0" * 40, "1" * 38 + "e5", B), strict=True))
    written = yaml.load(pinned(RECIPE, commits), Loader=Loader)["stages"]
    sources = written["raw"]["sources"]
    assert [one["revision"] for one in sources] == [A, "0" * 40, "c" * 40, "1" * 38 + "e5"]
    assert written["again"]["sources"] == [sources[1]] and written["base"] == {
        "kind": "source_model",
        "source": {"type": "hub", "repo": "lab/model", "revision": B},
        "note": "pin me",
    }
    assert open_revisions(pinned(RECIPE, commits), "r.yaml") == []


def test_one_without_a_repository_beside_it_is_told_by_its_line():
    with pytest.raises(ConfigError, match=r"r.yaml:3: `pin me` without a repository: write `repo` next to it"):
        open_revisions("stages:\n  base:\n    source: {revision: pin me}\n", "r.yaml")


def test_one_that_another_repository_merges_in_is_told_by_its_line():
    """Or the commit of the first would become that of the second."""
    text = "stages:\n  a: {source: &s {repo: lab/one, revision: pin me, split: train}}\n  b:\n    source: {<<: *s, REPO}\n"
    says = r"r.yaml:4: lab/two merges the `pin me` of lab/one through `<<`: write `revision: pin me` next to its `repo`"
    with pytest.raises(ConfigError, match=says):
        open_revisions(text.replace("REPO", "repo: lab/two"), "r.yaml")
    assert [one.repo for one in open_revisions(text.replace("REPO", "repo: lab/one, config: main"), "r.yaml")] == ["lab/one"]
    assert [one.repo for one in open_revisions(text.replace("REPO", f"repo: lab/two, revision: {A}"), "r.yaml")] == ["lab/one"]


@pytest.mark.parametrize(("config", "more"), [(HubModel, {}), (Hub, {"split": "train"})])
def test_names_that_move_are_refused(config, more):
    for moving in ("main", "v1.0", "a" * 39, "A" * 40, "pin  me", ""):
        with pytest.raises(ValueError, match=r"is not a full commit hash .*write a commit, or `pin me`"):
            config.model_validate({"type": "hub", "repo": "lab/rows", "revision": moving, **more})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"split": []}, "must name one split"),
        ({"split": ""}, "must name one split"),
        ({"split": ["a", "a"]}, "must name one split"),
        ({"columns": {"question": "prompt"}}, "columns question are not in any layout: before the colon write one of messages"),
        ({"columns": {"prompt": "p", "response": "r"}, "attributes": {"tone": 1.0}}, "lack the attributes tone: add them"),
        ({"attributes": {"tone": 0}}, "the weight of tone is 0, which has no effect: change it, or remove the attribute"),
        ({"attributes": {"tone": float("nan")}}, "should be a finite number"),
        ({"verifier": "chess"}, "'gsm', 'gsm8k', 'math', 'strict_math', 'exact_match', 'python' or 'facts'"),
        ({"repo": "../rows"}, "repo"),
        ({"config": ""}, "config"),
    ],
)
def test_mistakes_in_a_source_are_found_when_the_recipe_is_read(changes, says):
    with pytest.raises(ValueError, match=says):
        Hub.model_validate({"type": "hub", "repo": "lab/rows", "revision": A, "split": "train", **changes})
