"""Import a model that other software wrote: load its folder, check it, give it tokens for the ends of turns and padding, save it.

payload/                  model.safetensors, config.json, generation_config.json, tokenizer files, chat_template.jinja
evidence/model.json       parameters, vocabulary, special tokens
evidence/adopted-from/    the records of a model that Pedigree exported
"""

import hashlib
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from pedigree.configs.rows.source_models import OWN, SourceModel
from pedigree.data.artifacts.artifacts import ADOPTED, write_bytes, write_json
from pedigree.data.artifacts.exports import FOLDER, checked_records, is_export
from pedigree.data.artifacts.source_files import KnownHashes
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.chat_template import PROBE
from pedigree.data.sources.model_folders import SMALLEST_SHARE, default_template, problem_of
from pedigree.data.store.untrusted import ArtifactError
from pedigree.stages.job.failures import BUGS, StageError
from pedigree.stages.job.job import Job
from pedigree.stages.training.chat_format import ADDED, adopt, chat_template, refuse_words, rows_of
from pedigree.stages.training.stored_dtypes import to_dtype

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NUMBER = re.compile(r"\d+")


def imported(model: Any, tokenizer: Any, config: SourceModel, job: Job) -> dict[str, Any]:
    """Save a model in `config.dtype` as the job's payload, and check that its tokenizer and template can be used for training.

    Raises:
        StageError: the model has non-finite parameters, a vocabulary that is not its tokenizer's, or a template of another model.
        ChatError: the tokenizer and template do not match.
    """
    refuse(model, tokenizer)
    own = default_template(tokenizer.chat_template)
    template = chat_template(config, tokenizer, own, job.source_files)
    if config.chat_template == OWN:
        refuse_words(tokenizer, template, rows_of(model))
    elif own not in (None, template):
        job.marks.append(f"the model's own chat template was replaced by {config.chat_template}")
    added = adopt(model, tokenizer, template, own=config.chat_template == OWN)
    if ADDED in added:
        job.marks.append(f"the tokenizer had no token for padding that texts do not contain: {ADDED} was added to tokenizer and model")
    folder = job.out / "payload"
    with job.busy("writing the model"):
        to_dtype(model, DTYPES[config.dtype])
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    chat = Chat(folder)
    bos, starts = chat.tokenizer.bos_token_id, [chat.tokenizer("a")["input_ids"][:1], chat.prompt(PROBE[:-1])[:1]]
    if bos is not None and starts[0] == [bos] != starts[1]:
        job.marks.append(
            f"the tokenizer begins texts with {chat.tokenizer.bos_token!r}, but the chat template does not: lm-evaluation-harness and "
            "others that tokenize rendered conversations would read a token more than is trained; set add_bos: true to train it"
        )
    facts = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocabulary": len(tokenizer),
        "eos_id": chat.eos_id,
        "pad_id": chat.pad_id,
        "chat_template_sha256": hashlib.sha256(template.encode()).hexdigest(),
        "added_tokens": added,
    }
    write_json(job.evidence / "model.json", facts)
    return facts


def load_folder(what: str, folder: Path, config: SourceModel, job: Job) -> tuple[Any, Any]:
    """Load a model folder, from safetensors only and without running code from the folder; of an export, keep the records.

    Raises:
        StageError: it is an export that was changed, transformers has no class for such a model, files are missing or do not belong
            together, or the weights are not those that its config.json describes.
    """
    if is_export(folder):
        try:
            for name, data in checked_records(folder, KnownHashes().files(folder)).items():
                write_bytes(job.evidence / ADOPTED / FOLDER / name, data)
        except ArtifactError as error:
            raise StageError(f"{what}: {error}") from error
    problem = problem_of(folder, config)
    if problem:
        raise StageError(f"{what}: {problem}")
    ours: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        weights = {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
        found: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, **weights, **ours)
        model, loaded = found
        tokenizer = AutoTokenizer.from_pretrained(str(folder), **ours)
    except (*BUGS, OSError, SafetensorError) as error:  # the folder is user input, and transformers raises these if it cannot use it
        if isinstance(error, OSError) and error.errno is not None:  # a disk error; transformers sets no errno for missing files
            raise
        raise StageError(f"transformers cannot load this model ({type(error).__name__}: {error})") from error
    refuse_other_weights(what, model, loaded)
    return model, tokenizer


def refuse_other_weights(what: str, model: Any, loaded: dict[str, Any]) -> None:
    """Refuse weights that transformers would replace by random ones, or ignore although they are further ones of the model's kinds."""
    kinds = {NUMBER.sub("", name) for name in model.state_dict()}
    found = {
        "lack": sorted(loaded["missing_keys"]),
        "have another shape for": sorted(str(name[0]) for name in loaded["mismatched_keys"]),
        "also have": sorted(name for name in loaded["unexpected_keys"] if NUMBER.sub("", name) in kinds),
    }
    problems = [f"{verb} {', '.join(names[:3])}" for verb, names in found.items() if names]
    if problems:
        raise StageError(
            f"{what}: config.json describes another model than the weights, which {' and '.join(problems)}: copy both from its origin"
        )


def refuse(model: Any, tokenizer: Any) -> None:
    damaged = [name for name, value in model.state_dict().items() if not torch.isfinite(value).all()]
    if damaged:
        raise StageError(f"parameters {', '.join(damaged[:5])} contain non-finite values: the source is damaged")
    embedded, special = rows_of(model), tokenizer.added_tokens_decoder
    words = [number for number in tokenizer.get_vocab().values() if number not in special or not special[number].special]
    if not (SMALLEST_SHARE * embedded <= len(tokenizer) and max(words, default=-1) < embedded):
        raise StageError(f"the tokenizer has {len(tokenizer)} tokens, but the model embeds {embedded}: they do not match")
