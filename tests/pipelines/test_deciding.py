"""Code that decides what a stage keeps or how it scores makes the stage stale when it changes, and no other code does."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from running_lab import Lab, outcomes

from pedigree.configs.language.graph import Edge, Node
from pedigree.configs.language.kinds import KINDS
from pedigree.configs.methods.environment_programs import EnvironmentProgram
from pedigree.configs.methods.policy_gradient import Grpo, Keep
from pedigree.configs.methods.reward_terms import Majority, ModelReward, Reward, RewardProgram
from pedigree.configs.methods.training import Hints
from pedigree.data.artifacts.artifacts import Run
from pedigree.data.artifacts.provenance import CODE_ROOT
from pedigree.data.records import records
from pedigree.pipelines.cli.status import status
from pedigree.pipelines.ledger import deciding
from pedigree.pipelines.ledger.deciding import REVIEWED, VERIFIER, changes, deciding_code, hashes, named_verifiers
from pedigree.pipelines.run.plans import plan
from pedigree.stages import verifiers

ALGEBRA = {"math", "strict_math", "minerva_math", "strict_minerva_math", "extracted"}
OLD = Run(schema_version=1)
"""The `run.json` of an earlier version."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of the code that decides."""
    for name in ("configs", "data", "stages"):
        shutil.copytree(CODE_ROOT / "pedigree" / name, tmp_path / "pedigree" / name, ignore=lambda _, names: {"__pycache__", "rehearsal"})
    return tmp_path


def edit(root: Path, name: str, old: str, new: str) -> None:
    path = root / "pedigree" / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def judged(folder: Path, *names: str) -> tuple[Node, list[tuple[str, Path]]]:
    """A stage that verifies answers to prompts with these verifiers, and its input."""
    rows = [
        {
            "id": f"p{place}/sft/0", "prompt_id": f"p{place}", "source": "s", "messages": [{"role": "user", "content": "2 + 2?"}],
            "verifier": {"name": name, "answer": "4"}, "policy": "sft", "policy_content": "c", "on_policy": True, "index": 0, "seed": 1,
            "prompt_ids": [1], "response_ids": [2], "logprobs": [-0.1], "text": "4", "finish_reason": "stop",
        }
        for place, name in enumerate(names)
    ]  # fmt: skip
    records.save(folder, "completion", rows)
    config = KINDS["judge"].config.model_validate({})
    return Node("r", "judged", "judge", config, (Edge("completions", "it", "r/sampled"),), "judgment", (), ""), [("completions", folder)]


def reviewed(root: Path) -> None:
    (root / "pedigree" / REVIEWED).write_text(json.dumps(hashes(root)))


def changed(before: dict[str, str], root: Path) -> set[str]:
    return {name for name, found in hashes(root).items() if before[name] != found}


def test_the_version_of_every_verifier_stands_for_the_code_that_was_reviewed():
    """Where this fails: may an answer get another score than before, or a row be kept that was dropped? Then raise the version of the
    verifier, or of the kinds that use this code. Afterwards run `python -m docs.reviewed`."""
    listed = json.loads((CODE_ROOT / "pedigree" / REVIEWED).read_text())
    assert hashes() == listed


def test_the_table_of_verifiers_is_read_as_python_reads_it():
    assert {name: entry.version for name, entry in deciding._table(CODE_ROOT).items()} == {
        name: verifiers.version(name) for name in verifiers._VERIFIERS
    }


def sparse(kind: str, **fields: Any) -> Any:
    """A config with few of its required fields."""
    return KINDS[kind].config.model_construct(**({"algorithm": Grpo(type="grpo")} if kind == "rlvr" else {}) | fields)


def test_all_code_that_kinds_declare_is_listed():
    config = KINDS["prepare_data"].config.model_validate({
        "record": "prompt", "sources": [{"type": "arithmetic", "operations": ["add"], "digits": [1], "count": 3, "seed": 1}],
        "filters": [{"type": "exact_duplicates"}],
    })  # fmt: skip
    terms = (RewardProgram(type="program", path="mine.py"), ModelReward(type="reward_model"), Majority(type="majority"))
    environment = EnvironmentProgram(path="mine.py", max_turns=2)
    keeping = Grpo(type="grpo", keep=Keep(answers=1))
    rewarded = sparse("rlvr", reward=Reward(terms=terms), environment=environment, hints=Hints(), algorithm=keeping)
    configs = {"prepare_data": config, "rlvr": rewarded}
    declared = {part for kind in KINDS.values() for part in kind.decided_by(configs.get(kind.name) or sparse(kind.name))}
    assert declared == {name for name in hashes() if not name.startswith(VERIFIER)}


NUMBERS = "stages/verifiers/numbers.py"
"""Code of votes, too."""


@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        (NUMBERS, "import re\n", "import re\n\nANSWER = 42\n", {"arithmetic", "gsm", "gsm8k", "extracted", NUMBERS}),
        ("stages/verifiers/algebra.py", "return bool(", "return not bool(", {*ALGEBRA, "stages/verifiers/algebra.py"}),  # runs in a process
        ("stages/verifiers/sandboxed.py", "import ", "import abc\nimport ", {"python", "stages/verifiers/sandboxed.py"}),
        ("stages/verifiers/__init__.py", "numbers.gsm8k)", "numbers.gsm)", {"gsm8k"}),
        ("data/sources/golds.py", "import json\n", "import json\n\nANSWER = 42\n", ALGEBRA),
        (NUMBERS, "import re\n", "import re\n\n# a remark\n", set()),
        (NUMBERS, '"""', '"""Numbers. ', set()),
        ("stages/judge/run.py", "RESAMPLES = 1000", "RESAMPLES = 1001", set()),
    ],
)
def test_an_edit_counts_for_the_verifiers_that_it_reaches_and_no_others(root, name, old, new, expected):
    before = hashes(root)
    edit(root, name, old, new)
    assert {one.removeprefix(VERIFIER) for one in changed(before, root)} == expected


@pytest.mark.parametrize(
    ("kind", "name", "old", "new"),
    [
        ("rlvr", "stages/rlvr/rewarding.py", "given.right * score", "given.right * score - 1"),
        ("rlvr", "stages/core/advantages.py", "EPSILON = 1e-4", "EPSILON = 1e-3"),
        ("pair", "stages/pair/pair_selection.py", "import ", "import abc\nimport "),
        ("sft", "data/chat/chat.py", "import ", "import abc\nimport "),
        ("sft", "data/chat/tools.py", "import ", "import abc\nimport "),
        ("judge", "stages/sampling/rewards.py", "import ", "import abc\nimport "),
        ("select_rows", "stages/core/keeping.py", "from ", "import abc\nfrom "),
        ("select", "stages/select/run.py", "from ", "import abc\nfrom "),
        ("evaluate", "stages/core/statistics.py", "import ", "import abc\nimport "),
    ],
)
def test_rewards_selections_and_templates_are_part_of_what_made_a_result(root, kind, name, old, new):
    node = Node("r", "made", kind, sparse(kind), (), KINDS[kind].output, (), "")
    made = Run(schema_version=1, decided_by=deciding_code(node, [], root))
    assert changes(node, made, [], root) == changes(node, OLD, [], root) == []
    edit(root, name, old, new)
    (reason,) = changes(node, made, [], root)
    assert reason.startswith(f"deciding code changed: {name} (as released -> edited, ")


RENAMED = [
    ("data/chat/chat_template.py", "data/chat/chat.py"),
    ("stages/rlvr/group_selection.py", "stages/rlvr/resampling.py"),
    ("stages/rlvr/group_selection.py", "stages/rlvr/kept_answers.py"),
    ("stages/verifiers/project_programs.py", "stages/verifiers/reward_programs.py"),
]


def made_before_renaming(**edited: str) -> tuple[Node, Run]:
    """A stage of `rlvr`, and its record of a version whose files had other names."""
    config = sparse("rlvr", reward=Reward(terms=(RewardProgram(type="program", path="mine.py"),)), environment=None)
    node = Node("r", "made", "rlvr", config, (), "policy", (), "")
    new, old = {name for name, _ in RENAMED}, {name for _, name in RENAMED}
    parts = {part for part in node.declaration.decided_by(config) if part not in new} | old
    return node, Run(schema_version=1, decided_by=dict.fromkeys(parts, "as released") | edited)


@pytest.mark.parametrize(("new", "old"), RENAMED)
def test_a_record_of_before_a_file_was_renamed_counts_for_its_new_name(root, new, old):
    reviewed(root)
    node, made = made_before_renaming()
    assert changes(node, made, [], root) == []
    _, edited = made_before_renaming(**{old: "edited, 0123456789ab"})
    (reason,) = changes(node, edited, [], root)
    assert f"{new} (edited, 0123456789ab -> as released)" in reason
    edit(root, new, "import ", "import abc\nimport ")
    (reason,) = changes(node, made, [], root)
    assert reason.startswith(f"deciding code changed: {new} (as released -> edited, ")


def test_a_stage_is_stale_for_the_verifiers_of_its_rows_only(root, tmp_path):
    node, folders = judged(tmp_path / "rows", "gsm8k", "mentions")
    made = Run(schema_version=1, decided_by=deciding_code(node, named_verifiers(node, folders), root))
    assert made.decided_by is not None and made.decided_by["verifier gsm8k"] == "version 1" and "verifier math" not in made.decided_by
    edit(root, "stages/verifiers/maths.py", "SECONDS = 5.0", "SECONDS = 6.0")
    assert changes(node, made, [], root) == []
    edit(root, "stages/verifiers/numbers.py", "import re\n", "import re\n\nANSWER = 42\n")
    (reason,) = changes(node, made, [], root)
    assert reason.startswith("deciding code changed: verifier gsm8k (version 1 -> edited, ") and "mentions" not in reason


@pytest.mark.parametrize(("names", "stale"), [(["gsm8k"], True), (["mentions"], False)])
def test_a_record_of_an_earlier_version_is_current_unless_a_verifier_that_it_used_has_another_version(root, tmp_path, names, stale):
    node, folders = judged(tmp_path / "rows", *names)
    assert changes(node, OLD, folders, root) == []
    edit(root, "stages/verifiers/__init__.py", "numbers.gsm8k)", "numbers.gsm8k, version=2)")
    reviewed(root)
    expected = ["deciding code changed: verifier gsm8k (version 1 -> version 2)"]
    assert changes(node, OLD, folders, root) == (expected if stale else [])


def test_code_that_was_reviewed_again_without_another_version_makes_nothing_stale(root, tmp_path):
    node, folders = judged(tmp_path / "rows", "gsm8k")
    made = Run(schema_version=1, decided_by=deciding_code(node, named_verifiers(node, folders), root))
    edit(root, "stages/verifiers/numbers.py", "import re\n", "import re\n\nANSWER = 42\n")
    reviewed(root)
    assert changes(node, made, folders, root) == [] == changes(node, OLD, folders, root)


# --- runs ----------------------------------------------------------------------------------------------------------------


def reasons(lab: Lab) -> dict[str, tuple[str, ...]]:
    return {entry.node.name: entry.reasons for entry in plan(lab.run()) if entry.reasons}


def test_what_an_edit_decides_is_made_again_and_comes_back_with_the_old_code(finished: Lab):
    path = finished.code / "data/contamination/matching.py"
    before = path.read_text()
    finished.forget_runs()
    path.write_text(before + "\n# a remark\n")
    assert reasons(finished) == {}
    path.write_text(before + "\nANSWER = 42\n")
    found = reasons(finished)
    assert list(found) == ["clean", "cleaner"] and found["clean"][0].startswith(
        "deciding code changed: data/contamination (as released -> "
    )
    assert outcomes(finished) == {"suite": "unchanged", "raw": "unchanged", "clean": "ran", "cleaner": "ran"}
    assert finished.runs() == ["clean", "cleaner"] and reasons(finished) == {}
    path.write_text(before)
    assert outcomes(finished) == {"suite": "unchanged", "raw": "unchanged", "clean": "restored", "cleaner": "restored"}
    assert finished.runs() == ["clean", "cleaner"] and reasons(finished) == {}


def test_status_names_the_code_that_changed(finished: Lab):
    path = finished.code / "data/contamination/matching.py"
    path.write_text(path.read_text() + "\nANSWER = 42\n")
    stages = {stage.node.name: stage for stage in status(finished.run()).stages}
    assert stages["clean"].state == "stale" and "deciding code changed: data/contamination" in stages["clean"].why
    assert stages["raw"].state == "done"
