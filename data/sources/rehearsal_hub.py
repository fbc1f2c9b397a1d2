"""Stand-in for the hub in a rehearsal: synthetic datasets and models in an immutable mirror (`data/sources/hub.py`).

    configs/rehearsal/hub/datasets/OWNER/NAME/   synthetic rows in the form of a hub dataset, with its README.md
    configs/rehearsal/stored/NAME.jsonl          synthetic rows for a source of type `stored`, by its name and its URL's suffix

The commit of a synthetic repository is the hash of its content.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from pedigree.configs.base.frozen import digest
from pedigree.configs.methods.rubrics import FRAME, HIGHEST
from pedigree.configs.rows.row_sources import Arithmetic, Constraints, Stored
from pedigree.data.artifacts import assets
from pedigree.data.artifacts.artifacts import sha256_file
from pedigree.data.records.messages import ROLES
from pedigree.data.sources import layouts, procedural, row_files
from pedigree.data.sources.examples import Example
from pedigree.data.sources.hub import NOTES, STATEMENT
from pedigree.data.store.durable import rename, replacing, sync_tree
from pedigree.data.store.storage import StoreError

SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "rehearsal"
LONGEST_TEXT = 20_000
"""Characters per file used to train the vocabulary."""
FRAME_END = 200
"""Characters at the constant end of judge prompts."""
WRONG = "0"
"""Wrong answer that a synthetic model also learns."""
TIMES = 3
"""How often verifiable rows are repeated relative to others."""
MAKING = ".making-"
MAKING_SECONDS = 24 * 3600.0
"""Age at which an unfinished build counts as abandoned; builds take minutes."""


def cache() -> Path:
    """Machine-wide cache of synthetic models and mirrors."""
    return assets.cache_folder() / "rehearsals"


def places(project: Path) -> list[Path]:
    """Folders with rehearsal data: the project's own, then Pedigree's."""
    own = project / "configs" / "rehearsal"
    return [own] if own.resolve() == SHIPPED else [own, SHIPPED]


def data_set(repo: str, folders: Sequence[Path]) -> Path:
    """The folder with synthetic rows for a hub dataset. Raises StoreError with the path to create."""
    return _first_of([folder / "hub" / "datasets" / repo for folder in folders], f"dataset {repo}", " and its README.md")


def stored_rows(source: Stored, folders: Sequence[Path]) -> Path:
    """The file with synthetic rows for a stored source. Raises StoreError with the path to create."""
    return _first_of([folder / "stored" / row_files.file_name(source) for folder in folders], f"source {source.name}")


def _first_of(places: Sequence[Path], what: str, also: str = "") -> Path:
    for place in places:
        if place.exists():
            return place
    raise StoreError(f"{what} has no rehearsal rows: write a few in its own columns, with its quirks{also}, into {places[0]}")


def place_stored(source: Stored, file: Path) -> str:
    """Put synthetic rows into the cache of stored sources under their hash; return the hash."""
    sha256 = sha256_file(file)
    target = row_files.cached_at(source, sha256)
    if not target.is_file():
        with replacing(target) as temporary:
            shutil.copyfile(file, temporary)
    return sha256


def commit_of(folder: Path) -> str:
    """Content hash of a folder, as 40 hexadecimal digits."""
    return digest([[name, sha256_file(path)] for name, path in _files(folder)])[:40]


def build_once(names: Iterable[str], make: Callable[[dict[str, Path]], None]) -> dict[str, Path]:
    """Name → folder in the cache; `make` builds the missing ones.

    They are built under temporary names and renamed when all are complete, so that a kill leaves no partial folder.
    """
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
            try:
                rename(folder, targets[name])
            except OSError:
                if not targets[name].is_dir():  # otherwise another process was faster
                    raise
    return targets


def _sweep(folder: Path) -> None:
    """Remove abandoned builds of killed processes."""
    for left in folder.glob(f"{MAKING}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > MAKING_SECONDS:
                shutil.rmtree(left)


def mirror(repositories: Mapping[str, Path]) -> Path:
    """Build a folder for PEDIGREE_HUB from `datasets/OWNER/NAME` or `models/OWNER/NAME` → folder."""
    commits = {place: commit_of(folder) for place, folder in sorted(repositories.items())}
    name = f"hubs/{digest(commits)[:40]}"

    def make(building: dict[str, Path]) -> None:
        building[name].mkdir()
        for place, commit in commits.items():
            _lay(repositories[place], building[name] / place, commit)

    return build_once([name], make)[name]


def _lay(source: Path, target: Path, commit: str) -> None:
    """Write files with their commits and hashes, as `hf download --local-dir` does; readers verify them."""
    for name, path in _files(source):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / name)
        note = target / NOTES / f"{name}.metadata"
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(f"{commit}\n{sha256_file(path)}\n0\n")
    (target / STATEMENT).write_text(f"{commit}\n")


def _files(folder: Path) -> list[tuple[str, Path]]:
    return sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*") if path.is_file())


# --- training data of synthetic models ---------------------------------------------------------------------------------


def texts_and_dialogues(folders: Sequence[Path], ruled: Iterable[Arithmetic | Constraints]) -> tuple[list[str], list[dict[str, Any]]]:
    """(vocabulary texts, training dialogues) from all synthetic and rule-generated rows.

    Verifiable prompts come with right and wrong answers, so that the model is sometimes right: rehearsing reinforcement learning
    needs rewards that differ.
    """
    texts: list[str] = []
    examples: list[Example] = []
    files: dict[str, Path] = {}
    for folder in folders[::-1]:
        stored = [file for file in (folder / "stored").glob("*") if row_files.ending(file) in row_files.READERS]
        files |= {file.relative_to(folder).as_posix(): file for file in [*(folder / "hub").rglob("*.jsonl"), *stored]}
    for _, file in sorted(files.items()):
        rows = [row for _, row in row_files.read(file)]
        text = file.read_text() if file.suffix == ".jsonl" else "\n".join(json.dumps(row, ensure_ascii=False, default=str) for row in rows)
        texts.append(text[:LONGEST_TEXT])
        for row in rows:
            with suppress(ValueError):  # a deliberately malformed row
                examples.append(layouts.example_of(row))
    for source in ruled:
        made = procedural.arithmetic(source) if isinstance(source, Arithmetic) else procedural.constraints(source)
        texts += [f"{example.messages[-1]['content']} {example.answer}" for example in made]
        examples += made
    return texts, [dialogue for example in examples for dialogue in _dialogues(example)]


def judging() -> list[dict[str, Any]]:
    """Training dialogues of a judge: all ratings equally often."""
    asked = [{"role": "user", "content": FRAME[-FRAME_END:]}]
    return [{"messages": asked, "answer": f"Rating: {rating}"} for rating in range(1, HIGHEST + 1)]


def _dialogues(example: Example) -> Iterator[dict[str, Any]]:
    if not {message["role"] for message in example.messages} <= set(ROLES):  # not every template supports tools
        return
    messages = [{"role": message["role"], "content": message["content"]} for message in example.messages]
    gold = (example.verifier or {}).get("answer")
    answers = [answer["text"] for answer in example.answers]
    if not answers and isinstance(gold, str):
        right, wrong = (f"So the answer is $\\boxed{{{answer}}}$." for answer in (gold, WRONG if gold != WRONG else "1"))
        answers = TIMES * [right, right, wrong]
    yield from ({"messages": messages, "answer": answer} for answer in answers if answer)


def fingerprint(plan: str) -> str:
    """Hash of everything that determines a synthetic model: its plan, the code that builds it, and library versions."""
    from importlib.metadata import version

    code = Path(__file__).resolve().parents[2] / "stages" / "training" / "made_models.py"
    libraries = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    return digest([json.loads(plan), sha256_file(code), libraries])
