"""External commands in recipes: names in the command, what is identity, the decontamination gate, rehearsals."""

import pytest
from chain_lab import CHAIN

from pedigree.configs.base.shrink import Cut, StandIns
from pedigree.configs.language.kinds import KINDS
from pedigree.configs.language.stated_sources import licences_of
from pedigree.configs.methods.external import External, missing_program

TUNED = """\
  tuned:
    kind: external
    in: {models: {model: base}, data: [clean]}
    command: [train, "{model}", "--data={clean}/rows.jsonl", "{output}"]
    files: [scripts/train.sh, more]
    output: policy
"""


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("{model}", "{modle}", "names {modle}, which is not an input: write one of {model}, {clean}, {output}; did you mean model?"),
        ("{model}\"", "{model}\", \"{checkpoint}\"", "names {checkpoint}, which is not an input"),
        ("{model: base", "{3b: base", "{3b} is no name in a command: give the input another label, of letters, digits and `_`"),
        ("{model}\"", "x\"", "the command does not use the input model: write {model} where it expects the folder, or remove the input"),
        (", \"{output}\"]", "]", "does not say where to write: write {output} where it expects the folder"),
        ("{model}\"", "${model}\"", "the command does not use the input model"),  # of the shell
        ("{models: {model: base}, data: [clean]}", "{models: base, data: {base: clean}}", "two folders of the command would be {base}"),
        ("{model: base}", "{output: base}", "two folders of the command would be {output}"),
        ("data: [clean]", "data: [suite]", "input 'data' is suite of type item"),
        ("output: policy", "output: reward_model", "output: must be 'policy', 'conversation', 'prompt', 'preference' or 'report'"),
        ("[scripts/train.sh, more]", "[more/a.sh, more]", "files names more/a.sh twice"),
        ("[scripts/train.sh, more]", "[scripts/train.sh, scripts/train.sh]", "files names scripts/train.sh twice"),
        ("[scripts/train.sh, more]", "[../a.sh]", "no `..`"),
        ("data: [clean]", "data: {clean: raw}", "trains on chain/raw, which is not decontaminated against chain/suite"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_anything_runs(recipes, old, new, problem):
    recipes.write("chain", CHAIN + TUNED.replace(old, new))
    assert problem in recipes.problem("chain")


def test_braces_that_name_no_folder_are_the_programs_own(recipes):
    recipes.write("chain", CHAIN + TUNED.replace("[train,", '[bash, -c, "awk \'{print}\' $0", curl, "%{http_code}",'))
    assert recipes.load("chain").find("tuned").config.command[2] == "awk '{print}' $0"


def test_a_report_of_unchecked_rows_trains_on_nothing_and_rows_that_a_command_writes_are_unchecked(recipes):
    report = TUNED.replace("[clean]", "{clean: raw}").replace("output: policy", "output: report")
    recipes.write("chain", CHAIN + report)
    assert recipes.load("chain").find("tuned").trains_on == frozenset()
    written = TUNED.replace("output: policy", "output: conversation")
    recipes.write("chain", CHAIN.replace("data: [clean]}\n    global_batch", "data: [tuned]}\n    global_batch") + written)
    assert "trains on chain/tuned, which is not decontaminated against chain/suite" in recipes.problem("chain")


def test_command_and_files_are_identity_and_licence_and_rehearsal_are_not(recipes):
    found = []
    for old, new in (("", ""), ("--data", "--rows"), ("    output:", "    licence: mit\n    rehearse: [--quick]\n    output:")):
        recipes.write("chain", CHAIN + TUNED.replace(old, new, 1))
        found.append(recipes.load("chain").find("tuned"))
    first, changed, stated = found
    assert first.files == ("scripts/train.sh", "more") and first.output == "policy"
    assert first.spec == stated.spec != changed.spec
    assert licences_of(stated.config) == {"external command scripts/train.sh": ["mit"]}


def test_a_rehearsal_appends_its_arguments():
    config = External.model_validate({"command": ["train", "{output}"], "output": "policy", "rehearse": ["--max_steps", "2"]})
    cut = Cut("r/s", config, {}, StandIns())
    KINDS["external"].shrink(cut)
    assert cut.written == {"command": ["train", "{output}", "--max_steps", "2"], "output": "policy"}


def test_a_program_that_is_not_here_is_named_with_the_place_where_it_was_sought(tmp_path):
    def problem(program, environment=None):
        return missing_program(External.model_validate({"command": [program, "{output}"], "output": "policy"}), environment)

    assert problem("bash") is problem("python") is problem("/bin/sh") is problem("scripts/mine.sh") is None
    assert problem("axolotl") == (
        "axolotl is neither in the environment of Pedigree nor on PATH: install it, or name an environment that has it in "
        "placement.environment"
    )
    assert "has no folder bin" in str(problem("bash", tmp_path / "venv"))
    (tmp_path / "venv/bin").mkdir(parents=True)
    assert f"axolotl is neither in {tmp_path / 'venv'}" in str(problem("axolotl", tmp_path / "venv"))
    (tmp_path / "venv/bin/axolotl").touch(0o755)
    assert problem("axolotl", tmp_path / "venv") is None


def test_a_damaged_config_in_a_record_has_a_source_all_the_same():
    for config in ({}, {"command": []}, {"command": "rm -rf x"}):
        (source,) = KINDS["external"].sources(config)
        assert source["type"] == "command" and source["name"].startswith("external command ")
