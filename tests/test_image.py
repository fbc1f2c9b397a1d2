"""The container image, as far as its Dockerfile and what git ignores tell without a daemon."""

import os
import re
import subprocess
import sys
from fnmatch import translate
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "requirements"))
import cuda_links

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PATTERNS = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
PRIVATE = ("deploy/.env", ".env", "deploy/.env.local")
"""Where `docker compose` reads passwords from."""


def left_out(path: str) -> bool:
    """Whether .dockerignore keeps this path of the repository, or a folder above it, out of the image."""
    parts = path.split("/")
    above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(ignored(pattern, one) for pattern in PATTERNS for one in above)


def ignored(pattern: str, path: str) -> bool:
    """As Docker matches: from the top; `*` and `?` end at a slash, `**/` is any number of folders."""
    assert not pattern.startswith(("!", "/")), f"{pattern}: not implemented here"
    rest = pattern.removeprefix("**/")
    names, found = rest.split("/"), path.split("/")
    if rest != pattern:
        found = found[-len(names) :]
    return len(names) == len(found) and all(re.match(translate(name), one) for name, one in zip(names, found, strict=True))


def test_what_git_ignores_stays_out_of_the_image_too() -> None:
    lines = [line for line in (ROOT / ".gitignore").read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) > 10
    for line in lines:
        name = line.strip("/").replace("*", "x")
        for path in (name, *(f"configs/{name}" for _ in range("/" not in line.rstrip("/")))):
            assert left_out(path), f"{path} would be in the image: add `{line}` to .dockerignore"


def test_files_of_passwords_are_in_no_commit_and_no_image() -> None:
    done = subprocess.run(["git", "check-ignore", "--no-index", *PRIVATE], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == list(PRIVATE)
    assert all(left_out(path) for path in PRIVATE)


def test_all_that_is_copied_is_there() -> None:
    copied = [path for line in re.findall(r"^COPY (?:--chown=\w+ )?([^-].*) \S+$", DOCKERFILE, re.MULTILINE) for path in line.split()]
    assert "requirements/dev.txt" in copied and "." in copied
    for path in copied:
        assert (ROOT / path).exists() and (path == "." or not left_out(path)), path
    for path in ("pyproject.toml", "pedigree", "configs/recipes/demo.yaml", "dvc.yaml", "dvc.lock", ".git/HEAD"):
        assert not left_out(path), path
    assert set(re.findall(r"^FROM (\S+) AS index\nCOPY (\S+) /$", DOCKERFILE, re.MULTILINE)) == {("system", "Makefile")}


def test_each_device_has_a_stage_a_lock_and_the_index_that_its_torch_needs(tmp_path: Path) -> None:
    assert DOCKERFILE.splitlines()[-1].startswith("CMD") and "\nARG DEVICE=gpu\n" in DOCKERFILE and "\nFROM $DEVICE\n" in DOCKERFILE
    locks = {device: (ROOT / f"requirements/{device}.txt").read_text() for device in ("cpu", "gpu")}
    for device, lock in locks.items():
        assert f"\nFROM system AS {device}\n" in DOCKERFILE
        assert len(re.findall(r"^setuptools==[\d.]+$", lock, re.MULTILINE)) == 1
    assert len(re.findall(r"^torch==[\d.]+$", locks["cpu"], re.MULTILINE)) == 1
    (command,) = re.findall(r"^RUN (sed .*) > /torch-cpu$", DOCKERFILE, re.MULTILINE)
    done = subprocess.run(command.replace("/Makefile", "Makefile"), shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip().startswith("https://") and done.stdout.strip().endswith("/whl/cpu") and done.stdout.count("\n") == 1


def test_cuda_is_where_the_wheels_of_the_lock_put_it() -> None:
    (python, major) = re.findall(r"CUDA_HOME=/venv/lib/python([\d.]+)/site-packages/nvidia/cu(\d+) ", DOCKERFILE)[0]
    assert f"FROM python:{python}-slim" in DOCKERFILE
    lock = (ROOT / "requirements/gpu.txt").read_text()
    for package in ("nvcc", "runtime", "crt", "cccl"):
        assert re.search(rf"^nvidia-cuda-{package}=={major}\.", lock, re.MULTILINE), package


def test_the_demo_finds_its_models_under_any_user_id() -> None:
    """Who they are decides `HOME`, which pods set too: the cache is in none."""
    (cache,) = re.findall(r"PEDIGREE_CACHE=(\S+)", DOCKERFILE)
    fetched = DOCKERFILE.index("-m pedigree.data.artifacts.assets")
    assert not cache.startswith(("/home", "/root", "/tmp")) and DOCKERFILE.index(cache) < fetched < DOCKERFILE.index("USER pedigree")
    for folder, mode in ((f"/var/lib/pedigree {cache}", "1777"), ("/project", "-R a+rwX")):
        assert f"chmod {mode} {folder} " in DOCKERFILE


@pytest.fixture
def cuda(tmp_path: Path) -> Path:
    """CUDA as NVIDIA's wheels have it: libraries under the name of their version alone."""
    lib = tmp_path / "nvidia" / "cu13" / "lib"
    lib.mkdir(parents=True)
    shared(lib / "libcudart.so.13", "started")
    return lib.parent


def shared(library: Path, function: str) -> None:
    source = library.with_suffix(".c")
    source.write_text(f"int {function}(void) {{ return 7; }}\n")
    subprocess.run(["cc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, source], check=True)
    source.unlink()


def test_what_compiles_at_run_time_links_with_the_cuda_of_the_lock(tmp_path: Path, cuda: Path) -> None:
    driver = tmp_path / "driver"
    driver.mkdir()
    shared(driver / "libcuda.so.1", "driven")
    (tmp_path / "kernel.c").write_text("int started(void); int driven(void); int main(void) { return started() + driven() - 14; }\n")
    command = ["cc", "kernel.c", f"-L{cuda}/lib64", f"-L{cuda}/lib64/stubs", "-lcudart", "-lcuda", "-o", "kernel"]
    environment = os.environ | {"LIBRARY_PATH": str(driver), "LD_LIBRARY_PATH": f"{cuda}/lib:{driver}"}
    before = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert before.returncode and "cannot find -lcudart" in before.stderr
    for _ in range(2):  # each installation makes them anew
        cuda_links.main(tmp_path)
        subprocess.run(command, cwd=tmp_path, env=environment, check=True)
        subprocess.run([tmp_path / "kernel"], env=environment, check=True)


def test_links_follow_another_version_and_leave_other_environments_alone(tmp_path: Path, cuda: Path) -> None:
    cuda_links.main(tmp_path)
    (cuda / "lib/libcudart.so.13").rename(cuda / "lib/libcudart.so.14")
    cuda_links.main(tmp_path)
    assert (cuda / "lib64/libcudart.so").resolve() == cuda / "lib/libcudart.so.14"
    cuda_links.main(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
