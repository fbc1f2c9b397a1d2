"""The rows that configs of other trainers name, as sources of `prepare_data`."""

from typing import Any

from pydantic import TypeAdapter, ValidationError

from pedigree.configs.base.hub_names import COMMIT, PIN_ME, Repository
from pedigree.pipelines.importing.description import Description, listed, number, written

FILES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
UNNAMED = "OWNER/NAME"
"""Stands for a repository that the file does not name."""
COLUMNS = {"field_messages": "messages", "field_chosen": "chosen", "field_rejected": "rejected"}
"""axolotl's key → our column."""
READ = {"path", "split", "name", "data_files", "ds_type", "revision", "roles", "message_property_mappings", "type", "trust_remote_code"}
"""Keys of a dataset of axolotl that need no comment."""
OF_TRL = {"path", "id", "name", "config", "data_files", "split", "columns", "weight", "fraction"}
"""The same of TRL and alignment-handbook; `fraction` has one."""
BUILDERS = ("arrow", "csv", "json", "parquet", "text")
"""Names of file formats in place of a repository."""
CHATS = (None, "chat_template", "chat_template.default", "sharegpt")
"""Types of axolotl that render conversations by the chat template."""


def located(description: Description, name: Any, part: str, revision: Any = None) -> dict[str, Any]:
    """A file or folder as `{path: ...}`, or a repository of the hub; `part` is where to note what needs a look."""
    name = str(name)
    if name.startswith(("/", "./", "../", "~")) or name.endswith(FILES):
        return {"path": name.removeprefix("./").rstrip("/")}
    try:
        TypeAdapter(Repository).validate_python(name)
    except ValidationError:
        description.check(part, f"{name} is neither a repository of the hub nor a local path: name one")
        name = UNNAMED
    commit = COMMIT.fullmatch(str(revision))
    if revision not in (None, "main") and not commit:
        description.check(part, f"revision: {revision}: write its commit; `pedigree pin` takes the newest one of main")
    return {"repo": name, "revision": str(revision) if commit else PIN_ME}


def _source(description: Description, name: Any, split: Any = "train", config: Any = None, revision: Any = None) -> dict[str, Any]:
    place = located(description, name, "rows", revision)
    if "path" in place:
        return {"type": "files", **place}
    splits = split.split("+") if isinstance(split, str) else listed(split)
    for one in splits:
        if "[" in str(one):
            description.check("rows", f"split: {one}: for a part of a split, add `count: 1000` or `epochs: 0.2` to its source")
    bare = [str(one).partition("[")[0] for one in splits]
    return {"type": "hub", **place, **({"config": str(config)} if config else {}), "split": bare[0] if len(bare) == 1 else bare}


def _places(description: Description, one: dict[str, Any]) -> list[Any]:
    """The files of a dataset, or its repository or folder, of which `data_files` may select some."""
    files, place = one.get("data_files"), one.get("path") or one.get("id")
    if files and place and place not in BUILDERS:
        description.check("rows", f"{written('data_files', files)}: of {place}, all files are read here")
        return [place]
    return listed(files or place)


def _amount(value: Any) -> dict[str, Any]:
    """A share of the rows of a dataset; 1 is all of them."""
    return {} if number(value) == 1 else {"epochs": float(number(value))}


def _mappings(description: Description, value: Any) -> list[dict[str, Any]]:
    found = [one for one in listed(value or []) if isinstance(one, dict)]
    if len(found) < len(listed(value or [])):
        description.check("rows", f"{written('datasets', value)}: not a list of mappings")
    return found


def of_trl(description: Description, keys: dict[str, Any]) -> None:
    """`dataset_name`, `datasets`, or alignment-handbook's `dataset_mixture` and `dataset_mixer`."""
    mixture = next(iter(_mappings(description, keys.pop("dataset_mixture", None))), {})
    keys |= {key: value for key, value in mixture.items() if key == "test_split_size"}
    several = _mappings(description, keys.pop("datasets", None) or mixture.get("datasets"))
    name, config, split = (keys.pop(key, None) for key in ("dataset_name", "dataset_config", "dataset_train_split"))
    splits = [one for one in listed(keys.pop("dataset_splits", "train")) if "test" not in str(one)]
    for mixer in _mappings(description, keys.pop("dataset_mixer", None)):
        description.sources += [_source(description, repository, splits) | _amount(share) for repository, share in mixer.items()]
    for one in several:
        for place in _places(description, one):
            source = _source(description, place, one.get("split") or "train", one.get("name") or one.get("config"))
            description.sources.append(source | _amount(1 if one.get("weight") is None else one["weight"]))
        for key in [key for key, value in one.items() if key not in OF_TRL and value is not None]:
            description.check("rows", f"{written(key, one[key])}: unknown")
        if one.get("fraction") is not None:
            description.check("rows", f"{written('fraction', one['fraction'])}: write `share` in its source and `total` in the stage")
    if name and not several:
        description.sources.append(_source(description, name, split or "train", config))


def of_llama_factory(description: Description, keys: dict[str, Any]) -> None:
    """`dataset`: names of `dataset_info.json`."""
    count, folder = keys.pop("max_samples", None), keys.pop("dataset_dir", "data")
    for name in listed(keys.pop("dataset", [])):
        description.check(
            "rows", f"{name}: write the repository, or `{{type: files, path: ...}}`, of its entry in {folder}/dataset_info.json"
        )
        description.sources.append({"type": "hub", "repo": UNNAMED, "revision": PIN_ME, "split": "train"})
    if count:
        description.check("rows", f"max_samples: {count}: write `count: {count}` in each source that has more rows")


def of_axolotl(description: Description, keys: dict[str, Any]) -> None:
    """`datasets`."""
    for one in _mappings(description, keys.pop("datasets", None)):
        columns = {ours: one[key] for key, ours in COLUMNS.items() if one.get(key, ours) not in (ours, "conversations", "conversation")}
        for place in _places(description, one):
            source = _source(description, place, one.get("split") or "train", one.get("name"), one.get("revision"))
            description.sources.append(source | ({"columns": columns} if columns else {}))
        strange = [key for key in one if key not in READ | COLUMNS.keys()] + ["type"] * (one.get("type") not in CHATS)
        for key in strange:
            what = "the chat template renders all rows, and docs/layouts.md lists the columns that are read"
            description.check("rows", f"{written(key, one[key])}: {what}")


def of_open_instruct(description: Description, keys: dict[str, Any]) -> None:
    """`dataset_mixer`, or `dataset_mixer_list`: names and amounts in turn; a number with a point is a share of the rows."""
    pairs = [one for mixer in _mappings(description, keys.pop("dataset_mixer", None)) for pair in mixer.items() for one in pair]
    pairs += listed(keys.pop("dataset_mixer_list", []))
    splits = listed(keys.pop("dataset_mixer_list_splits", None) or keys.pop("dataset_train_splits", "train"))
    for place, name in enumerate(pairs[::2]):
        amount = pairs[2 * place + 1] if 2 * place + 1 < len(pairs) else 1.0
        amount = int(amount) if isinstance(amount, str) and amount.isdecimal() else number(amount)
        how = {"count": amount} if isinstance(amount, int) else _amount(amount)
        description.sources.append(_source(description, name, splits[place % len(splits)]) | how)


READERS = {"TRL": of_trl, "LLaMA-Factory": of_llama_factory, "axolotl": of_axolotl, "open-instruct": of_open_instruct}
"""Trainer → takes the keys of its rows, and notes them in the description."""
