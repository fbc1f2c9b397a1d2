"""Import a model into the project as a Hugging Face folder of safetensors, tokenizer and chat template.

payload/                  model.safetensors, config.json, generation_config.json, tokenizer files, chat_template.jinja
evidence/model.json       parameters, vocabulary, special tokens
evidence/adopted-from/    the records of a model that Pedigree exported
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from pedigree.configs.rows.source_models import OWN, FolderModel, HubModel, PackagedModel, RandomLlama, SourceModel
from pedigree.data.artifacts import assets
from pedigree.data.artifacts.artifacts import ADOPTED, write_bytes, write_json
from pedigree.data.artifacts.exports import FOLDER, checked_records, is_export
from pedigree.data.artifacts.source_files import KnownHashes
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.chat_template import PROBE
from pedigree.data.records import records
from pedigree.data.sources import hub
from pedigree.data.sources.model_folders import SMALLEST_SHARE, default_template, problem_of
from pedigree.data.store.untrusted import ArtifactError
from pedigree.stages.job.failures import BUGS, StageError
from pedigree.stages.job.job import Inputs, Job
from pedigree.stages.source_model.chat_format import ADDED, adopt, chat_template, refuse_words, rows_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NUMBER = re.compile(r"\d+")
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
"""ChatML tokens. Padding is a separate token: if it were the end-of-turn token, the model would not learn to stop."""


def run(config: SourceModel, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Load or create the model, save it in `config.dtype`, and check that its tokenizer and template can be used for training.

    Raises:
        StageError: the model has non-finite parameters, a vocabulary that is not its tokenizer's, a template of another model, or no
            corpus; it is an export that was changed, its files do not belong together, or its tokenizer cannot be reproduced exactly.
        ChatError: the tokenizer and template do not match.
    """
    disable_progress_bar()
    with job.busy("loading the model"):
        model, tokenizer = load(config, inputs, job)
    refuse(model, tokenizer)
    own = default_template(tokenizer.chat_template)
    template = chat_template(config, tokenizer, own)
    if config.chat_template == OWN:
        refuse_words(tokenizer, template, rows_of(model))
    elif own not in (None, template):
        job.marks.append(f"the model's own chat template was replaced by {config.chat_template}")
    added = adopt(model, tokenizer, template, own=config.chat_template == OWN)
    if ADDED in added:
        job.marks.append(f"the tokenizer had no token for padding that texts do not contain: {ADDED} was added to tokenizer and model")
    folder = job.out / "payload"
    with job.busy("writing the model"):
        model.to(DTYPES[config.dtype]).save_pretrained(folder)
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


def load(config: SourceModel, inputs: Inputs, job: Job) -> tuple[Any, Any]:
    """(model in fp32, tokenizer) of the configured source."""
    match config.source:
        case PackagedModel(asset=asset):
            return load_gguf(assets.path(asset))
        case RandomLlama() as wanted:
            tokenizer = train_tokenizer(corpus(inputs), wanted.vocabulary)
            return random_llama(wanted, tokenizer), tokenizer
        case FolderModel(path=path):
            return load_folder(f"folder {path}", job.source_files[path], config, job)
        case HubModel(repo=repo, revision=revision):
            found = hub.model(hub.Repository("model", repo, revision), beat=lambda: job.progress(0, 0))
            if found.unproved:
                job.marks.append(found.unproved)
            return load_folder(f"hub model {repo}", found.folder, config, job)


@contextmanager
def gguf_parsed_once() -> Iterator[None]:
    """Cache GGUF readers: transformers creates one for each thing it reads from a file.

    A reader is a view of the file; parsing takes seconds, most of it for tokens and merges.
    """
    import gguf

    reader = gguf.GGUFReader
    gguf.GGUFReader = cache(reader)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        gguf.GGUFReader = reader


@gguf_parsed_once()
def load_gguf(file: Path) -> tuple[Any, Any]:
    """(dequantized model, tokenizer) of a GGUF file."""
    quantization = GgufConfig(gguf_file=file.name, dequantize=True)
    place = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = gguf_tokenizer(file)
    return AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, quantization_config=quantization, **place), tokenizer


@gguf_parsed_once()
def gguf_tokenizer(file: Path) -> Any:
    """The tokenizer of a GGUF file, with its pre-tokenizer.

    The file only names the pre-tokenizer (`tokenizer.ggml.pre`), and transformers ignores names that it does not know.

    Raises:
        StageError: the name is not in `PRE_TOKENIZERS`, or is missing.
    """
    from gguf import GGUFReader

    field = GGUFReader(str(file)).fields.get("tokenizer.ggml.pre")
    name = None if field is None else field.contents()
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise StageError(
            f"{file.name} has tokenizer.ggml.pre {name!r}, which is not supported (supported: {known}): its tokens would differ from the "
            "original's; use the model in safetensors, from a folder or the hub"
        )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    tokenizer.backend_tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]()
    return tokenizer


def digits_then_words() -> Any:
    """Split off every digit, then split words and bytes as in GPT-2."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])


PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {"smollm": digits_then_words}
"""`tokenizer.ggml.pre` → pre-tokenizer. In llama.cpp (src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM): `\\p{N}`, then GPT-2's pattern."""


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


def corpus(inputs: Inputs) -> list[str]:
    """All texts of the corpus input."""
    rows = [row for artifact in inputs.get("corpus", {}).values() for row in records.load(artifact)]
    if not rows:
        raise StageError("a random_llama trains its tokenizer on the input `corpus`: set it to a stage that outputs conversations")
    return [message["content"] for row in rows for message in row["messages"]]


def train_tokenizer(texts: list[str], vocabulary: int) -> Any:
    """Byte-level BPE with single digits (as in SmolLM2 and Llama). Equal texts in any order give equal files."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = digits_then_words()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sorted(texts), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)


def random_llama(wanted: RandomLlama, tokenizer: Any) -> Any:
    """A randomly initialized Llama; the seed determines its weights, and the global random state is not changed."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),  # a small corpus yields fewer tokens than configured
        hidden_size=wanted.hidden,
        intermediate_size=wanted.ffn,
        num_hidden_layers=wanted.layers,
        num_attention_heads=wanted.heads,
        num_key_value_heads=wanted.kv_heads,
        max_position_embeddings=wanted.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(wanted.seed)
        return LlamaForCausalLM(config)


def refuse(model: Any, tokenizer: Any) -> None:
    damaged = [name for name, parameter in model.named_parameters() if not torch.isfinite(parameter).all()]
    if damaged:
        raise StageError(f"parameters {', '.join(damaged[:5])} contain non-finite values: the source is damaged")
    embedded, special = rows_of(model), tokenizer.added_tokens_decoder
    words = [number for number in tokenizer.get_vocab().values() if number not in special or not special[number].special]
    if not (SMALLEST_SHARE * embedded <= len(tokenizer) and max(words, default=-1) < embedded):
        raise StageError(f"the tokenizer has {len(tokenizer)} tokens, but the model embeds {embedded}: they do not match")
