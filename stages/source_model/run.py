"""Import a model into the project as a Hugging Face folder of safetensors, tokenizer and chat template.

Its output is that of `stages/training/imported_models.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from pedigree.configs.rows.source_models import FolderModel, HubModel, PackagedModel, RandomLlama, SourceModel
from pedigree.data.artifacts import assets
from pedigree.data.records import records
from pedigree.data.sources import hub
from pedigree.stages.job.failures import StageError
from pedigree.stages.job.job import Inputs, Job
from pedigree.stages.training.imported_models import imported, load_folder

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
    return imported(model, tokenizer, config, job)


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
    from gguf.gguf_reader import GGUFReader

    before = gguf.GGUFReader

    class Reader(GGUFReader):
        """Takes a million slices of the file, which a plain array gives three times as fast as a memmap."""

        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = np.asarray(mapped)

    if before is GGUFReader:  # else an outer block caches readers
        gguf.GGUFReader = cache(Reader)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        gguf.GGUFReader = before


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
