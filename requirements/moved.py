"""Gives the files of .venv that name the folder of the clone its new name; make calls it where the clone was moved or copied."""

import re
import sys
from pathlib import Path


def main(old: str, new: str) -> None:
    packages = Path(".venv").glob("lib/python*/site-packages")
    files = [
        *Path(".venv/bin").iterdir(),
        *(path for folder in packages for form in ("*.pth", "*/direct_url.json") for path in folder.glob(form)),
    ]
    named = re.compile(re.escape(old.encode()) + rb"(?=[/\"'\s]|$)")
    for path in files:
        if path.is_file() and not path.is_symlink() and named.search(data := path.read_bytes()):
            path.write_bytes(named.sub(lambda found: new.encode(), data))
    Path(".venv/named").write_text(new + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
