"""The set-up before any package is there: what is missing is named at once, and packages come from where the user has them."""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "requirements"))
import install

ROOT = Path(__file__).resolve().parents[1]
SHELL = ("bash", "uname", "df", "awk", "env")


def check(bin_: Path, python: str, device: str = "cpu") -> subprocess.CompletedProcess[str]:
    """What the first step of the set-up says with the programs of this folder alone."""
    for name in SHELL:
        (bin_ / name).exists() or (bin_ / name).symlink_to(str(shutil.which(name)))
    command = [str(ROOT / "requirements" / "check.sh"), python, device]
    return subprocess.run(command, cwd=bin_, env={"PATH": str(bin_)}, capture_output=True, text=True)


def program(folder: Path, name: str, text: str = "exit 0") -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_all_that_is_missing_is_named_at_once_with_the_commands_that_install_it(tmp_path: Path) -> None:
    program(tmp_path, "apt-cache", 'test "$2" = python3.12')  # all that this system offers
    done = check(tmp_path, "python3.11")
    assert done.returncode == 1 and not done.stdout
    for words in ("  - git\n", "  - a C++ compiler", "  - Python 3.11, 3.12 or 3.13 (python3.11 is not found"):
        assert words in done.stderr
    assert "sudo apt-get install git g++ python3.12 python3.12-dev python3.12-venv\n" in done.stderr
    assert "sudo dnf install git gcc-c++ python3.13 python3.13-devel\n" in done.stderr


def test_a_python_of_another_version_is_named_with_its_version(tmp_path: Path) -> None:
    for name in ("git", "c++"):
        program(tmp_path, name)
    old = program(tmp_path, "python3", "echo 3.9")
    done = check(tmp_path, str(old))
    assert done.returncode == 1 and f"({old} is 3.9;" in done.stderr and "git" not in done.stderr


def test_headers_and_room_on_the_disk_are_looked_for(tmp_path: Path) -> None:
    for name in ("git", "c++"):
        program(tmp_path, name)
    program(tmp_path, "df", "echo '/dev/x 9 9 3000000 9% /'")
    python = program(tmp_path, "python3.12", 'case "$2" in *version_info*) echo 3.12 ;; *) echo /nowhere ;; esac')
    done = check(tmp_path, str(python))
    assert "  - the headers of Python 3.12\n  - 10 GB of free disk space here (3 GB available)\n" in done.stderr
    assert "sudo apt-get install python3.12-dev\n" in done.stderr


def test_elsewhere_than_on_linux_the_container_is_named(tmp_path: Path) -> None:
    program(tmp_path, "uname", "echo Darwin")
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = subprocess.run(["make", "setup"], cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert done.returncode != 0 and "container" in done.stderr and "docker run" in (ROOT / "docs/quickstart.md").read_text()


def test_with_all_of_it_nothing_is_said(tmp_path: Path) -> None:
    for name in ("git", "c++"):
        program(tmp_path, name)
    program(tmp_path, "df", "echo '/dev/x 9 9 300000000 9% /'")
    done = check(tmp_path, sys.executable)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_second_make_takes_the_python_of_the_first(tmp_path: Path) -> None:
    """Another one would make the environment again."""
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "made-with").write_text("python3.12\n")
    (tmp_path / "requirements").symlink_to(ROOT / "requirements")
    shown = ["make", "-f", str(ROOT / "Makefile"), "--eval", "python: ; @echo $(PYTHON)", "python"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(shown, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "python3.12\n"


def test_a_clone_that_was_moved_needs_no_new_environment(tmp_path: Path) -> None:
    old, new = tmp_path / "my clone", tmp_path / "moved"
    old.mkdir()
    (old / "requirements").symlink_to(ROOT / "requirements")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "MAKEFLAGS", "MAKELEVEL")}

    def make(folder: Path) -> str:
        command = ["make", "-f", str(ROOT / "Makefile"), "--eval", "of: ; @echo $(STEPS)", "of", f"PYTHON={sys.executable}"]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", ".venv"], cwd=old, check=True)
    steps = make(old)
    program(old / ".venv/bin", "pedigree", f'exec "{old}/.venv/bin/python" -c "import editable; print(editable.__file__)"')
    (old / "editable.py").touch()
    (packages,) = (old / ".venv/lib").glob("python*/site-packages")
    (packages / "editable.pth").write_text(str(old))
    (old / ".venv/bin/other").write_text(f"{old}2/x {old}/x")  # the first is a folder whose name begins alike
    old.rename(new)
    told = make(new)
    assert told.splitlines()[0] == f"==> this folder was {old}: .venv gets its new name" and told.endswith(steps)
    assert subprocess.run([new / ".venv/bin/pedigree"], capture_output=True, text=True, check=True).stdout == f"{new}/editable.py\n"
    assert (new / ".venv/bin/other").read_text() == f"{old}2/x {new}/x"
    assert make(new) == steps


def test_an_environment_moved_to_a_path_with_a_blank_has_commands(tmp_path: Path) -> None:
    """The kernel reads no blank in a first line, nor one of more than 127 bytes: pip writes a script for a shell there, and so do we."""
    old = tmp_path / "clone"
    (old / ".venv/bin").mkdir(parents=True)
    (old / ".venv/bin/python").symlink_to(sys.executable)
    command = old / ".venv/bin/pedigree"
    command.write_text(f"#!{old}/.venv/bin/python\nimport sys\nprint(sys.argv[1], '{old}')\n")
    command.chmod(0o755)
    origin = old / ".venv/lib/python3/site-packages/pedigree.dist-info/direct_url.json"
    origin.parent.mkdir(parents=True)
    origin.write_text(f'{{"url": "file://{old}"}}')
    for name in ("my clone", "long" * 30, "short"):
        new = tmp_path / name
        old.rename(new)
        subprocess.run([sys.executable, ROOT / "requirements/moved.py", str(old), str(new)], cwd=new, check=True)
        shown = subprocess.run([new / ".venv/bin/pedigree", "a b"], capture_output=True, text=True, check=True).stdout
        assert shown == f"a b {new}\n"
        old = new
        assert f'"file://{new}"'.replace(" ", "%20") in (old / origin.relative_to(tmp_path / "clone")).read_text()


def test_the_demo_takes_options_of_run() -> None:
    make = ["make", "--dry-run", "--assume-old=setup", "demo", "ARGS=--execution slurm"]
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    shown = subprocess.run(make, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-2:] == ["pedigree run demo --execution slurm", "pedigree report demo"]


def test_uv_looks_where_pip_does() -> None:
    listed = (
        "global.extra-index-url='https://a.example/simple https://b.example/simple'\n"
        "global.find-links='/wheels'\ninstall.find-links='/one\\n/two'\n:env:.index-url='https://c.example/simple?key=value'\n"
        "global.quiet='1'\n"
    )
    assert install.uv_variables(install.pip_options(listed)) == {
        "UV_DEFAULT_INDEX": "https://c.example/simple?key=value",
        "UV_INDEX": "https://a.example/simple https://b.example/simple",
        "UV_FIND_LINKS": "/one,/two",
    }


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    return folder


def wheel(folder: Path, name: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")


@pytest.mark.slow
@pytest.mark.parametrize("uv", ["", "exit 0", "echo no such index; exit 2"], ids=["without uv", "uv", "uv fails"])
def test_pip_does_what_uv_cannot(environment: Path, tmp_path: Path, uv: str) -> None:
    names = [f"thing{place}{len(uv)}" for place in range(3)]
    for name in names:
        wheel(tmp_path, name)
    (tmp_path / "lock.txt").write_text(
        "# a comment\n" + "".join(f"{name}==1.0\n" for name in names) + 'never==1.0 ; python_version < "3"\n'
    )
    if uv:
        program(tmp_path, "uv", uv)
    python = environment / "bin" / "python"
    paths = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    command = [python, ROOT / "requirements/install.py", "lock.txt"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | paths, capture_output=True, text=True)
    installed = all(next(environment.glob(f"lib/*/site-packages/{name}.py"), None) for name in names)
    assert done.returncode == 0, done.stderr
    assert installed == (uv != "exit 0")  # this uv says that it has, and is believed
    assert (f"uv could not install {names[0]}==1.0 and 3 more, so pip does:\nno such index" in done.stdout) == ("echo" in uv)


BUILD = """
def build_wheel(folder, config_settings=None, metadata_directory=None):
    return shutil.copy("deepspeed-1.0-py3-none-any.whl", folder) and "deepspeed-1.0-py3-none-any.whl"
"""


@pytest.mark.slow
def test_nothing_is_installed_while_a_build_imports_what_is(environment: Path, tmp_path: Path) -> None:
    names = [f"early{place}" for place in range(4)]
    for name in names:
        wheel(tmp_path, name)
    source = tmp_path / "deepspeed-1.0"
    source.mkdir()
    wheel(source, "deepspeed")
    (source / "pyproject.toml").write_text('[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n')
    (source / "backend.py").write_text(f"import {', '.join(names)}, shutil\n{BUILD}")
    with tarfile.open(tmp_path / "deepspeed-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)
    (tmp_path / "lock.txt").write_text("".join(f"{name}==1.0\n" for name in ("deepspeed", *names)))
    paths = {"PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1", "PIP_NO_CACHE_DIR": "1", "PIP_FIND_LINKS": str(tmp_path)}
    command = [environment / "bin" / "python", ROOT / "requirements/install.py", "lock.txt"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | paths, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_nobody_has_is_said_in_pips_words(environment: Path, tmp_path: Path) -> None:
    command = [environment / "bin" / "python", ROOT / "requirements/install.py", "no-such-thing==1.0"]
    paths = {"PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True)
    assert done.returncode == 1 and "No matching distribution found for no-such-thing==1.0" in done.stderr
