"""Installs requirements into the environment whose Python runs this: by uv where it is installed, else by pip.

`make setup` calls it before anything else is installed, so it needs Python and pip alone. Locks are complete: nothing is resolved.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOR_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "proxy": "ALL_PROXY",
    "cert": "SSL_CERT_FILE",
    "timeout": "UV_HTTP_TIMEOUT",
}
"""Options of pip's configuration, which uv does not read, and the variables that tell uv the same."""
OF_UV = ("--no-deps", "--no-build-isolation", "--index-strategy=unsafe-best-match")  # looks into all indexes, as pip does
BUILT_LAST = ("deepspeed",)
"""Their builds import what is installed: one that met a library of which half was written ended with SIGBUS."""
OF_PIP = ("--progress-bar=off", "--no-deps", "--no-build-isolation", "--no-compile", "--disable-pip-version-check", "--no-input")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("requirement", nargs="+", help="a requirement, or a file of them (*.txt)")
    parser.add_argument("--extra-index", help="an index to look into where the configured ones do not have all of them")
    given = parser.parse_args()
    requirements = [line for one in given.requirement for line in _lines(one)]
    indexes: list[str | None] = [None, given.extra_index] if given.extra_index else [None]
    last = [one for one in requirements if one.partition("==")[0] in BUILT_LAST]
    for group in ([one for one in requirements if one not in last], last):
        said = _install(group, indexes) if group else ""
        if said:
            print(_last(said, 40), file=sys.stderr)
            return 1
    return 0


def _install(requirements: list[str], indexes: list[str | None]) -> str:
    """What pip complained of; nothing where all of them are installed."""
    if shutil.which("uv"):
        said = _tried(_by_uv, requirements, indexes)
        if not said:
            return ""
        print(f"    uv could not install {_shown(requirements)}, so pip does:\n{_last(said, 8)}", flush=True)
    return _tried(_by_pip, requirements, indexes)


def _tried(install: Callable[[list[str], str | None], str], requirements: list[str], indexes: list[str | None]) -> str:
    """What was complained of with the last of these indexes; nothing where one of them had everything."""
    said = ""
    for index in indexes:
        said = install(requirements, index)
        if not said:
            break
    return said


def _lines(requirement: str) -> list[str]:
    if not requirement.endswith(".txt"):
        return [requirement]
    return [line for line in Path(requirement).read_text().splitlines() if line and not line.startswith("#")]


def _shown(requirements: list[str]) -> str:
    first, *more = requirements
    return f"{first} and {len(more)} more" if more else first


def _last(text: str, lines: int) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


def _by_uv(requirements: list[str], index: str | None) -> str:
    """What uv complained of; nothing where it has installed all."""
    options = pip_options(_pip_config())
    more = ["--no-index"] if options.get("no-index") else [f"--index={index}"] if index else []
    command = ["uv", "pip", "install", f"--python={sys.executable}", *OF_UV, *more]
    return _installed([command], [requirements], uv_variables(options) | os.environ)


def _installed(commands: list[list[str]], parts: list[list[str]], environment: Mapping[str, str]) -> str:
    """What the commands that failed have said. Each installs its part of the requirements, all at the same time."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        files = [Path(folder) / f"{number}.txt" for number in range(len(parts))]
        for file, part in zip(files, parts, strict=True):
            file.write_text("\n".join(part))
        started = [
            subprocess.Popen(
                [*command, f"--requirement={file}"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            for command, file in zip(commands, files, strict=True)
        ]
        said = list(pool.map(_followed, started))
    return "\n".join(text for process, text in zip(started, said, strict=True) if process.wait())


def _followed(process: subprocess.Popen[str]) -> str:
    """All that a process says; its latest line is shown by `make setup` beside the name of the step."""
    step = os.environ.get("STEP")
    lines = []
    for line in process.stdout or ():
        lines.append(line)
        if step and not line.startswith("WARNING"):
            Path(step).write_text(f" {Path(step).name} ({line.strip()[:50]})\n")
    return "".join(lines) or "no word"


def _pip_config() -> str:
    return subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout


def pip_options(listed: str) -> dict[str, str]:
    """Option → value, from what `pip config list` prints (`section.option='value'`)."""
    options: dict[str, str] = {}
    for section in ("global", "install", ":env:"):  # the later ones win, as in pip
        for name, _, value in (line.partition("=") for line in listed.splitlines()):
            if name.startswith(f"{section}."):
                options[name.removeprefix(f"{section}.")] = ast.literal_eval(value)
    return options


def uv_variables(options: dict[str, str]) -> dict[str, str]:
    """What makes uv look where pip does. pip separates values by blanks or lines; uv wants commas between its find-links."""
    return {
        variable: ("," if option == "find-links" else " ").join(options[option].split())
        for option, variable in FOR_UV.items()
        if options.get(option)
    }


def _by_pip(requirements: list[str], index: str | None) -> str:
    """What pip complained of; nothing where it has installed all. Two of them, since unpacking keeps one core busy."""
    more = [f"--extra-index-url={index}", "--retries=1", "--timeout=10"] if index else []
    command = [sys.executable, "-m", "pip", "install", *OF_PIP, *more]
    parts = [part for part in (requirements[::2], requirements[1::2]) if part]
    return _installed([command] * len(parts), parts, os.environ)


if __name__ == "__main__":
    sys.exit(main())
