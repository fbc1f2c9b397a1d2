"""Execution profiles: the later override wins; what cannot hold is refused before anything runs."""

import ast
from pathlib import Path

import pytest
from pydantic import ValidationError

from pedigree.configs.base.document import ConfigError, YamlDocument, read_document
from pedigree.configs.base.mistakes import validated
from pedigree.configs.language.execution import Execution, Numerics, Placement, batch_problem, engines_problem, fitted, ranks_problem
from pedigree.configs.methods.training import Optimizer, Sft


def test_stage_beats_kind_beats_default():
    profile = Execution.model_validate(
        {
            "slots": 4,
            "numerics": {"threads": 1, "zero_stage": 2},
            "kinds": {"sft": {"numerics": {"threads": 2}, "placement": {"slots": 2}}},
            "stages": {"warm": {"numerics": {"threads": 3}}},
        }
    )
    for kind, stage, expected in (("sft", "warm", (3, 2, 2)), ("sft", "other", (2, 2, 2)), ("pair", "other", (1, 2, 1))):
        numerics, placement = profile.of(kind, stage)
        assert (numerics.threads, numerics.zero_stage, placement.slots) == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"kinds": {"sfft": {}}}, "kinds: 'sfft' is not one of best_answers, .* did you mean sft?"),
        ({"kinds": {"sft": {"numeric": {}}}}, "kinds.sft.numeric: unknown key; did you mean numerics?"),
        ({"kinds": {"sft": {"numerics": {"thread": 2}}}}, "kinds.sft.numerics.thread: unknown key; did you mean threads?"),
        ({"kinds": {"sft": {"numerics": 3}}}, "kinds.sft.numerics: must be a mapping, not 3"),
        ({"stages": {"a": {"placement": {"slots": 3}}}}, "slots 3 exceeds the profile's 2"),
        ({"placement": {"slots": 3}}, "slots 3 exceeds the profile's 2"),
        ({"numerics": {"zero_stage": 4}}, "zero_stage"),
        ({"numerics": {"kernels": "liger"}}, "kernels liger requires a GPU, but device is cpu: set kernels to compiled or torch"),
        ({"numerics": {"kernels": "compiled", "zero_stage": 3}}, "but zero_stage is 3: set zero_stage to 2 or less, or kernels to"),
        ({"numerics": {"zero_stage": 3}, "kinds": {"sft": {"numerics": {"kernels": "compiled"}}}}, "kernels compiled"),
    ],
)
def test_what_cannot_hold_is_refused(override, message):
    lines = {("kinds",): 3, ("kinds", "sft"): 4, ("kinds", "sft", "numerics"): 5, ("kinds", "sft", "numerics", "thread"): 6}
    with pytest.raises(ConfigError, match=message) as caught:
        validated(Execution, YamlDocument("mine.yaml", {}, {(): 1, **lines}), (), {"slots": 2, **override})
    (problem,) = caught.value.problems
    assert problem.line == (6 if "thread" in message else 5 if "kernels" in str(override.get("kinds")) else problem.line)


def test_every_shipped_profile_is_valid(root):
    paths = sorted((root / "configs" / "execution").glob("*.yaml"))
    assert "cpu" in [path.stem for path in paths]
    for path in paths:
        Execution.model_validate(fitted(read_document(path).value, cores=3, memory=None))


@pytest.mark.parametrize("name", ["slurm", "ray"])
def test_the_profile_for_a_cluster_is_that_for_cpus_with_its_launcher(root, name):
    cpu, other = (read_document(root / "configs" / "execution" / f"{each}.yaml").value for each in ("cpu", name))
    assert other["placement"].pop("launcher")["type"] == name and other == cpu


GIB = 1 << 30


@pytest.mark.parametrize(
    ("cores", "memory", "slots", "threads", "taken"),
    [
        (1, 8 * GIB, 1, 1, 1),
        (2, 23 * GIB, 2, 2, 2),
        (4, None, 4, 4, 4),
        (16, 64 * GIB, 16, 8, 8),  # two jobs that compute, or one beside eight that read rows
        (8, 7 * GIB, 3, 8, 3),  # a job has all cores, but fewer than eight jobs have room
        (2, GIB, 1, 2, 1),
    ],
)
def test_the_profile_for_cpus_follows_the_machine(root, cores, memory, slots, threads, taken):
    profile = Execution.model_validate(fitted(read_document(root / "configs" / "execution" / "cpu.yaml").value, cores, memory))
    numerics, placement = profile.of("sft", "sft")
    assert (profile.slots, numerics.threads, placement.slots) == (slots, threads, taken)
    numerics, placement = profile.of("prepare_data", "rows")
    assert (numerics.threads, placement.slots) == (1, 1)


def test_a_number_in_a_profile_stands_whatever_the_machine_has():
    overrides = {"sft": {"numerics": {"threads": "auto"}, "placement": {"slots": 3}}}
    given = {"slots": 4, "numerics": {"threads": 3}, "placement": {"slots": "auto"}, "kinds": overrides}
    profile = Execution.model_validate(fitted(given, cores=2, memory=None))
    numerics, placement = profile.of("sft", "sft")
    found = (profile.slots, profile.numerics.threads, profile.placement.slots, numerics.threads, placement.slots)
    assert found == (4, 3, 2, 2, 3)


@pytest.mark.parametrize(
    ("changes", "cores", "memory", "threads", "taken"),
    [
        ({"slots": 2}, 8, None, 2, 2),
        ({"slots": 20}, 8, None, 8, 8),
        ({"numerics": {"threads": "auto", "world_size": 2}}, 8, None, 4, 8),
        ({"numerics": {"threads": "auto", "world_size": 4, "nodes": 2}}, 8, None, 4, 8),
        ({"placement": {"slots": "auto", "engines": 2}}, 8, None, 4, 8),
        ({"placement": {"slots": 4, "engines": 2}}, 8, None, 2, 4),
        ({"placement": {"slots": "auto", "engines": 2}}, 8, 8 * GIB, 2, 4),  # engines must find room in the slots
        ({"kinds": {"sample": {"placement": {"engines": 2}}}}, 8, None, 4, 8),
        ({"stages": {"drawn": {"placement": {"engines": 4}}}}, 8, None, 2, 8),
        ({"kinds": {"sample": {"placement": {"engines": 2}, "numerics": {"tensor_parallel": 2}}}}, 8, None, 2, 8),
        ({"kinds": {"sample": {"placement": {"engines": 2}, "numerics": {"threads": 3}}}}, 8, None, 3, 8),  # a number stands
    ],
)
def test_ranks_and_engines_share_the_threads_of_the_machine(changes, cores, memory, threads, taken):
    profile = {"slots": "auto", "numerics": {"threads": "auto"}, "placement": {"slots": "auto"}} | changes
    numerics, placement = Execution.model_validate(fitted(profile, cores, memory)).of("sample", "drawn")
    assert (numerics.threads, placement.slots) == (threads, taken) and engines_problem(numerics, placement) is None


def test_ranks_beyond_the_gpus_of_a_node_are_refused_and_nodes_divide_them():
    placement, ranks = Placement(slots=8), {"device": "cuda", "world_size": 16}
    problem = ranks_problem(Numerics(**ranks), placement)
    assert problem and "world_size 16 on nodes 1 is 16 ranks on each, but placement.slots gives it 8 GPUs there" in problem
    assert ranks_problem(Numerics(**ranks, nodes=2), placement) is None and ranks_problem(Numerics(world_size=2), Placement()) is None
    with pytest.raises(ValueError, match="world_size 16 is not divisible by 3 nodes"):
        Numerics(**ranks, nodes=3)


def test_ranks_that_compute_rows_together_are_one_for_the_batch():
    stage = Sft.model_validate({"global_batch": 4, "max_length": 8, "optimizer": {"learning_rate": 0.1}})
    eight = {"world_size": 8, "micro_batch_tokens": 8}
    assert "4 is not divisible by 8 ranks" in (batch_problem(stage, Numerics(**eight)) or "")
    assert batch_problem(stage, Numerics(**eight, sequence_parallel=2)) is None
    for changed, said in (
        ({"sequence_parallel": 3}, "sequence_parallel 3 does not divide world_size 8"),
        ({"sequence_parallel": 2, "packing": False}, "sequence_parallel 2 requires `packing: true`"),
        ({"sequence_parallel": 2, "kernels": "compiled"}, "and kernels other than compiled"),
    ):
        with pytest.raises(ValueError, match=said):
            Numerics(**eight, **changed)


def test_on_gpus_a_stage_has_the_cores_of_its_share_of_the_node(root):
    """Of 104 cores: eight ranks or engines with 13 each, or a data stage on one of eight slots with 13."""
    node, one = (
        Execution.model_validate(fitted(read_document(root / "configs" / "execution" / f"{name}.yaml").value, cores, memory=None))
        for name, cores in (("gpu8", 104), ("gpu", 24))
    )
    for kind, stage in (("sft", "sft"), ("rlvr", "rlvr_1"), ("evaluate", "scores"), ("judge", "rated"), ("prepare_data", "rows")):
        (numerics, placement), threads = node.of(kind, stage), one.of(kind, stage)[0].threads
        at_work = max(numerics.world_size, placement.engines)
        assert numerics.threads * at_work == 13 * placement.slots and threads == 24, stage


def test_threads_decide_nothing_on_gpus_but_where_the_host_computes_the_update():
    on_gpu = Numerics(device="cuda", threads=2)
    assert on_gpu.deciding() == Numerics(device="cuda", threads=13).deciding()
    for other in ({"device": "cpu"}, {"device": "cuda", "offload_optimizer": True}):
        assert Numerics(threads=2, **other).deciding() != Numerics(threads=13, **other).deciding()


def test_a_kind_without_ranks_of_its_own_keeps_the_threads_of_the_profile():
    given = {"slots": "auto", "numerics": {"threads": "auto"}, "kinds": {"sft": {"numerics": {"world_size": 2}}, "pair": {"placement": {}}}}
    profile = Execution.model_validate(fitted(given, cores=8, memory=None))
    assert [profile.of(kind, "")[0].threads for kind in ("sft", "pair", "rlvr")] == [4, 8, 8]


def test_what_is_wrong_in_a_profile_is_left_for_its_check():
    for wrong in (None, [], "auto", *({"slots": 1, **more} for more in ({"kinds": 3}, {"numerics": {"zero_stage": "auto"}}))):
        with pytest.raises(ValidationError):
            Execution.model_validate(fitted(wrong, cores=2, memory=None))


@pytest.mark.parametrize(
    ("numerics", "problem"),
    [
        ({"world_size": 3}, "global_batch 32 is not divisible by 3 ranks"),
        ({"packing": False, "micro_batch_sequences": 12}, "is 32 sequences per rank, not a multiple of micro_batch_sequences 12"),
        ({"packing": False, "micro_batch_sequences": 4, "world_size": 2}, None),
        ({"packing": False, "micro_batch_sequences": 64}, None),
        ({"world_size": 4}, None),
    ],
)
def test_a_global_batch_that_cannot_be_split_is_refused(numerics, problem):
    config = Sft(global_batch=32, max_length=64, optimizer=Optimizer(learning_rate=1e-4))
    found = batch_problem(config, Numerics(**numerics))
    assert (found is None) if problem is None else (found is not None and problem in found)


def test_options_of_sbatch_that_every_job_needs_otherwise_are_refused():
    for option in ("--comment=mine", "--export=NONE", "--requeue", "--ntasks-per-node=4"):
        profile = {"slots": 1, "placement": {"launcher": {"type": "slurm", "options": ["--partition=gpu", option]}}}
        with pytest.raises(ValidationError, match=f"{option.partition('=')[0]} is set for every job: remove it"):
            Execution.model_validate(profile)


def test_the_cluster_of_a_job_is_stated_where_all_programs_of_slurm_find_it():
    with pytest.raises(ValidationError, match=r"--clusters would hide jobs from squeue and scancel: set SLURM_CLUSTERS"):
        Execution.model_validate({"slots": 1, "placement": {"launcher": {"type": "slurm", "options": ["--clusters=gpu"]}}})


def test_cores_and_gpus_of_ray_come_from_slots_alone():
    launcher = {"type": "ray", "address": "http://head:8265", "resources": {"CPU": 8.0}}
    with pytest.raises(ValidationError, match=r"CPU and GPU are set by placement\.slots: remove them"):
        Execution.model_validate({"slots": 1, "placement": {"launcher": launcher}})


def test_a_job_of_a_cluster_may_take_more_slots_than_this_machine_has():
    stages = {"there": {"placement": {"launcher": {"type": "slurm"}, "slots": 8}}}
    assert Execution.model_validate({"slots": 1, "stages": stages}).of("sft", "there")[1].slots == 8


def proofs(tests: Path) -> dict[str, list[str]]:
    """Option of a profile → the tests of `make test` that are marked to show its effect."""
    found: dict[str, list[str]] = {}
    files = {path: text for path in sorted(tests.rglob("test_*.py")) if ".proves(" in (text := path.read_text())}
    for path, text in files.items():
        for function in ast.walk(ast.parse(text)):
            marks = function.decorator_list if isinstance(function, ast.FunctionDef) else []
            nightly = any(ast.unparse(mark).endswith("nightly") for mark in marks)
            for mark in [] if nightly else marks:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.proves":
                    found.setdefault(ast.literal_eval(mark.args[0]), []).append(f"{path.name}::{function.name}")
    return found


def test_every_option_of_a_profile_has_a_test_that_shows_its_effect(root):
    """Not that results stay equal, which an option without any effect would also pass: passes, bytes, calls, processes, files or ends."""
    options = {f"{part}.{name}" for part, fields in (("numerics", Numerics), ("placement", Placement)) for name in fields.model_fields}
    found = proofs(root / "tests")
    assert not options - found.keys(), "mark a test of its effect with @pytest.mark.proves(...)"
    assert not found.keys() - options, "there is no such option"
