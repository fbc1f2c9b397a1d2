"""Models for rehearsals: the architecture and the tokenizer's family of a real one, and answers that come to an end."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from waiting import deadline, until

from pedigree.configs.rehearsal.families import Dialogue, ModelPlan, families, family_of
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.chat_template import PROBE, ChatError
from pedigree.data.sources import rehearsal_hub
from pedigree.stages.core.rating import parse_rating
from pedigree.stages.training.made_models import main, make

ROOT = Path(__file__).parents[2]
KNOWN = families([rehearsal_hub.SHIPPED / "models"])
TULU = (ROOT / "configs" / "templates" / "tulu.jinja").read_text()
SUMS = [Dialogue(messages=({"role": "user", "content": f"What is {n} + 1?"},), answer=f"So the answer is {n + 1}.") for n in range(8)]


def plan_of(repo: str, **fields: Any) -> ModelPlan:
    family = family_of(repo, KNOWN)
    assert family is not None
    texts = ("The quick brown fox. " * 30, "So the answer is 12345. " * 30)
    given = {"texts": texts, "dialogues": tuple(SUMS), "steps": 0, "vocabulary": 400}
    return ModelPlan(**{"family": family, "template": TULU, **given, **fields})


def made(folder: Path, plan: ModelPlan) -> Path:
    make(plan, folder)
    return folder


@pytest.mark.parametrize(
    ("repo", "model_type", "shared"),
    [("meta-llama/Llama-3.1-8B", "llama", 4), ("allenai/OLMo-2-0425-1B", "olmo2", 1), ("Qwen/Qwen2.5-7B-Instruct", "qwen2", 7)],
)
def test_a_made_model_is_of_the_real_ones_kind(tmp_path, repo, model_type, shared):
    folder = made(tmp_path / "model", plan_of(repo))
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == model_type and config["dtype"] == "bfloat16"
    assert config["num_attention_heads"] // config["num_key_value_heads"] == shared
    tokenizer = AutoTokenizer.from_pretrained(folder)
    family = plan_of(repo).family.tokenizer
    assert [tokenizer.convert_ids_to_tokens(number) for number in range(len(family.control))] == list(family.control)
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) == (family.eos, family.bos, family.pad)


def test_digits_are_cut_as_the_family_cuts_them(tmp_path):
    def pieces(repo: str) -> list[str]:
        tokenizer = AutoTokenizer.from_pretrained(made(tmp_path / repo, plan_of(repo)))
        return [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("is 12345")]

    assert pieces("meta-llama/Llama-3.1-8B") == ["is", "Ġ", "123", "45"]
    assert pieces("Qwen/Qwen2.5-7B-Instruct") == ["is", "Ġ", "1", "2", "3", "4", "5"]


def test_equal_plans_give_equal_bytes_and_other_texts_others(tmp_path):
    plan = plan_of("meta-llama/Llama-3.1-8B", steps=3)
    one, two = (rehearsal_hub.commit_of(made(tmp_path / name, plan)) for name in ("one", "two"))
    other = rehearsal_hub.commit_of(made(tmp_path / "other", plan.model_copy(update={"seed": 1})))
    assert one == two != other


def answered(folder: Path, questions: list[str]) -> list[tuple[str, bool]]:
    """(answer, whether it came to its end) to each question."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    found = []
    for question in questions:
        ids = tokenizer(f"<|user|>\n{question}\n<|assistant|>\n", return_tensors="pt", add_special_tokens=False)
        out = model.generate(**ids, do_sample=True, max_new_tokens=24, pad_token_id=0)[0, ids["input_ids"].shape[1] :]
        found.append((tokenizer.decode(out, skip_special_tokens=True), tokenizer.eos_token_id in out.tolist()))
    return found


def test_it_learns_to_end_its_turns_and_to_be_right_now_and_then(tmp_path):
    folder = made(tmp_path / "model", plan_of("allenai/OLMo-2-0425-1B", steps=120))
    found = answered(folder, [dialogue.messages[0]["content"] for dialogue in SUMS * 2])
    ended = sum(end for _, end in found)
    right = sum(dialogue.answer in text for dialogue, (text, _) in zip(SUMS * 2, found, strict=True))
    assert ended >= 14 and right >= 2  # of 16; without learning it is 0 of both


def test_a_judge_rates_after_every_question_however_long(tmp_path):
    dialogues = tuple(Dialogue.model_validate(one) for one in rehearsal_hub.judging())
    folder = made(tmp_path / "model", plan_of("meta-llama/Llama-3.1-8B", steps=200, reads=False, dialogues=dialogues))
    found = [parse_rating(text) for text, _ in answered(folder, ["Rate this.", "A long story about foxes. " * 100] * 8)]
    assert sum(isinstance(one, int) for one in found) >= 15 and len(set(found)) >= 3


def test_a_template_that_a_model_brings_has_no_marks_and_is_trained_on_in_a_rehearsal(tmp_path):
    """As those of nearly all real models."""
    template = (ROOT / "configs" / "templates" / "chatml.jinja").read_text()
    folder = made(tmp_path / "model", plan_of("Qwen/Qwen2.5-7B-Instruct", template=template, comes_with_template=True))
    chat = Chat(folder)
    assert "generation %}" not in chat.template and sum(chat.training(PROBE)[1]) == len([*chat.response_ids("2It is 4."), 1, 1])


def test_a_tokenizer_of_sentencepiece_is_refused_as_the_real_one_is(tmp_path):
    folder = made(tmp_path / "model", plan_of("allenai/tulu-2-7b"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("The quick é fox")["input_ids"], skip_special_tokens=True) == "The quick é fox"
    tokenizer.chat_template = TULU
    tokenizer.save_pretrained(folder)
    with pytest.raises(ChatError, match="a prefix space"):
        Chat(folder)


def written(folder: Path, *plans: ModelPlan) -> tuple[list[Path], list[str]]:
    """Folders for models, and what the command that makes them is given."""
    folders = [folder / f"made-{number}" for number in range(len(plans))]
    for made_folder, plan in zip(folders, plans, strict=True):
        made_folder.with_suffix(".json").write_text(plan.model_dump_json())
    return folders, [str(place) for one in folders for place in (one.with_suffix(".json"), one)]


def test_the_command_says_of_each_model_why_it_could_not_be_made(tmp_path, capsys):
    good = plan_of("meta-llama/Llama-3.1-8B", steps=1)
    lame = good.model_copy(update={"family": good.family.model_copy(update={"model_type": "lama"})})
    folders, places = written(tmp_path, lame, good)
    main(*places)
    problem, none = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert problem.startswith("ValueError: Unrecognized model identifier: lama") and len(problem) == 300 and none is None
    assert (folders[1] / "config.json").is_file()


def test_processes_that_make_models_die_with_the_one_that_began_them(tmp_path):
    endless = plan_of("meta-llama/Llama-3.1-8B", steps=1_000_000)
    _, places = written(tmp_path, endless, endless)
    words = [sys.executable, "-m", "pedigree.stages.training.made_models", *places]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    task = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    workers = until(lambda: [int(pid) for pid in task.read_text().split()], alive=lambda: process.poll() is None)
    watched = [os.pidfd_open(pid) for pid in workers]
    process.send_signal(signal.SIGKILL)
    for one in watched:
        assert select.select([one], [], [], deadline(20))[0], "a worker outlived its parent"
        os.close(one)
    process.communicate()
