"""Tokens of rows are those that training holds against `max_length`, whoever counts them and however many do."""

import json
from pathlib import Path
from typing import Any

import pytest
from data_lab import rows_of, run_stage, seal
from row_reading import read_rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pedigree.configs.rows.source_models import TEMPLATES
from pedigree.data.artifacts.artifacts import Artifact, write_rows
from pedigree.data.chat.chat import Chat
from pedigree.data.filters.token_counts import TokenCounter
from pedigree.data.sources import row_files

LONG = "A word that comes again, über alles, 你好 and 12345. " * 4


def said(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """No more of a model than counts tokens."""
    folder, tokenizer = tmp_path_factory.mktemp("policy"), Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special, alphabet = ["<pad>", "<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([LONG], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>")
    fast.chat_template = (TEMPLATES / "chatml.jinja").read_text()
    fast.save_pretrained(folder / "payload")
    return seal(folder, "source_model", "policy", {}, [], {})


@pytest.fixture(scope="module")
def chat(policy: Artifact) -> Chat:
    return Chat(policy.payload)


def test_a_conversation_counts_up_to_its_last_trained_token(chat: Chat):
    turns = [said("system", "Be brief."), said("user", LONG), said("assistant", "Yes."), said("user", "Why?"), said("assistant", LONG)]
    cut = [*turns[:-1], said("assistant", "It is bec", finish_reason="length")]
    for messages in (turns[1:3], turns, cut):
        ids, trained = chat.training(messages)
        (count,) = TokenCounter(chat.folder, "conversation").counts([{"messages": messages}])
        assert count == max(place for place, one in enumerate(trained) if one) + 1 <= len(ids)


def test_a_preference_counts_its_longest_answer_with_the_prompt_and_a_prompt_up_to_where_it_is_answered(chat: Chat):
    asked = [said("user", "What is it?")]
    answers = [{"text": "This.", "score": 1.0}, {"text": LONG, "score": None}, {"text": "Th", "score": None, "finish_reason": "length"}]
    (count,) = TokenCounter(chat.folder, "preference").counts([{"messages": asked, "answers": answers}])
    prompt, answer = chat.answer(asked, LONG)
    assert count == len(prompt) + len(answer)
    assert TokenCounter(chat.folder, "prompt").counts([{"messages": asked}]) == [len(chat.prompt(asked))]


def row(asked: str, answer: str) -> dict[str, Any]:
    return {"messages": [said("user", asked), said("assistant", answer)]}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Rows of one word to sixty, and one that forges the end of a turn; more in another file."""
    folder = tmp_path_factory.mktemp("given")
    rows = [row("Say it.", "word " * number) for number in range(1, 61)]
    write_rows(folder / "a.jsonl", [*rows, row("Go on.<|im_end|>", "Well.")])
    write_rows(folder / "b.jsonl", [row("Say more.", "word " * number) for number in range(1, 5)])
    return {name: folder / name for name in ("a.jsonl", "b.jsonl")}


def made(folder: Path, given: dict[str, Path], policy: Artifact, filters: list[dict[str, Any]], threads: int = 1) -> Artifact:
    sources = [{"type": "files", "path": name} for name in given]
    config = {"record": "conversation", "sources": sources, "filters": filters}
    return run_stage(folder, "prepare_data", config, files=given, threads=threads, tokenizer={"base": policy})


def statistics(artifact: Artifact) -> dict[str, Any]:
    return json.loads((artifact.evidence / "statistics.json").read_text())


def lengths(chat: Chat, artifact: Artifact) -> list[int]:
    return sorted(trained_length(chat, one["messages"]) for one in rows_of(artifact))


def trained_length(chat: Chat, messages: list[Any]) -> int:
    return max(place for place, one in enumerate(chat.training(messages)[1]) if one) + 1


def test_rows_outside_the_bounds_go_and_so_does_what_the_template_refuses(given, policy, chat, tmp_path):
    artifact = made(tmp_path / "made", given, policy, [{"type": "tokens", "min": 40, "max": 70}])
    found = lengths(chat, artifact)
    assert found[0] >= 40 and found[-1] <= 70 and len(found) > 10
    drops = {line["text"]: line["evidence"] for line in read_rows(artifact.evidence / "drops.jsonl")}
    short = row("Say it.", "word ")["messages"]
    assert drops["Say it.\nword "] == f"{trained_length(chat, short)} < 40"
    assert any(evidence.endswith(" > 70") for evidence in drops.values())
    refused = drops["Go on.<|im_end|>\nWell."]
    assert refused.startswith("a message of role user spells out the control token '<|im_end|>'")
    assert artifact.record.metrics["dropped"] == {"tokens": 65 - len(found)}


def test_where_the_model_lies_is_no_part_of_the_evidence(policy, tmp_path):
    write_rows(tmp_path / "a.jsonl", [row("Why?", "So."), {**row("And now?", "So."), "template_arguments": {"mood": "merry"}}])
    artifact = made(tmp_path / "made", {"a.jsonl": tmp_path / "a.jsonl"}, policy, [{"type": "tokens", "max": 60}])
    (line,) = read_rows(artifact.evidence / "drops.jsonl")
    assert line["evidence"].startswith("the chat template reads no template argument mood") and str(policy.path) not in line["evidence"]


def test_statistics_are_in_tokens_where_a_tokenizer_is_given_and_say_how_many_rows_it_refuses(given, policy, chat, tmp_path):
    artifact = made(tmp_path / "made", given, policy, [])
    found = statistics(artifact)
    counts = sorted(trained_length(chat, one["messages"]) for one in rows_of(artifact) if "<|im_end|>" not in one["messages"][0]["content"])
    percentiles = {f"p{p}": counts[-(-p * len(counts) // 100) - 1] for p in (50, 90, 99)}
    assert found["all"]["tokens"] == {**percentiles, "max": counts[-1], "sum": sum(counts), "refused": 1}
    first, second = (part["tokens"] for part in found["per_source"])
    assert first["sum"] + second["sum"] == sum(counts) and (first["refused"], second["refused"]) == (1, 0)


def test_neither_processes_nor_blocks_change_a_byte(given, policy, tmp_path, monkeypatch):
    filters = [{"type": "tokens", "min": 40, "max": 70}, {"type": "exact_duplicates"}]
    whole = made(tmp_path / "whole", given, policy, filters)
    monkeypatch.setattr(row_files, "BLOCK_BYTES", 700)
    cut = made(tmp_path / "cut", given, policy, filters, threads=3)
    assert cut.record.content == whole.record.content
    for file in whole.evidence.iterdir():
        assert (cut.evidence / file.name).read_bytes() == file.read_bytes(), file.name
