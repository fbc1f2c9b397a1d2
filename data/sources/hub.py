"""Datasets and models of the Hugging Face hub, or of a mirror, at one commit; the only user of `huggingface_hub` and `datasets`.

Files come from the hub at HF_ENDPOINT through the cache of `huggingface_hub`, or, if PEDIGREE_HUB is set, only from that folder:

    datasets/OWNER/NAME/...     as written by `hf download OWNER/NAME --repo-type dataset --local-dir`
    models/OWNER/NAME/...

Files are verified: a cached file is named by its hash; in a mirror, the metadata of `hf download` gives commit and hash, and a file
`REVISION` the commit. `datasets` resolves splits and reads local files only; it never downloads a repository, because it would fall back
to any cached commit when the hub is unreachable.
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

from pedigree.configs.base.hub_names import COMMIT, PIN_ME
from pedigree.configs.base.texts import command
from pedigree.configs.rows.row_sources import Hub
from pedigree.data.artifacts import exports
from pedigree.data.sources.named_columns import SelectedRow, lacking, select_columns
from pedigree.data.store.storage import StoreError

if TYPE_CHECKING:
    from datasets import DatasetBuilder

Kind = Literal["dataset", "model"]
Beat = Callable[[], None]
FOLDER = "PEDIGREE_HUB"
CARDS = ("README.md", ".huggingface.yaml", "dataset_infos.json")
"""Files that define a dataset's splits."""
NOTES = ".cache/huggingface/download"
"""Folder where `hf download --local-dir` stores each file's commit and hash."""
STATEMENT = "REVISION"
NOT_NEEDED = ("*/*", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5", "*.onnx", "*.gguf", "*.zip", "consolidated*")
"""Files of a model that are not downloaded; weights must be safetensors."""
PIECE = 1 << 20
BATCH = 100
"""Rows read from a file at a time."""


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
        """Its path in a mirror."""
        return f"{self.kind}s/{self.name}"

    @property
    def page(self) -> str:
        """Its web page."""
        return f"{_endpoint()}/{'datasets/' if self.kind == 'dataset' else ''}{self.name}"


@dataclass(frozen=True)
class Found:
    """A folder with files of a repository."""

    folder: Path
    unproved: str | None = None
    """Why the files could not be verified against the commit; None if they were."""


def check(repo: Repository) -> bool:
    """Check up front that a repository is available; returns False if the hub cannot be reached, because a job waits for the network.

    Raises StoreError if it is gated, missing or moved, has no such commit, is not in the mirror, or the mirror has another commit.
    """
    if mirror() is not None:
        _mirrored(repo)
        return True
    if listed(repo) is not None:
        return True
    if _offline():
        raise _offline_error(repo, f"commit {repo.revision} is not in its cache")
    try:
        _info(repo, repo.revision)
    except StoreError as error:
        if not error.passing:
            raise
        return False
    return True


def fetch(repo: Repository, names: Sequence[str]) -> None:
    """Fetch files of a repository into the cache, unless a mirror has them. Network failures are ignored as in `check`."""
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        if mirror() is None:
            _snapshot(repo, allow=tuple(names))
    except StoreError as error:
        if not error.passing:
            raise


def newest(repo: Repository) -> str:
    """The newest commit of a repository's main branch, or the commit in the mirror. Raises StoreError if it cannot be determined."""
    if mirror() is not None:
        folder = _mirrored(repo)
        commits = _stated(folder)
        if len(commits) == 1:
            return next(iter(commits.values()))
        what = "does not record its commit" if not commits else f"has files of {len(set(commits.values()))} commits"
        raise StoreError(f"{repo}: {folder} in the mirror {what}: {_download_again(repo)}, or unset {FOLDER} to use the hub")
    if _offline():
        raise _offline_error(repo, "its newest commit cannot be looked up")
    found = _info(repo, None)
    if not COMMIT.fullmatch(str(found.sha)):
        raise StoreError(f"{repo}: {_endpoint()} reports {found.sha!r} as its newest commit, which is not a commit hash")
    return found.sha


def model(repo: Repository, beat: Beat = lambda: None) -> Found:
    """A model's folder: safetensors, configuration, tokenizer, and the records if Pedigree exported it.

    Raises StoreError if it is not available, or its files do not match the commit.
    """
    if mirror() is not None:
        folder = _mirrored(repo)
        return Found(folder, _proved_mirror(repo, folder, None, beat))
    _reach(repo)
    folder = _snapshot(repo, ignore=NOT_NEEDED)
    _snapshot(repo, allow=tuple(f"{exports.FOLDER}/{name}" for name in exports.RECORDS))
    _prove_cached(repo, [path for path in folder.rglob("*") if path.is_file()], beat)
    return Found(folder)


def rows(
    source: Hub, beat: Beat = lambda: None, mark: Callable[[str], None] = lambda mark: None, beside: Sequence[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Iterate over (place, row) of the source's configurations and splits, with columns selected and renamed.

    `beat` is called periodically, and `mark` records a caveat about the rows' origin. With further columns in `beside`, each row is a
    `SelectedRow` with their values.

    Raises StoreError if the dataset is not available, does not match the commit, or lacks a configuration, split or column.
    """
    repo = Repository("dataset", source.repo, source.revision)
    with tempfile.TemporaryDirectory(prefix="pedigree-hub-") as scratch:
        mirrored = mirror() and _mirrored(repo)
        folder = (mirrored or _listing(repo, Path(scratch) / "files")).resolve()
        own = None if mirrored else frozenset(listed(repo) or ())
        marked = False
        for config in source.configs:
            builder = _builder(repo, folder, source, config, Path(scratch))
            files: Any = builder.config.data_files
            wanted = _names(repo, folder, [file for split in source.splits for file in files[split]], own)
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
    """Repository names of the `files`, full paths or URLs, that `datasets` would read according to the dataset's card.

    `listed` are the names of all files of the commit; None for a mirror, where links must stay within the folder, which is resolved.
    Raises StoreError if a file is not part of the repository.
    """
    names = []
    for file in files:
        path = PurePosixPath(file)
        name = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else ""
        own = name in listed if listed is not None else (folder / name).resolve().is_relative_to(folder)
        if not name or ".." in path.parts or not own:
            raise StoreError(f"{repo}: its card reads {file!r}, which is not one of its files: use another commit, or notify its authors")
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
    for batch in stream.iter(batch_size=BATCH):  # twice as fast as row by row
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        if not number:
            _refuse_columns(f"{repo}: {split}", rows, source)
        for row in rows:
            given = select_columns(row, source.columns, beside)
            further = {**{column: name for column, name in named.items() if column in beside}, **given.values}
            yield f"{place}[{number}]", SelectedRow(given.row | named, further) if beside else given.row | named
            number += 1


def _refuse_columns(split: str, rows: list[dict[str, Any]], source: Hub) -> None:
    """Raise StoreError if a split lacks a chosen column, or already has a column named by `config_as` or `split_as`."""
    unknown, instead = lacking(rows, source.columns)
    if unknown:
        raise StoreError(f"{split} has no column {', '.join(unknown)}: it has {', '.join(instead)}")
    for field, column in (("config_as", source.config_as), ("split_as", source.split_as)):
        if not source.columns and column in rows[0]:
            raise StoreError(f"{split} already has a column {column}: omit {field}, or use another name")


def _builder(repo: Repository, folder: Path, source: Hub, config: str | None, scratch: Path) -> "DatasetBuilder":
    """The builder of a configuration, restricted to the requested splits.

    Raises StoreError if the configuration or split does not exist, or no file is readable by `datasets`.
    """
    from datasets import load_dataset_builder

    with _reading(repo, folder):
        builder = load_dataset_builder(str(folder), name=config, cache_dir=str(scratch / "cache"))
    files: Any = builder.config.data_files
    missing = [split for split in source.splits if split not in files]
    if missing:
        raise StoreError(f"{repo}: there is no split {', '.join(missing)}: it has {', '.join(map(str, files))}")
    for split in set(files) - set(source.splits):  # their files need not be present
        del files[split]
    return builder


@contextmanager
def _reading(repo: Repository, folder: Path) -> Iterator[None]:
    """Turn read errors of `datasets` and pyarrow into StoreErrors that name the repository instead of the folder.

    Some readers report damaged files by an OSError without errno. An OSError with errno comes from the system and is raised as is, except
    for missing files.
    """
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (DatasetsError, ValueError, TypeError, KeyError, EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, FileNotFoundError):
            raise
        raise StoreError(f"{repo}: {str(error).replace(str(folder.resolve()), repo.name)}") from error


@contextmanager
def _without_torch() -> Iterator[None]:
    """Keep `datasets` from importing torch for its streams, which takes longer than reading most suites."""
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
    """The hub's information on a repository that the user can access.

    Raises StoreError if it is gated, missing, moved, without that commit, or the hub is unreachable (`passing`).
    """
    from huggingface_hub import HfApi

    api = HfApi()
    with _explained(repo):
        found = api.repo_info(repo.name, repo_type=repo.kind, revision=revision)
        if found.id != repo.name:
            raise StoreError(f"{repo} has moved to {found.id}: write that as its `repo`")
        if getattr(found, "gated", False):
            api.auth_check(repo.name, repo_type=repo.kind)
    return found


def listed(repo: Repository) -> list[str] | None:
    """Names of all files of a commit, cached when the first was fetched; None before."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return [file.path for file in get_cached_repo_tree(repo.name, repo_type=repo.kind, revision=repo.revision)]
    except CachedRepoTreeNotFoundError:
        return None


def _reach(repo: Repository) -> None:
    """Query a repository that is not cached yet, so that errors name their cause. Raises StoreError as in `_info`."""
    if repo.revision == PIN_ME:
        raise StoreError(f"{repo}: its revision is not pinned: {command('pin', 'RECIPE')} writes the newest commit into the recipe")
    print(f"{repo}: files of commit {repo.revision[:12]} from {_endpoint()} or its cache", flush=True)
    if listed(repo) is None and not _offline():
        _info(repo, repo.revision)


def _snapshot(repo: Repository, allow: tuple[str, ...] | None = None, ignore: tuple[str, ...] | None = None) -> Path:
    """The commit's folder in the cache, with the requested files; cached files are not fetched again."""
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = {"allow_patterns": allow and list(allow), "ignore_patterns": ignore and list(ignore)}
    with _explained(repo):
        return Path(snapshot_download(repo.name, repo_type=repo.kind, revision=repo.revision, **options))


def _listing(repo: Repository, view: Path) -> Path:
    """Create a folder with all file names of a commit; only the cards have content."""
    _reach(repo)
    snapshot, names = _snapshot(repo, allow=CARDS), listed(repo)
    if names is None:
        raise _offline_error(repo, "its file list is not in the cache")
    for name in names:
        if ".." in PurePosixPath(name).parts or name.startswith("/"):
            raise StoreError(f"{repo}: the file name {name!r} leads outside its folder")
        (view / name).parent.mkdir(parents=True, exist_ok=True)
        (view / name).symlink_to(snapshot / name) if name in CARDS else (view / name).touch()
    view.mkdir(exist_ok=True)
    return view


def _fetch(repo: Repository, view: Path, wanted: list[str], beat: Beat) -> None:
    """Link the wanted files into the folder of names."""
    snapshot = _snapshot(repo, allow=tuple(glob.escape(name) for name in wanted))
    _prove_cached(repo, [snapshot / name for name in (*wanted, *CARDS) if (snapshot / name).exists()], beat)
    for name in wanted:
        (view / name).unlink()
        (view / name).symlink_to(snapshot / name)


def _prove_cached(repo: Repository, files: list[Path], beat: Beat) -> None:
    """Verify cached files, which are named by their hash: SHA-256 for large files, git's for others."""
    for file in files:
        blob = file.resolve()
        if not _hashes_to(blob, blob.name, beat):
            raise StoreError(f"{repo}: {blob} is damaged, it does not hash to its name: delete it to have it fetched again")


def _offline_error(repo: Repository, why: str) -> StoreError:
    return StoreError(f"{repo}: {why}, and HF_HUB_OFFLINE disables the hub: unset it, or set {FOLDER} to the folder of a mirror")


@contextmanager
def _explained(repo: Repository) -> Iterator[None]:
    """Turn exceptions of `huggingface_hub` into one sentence with the remedy."""
    from httpx2 import HTTPError
    from huggingface_hub import errors

    token = "log in with `hf auth login`, or set HF_TOKEN"
    rights = f"allow it to read gated repositories, or request access at {repo.page}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise StoreError(f"{repo} is gated: request access at {repo.page}, and {token}") from error
    except errors.DisabledRepoError as error:
        raise StoreError(f"{repo} is disabled by the hub: see {repo.page}, and use another `repo`") from error
    except errors.RepositoryNotFoundError as error:
        raise StoreError(f"{repo} does not exist on {_endpoint()}, or is private: correct `repo`, or {token}") from error
    except errors.RevisionNotFoundError as error:
        pin = f"write `{PIN_ME}` and run {command('pin', 'RECIPE')} for the newest one"
        raise StoreError(f"{repo} has no commit {repo.revision}: correct `revision`, or {pin}") from error
    except errors.RemoteEntryNotFoundError as error:
        raise StoreError(f"{repo} lacks a file of commit {repo.revision}: {error}") from error
    except errors.LocalEntryNotFoundError as error:
        if _offline():
            raise _offline_error(repo, f"not all files of commit {repo.revision} are in its cache") from error
        raise _away(repo, error) from error
    except errors.HfHubHTTPError as error:
        if error.response.status_code == 401:
            raise StoreError(f"{repo}: {_endpoint()} does not accept the access token: {token}") from error
        if error.response.status_code == 403:
            raise StoreError(f"{repo}: {_endpoint()} forbids this to the access token ({_first_line(error)}): {rights}") from error
        raise _away(repo, error) from error
    except (HTTPError, errors.OfflineModeIsEnabled) as error:
        raise _away(repo, error) from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _away(repo: Repository, error: Exception) -> StoreError:
    remedy = f"retry later, correct HF_ENDPOINT, or set {FOLDER} to the folder of a mirror"
    return StoreError(f"{repo}: {_endpoint()} cannot be reached ({_first_line(error)}): {remedy}", passing=True)


# --- a mirror ----------------------------------------------------------------------------------------------------------


def mirror() -> Path | None:
    """The folder that replaces the hub, $PEDIGREE_HUB. Raises StoreError if it is not a folder, or not an absolute path."""
    given = os.environ.get(FOLDER)
    if not given:
        return None
    folder = Path(given).expanduser()
    if not folder.is_absolute():
        raise StoreError(f"{FOLDER}={given} is relative, but jobs run in other folders: write {folder.absolute()}")
    if not folder.is_dir():
        raise StoreError(f"{FOLDER}={given} is not a folder: correct it, or unset it to use the hub")
    return folder


def _mirrored(repo: Repository) -> Path:
    """The repository's folder in the mirror. Raises StoreError if it is missing, or of another commit."""
    folder = (mirror() or Path()) / repo.place
    if not folder.is_dir():
        raise StoreError(f"{repo}: the mirror has no {folder}: {_download_again(repo)}, or unset {FOLDER} to use the hub")
    for name, commit in _stated(folder).items():
        if repo.revision not in (PIN_ME, commit):
            raise StoreError(f"{repo}: {folder / name} is of commit {commit}, not of {repo.revision}: {_download_again(repo)}")
    return folder


def _download_again(repo: Repository) -> str:
    kind = " --repo-type dataset" if repo.kind == "dataset" else ""
    revision = "" if repo.revision == PIN_ME else f" --revision {repo.revision}"
    return f"download it with `hf download {repo.name}{kind}{revision} --local-dir ${FOLDER}/{repo.place}`"


def _stated(folder: Path) -> dict[str, str]:
    """File → recorded commit, one file per distinct commit; `REVISION` counts as such a file. Raises StoreError for another text."""
    stated = {name: commit for name, (commit, _) in _notes(folder).items()}
    if (folder / STATEMENT).is_file():
        stated = {STATEMENT: (folder / STATEMENT).read_text().strip(), **stated}
    for name, commit in stated.items():
        if not COMMIT.fullmatch(commit):
            raise StoreError(f"{folder} records commit {commit[:60]!r} for {name}, which is not a commit hash: download the mirror again")
    return {name: commit for commit, name in reversed({commit: name for name, commit in stated.items()}.items())}


def _notes(folder: Path) -> dict[str, tuple[str, str]]:
    """File → (commit, hash) as recorded by `hf download`, for existing files."""
    notes = folder / NOTES
    found = {}
    for note in sorted(notes.rglob("*.metadata")) if notes.is_dir() else ():
        name = note.relative_to(notes).as_posix().removesuffix(".metadata")
        lines = note.read_text().split("\n")
        if (folder / name).is_file() and len(lines) >= 2:
            found[name] = (lines[0].strip(), lines[1].strip())
    return found


def _proved_mirror(repo: Repository, folder: Path, wanted: list[str] | None, beat: Beat) -> str | None:
    """Verify the wanted files (all if None) against the mirror's metadata; returns why they are unverified, or None.

    Raises StoreError if a file was changed after the download.
    """
    notes = _notes(folder)
    names = _laid(folder) if wanted is None else [name for name in (*wanted, *CARDS) if (folder / name).is_file()]
    for name in names:
        if name in notes and not _hashes_to(folder / name, notes[name][1], beat):
            raise StoreError(f"{repo}: {folder / name} was changed after the download: {_download_again(repo)}")
    unnoted = [name for name in names if name not in notes]
    if (names and not unnoted) or repo.revision == PIN_ME:
        return None
    stated = "says" if (folder / STATEMENT).is_file() else "does not say"
    return f"{repo} was read from a mirror that {stated} that it is of commit {repo.revision[:12]}, and holds no hashes to prove it"


def _laid(folder: Path) -> list[str]:
    """Names of all files of a mirrored repository, without metadata."""
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(name.as_posix() for name in names if name.parts[0] != NOTES.partition("/")[0] and name.as_posix() != STATEMENT)


def _hashes_to(file: Path, expected: str, beat: Beat) -> bool:
    """Whether a file has this SHA-256, git hash, or (from servers other than the hub) SHA-1; True if `expected` is not a hash."""
    if len(expected) not in (40, 64):
        return True
    hashes = [hashlib.sha256()] if len(expected) == 64 else [hashlib.sha1(b"blob %d\0" % file.stat().st_size), hashlib.sha1()]
    with file.open("rb") as stream:
        while piece := stream.read(PIECE):
            for one in hashes:
                one.update(piece)
            beat()
    return expected in [one.hexdigest() for one in hashes]
