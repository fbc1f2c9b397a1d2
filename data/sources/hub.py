"""Data sets and models of the Hugging Face hub at one commit, or of a mirror of it: the one door to `huggingface_hub` and `datasets`.

Files come through the cache of `huggingface_hub` from the hub that HF_ENDPOINT names; or, where PEDIGREE_HUB names a folder, from there
and from nowhere else:

    datasets/OWNER/NAME/...     as `hf download OWNER/NAME --repo-type dataset --local-dir` lays it
    models/OWNER/NAME/...

What is read is proved: of cached files the name says the hash, of a mirror the notes that `hf download` leaves in it say commit and
hash, and a file `REVISION` the commit. `datasets` says which files make a split and reads them; it is never asked for a repository, since
it takes whatever commit it has cached where the hub cannot be reached.
"""

import glob
import hashlib
import os
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from configs.base.hub_names import COMMIT, PIN_ME
from configs.base.texts import command
from configs.rows.datasets import Hub
from data.sources.named_columns import Told, lacking, told
from data.store.storage import StoreError

if TYPE_CHECKING:
    from datasets import DatasetBuilder

Kind = Literal["dataset", "model"]
Beat = Callable[[], None]
FOLDER = "PEDIGREE_HUB"
CARDS = ("README.md", ".huggingface.yaml", "dataset_infos.json")
"""What says of a data set which files make which split."""
NOTES = ".cache/huggingface/download"
"""Where `hf download --local-dir` notes commit and hash of each file."""
STATEMENT = "REVISION"
NOT_NEEDED = ("*/*", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5", "*.onnx", "*.gguf", "*.zip", "consolidated*")
"""Files of a model that transformers does not read, or that we do not: weights travel as safetensors."""
PIECE = 1 << 20
BATCH = 100
"""Rows that are taken out of a file together."""


class HubError(StoreError):
    """A repository cannot be had as it is asked for; the message names it and the remedy."""


@dataclass(frozen=True)
class Repository:
    """One repository at one commit."""

    kind: Kind
    name: str
    revision: str
    """A commit, or `pin me`."""

    def __str__(self) -> str:
        return f"hub {'data set' if self.kind == 'dataset' else 'model'} {self.name}"

    @property
    def place(self) -> str:
        """Where it lies in a mirror."""
        return f"{self.kind}s/{self.name}"

    @property
    def page(self) -> str:
        """Where people look at it."""
        return f"{_endpoint()}/{'datasets/' if self.kind == 'dataset' else ''}{self.name}"


@dataclass(frozen=True)
class Found:
    """A folder with files of a repository."""

    folder: Path
    unproved: str | None = None
    """Why nobody can tell that they are those of the commit; None where they are."""


def check(repo: Repository) -> None:
    """Looks whether a repository can be had, before anything is begun. Where only the network is at fault nothing is said: a job waits.

    Raises:
        HubError: it is gated, missing or moved, has no such commit, is not in the mirror, or the mirror has another commit.
    """
    if mirror() is not None:
        _mirrored(repo)
        return
    if _listed(repo) is not None:
        return
    if _offline():
        raise _offline_error(repo, f"commit {repo.revision} is not in its cache")
    try:
        _info(repo, repo.revision)
    except HubError as error:
        if not error.passing:
            raise


def newest(repo: Repository) -> str:
    """The newest commit of a repository's main branch, or the one that the mirror has.

    Raises:
        HubError: it cannot be told; the message says why and the remedy.
    """
    if mirror() is not None:
        folder = _mirrored(repo)
        commits = _stated(folder)
        if len(commits) == 1:
            return next(iter(commits.values()))
        what = "does not say of which commit it is" if not commits else f"has files of {len(set(commits.values()))} commits"
        raise HubError(f"{repo}: the mirror's {folder} {what}: {_laid_again(repo)}, or unset {FOLDER} to ask the hub")
    if _offline():
        raise _offline_error(repo, "its newest commit cannot be asked for")
    found = _info(repo, None)
    if not COMMIT.fullmatch(str(found.sha)):
        raise HubError(f"{repo}: {_endpoint()} gives {found.sha!r} as its newest commit, which is none")
    return found.sha


def model(repo: Repository, beat: Beat = lambda: None) -> Found:
    """The folder of a model: its safetensors, configuration and tokenizer, and the record of one that Pedigree exported.

    Raises:
        HubError: it cannot be had, or is not what the commit says.
    """
    if mirror() is not None:
        folder = _mirrored(repo)
        return Found(folder, _proved_mirror(repo, folder, None, beat))
    _reach(repo)
    folder = _snapshot(repo, ignore=NOT_NEEDED)
    _snapshot(repo, allow=("pedigree/record.json",))
    _prove_cached(repo, [path for path in folder.rglob("*") if path.is_file()], beat)
    return Found(folder)


def rows(
    source: Hub, beat: Beat = lambda: None, mark: Callable[[str], None] = lambda mark: None, beside: Sequence[str] = ()
) -> Iterator[tuple[str, Any]]:
    """(place, row) of every row of the source's configurations and splits, its columns chosen and named as the source says.

    Args:
        source: what is read.
        beat: called now and then.
        mark: is told what a reader of the result must know.
        beside: other columns that somebody asks for; where there are some, a row is `Told` with what stands in them.

    Raises:
        HubError: it cannot be had, is not what the commit says, or has no such configuration, split or column.
    """
    repo = Repository("dataset", source.repo, source.revision)
    with tempfile.TemporaryDirectory(prefix="pedigree-hub-") as scratch:
        mirrored = mirror() and _mirrored(repo)
        folder = (mirrored or _listing(repo, Path(scratch) / "files")).resolve()
        listed = None if mirrored else frozenset(_listed(repo) or ())
        marked = False
        for config in source.configs:
            builder = _builder(repo, folder, source, config, Path(scratch))
            files: Any = builder.config.data_files
            wanted = _names(repo, folder, [file for split in source.splits for file in files[split]], listed)
            if mirrored:
                unproved = _proved_mirror(repo, mirrored, wanted, beat)
                if unproved and not marked:
                    mark(unproved)
                    marked = True
            else:
                _fetch(repo, folder, wanted, beat)
            with _reading(repo, folder):
                for split in source.splits:
                    yield from _split(repo, builder, split, source, config, beside)


def _names(repo: Repository, folder: Path, files: list[str], listed: Collection[str] | None) -> list[str]:
    """The names in the repository of files that `datasets` would read, which its card decides.

    Args:
        repo: whose card it is.
        folder: where the repository lies, without links on the way.
        files: as `datasets` has found them: full paths, or URLs.
        listed: the names of all files of the commit; in a mirror None, whose links may lead to its own files alone.

    Raises:
        HubError: one of them is no file of the repository.
    """
    names = []
    for file in files:
        path = PurePosixPath(file)
        name = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else ""
        own = name in listed if listed is not None else (folder / name).resolve().is_relative_to(folder)
        if not name or ".." in path.parts or not own:
            raise HubError(f"{repo}: its card reads {file!r}, which is none of its files: use another commit, or tell its authors")
        names.append(name)
    return names


def _split(
    repo: Repository, builder: "DatasetBuilder", split: str, source: Hub, config: str | None, beside: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    with _without_torch():
        stream: Any = builder.as_streaming_dataset(split=split)
    named = {column: name for column, name in ((source.config_as, config), (source.split_as, split)) if column}
    place = f"{repo.name}/{config}/{split}" if len(source.configs) > 1 else f"{repo.name}/{split}"
    number = 0
    for batch in stream.iter(batch_size=BATCH):  # row by row takes twice as long
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        if not number:
            _refuse_columns(f"{repo}: {split}", rows, source)
        for row in rows:
            given = told(row, source.columns, beside)
            said = {**{column: name for column, name in named.items() if column in beside}, **given.said}
            yield f"{place}[{number}]", Told(given.row | named, said) if beside else given.row | named
            number += 1


def _refuse_columns(split: str, rows: list[dict[str, Any]], source: Hub) -> None:
    """Raises HubError where a split lacks a column that is chosen, or has one of its own by a name that is given."""
    unknown, instead = lacking(rows, source.columns)
    if unknown:
        raise HubError(f"{split} has no column {', '.join(unknown)}: it has {', '.join(instead)}")
    for field, column in (("config_as", source.config_as), ("split_as", source.split_as)):
        if not source.columns and column in rows[0]:
            raise HubError(f"{split} has a column {column} of its own: leave {field} out, or name another")


def _builder(repo: Repository, folder: Path, source: Hub, config: str | None, scratch: Path) -> "DatasetBuilder":
    """What knows the files of each split of a configuration, left with the wanted splits.

    Raises:
        HubError: there is no such configuration or split, or no file that `datasets` reads.
    """
    from datasets import load_dataset_builder

    with _reading(repo, folder):
        builder = load_dataset_builder(str(folder), name=config, cache_dir=str(scratch / "cache"))
    files: Any = builder.config.data_files
    missing = [split for split in source.splits if split not in files]
    if missing:
        raise HubError(f"{repo}: there is no split {', '.join(missing)}: it has {', '.join(map(str, files))}")
    for split in set(files) - set(source.splits):  # whose files need not be here
        del files[split]
    return builder


@contextmanager
def _reading(repo: Repository, folder: Path) -> Iterator[None]:
    """What `datasets` and pyarrow say of files that they cannot read is told of the repository instead of the folder. Of damaged files
    some say it by an OSError without a number; one of the system has a number, and is no fault of a file unless that is missing."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (DatasetsError, ValueError, TypeError, KeyError, EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, FileNotFoundError):
            raise
        raise HubError(f"{repo}: {str(error).replace(str(folder.resolve()), repo.name)}") from error


@contextmanager
def _without_torch() -> Iterator[None]:
    """`datasets` prepares its streams for torch's loaders, and imports torch for it: longer than most suites take to be read."""
    from datasets import config

    available = config.TORCH_AVAILABLE
    config.TORCH_AVAILABLE = False
    try:
        yield
    finally:
        config.TORCH_AVAILABLE = available


# --- the hub -----------------------------------------------------------------------------------------------------------


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _offline() -> bool:
    from huggingface_hub import constants

    return constants.is_offline_mode()


def _info(repo: Repository, revision: str | None) -> Any:
    """What the hub says of a repository that we may read.

    Raises:
        HubError: gated, missing, moved, without that commit, or the hub cannot be reached (`passing`).
    """
    from huggingface_hub import HfApi

    api = HfApi()
    with _told(repo):
        found = api.repo_info(repo.name, repo_type=repo.kind, revision=revision)
        if found.id != repo.name:
            raise HubError(f"{repo} has moved to {found.id}: write that as its `repo`")
        if getattr(found, "gated", False):
            api.auth_check(repo.name, repo_type=repo.kind)
    return found


def _listed(repo: Repository) -> list[str] | None:
    """The names of all files of a commit, as they were noted when the first of them was fetched; None before."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return [file.path for file in get_cached_repo_tree(repo.name, repo_type=repo.kind, revision=repo.revision)]
    except CachedRepoTreeNotFoundError:
        return None


def _reach(repo: Repository) -> None:
    """Asks for a repository of which nothing is here yet, so that what is wrong with it is told by name.

    Raises:
        HubError: as `check`, also where the hub cannot be reached.
    """
    if repo.revision == PIN_ME:
        raise HubError(f"{repo}: its revision is still to be chosen: {command('pin', 'RECIPE')} writes the newest commit into the recipe")
    print(f"{repo}: files of commit {repo.revision[:12]} from {_endpoint()} or its cache", flush=True)
    if _listed(repo) is None and not _offline():
        _info(repo, repo.revision)


def _snapshot(repo: Repository, allow: tuple[str, ...] | None = None, ignore: tuple[str, ...] | None = None) -> Path:
    """The commit's folder in the cache, the files that are asked for in it. A file that is there is not fetched again."""
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = {"allow_patterns": allow and list(allow), "ignore_patterns": ignore and list(ignore)}
    with _told(repo):
        return Path(snapshot_download(repo.name, repo_type=repo.kind, revision=repo.revision, **options))


def _listing(repo: Repository, view: Path) -> Path:
    """A folder that shows all files of a commit: the cards as they are, of others the names."""
    _reach(repo)
    snapshot, names = _snapshot(repo, allow=CARDS), _listed(repo)
    if names is None:
        raise _offline_error(repo, "its cache does not say which files it has")
    for name in names:
        if ".." in PurePosixPath(name).parts or name.startswith("/"):
            raise HubError(f"{repo}: the file name {name!r} leads out of its folder")
        (view / name).parent.mkdir(parents=True, exist_ok=True)
        (view / name).symlink_to(snapshot / name) if name in CARDS else (view / name).touch()
    view.mkdir(exist_ok=True)
    return view


def _fetch(repo: Repository, view: Path, wanted: list[str], beat: Beat) -> None:
    """Puts the files that are wanted into the folder that shows their names."""
    snapshot = _snapshot(repo, allow=tuple(glob.escape(name) for name in wanted))
    _prove_cached(repo, [snapshot / name for name in (*wanted, *CARDS) if (snapshot / name).exists()], beat)
    for name in wanted:
        (view / name).unlink()
        (view / name).symlink_to(snapshot / name)


def _prove_cached(repo: Repository, files: list[Path], beat: Beat) -> None:
    """Of a cached file the name is the hash: sha256 of a large one, git's own of others."""
    for file in files:
        blob = file.resolve()
        if not _hashes_to(blob, blob.name, beat):
            raise HubError(f"{repo}: {blob} is damaged, it does not hash to its name: delete it, and it is fetched again")


def _offline_error(repo: Repository, why: str) -> HubError:
    return HubError(f"{repo}: {why}, and HF_HUB_OFFLINE forbids to ask the hub: unset it, or name a mirror's folder in {FOLDER}")


@contextmanager
def _told(repo: Repository) -> Iterator[None]:
    """What `huggingface_hub` raises, as one sentence with the remedy."""
    from httpx2 import HTTPError
    from huggingface_hub import errors

    token = "log in by `hf auth login`, or set HF_TOKEN"
    rights = f"give it the right to read gated repositories, or ask for access at {repo.page}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(f"{repo} is gated: ask for access at {repo.page}, and {token}") from error
    except errors.DisabledRepoError as error:
        raise HubError(f"{repo} is disabled by the hub: look at {repo.page}, and name another `repo`") from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(f"{repo} does not exist on {_endpoint()}, or is private: correct `repo`, or {token}") from error
    except errors.RevisionNotFoundError as error:
        pin = f"write `{PIN_ME}` and type {command('pin', 'RECIPE')} for the newest one"
        raise HubError(f"{repo} has no commit {repo.revision}: correct `revision`, or {pin}") from error
    except errors.RemoteEntryNotFoundError as error:
        raise HubError(f"{repo} lacks a file of commit {repo.revision}: {error}") from error
    except errors.LocalEntryNotFoundError as error:
        if _offline():
            raise _offline_error(repo, f"not all files of commit {repo.revision} are in its cache") from error
        raise _away(repo, error) from error
    except errors.HfHubHTTPError as error:
        if error.response.status_code == 401:
            raise HubError(f"{repo}: {_endpoint()} does not take the access token: {token}") from error
        if error.response.status_code == 403:
            raise HubError(f"{repo}: {_endpoint()} forbids this to the access token ({_first_line(error)}): {rights}") from error
        raise _away(repo, error) from error
    except (HTTPError, errors.OfflineModeIsEnabled) as error:
        raise _away(repo, error) from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _away(repo: Repository, error: Exception) -> HubError:
    remedy = f"type the command again when it answers, correct HF_ENDPOINT, or name a mirror's folder in {FOLDER}"
    return HubError(f"{repo}: {_endpoint()} cannot be reached ({_first_line(error)}): {remedy}", passing=True)


# --- a mirror ----------------------------------------------------------------------------------------------------------


def mirror() -> Path | None:
    """The folder that is read instead of the hub, $PEDIGREE_HUB.

    Raises:
        HubError: it is no folder, or not named in full.
    """
    given = os.environ.get(FOLDER)
    if not given:
        return None
    folder = Path(given).expanduser()
    if not folder.is_absolute():
        raise HubError(f"{FOLDER}={given} is relative, and jobs run in folders of their own: write {folder.absolute()}")
    if not folder.is_dir():
        raise HubError(f"{FOLDER}={given} is no folder: correct it, or unset it to ask the hub")
    return folder


def _mirrored(repo: Repository) -> Path:
    """The repository's folder in the mirror.

    Raises:
        HubError: it is not there, or says that it is of another commit.
    """
    folder = (mirror() or Path()) / repo.place
    if not folder.is_dir():
        raise HubError(f"{repo}: the mirror has no {folder}: {_laid_again(repo)}, or unset {FOLDER} to ask the hub")
    for name, commit in _stated(folder).items():
        if repo.revision not in (PIN_ME, commit):
            raise HubError(f"{repo}: {folder / name} is of commit {commit}, not of {repo.revision}: {_laid_again(repo)}")
    return folder


def _laid_again(repo: Repository) -> str:
    kind = " --repo-type dataset" if repo.kind == "dataset" else ""
    revision = "" if repo.revision == PIN_ME else f" --revision {repo.revision}"
    return f"put it there by `hf download {repo.name}{kind}{revision} --local-dir ${FOLDER}/{repo.place}`"


def _stated(folder: Path) -> dict[str, str]:
    """File → the commit that it is of, one file for each commit, as far as the folder says so; `REVISION` speaks for all of them.

    Raises:
        HubError: it says something that is no commit.
    """
    said = {name: commit for name, (commit, _) in _notes(folder).items()}
    if (folder / STATEMENT).is_file():
        said = {STATEMENT: (folder / STATEMENT).read_text().strip(), **said}
    for name, commit in said.items():
        if not COMMIT.fullmatch(commit):
            raise HubError(f"{folder} says that {name} is of commit {commit[:60]!r}, which is none: lay it there again")
    return {name: commit for commit, name in reversed({commit: name for name, commit in said.items()}.items())}


def _notes(folder: Path) -> dict[str, tuple[str, str]]:
    """File → (commit, hash), as `hf download` has noted them, of the files that are there."""
    notes = folder / NOTES
    found = {}
    for note in sorted(notes.rglob("*.metadata")) if notes.is_dir() else ():
        name = note.relative_to(notes).as_posix().removesuffix(".metadata")
        lines = note.read_text().split("\n")
        if (folder / name).is_file() and len(lines) >= 2:
            found[name] = (lines[0].strip(), lines[1].strip())
    return found


def _proved_mirror(repo: Repository, folder: Path, wanted: list[str] | None, beat: Beat) -> str | None:
    """Hashes the wanted files (all where None) against what the mirror notes; returns why nothing is proved, None where all is.

    Raises:
        HubError: a file was changed since it was laid there.
    """
    notes = _notes(folder)
    names = _laid(folder) if wanted is None else [name for name in (*wanted, *CARDS) if (folder / name).is_file()]
    for name in names:
        if name in notes and not _hashes_to(folder / name, notes[name][1], beat):
            raise HubError(f"{repo}: {folder / name} was changed since it was laid there: {_laid_again(repo)}")
    unnoted = [name for name in names if name not in notes]
    if (names and not unnoted) or repo.revision == PIN_ME:
        return None
    stated = "says" if (folder / STATEMENT).is_file() else "does not say"
    return f"{repo} was read from a mirror that {stated} that it is of commit {repo.revision[:12]}, and holds no hashes to prove it"


def _laid(folder: Path) -> list[str]:
    """The names of all files of a repository in the mirror, without what is noted of them."""
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(name.as_posix() for name in names if name.parts[0] != NOTES.partition("/")[0] and name.as_posix() != STATEMENT)


def _hashes_to(file: Path, expected: str, beat: Beat) -> bool:
    """Whether a file has this sha256, this hash of git's, or (from servers other than the hub) this sha1; true of what is no hash."""
    if len(expected) not in (40, 64):
        return True
    hashes = [hashlib.sha256()] if len(expected) == 64 else [hashlib.sha1(b"blob %d\0" % file.stat().st_size), hashlib.sha1()]
    with file.open("rb") as stream:
        while piece := stream.read(PIECE):
            for one in hashes:
                one.update(piece)
            beat()
    return expected in [one.hexdigest() for one in hashes]
