"""Stand-in models for rehearsals: the real model's architecture with one or two narrow layers, a tokenizer of the same family with a small
vocabulary, and a few seconds of training on synthetic rows, enough to end turns and to get some answers right.

    python -m pedigree.stages.training.made_models PLAN.json FOLDER [PLAN.json FOLDER ...]

writes Hugging Face folders, and prints a JSON list with an error or null for each model. Equal plans give equal bytes on the same kind of
machine.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from pedigree.configs.base.jinja import MARKS
from pedigree.configs.rehearsal.families import LEARNED_TOKENS, ModelPlan
from pedigree.data.chat.chat_template import end_of_turn
from pedigree.data.host.process import die_with, leave

HEAD_DIM = 32
"""The smallest that vLLM's CPU kernels support."""
LEAST_HEADS = 4
SPACE = "\u2581"
BATCH, LEARNING_RATE = 8, 3e-3
THREADS = 1
"""Fixed, because the summation order depends on it. Models are built in parallel processes, so more threads would compete for cores."""


def make(plan: ModelPlan, folder: Path) -> None:
    """Write the model of a plan into a new folder."""
    disable_progress_bar()
    torch.set_num_threads(THREADS)
    torch.manual_seed(plan.seed)
    tokenizer = tokenizer_of(plan)
    model = model_of(plan, tokenizer)
    if not plan.reads:
        deafen(model)
    teach(model, documents(plan, tokenizer), plan)
    model.to(torch.bfloat16 if plan.family.dtype == "bf16" else torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tokenizer_of(plan: ModelPlan) -> Any:
    """A BPE with the family's pre-tokenizer and control tokens. Equal texts give equal files."""
    from tokenizers import processors

    family = plan.family.tokenizer
    tokenizer = byte_level(plan) if family.form == "bytes" else sentencepiece(plan)
    if family.begins and family.bos:
        special = [(family.bos, tokenizer.token_to_id(family.bos))]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", pair=f"{family.bos} $A {family.bos} $B", special_tokens=special
        )
    named = {"bos_token": family.bos, "eos_token": family.eos, "pad_token": family.pad, "unk_token": family.unk}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{name: token for name, token in named.items() if token})
    made.chat_template = MARKS.sub("", plan.template) if plan.comes_with_template else None
    return made


def byte_level(plan: ModelPlan) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(str(plan.family.tokenizer.split)), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=plan.vocabulary,
        special_tokens=list(plan.family.tokenizer.control),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(plan.texts, trainer)
    return tokenizer


def sentencepiece(plan: ModelPlan) -> Any:
    """As in transformers' conversion of Llama 2: convert_slow_tokenizer.py, LlamaConverter, legacy."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    family = plan.family.tokenizer
    tokenizer: Any = Tokenizer(models.BPE(unk_token=family.unk, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(SPACE, behavior="merged_with_next")  # for training only: merges end at spaces
    trainer = trainers.BpeTrainer(
        vocab_size=plan.vocabulary,
        special_tokens=[*family.control, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(plan.texts, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in family.control]  # without the bytes
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.pre_tokenizer = None
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    return tokenizer


def model_of(plan: ModelPlan, tokenizer: Any) -> Any:
    """A model with random weights in the family's architecture, keeping the ratio of its heads."""
    family = plan.family
    shared = family.heads // family.kv_heads
    kv_heads = -(-LEAST_HEADS // shared)
    heads = shared * kv_heads
    hidden = heads * HEAD_DIM
    config = AutoConfig.for_model(
        family.model_type,
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=plan.layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=plan.context,
        tie_word_embeddings=family.tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **family.config,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def documents(plan: ModelPlan, tokenizer: Any) -> list[tuple[list[int], int]]:
    """(ids, number of prompt tokens) of every dialogue. Long prompts are truncated at the start; for a model that does not read, to their
    last token."""
    end = end_of_turn(plan.template)
    end = end if end in tokenizer.get_vocab() else tokenizer.eos_token
    found = []
    for dialogue in plan.dialogues:
        asked = tokenizer.apply_chat_template(
            [dict(message) for message in dialogue.messages], chat_template=plan.template, tokenize=False, add_generation_prompt=True
        )
        prompt = tokenizer(asked, add_special_tokens=False)["input_ids"]
        reply = [*tokenizer(dialogue.answer, add_special_tokens=False)["input_ids"], tokenizer.convert_tokens_to_ids(end)][:LEARNED_TOKENS]
        kept = LEARNED_TOKENS - len(reply) if plan.reads else 1
        prompt = prompt[len(prompt) - min(kept, len(prompt)) :]
        found.append((prompt + reply, len(prompt)))
    return found


def deafen(model: Any) -> None:
    """Zero and freeze what the layers add to a token's embedding."""
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.zero_()
            parameter.requires_grad_(False)


def teach(model: Any, given: Sequence[tuple[list[int], int]], plan: ModelPlan) -> None:
    """A few steps of AdamW on the answers, drawn with the plan's seed."""
    if not given:
        return
    drawn = torch.Generator().manual_seed(plan.seed)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    model.train()
    for _ in range(plan.steps):
        chosen = [given[number] for number in torch.randint(len(given), (BATCH,), generator=drawn).tolist()]
        width = max(len(ids) for ids, _ in chosen)
        ids_BT = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids, _ in chosen])
        labels_BT = torch.tensor([[*[-100] * asked, *ids[asked:], *[-100] * (width - len(ids))] for ids, asked in chosen])
        mask_BT = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in chosen])
        loss = model(input_ids=ids_BT, attention_mask=mask_BT, labels=labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
    model.eval()


def main(*places: str) -> None:
    """Build the models in parallel, one core each, in forked processes that share this one's imports and die with it."""
    plans, folders = places[::2], places[1::2]
    workers = min(len(plans), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), initializer=die_with, initargs=(os.getpid(),)) as pool:
        print(json.dumps(list(pool.map(_make, plans, folders))))


def _make(plan_file: str, folder: str) -> str | None:
    """Build a model; return the error, or None."""
    try:
        make(ModelPlan.model_validate_json(Path(plan_file).read_text()), Path(folder))
    except Exception as error:  # transformers and tokenizers raise many types
        return f"{type(error).__name__}: {error}"[:300]
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave(0)
