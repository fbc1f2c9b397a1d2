"""What asks a hub in a process of its own, as jobs do: the libraries read HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE when they are loaded.

`HubChild(hub.url, home)` starts one; `ask(what, ...)` calls one of the functions below in it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from waiting import deadline

CODE = Path(__file__).parents[1]


class HubChild:
    """One process and its cache of the hub."""

    def __init__(self, url: str, home: Path, **environment: str) -> None:
        settings = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        # a hub that has no processor for ten seconds is not away
        settings |= {"HF_HUB_ETAG_TIMEOUT": "600", "HF_HUB_DOWNLOAD_TIMEOUT": "600", **environment}
        path = {"PYTHONPATH": os.pathsep.join([str(CODE), *filter(None, [os.environ.get("PYTHONPATH")])])}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PEDIGREE_HUB"))}
        command = [sys.executable, __file__]
        self.process = subprocess.Popen(command, env=kept | path | settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, what: str, *arguments: Any) -> dict[str, Any]:
        """{"value": what the function returned} or {"error": its message, "kind": its class, "passing": ...}"""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps([what, *arguments]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait(timeout=deadline(60))


def rows(source: dict[str, Any], beside: Sequence[str] = ()) -> dict[str, Any]:
    """What a hub source reads."""
    from pedigree.configs.rows.row_sources import Hub
    from pedigree.data.sources import hub

    marks: list[str] = []
    given = Hub.model_validate({"type": "hub", **source})
    found = [[place, row] for place, row in hub.rows(given, mark=marks.append, beside=beside)]
    return {"rows": found, "marks": marks}


def model(repo: str, revision: str) -> dict[str, Any]:
    from pedigree.data.sources import hub

    found = hub.model(hub.Repository("model", repo, revision))
    names = sorted(path.relative_to(found.folder).as_posix() for path in found.folder.rglob("*") if path.is_file())
    return {"files": names, "unproved": found.unproved, "folder": str(found.folder)}


def check(kind: Any, repo: str, revision: str) -> None:
    from pedigree.data.sources import hub

    hub.check(hub.Repository(kind, repo, revision))


def newest(kind: Any, repo: str) -> str:
    from pedigree.configs.base.hub_names import PIN_ME
    from pedigree.data.sources import hub

    return hub.newest(hub.Repository(kind, repo, PIN_ME))


def load_dataset(repo: str, config: str | None, split: str, revision: str) -> list[Any]:
    """The rows as the library gives them where it asks the hub itself."""
    import datasets

    return [dict(row) for row in datasets.load_dataset(repo, config, split=split, revision=revision)]


def download(repo: str, revision: str, folder: str, kind: str) -> str:
    """As `hf download --local-dir` does."""
    from huggingface_hub import snapshot_download

    return snapshot_download(repo, repo_type=kind, revision=revision, local_dir=folder)


def loaded(names: list[str]) -> list[str]:
    """Those of these modules that this process has imported."""
    return [name for name in names if name in sys.modules]


def set_mirror(folder: str | None) -> None:
    os.environ.pop("PEDIGREE_HUB", None)
    if folder is not None:
        os.environ["PEDIGREE_HUB"] = folder


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no answer
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        try:
            said: dict[str, Any] = {"value": globals()[what](*arguments)}
        except Exception as error:  # the test that asked looks at it
            said = {"error": str(error), "kind": type(error).__name__, "passing": getattr(error, "passing", None)}
        answers.write(json.dumps(said) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
