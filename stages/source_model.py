"""Brings a model into the project: safetensors, tokenizer and our chat template, in one Hugging Face folder.

payload/                  model.safetensors, config.json, generation_config.json, tokenizer files, chat_template.jinja
evidence/model.json       parameters, vocabulary, special tokens
"""

from collections.abc import Callable
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
from transformers.utils.hub import cached_file
from transformers.utils.logging import disable_progress_bar

from configs.datasets import TEMPLATES, FolderModel, HubModel, PackagedModel, RandomLlama, SourceModel
from data import assets, records
from data.artifacts import load_record, write_json
from data.chat import Chat
from stages.job import BUGS, Inputs, Job, StageError

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
    template = (TEMPLATES / f"{config.chat_template}.jinja").read_text()
    adopt(model, tokenizer, template)
    refuse(model, tokenizer)
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
        "chat_template_sha256": config.chat_template_sha256,
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
            folder = job.source_files[path]
            if (folder / MADE_HERE).exists() or (folder / "record.json").exists():
                refuse_made_here(f"folder {path}", folder / MADE_HERE if (folder / MADE_HERE).exists() else folder / "record.json")
            return load_folder(str(folder), local_files_only=True)
        case HubModel(repo=repo, revision=revision):
            if Path(repo).exists():  # the library would take the folder instead
                raise StageError(f"hub model {repo}: a file or folder of that name lies here, and would be read instead: rename it")
            optional = {f"_raise_exceptions_for_{what}": False for what in ("gated_repo", "missing_entries", "connection_errors")}
            record = cached_file(repo, MADE_HERE, revision=revision, **optional)
            if record is not None:
                refuse_made_here(f"hub model {repo}", Path(record))
            return load_folder(repo, revision=revision)


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


def load_gguf(file: Path) -> tuple[Any, Any]:
    """A GGUF file's weights, dequantised, and the tokenizer inside it.

    Raises:
        StageError: the file says of its tokenizer that it cuts texts in a way that we do not know.
    """
    tokenizer = gguf_tokenizer(file)
    quantization = GgufConfig(gguf_file=file.name, dequantize=True)
    place = {"gguf_file": file.name, "local_files_only": True}
    return AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, quantization_config=quantization, **place), tokenizer


def gguf_tokenizer(file: Path) -> Any:
    """The tokenizer inside a GGUF file, with the step that cuts a text before merges are applied.

    The file has that step by name only (`tokenizer.ggml.pre`), and transformers leaves out names that it does not know.

    Raises:
        StageError: it has another name than those of `PRE_TOKENIZERS`, or none.
    """
    from gguf import GGUFReader

    field = GGUFReader(file).fields.get("tokenizer.ggml.pre")
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


def load_folder(name: str, **place: Any) -> tuple[Any, Any]:
    """Safetensors only, and no code from the folder.

    Raises:
        StageError: transformers has no class for such a model, or its files lack something.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, **place)
        return model, AutoTokenizer.from_pretrained(name, trust_remote_code=False, **place)
    except BUGS as error:  # what lies there is the user's, and this is how transformers says that it cannot use it
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


def adopt(model: Any, tokenizer: Any, template: str) -> None:
    """Sets our chat template, and the same end-of-turn and padding tokens in tokenizer, model and generation config."""
    vocabulary = tokenizer.get_vocab()
    if END in template:
        if END not in vocabulary:
            raise StageError(
                f"the chat template ends turns with {END}, which the tokenizer lacks: add a template with the model's own tokens"
            )
        tokenizer.eos_token = END
    if tokenizer.pad_token is None or tokenizer.pad_token == tokenizer.eos_token:
        spare = [token for token in (PAD, tokenizer.unk_token, tokenizer.bos_token) if token in vocabulary and token != tokenizer.eos_token]
        tokenizer.pad_token = spare[0] if spare else tokenizer.eos_token
    tokenizer.chat_template = template
    model.config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )


def refuse(model: Any, tokenizer: Any) -> None:
    damaged = [name for name, parameter in model.named_parameters() if not torch.isfinite(parameter).all()]
    if damaged:
        raise StageError(f"parameters {', '.join(damaged[:5])} hold values that are not finite: the source is damaged")
    embedded = model.config.get_text_config().vocab_size
    if len(tokenizer) > embedded:
        raise StageError(f"the tokenizer has {len(tokenizer)} tokens, the model embeds {embedded}: they do not belong together")
