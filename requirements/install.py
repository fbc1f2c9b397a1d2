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
OF_UV = ("--quiet", "--no-deps", "--no-build-isolation", "--index-strategy=unsafe-best-match")  # looks into all indexes, as pip does
OF_PIP = ("--quiet", "--no-deps", "--no-build-isolation", "--no-compile", "--disable-pip-version-check", "--no-input")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("requirement", nargs="+", help="a requirement, or a file of them (*.txt)")
    parser.add_argument("--extra-index", help="an index to look into where the configured ones do not have all of them")
    given = parser.parse_args()
    requirements = [line for one in given.requirement for line in _lines(one)]
    indexes = [None, given.extra_index] if given.extra_index else [None]
    uv = shutil.which("uv")
    if uv:
        said = ""
        for index in indexes:
            said = _by_uv(uv, requirements, index)
            if not said:
                return 0
        print(f"    uv could not install {', '.join(given.requirement)}, so pip does:\n{_last(said, 8)}", flush=True)
    said = ""
    for index in indexes:
        said = _by_pip(requirements, index)
        if not said:
            return 0
    print(_last(said, 40), file=sys.stderr)
    return 1


def _lines(requirement: str) -> list[str]:
    if not requirement.endswith(".txt"):
        return [requirement]
    return [line for line in Path(requirement).read_text().splitlines() if line and not line.startswith("#")]


def _last(text: str, lines: int) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


def _by_uv(uv: str, requirements: list[str], index: str | None) -> str:
    """What uv complained of; nothing where it has installed all."""
    options = pip_options(_pip_config())
    more = ["--no-index"] if options.get("no-index") else [f"--index={index}"] if index else []
    command = [uv, "pip", "install", f"--python={sys.executable}", *OF_UV, *more, "--requirement=-"]
    environment = uv_variables(options) | os.environ
    done = subprocess.run(
        command, env=environment, input="\n".join(requirements), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.stdout or "uv failed without a word" if done.returncode else ""


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
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.txt" for number in range(len(parts))]
        for file, part in zip(files, parts, strict=True):
            file.write_text("\n".join(part))
        started = [
            subprocess.Popen([*command, f"--requirement={file}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for file in files
        ]
        said = [(pip.communicate()[0], pip.returncode) for pip in started]
    return "\n".join(text or "pip failed without a word" for text, code in said if code)


if __name__ == "__main__":
    sys.exit(main())
