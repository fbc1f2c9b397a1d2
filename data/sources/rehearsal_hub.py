"""What stands for the hub in a rehearsal: made data sets and models, laid as a mirror (`data/sources/hub.py`) that never changes once it is
there.

    configs/rehearsal/hub/datasets/OWNER/NAME/   made rows in the form of a data set of the hub, with its README.md
    configs/rehearsal/stored/NAME.jsonl          made rows for a source of type `stored`, by its name and the ending of its URL

A made repository's commit is the hash of what lies in it.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from configs.base.frozen import digest
from configs.judging.rubrics import FRAME, HIGHEST
from configs.rows.datasets import Arithmetic, Constraints, Stored
from data.artifacts import assets
from data.artifacts.artifacts import sha256_file
from data.records.messages import ROLES
from data.sources import layouts, procedural, row_files
from data.sources.hub import NOTES, STATEMENT, HubError
from data.sources.procedural import Example
from data.store.durable import rename, sync_tree

SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "rehearsal"
LONGEST_TEXT = 20_000
"""Characters of a file that a vocabulary is learned from."""
FRAME_END = 200
"""Characters at the end of what judges are asked, which never change."""
WRONG = "0"
"""What a made model also learns to answer."""
TIMES = 3
"""How often it reads what a verifier judges, for each time that it reads anything else."""
MAKING = ".making-"
MAKING_SECONDS = 24 * 3600.0
"""After which nobody makes it any more: minutes are the rule."""


def cache() -> Path:
    """Where made models and mirrors are kept for all clones on this machine."""
    return assets.cache_folder() / "rehearsals"


def places(project: Path) -> list[Path]:
    """Folders with made things: the project's own, then those that ship with Pedigree."""
    own = project / "configs" / "rehearsal"
    return [own] if own.resolve() == SHIPPED else [own, SHIPPED]


def data_set(repo: str, folders: Sequence[Path]) -> Path:
    """The folder with made rows of a data set of the hub.

    Raises:
        HubError: nobody has made any; the message says where they belong.
    """
    found = [folder / "hub" / "datasets" / repo for folder in folders]
    for folder in found:
        if folder.is_dir():
            return folder
    raise HubError(
        f"data set {repo} has no made rows to rehearse with: write a few in its own columns, quirks included, with its README.md, into "
        f"{found[0]}"
    )


def stored_rows(source: Stored, folders: Sequence[Path]) -> Path:
    """The file with made rows of a stored source.

    Raises:
        HubError: there is none; the message says where it belongs.
    """
    name = f"{source.name}{row_files.ending(PurePosixPath(source.url))}"
    found = [folder / "stored" / name for folder in folders]
    for file in found:
        if file.is_file():
            return file
    raise HubError(
        f"source {source.name} has no made rows to rehearse with: write a few in its own columns, quirks included, into {found[0]}"
    )


def lay_stored(source: Stored, file: Path) -> str:
    """Puts made rows where fetched files of stored sources are kept, under their own hash, which is returned."""
    sha256 = sha256_file(file)
    target = assets.cache_folder() / "sources" / sha256 / f"{source.name}{row_files.ending(PurePosixPath(source.url))}"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(file, temporary)
        os.replace(temporary, target)
    return sha256


def commit_of(folder: Path) -> str:
    """40 hexadecimal digits that follow from the files of a folder."""
    return digest([[name, sha256_file(path)] for name, path in _files(folder)])[:40]


def made_once(names: Iterable[str], make: Callable[[dict[str, Path]], None]) -> dict[str, Path]:
    """Name → folder of the cache; `make` makes those that are missing, under other names, and each is renamed when all are whole, so that
    a kill leaves nothing behind that could be taken for one."""
    targets = {name: cache() / name for name in names}
    with ExitStack() as scratch:
        building: dict[str, Path] = {}
        for name, target in targets.items():
            if not target.is_dir():
                target.parent.mkdir(parents=True, exist_ok=True)
                _sweep(target.parent)
                building[name] = Path(scratch.enter_context(tempfile.TemporaryDirectory(dir=target.parent, prefix=MAKING))) / "made"
        if building:
            make(building)
        for name, folder in building.items():
            sync_tree(folder)
            with _unless_there(targets[name]):
                rename(folder, targets[name])
    return targets


def _sweep(folder: Path) -> None:
    """Removes what a killed process has begun and left."""
    for left in folder.glob(f"{MAKING}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > MAKING_SECONDS:
                shutil.rmtree(left)


def mirror(repositories: Mapping[str, Path]) -> Path:
    """A folder for PEDIGREE_HUB with these repositories (`datasets/OWNER/NAME` or `models/OWNER/NAME` → folder)."""
    commits = {place: commit_of(folder) for place, folder in sorted(repositories.items())}
    name = f"hubs/{digest(commits)[:40]}"

    def make(building: dict[str, Path]) -> None:
        building[name].mkdir()
        for place, commit in commits.items():
            _lay(repositories[place], building[name] / place, commit)

    return made_once([name], make)[name]


def _lay(source: Path, target: Path, commit: str) -> None:
    """As `hf download --local-dir` does: the files, and of each its commit and hash, which whoever reads it proves."""
    for name, path in _files(source):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / name)
        note = target / NOTES / f"{name}.metadata"
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(f"{commit}\n{sha256_file(path)}\n0\n")
    (target / STATEMENT).write_text(f"{commit}\n")


def _files(folder: Path) -> list[tuple[str, Path]]:
    return sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*") if path.is_file())


@contextmanager
def _unless_there(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError:
        if not target.is_dir():  # else another has been faster
            raise


# --- what made models learn --------------------------------------------------------------------------------------------


def texts_and_dialogues(folders: Sequence[Path], ruled: Iterable[Arithmetic | Constraints]) -> tuple[list[str], list[dict[str, Any]]]:
    """What a vocabulary is learned from, and what a model learns to say: of all made rows, and of rows made by rule.

    Of a prompt that a verifier judges the right answer is learned and a wrong one, so that a model is right now and then: a rehearsal of
    reinforcement learning needs rewards that differ.
    """
    texts: list[str] = []
    examples: list[Example] = []
    files = {file.relative_to(folder).as_posix(): file for folder in folders[::-1] for file in _made_files(folder)}
    for _, file in sorted(files.items()):
        rows = [row for _, row in row_files.read(file)]
        text = file.read_text() if file.suffix == ".jsonl" else "\n".join(json.dumps(row, ensure_ascii=False, default=str) for row in rows)
        texts.append(text[:LONGEST_TEXT])
        examples += [example for row in rows if (example := _example(row)) is not None]
    for source in ruled:
        made = procedural.arithmetic(source) if isinstance(source, Arithmetic) else procedural.constraints(source)
        texts += [f"{example.messages[-1]['content']} {example.answer}" for example in made]
        examples += made
    return texts, [dialogue for example in examples for dialogue in _dialogues(example)]


def _made_files(folder: Path) -> list[Path]:
    """Those with rows, of the hub and of object stores."""
    stored = [file for file in (folder / "stored").glob("*") if row_files.ending(file) in row_files.READERS]
    return [*(folder / "hub").rglob("*.jsonl"), *stored]


def judging() -> list[dict[str, Any]]:
    """What a judge learns: to end with a rating, and none more than another."""
    asked = [{"role": "user", "content": FRAME[-FRAME_END:]}]
    return [{"messages": asked, "answer": f"Rating: {rating}"} for rating in range(1, HIGHEST + 1)]


def _example(row: Any) -> Example | None:
    try:
        return layouts.example_of(row)
    except ValueError:  # one of the quirks
        return None


def _dialogues(example: Example) -> Iterator[dict[str, Any]]:
    if not {message["role"] for message in example.messages} <= set(ROLES):  # not every template has a form for tools
        return
    messages = [{"role": message["role"], "content": message["content"]} for message in example.messages]
    gold = (example.verifier or {}).get("answer")
    answers = [answer["text"] for answer in example.answers]
    if not answers and isinstance(gold, str):
        right, wrong = (f"So the answer is $\\boxed{{{said}}}$." for said in (gold, WRONG if gold != WRONG else "1"))
        answers = TIMES * [right, right, wrong]
    yield from ({"messages": messages, "answer": answer} for answer in answers if answer)


def fingerprint(plan: str) -> str:
    """Of what a made model follows from: its plan, our code that makes it, and the libraries that do."""
    from importlib.metadata import version

    code = Path(__file__).resolve().parents[2] / "stages" / "training" / "made_models.py"
    libraries = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    return digest([json.loads(plan), sha256_file(code), libraries])
