"""Whether the files of a model folder belong together, before the model is loaded: configuration, weights, tokenizer, chat template."""

import filecmp
import fnmatch
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open

from pedigree.configs.base.jinja import jinja_problem
from pedigree.configs.rows.source_models import OWN, SourceModel, shipped_templates
from pedigree.data.store.untrusted import LINEAGE_BYTES, ArtifactError, read_json, read_plain

CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
)  # fmt: skip
ADAPTER, SPECIAL = "adapter_config.json", "special_tokens_map.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DESCRIBING = (CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG, TEMPLATE, SPECIAL, ADAPTER, INDEX)
"""What is read here besides the headers of weights."""
TOKENIZERS = (
    TOKENIZER,
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "*.tiktoken",
)
"""Any of these holds a vocabulary."""
SMALLEST_SHARE = 0.5
"""Of the rows of an embedding that a tokenizer uses. Rows are padded by a few percent, and a few models reserve a tenth. Special tokens
that no text contains may be beyond the rows, such as Gemma 3's for images in its models of text."""
WORD = re.compile(r"[Ġ▁]?(?:\w+|\W)")
"""A token of ordinary text; control tokens have brackets."""
SAME_BASE = "use one of the same base model"
"""Remedy where `unlike_tokens` has a reason."""
ENDS, PAD = ("bos_token_id", "eos_token_id"), "pad_token_id"


def problem_of(folder: Path, config: SourceModel, coming: Collection[str] = ()) -> str | None:
    """Why the model in a folder cannot be imported with this config, with the remedy; None if its files show no reason.

    `coming` are files that the folder will have, weights for instance; those in `DESCRIBING` must be there.
    """
    if not folder.is_dir():
        return f"it is a file, not a model folder: name the folder of transformers with {CONFIG}, tokenizer and weights in safetensors"
    try:
        names = {path.name for path in folder.iterdir()} | {name for name in coming if "/" not in name}
        model = _mapping(folder / CONFIG)
        return (
            _problem_of_adapter(folder)
            or _problem_of_weights(folder, sorted(names))
            or ("its config.json has no model_type: restore the file" if not model.get("model_type") else None)
            or _problem_of_tokenizer(folder, names, model)
            or (_problem_of_template(own_template(folder)) if config.chat_template == OWN else None)
        )
    except ArtifactError as error:
        return f"{error}: copy it from the model's origin"
    except (OSError, UnicodeDecodeError) as error:
        return f"a file of the model cannot be read: {error}"


def _problem_of_template(own: str | None) -> str | None:
    problem = None if own is None else jinja_problem(own)
    fix = f"restore the file, or set chat_template to one of {', '.join(shipped_templates())}"
    return choice() if own is None else f"its chat template is not Jinja, {problem}: {fix}" if problem else None


def choice() -> str:
    return f"it has no chat template, as base models have none: set chat_template to one of {', '.join(shipped_templates())}"


def own_template(folder: Path) -> str | None:
    """The chat template in a model folder; the default one of several."""
    if (folder / TEMPLATE).exists():
        return (folder / TEMPLATE).read_text()
    return default_template(_mapping(folder / TOKENIZER_CONFIG).get("chat_template"))


def default_template(found: Any) -> str | None:
    """The chat template among those that a tokenizer has: a text, a mapping, or a list of {name, template}."""
    if isinstance(found, list):
        found = {str(one.get("name")): one.get("template") for one in found if isinstance(one, dict)}
    if isinstance(found, Mapping):
        found = found.get("default")
    return found if isinstance(found, str) and found else None


def _mapping(file: Path) -> dict[str, Any]:
    """A JSON file; empty if it does not exist."""
    if not file.exists():
        return {}
    try:
        found = read_json(file.resolve())  # the hub's cache consists of links
    except ArtifactError as error:
        raise ArtifactError(f"its {file.name} is not JSON") from error
    if not isinstance(found, dict):
        raise ArtifactError(f"its {file.name} is not a mapping")
    return found


def _problem_of_adapter(folder: Path) -> str | None:
    """Of a PEFT adapter, which transformers would load onto a base model that it looks up by name."""
    if not (folder / ADAPTER).exists():
        return None
    base = _mapping(folder / ADAPTER).get("base_model_name_or_path")
    return (
        f"it is a PEFT adapter{f' of {base}' if isinstance(base, str) else ''}, not a model: merge it into its base, in Python `from peft "
        f"import AutoPeftModelForCausalLM; AutoPeftModelForCausalLM.from_pretrained({folder.name!r}).merge_and_unload()"
        ".save_pretrained('merged')`, copy the tokenizer's files there, and name that folder"
    )


def _problem_of_weights(folder: Path, names: Sequence[str]) -> str | None:
    if CONFIG not in names:
        return f"it is not a model folder of transformers: {CONFIG} is missing; it has {', '.join(names[:5]) or 'no files'}"
    if INDEX in names:
        shards = _mapping(folder / INDEX).get("weight_map")
        named = sorted({str(name) for name in shards.values()}) if isinstance(shards, dict) else []
        lacking = [name for name in named if name not in names]
        if lacking:
            return f"{INDEX} names {', '.join(lacking[:3])}, which the folder lacks: copy all files of the model"
        return next(filter(None, (_damage(folder / name) for name in named)), None)
    if WEIGHTS in names:
        return _damage(folder / WEIGHTS)
    others = [name for name in names if name.endswith((".bin", ".gguf", ".pt", ".pth", ".safetensors"))]
    found = f", only {', '.join(others[:3])}: convert them with save_pretrained" if others else ": copy all files of the model"
    return f"it has no weights in safetensors ({WEIGHTS}){found}"


def _damage(weights: Path) -> str | None:
    """Why the header of a file of weights does not fit its size, as after a copy that was cut; None before the file is there."""
    if not weights.exists():
        return None
    try:
        with safe_open(weights, framework="numpy"):
            return None
    except SafetensorError as error:
        return f"{weights.name} is damaged ({error}): copy it again from the model's origin"


def _problem_of_tokenizer(folder: Path, names: Collection[str], model: Mapping[str, Any]) -> str | None:
    if not any(fnmatch.filter(names, pattern) for pattern in TOKENIZERS):
        return f"it has no tokenizer ({TOKENIZER}): copy the tokenizer's files from the model's origin"
    if not (folder / TOKENIZER).exists():
        return None  # the vocabulary is in a form of its own
    tokens, added = _tokens(folder / TOKENIZER)
    text = _of_text(model)
    rows = text.get("vocab_size")
    size, words = (max(some, default=-1) + 1 for some in (tokens, [number for number in tokens if not added.get(number)]))
    if isinstance(rows, int) and not (SMALLEST_SHARE * rows <= size and words <= rows):
        return (
            f"the tokenizer has {size} tokens, but the model embeds {rows}: they do not match; copy the tokenizer's "
            "files from the model's origin"
        )
    settings = _mapping(folder / TOKENIZER_CONFIG)
    special_map = _mapping(folder / SPECIAL)
    padding = next(iter(_named_in({"pad_token": (special_map | settings).get("pad_token")})), "")
    if WORD.fullmatch(padding):
        return f"its tokenizer pads with {padding!r}, which texts contain: name another pad_token in {TOKENIZER_CONFIG}, or none"
    named = _named_in(settings) | _named_in(special_map)
    special = {int(number) for number in (settings.get("added_tokens_decoder") or ()) if str(number).isdigit()} | added.keys()
    special |= {number for number, token in tokens.items() if token in named}
    for file, stated in ((CONFIG, text), (GENERATION, _mapping(folder / GENERATION))):
        for name, known in [*((name, special) for name in ENDS), (PAD, special | tokens.keys())]:
            ids = stated.get(name)
            wrong = [one for one in (ids if isinstance(ids, list) else [ids]) if isinstance(one, int) and one >= 0 and one not in known]
            if wrong:
                token = f"the word {tokens[wrong[0]]!r}" if wrong[0] in tokens else "no token"
                return (
                    f"{name} of {file} is {wrong[0]}, which is {token} of its tokenizer: the tokenizer is another model's; copy its files "
                    "from the model's origin"
                )
    return None


def _of_text(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json about texts: all of it, unless the model has others."""
    return model["text_config"] if isinstance(model.get("text_config"), dict) else model


def unlike_tokens(policy: Path, other: Path, spare: int = 0) -> str | None:
    """Why another model, which gets the tokens of a policy, would take them for others; None if it would not, as far as the files tell.

    Args:
        spare: tokens that the other model may still get.

    Raises:
        ArtifactError: a file cannot be read.
    """
    ours, theirs = (_of_text(_mapping(folder / CONFIG)).get("vocab_size") for folder in (policy, other))
    if isinstance(ours, int) and isinstance(theirs, int) and theirs + spare < ours:
        return f"has a vocabulary of {theirs} and the policy one of {ours}"
    files = [folder / TOKENIZER for folder in (policy, other)]
    if not all(file.exists() for file in files) or filecmp.cmp(*files, shallow=False):
        return None
    (ours, _), (theirs, _) = map(_tokens, files)
    unlike = min((number for number in ours.keys() & theirs.keys() if ours[number] != theirs[number]), default=None)
    if unlike is None:
        return None
    return f"has another tokenizer than the policy: token {unlike} is {theirs[unlike]!r} in it and {ours[unlike]!r} in the policy"


class _Added(BaseModel):
    id: int
    content: str
    special: bool = False


class _Vocabulary(BaseModel):
    vocab: dict[str, int] | list[tuple[str, float]]


class _TokenizerFile(BaseModel):
    """What is read of a file of the tokenizers library."""

    model: _Vocabulary
    added_tokens: list[_Added] = []


def _tokens(file: Path) -> tuple[dict[int, str], dict[int, bool]]:
    """(id → token, id of each added token → whether it is special) of a file of the tokenizers library."""
    try:
        found = _TokenizerFile.model_validate_json(read_plain(file.resolve(), LINEAGE_BYTES))
    except ValidationError as error:
        raise ArtifactError(f"{file.name} has no vocabulary ({error.errors()[0]['msg']})") from error
    vocabulary = found.model.vocab
    pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((one[0], number) for number, one in enumerate(vocabulary))
    added = found.added_tokens
    return {number: token for token, number in pairs} | {one.id: one.content for one in added}, {one.id: one.special for one in added}


def _named_in(settings: Mapping[str, Any]) -> set[str]:
    """The special tokens that a tokenizer's settings name."""
    found = [value for name, value in settings.items() if name.endswith("_token")]
    texts = [value.get("content") if isinstance(value, dict) else value for value in found]
    return {text for text in texts if isinstance(text, str)}
