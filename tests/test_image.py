"""The container image, as far as its Dockerfile and what git ignores tell without a daemon."""

import re
import subprocess
from fnmatch import translate
from pathlib import Path

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
    copied = [path for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for path in line.split()]
    assert "requirements/dev.txt" in copied and "." in copied
    for path in copied:
        assert (ROOT / path).exists() and (path == "." or not left_out(path)), path
    for path in ("pyproject.toml", "pedigree", "configs/recipes/demo.yaml", "dvc.yaml", "dvc.lock", ".git/HEAD"):
        assert not left_out(path), path
