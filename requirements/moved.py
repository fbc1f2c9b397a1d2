"""Gives the files of .venv that name the folder of the clone its new name; make calls it where the clone was moved or copied."""

import re
import sys
from pathlib import Path
from urllib.parse import quote

HEAD = re.compile(rb"""\A#!(?:/bin/sh\n'''exec' )?"?(/[^"\n]*/\.venv/bin/python[\d.]*)"?(?: "\$0" "\$@"\n' ''')?\n""")
"""The head of a command: its interpreter, or pip's script for a shell, which calls it."""
MOST = 127
"""Bytes of a first line that every kernel reads, which takes a blank for the end of the interpreter's path."""


def main(old: str, new: str) -> None:
    packages = Path(".venv").glob("lib/python*/site-packages")
    files = [
        *Path(".venv/bin").iterdir(),
        *(path for folder in packages for form in ("*.pth", "*/direct_url.json") for path in folder.glob(form)),
    ]
    for path in files:
        before, after = (quote(old), quote(new)) if path.suffix == ".json" else (old, new)  # that one holds a URL
        named = re.compile(re.escape(before.encode()) + rb"(?=[/\"'\s]|$)")
        if path.is_file() and not path.is_symlink() and named.search(data := path.read_bytes()):
            path.write_bytes(HEAD.sub(_head, named.sub(lambda found, after=after: after.encode(), data)))
    Path(".venv/named").write_text(new + "\n")


def _head(found: re.Match[bytes]) -> bytes:
    interpreter = found[1]
    if b" " not in interpreter and len(interpreter) + 3 <= MOST:
        return b"#!" + interpreter + b"\n"
    return b"#!/bin/sh\n'''exec' \"" + interpreter + b'" "$0" "$@"\n\' \'\'\'\n'


if __name__ == "__main__":
    main(*sys.argv[1:])
