"""Brings a model into the project: safetensors, tokenizer and our chat template, in one Hugging Face folder.

payload/                  model.safetensors, config.json, generation_config.json, tokenizer files, chat_template.jinja
evidence/model.json       parameters, vocabulary, special tokens
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

from configs.base.frozen import canonical_json
from configs.rows.datasets import OWN, TEMPLATES, FolderModel, HubModel, PackagedModel, RandomLlama, SourceModel
from data.artifacts import assets
from data.artifacts.artifacts import load_record, write_json
from data.chat.chat import CONTROL, Chat, end_of_turn, variables_of
from data.records import records
from data.sources import hub
from stages.job.job import BUGS, Inputs, Job, StageError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MADE_HERE = "pedigree/record.json"
"""In a folder that Pedigree exported: the record of the model."""
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
"""ChatML's tokens. Padding is a separate token: if it were the end-of-turn token, a model would not learn to stop."""


def run(config: SourceModel, inputs: Inputs, job: Job) -> dict[str, Any]:
    """Loads or makes the model, stores it in `config.dtype`, and checks that its tokenizer and template can be used for training.

    Raises:
        StageError: the model has parameters that are not finite, a vocabulary smaller than its tokenizer's, or no corpus; it is an export
            of ours, or its tokenizer cannot be had as it was.
        ChatError: the tokenizer and template do not match.
    """
    disable_progress_bar()
    with job.busy("loading the model"):
        model, tokenizer = load(config, inputs, job)
    refuse(model, tokenizer)
    template = chat_template(config, tokenizer)
    added = adopt(model, tokenizer, template)
    folder = job.out / "payload"
    with job.busy("writing the model"):
        model.to(DTYPES[config.dtype]).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    chat = Chat(folder)
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
            return load_folder(f"folder {path}", job.source_files[path])
        case HubModel(repo=repo, revision=revision):
            found = hub.model(hub.Repository("model", repo, revision), beat=lambda: job.progress(0, 0))
            if found.unproved:
                job.marks.append(found.unproved)
            return load_folder(f"hub model {repo}", found.folder)


def refuse_made_here(what: str, record: Path) -> None:
    """A model that a recipe made is no base model: what it was trained on, and by which suites it was chosen, would be forgotten.

    Raises:
        StageError: always; it names the stage that made the model.
    """
    made = load_record(record)
    raise StageError(
        f"{what} is an export of Pedigree (a {made.type} of kind {made.kind}, content {made.content[:12]}): a source_model would cut off "
        "its lineage; name the stage that made it, RECIPE/STAGE, as input instead"
    )


@contextmanager
def gguf_parsed_once() -> Iterator[None]:
    """Gives everybody who reads a GGUF file the same reader: transformers makes one for each thing that it takes out of it.

    A reader is a view of the file, and parsing takes seconds, most of them for the tokens and merges.
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
    """A GGUF file's weights, dequantized, and the tokenizer inside it.

    Raises:
        StageError: the file says of its tokenizer that it cuts texts in a way that we do not know.
    """
    quantization = GgufConfig(gguf_file=file.name, dequantize=True)
    place = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = gguf_tokenizer(file)
    return AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, quantization_config=quantization, **place), tokenizer


@gguf_parsed_once()
def gguf_tokenizer(file: Path) -> Any:
    """The tokenizer inside a GGUF file, with the step that cuts a text before merges are applied.

    The file has that step by name only (`tokenizer.ggml.pre`), and transformers leaves out names that it does not know.

    Raises:
        StageError: it has another name than those of `PRE_TOKENIZERS`, or none.
    """
    from gguf import GGUFReader

    field = GGUFReader(str(file)).fields.get("tokenizer.ggml.pre")
    name = None if field is None else field.contents()
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise StageError(
            f"{file.name} has tokenizer.ggml.pre {name!r}, which is none of {known}: it would give other tokens than the original; "
            "take the model in safetensors, from a folder or the hub"
        )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    tokenizer.backend_tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]()
    return tokenizer


def digits_then_words() -> Any:
    """Cuts out every digit, then words and bytes as GPT-2 does."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])


PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {"smollm": digits_then_words}
"""`tokenizer.ggml.pre` → what it means: in llama.cpp (src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM) `\\p{N}`, then GPT-2's pattern."""


def load_folder(what: str, folder: Path) -> tuple[Any, Any]:
    """Safetensors only, and no code from the folder.

    Raises:
        StageError: a recipe made it, transformers has no class for such a model, or its files lack something.
    """
    for record in (folder / MADE_HERE, folder / "record.json"):
        if record.exists():
            refuse_made_here(what, record)
    ours: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, use_safetensors=True, **ours)
        return model, AutoTokenizer.from_pretrained(str(folder), **ours)
    except (*BUGS, OSError) as error:  # what lies there is the user's, and this is how transformers says that it cannot use it
        if isinstance(error, OSError) and error.errno is not None:  # a disk's; of a file that is missing transformers gives no number
            raise
        raise StageError(f"transformers cannot load this model ({type(error).__name__}: {error})") from error


def corpus(inputs: Inputs) -> list[str]:
    """Every text of the corpus input.

    Raises:
        StageError: there is no corpus to train a tokenizer on.
    """
    rows = [row for artifact in inputs.get("corpus", {}).values() for row in records.load(artifact)]
    if not rows:
        raise StageError("a random_llama trains its tokenizer on the input `corpus`: name a stage that makes conversations")
    return [message["content"] for row in rows for message in row["messages"]]


def train_tokenizer(texts: list[str], vocabulary: int) -> Any:
    """Byte-level BPE with digits one by one (as SmolLM2 and Llama do); equal texts in any order give equal files."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

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
    """A randomly initialised Llama; the seed decides its weights, and the global random state is not changed."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),  # a small corpus gives fewer tokens than configured
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


def adopt(model: Any, tokenizer: Any, template: str) -> list[str]:
    """Sets a chat template, and the same end-of-turn and padding tokens in tokenizer, model and generation config.

    Returns:
        the template's tokens that the tokenizer lacked: it has them now, and the model embeds them, each as the mean of its other tokens.
    """
    end = end_of_turn(template)
    added = [] if end is None else add_tokens(model, tokenizer, sorted({end, *CONTROL.findall(template)}))
    tokenizer.eos_token = end or tokenizer.eos_token
    vocabulary = tokenizer.get_vocab()
    if tokenizer.pad_token is None or tokenizer.pad_token == tokenizer.eos_token:
        spare = [token for token in (PAD, tokenizer.unk_token, tokenizer.bos_token) if token in vocabulary and token != tokenizer.eos_token]
        tokenizer.pad_token = spare[0] if spare else tokenizer.eos_token
    tokenizer.chat_template = template
    model.config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return added


def chat_template(config: SourceModel, tokenizer: Any) -> str:
    """The configured template, which begins with the BOS token where that is asked for, and with the values of its arguments.

    Raises:
        StageError: the model comes without one; it does not read an argument; it has no token to begin with, or its template begins with
            it already.
    """
    own = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
    template = own if config.chat_template == OWN else (TEMPLATES / f"{config.chat_template}.jinja").read_text()
    if not template:
        raise StageError("chat_template: own, and the model comes without one: name one of configs/templates")
    known = variables_of(template) if config.template_arguments else set()
    unread = sorted(config.template_arguments.keys() - known)
    if unread:
        reads = ", ".join(sorted(known)) or "none"
        raise StageError(f"template_arguments: the template {config.chat_template} reads no {', '.join(unread)} (it reads {reads})")
    defaults = "".join(default_of(name, value) for name, value in sorted(config.template_arguments.items()))
    return defaults + (with_bos(config, tokenizer, template) if config.add_bos else template)


def default_of(name: str, value: Any) -> str:
    """What gives a variable of a template its value where the caller does not. JSON without null and NaN is Jinja."""
    return f"{{% if {name} is not defined %}}{{% set {name} = {canonical_json(value)} %}}{{% endif %}}"


def with_bos(config: SourceModel, tokenizer: Any, template: str) -> str:
    """The template beginning with the BOS token.

    Raises:
        StageError: there is none, or it stands there already.
    """
    tokenizer.bos_token = tokenizer.bos_token or tokenizer.eos_token  # OLMo's tokenizer has one token for both
    if tokenizer.bos_token is None:
        raise StageError("add_bos: true, and the tokenizer has neither a BOS nor an EOS token: leave add_bos out")
    if template.lstrip().startswith(("{{ bos_token", "{{- bos_token", f"{{{{ '{tokenizer.bos_token}'")):
        raise StageError(f"add_bos: true, and the template {config.chat_template} begins with the BOS token already: leave add_bos out")
    return "{{ bos_token }}" + template


def add_tokens(model: Any, tokenizer: Any, tokens: list[str]) -> list[str]:
    """Makes these control tokens of tokenizer and model; returns those that were not there."""
    from tokenizers import AddedToken

    vocabulary = tokenizer.get_vocab()
    lacking = [token for token in tokens if token not in vocabulary]
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens], special_tokens=True)
    known = model.config.get_text_config().vocab_size
    if len(tokenizer) > known:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
        if embedding is not None and lacking:
            rows = tokenizer.convert_tokens_to_ids(lacking)
            with torch.no_grad():
                embedding.weight[rows] = embedding.weight[: len(vocabulary)].mean(dim=0)
    return lacking


def refuse(model: Any, tokenizer: Any) -> None:
    damaged = [name for name, parameter in model.named_parameters() if not torch.isfinite(parameter).all()]
    if damaged:
        raise StageError(f"parameters {', '.join(damaged[:5])} hold values that are not finite: the source is damaged")
    embedded = model.config.get_text_config().vocab_size
    if len(tokenizer) > embedded:
        raise StageError(f"the tokenizer has {len(tokenizer)} tokens, the model embeds {embedded}: they do not belong together")
