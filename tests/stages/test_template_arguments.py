"""Template arguments of rows: how they come in, and that no stage loses them on the way to the tokens."""

import json
import shutil

import pytest
from data_lab import publish, rows_of, run_stage, seal
from models import a_job, config_of
from test_source_model import corpus, llama  # noqa: F401, fixtures

from pedigree.data.chat.chat import Chat
from pedigree.data.chat.documents import Conversations, Pairs, SingleAnswers
from pedigree.data.contamination.decontamination import Index
from pedigree.data.sources.attributes import grouped
from pedigree.data.sources.layouts import example_of
from pedigree.stages.job.failures import StageError
from pedigree.stages.rlvr.run import usable_prompts
from pedigree.stages.sample.run import Draw, ask, completion
from pedigree.stages.sampling.generate import Ask
from pedigree.stages.sampling.sampler import Generation
from pedigree.stages.training import training_rows

UNTHINKING = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
QUESTION = [{"role": "user", "content": "What is 1 + 1?"}]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory, llama):  # noqa: F811
    config = {"source": {"type": "folder", "path": "given"}, "chat_template": "qwen"}
    return run_stage(tmp_path_factory.mktemp("qwen") / "qwen", "source_model", config, files={"given": llama.payload})


def prepared(folder, record, *given, **stage):
    file = folder / "rows.jsonl"
    folder.mkdir()
    file.write_text("".join(json.dumps(row) + "\n" for row in given))
    config = {"record": record, "sources": [{"type": "files", "path": "rows.jsonl"}], **stage}
    return run_stage(folder / "stage", "prepare_data", config, files={"rows.jsonl": file})


def sampled(policy, prompts, *texts):
    """Completions as `sample` makes them, with these words for a model's."""
    (prompt,) = prompts
    drawn = [Draw(prompt, index, index, None) for index in range(len(texts))]
    asked: Ask = ask(
        config_of("sample", sampling={"max_tokens": 4}, samples_per_prompt=1, prompts={"count": 1}),
        policy,
        Chat(policy.payload),
        drawn,
        None,
        policy.path,
        lambda: None,
    )
    answers = [Generation([*asked.chat.response_ids(text), asked.chat.eos_id], [0.0], "stop") for text in texts]
    return asked, [
        completion(one, "qwen", True, asked, request, answer) for one, request, answer in zip(drawn, asked.requests, answers, strict=True)
    ]


def test_a_row_that_is_asked_without_thoughts_stays_so_from_the_prompt_to_the_tokens(tmp_path, qwen):
    verifier = {"name": "arithmetic", "answer": "2"}
    row = {"messages": QUESTION, "verifier": verifier, "chat_template_kwargs": {"enable_thinking": False, "xml_tools": [], "note": None}}
    prompts = prepared(tmp_path / "prompts", "prompt", row)
    item = {"id": "i", "source": "s", "task": "t", "messages": [{"role": "user", "content": "What else?"}], "verifier": verifier}
    suite = publish(tmp_path / "suite", "item", [item])
    clean = run_stage(tmp_path / "clean", "decontaminate", {}, data=prompts, benchmarks=suite)
    asked, made = sampled(qwen, rows_of(clean), "It is 2.", "It is 3.")
    prompt = asked.requests[0].prompt_ids
    assert asked.chat.tokenizer.decode(prompt).endswith(UNTHINKING)

    completions = publish(tmp_path / "completions", "completion", made)
    judgments = run_stage(tmp_path / "judge", "judge", {}, completions=completions)
    pairs = run_stage(tmp_path / "pair", "pair", {}, judgments=judgments)
    for stage in (clean, completions, judgments, pairs):
        assert [row["template_arguments"] for row in rows_of(stage)] == [{"enable_thinking": False}] * len(rows_of(stage))
    answers = rows_of(pairs)
    taken = training_rows.pairs(answers, "best_vs_worst"), training_rows.single_answers(answers, 0.5), training_rows.every_answer(answers)
    for kind, some in zip((Pairs("best_vs_worst"), SingleAnswers("a"), SingleAnswers("b")), taken, strict=True):
        for draft in kind.pieces(asked.chat, some[0]):
            assert [token for piece in draft[:-1] for token in asked.chat.ids(piece)] == prompt


def test_rollouts_are_asked_for_under_the_arguments_of_their_prompts(tmp_path, qwen):
    chat, verifier = Chat(qwen.payload), {"name": "arithmetic", "answer": "2"}
    row = {"id": "p", "source": "s", "messages": QUESTION, "verifier": verifier, "template_arguments": {"enable_thinking": False}}
    fields = {"steps": 1, "prompts_per_step": 1, "samples_per_prompt": 2, "max_prompt_length": 100, "sampling": {"max_tokens": 4}}
    config = config_of("rlvr", algorithm={"type": "grpo"}, optimizer={"learning_rate": 1e-6}, **fields)
    ((_, ids),), _ = usable_prompts([row], chat, config, a_job(tmp_path / "job"))
    assert chat.tokenizer.decode(ids).endswith(UNTHINKING)


def test_a_reward_model_whose_template_reads_none_says_so_and_scores_nothing(tmp_path, qwen, llama):  # noqa: F811
    """It would score the answer in another context."""
    prompt = {"id": "p", "source": "s", "messages": QUESTION, "verifier": None, "template_arguments": {"enable_thinking": False}}
    _, made = sampled(qwen, [prompt], "It is 2.")
    shutil.copytree(llama.path, tmp_path / "reward")
    (tmp_path / "reward" / "payload" / "reward_stats.json").write_text('{"mean": 0.0, "std": 1.0}')
    reward = seal(tmp_path / "reward", "by_hand", "reward_model", {}, [], {})
    completions = publish(tmp_path / "completions", "completion", made)
    config = {"verifier_weight": 0.0, "reward_weight": 1.0}
    with pytest.raises(StageError, match=r"1 of 1 answers have no score.*reads no template argument enable_thinking"):
        run_stage(tmp_path / "judge", "judge", config, completions=completions, reward_models=reward)


def test_a_conversation_is_trained_under_its_arguments(tmp_path, qwen):
    said = [*QUESTION, {"role": "assistant", "content": "2"}]
    data = prepared(tmp_path / "data", "conversation", {"messages": said, "template_arguments": '{"enable_thinking": false}'})
    chat = Chat(qwen.payload)
    (pieces,) = Conversations("assistant").pieces(chat, rows_of(data)[0])
    assert [piece.text for piece in pieces if not piece.trained] == [f"<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n{UNTHINKING}", "\n"]


@pytest.mark.parametrize("record", ["conversation", "preference"])
def test_a_row_without_arguments_is_the_same_whether_or_not_its_table_has_the_column(tmp_path, record):
    """So its id, its content and its place in the order stay what they were."""
    row = {"prompt": "Hi.", "chosen": "Yo.", "rejected": "No."}
    empty = {"tools": [], "note": None, "system": ""}
    columns = ({}, {"chat_template_kwargs": None}, {"chat_template_kwargs": empty}, {"template_arguments": ""})
    contents = {prepared(tmp_path / str(number), record, row | more).record.content for number, more in enumerate(columns)}
    assert len(contents) == 1
    other = prepared(tmp_path / "other", record, row | {"chat_template_kwargs": {"enable_thinking": False}})
    assert other.record.content not in contents


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{enable", "template_arguments is nothing that JSON has a form for"),
        ({"temperature": float("nan")}, "template_arguments is nothing that JSON has a form for"),
        ({"file": b"x"}, "template_arguments is nothing that JSON has a form for"),
        ("[1]", r"template_arguments \[1\] is no mapping of names to values"),
        (3, "template_arguments 3 is no mapping of names to values"),
        ({"enable thinking": True}, "template_arguments {'enable thinking': True} is no mapping of names to values"),
    ],
)
def test_what_are_no_arguments_makes_a_bad_row(given, says):
    with pytest.raises(ValueError, match=says):
        example_of({"messages": QUESTION, "template_arguments": given})


def test_a_suite_takes_no_arguments(tmp_path):
    row = {"messages": QUESTION, "verifier": {"name": "arithmetic", "answer": "2"}, "template_arguments": {"enable_thinking": False}}
    with pytest.raises(Exception, match=r"a suite asks all policies alike, and the row has template arguments \(enable_thinking\)"):
        prepared(tmp_path / "suite", "item", row, task="t")


def test_responses_that_were_asked_for_under_other_arguments_are_not_compared():
    row = {"prompt": "Hi.", "response": "Yo.", "good": 1}
    asked = [row, {**row, "response": "No.", "good": 0}, {**row, "good": 3, "template_arguments": {"enable_thinking": False}}]
    made = [made for _, made in grouped([(str(number), one) for number, one in enumerate(asked)], {"good": 1.0})]
    assert [len(one.get("answers", "1")) for one in made] == [2, 1] and made[1]["template_arguments"] == {"enable_thinking": False}


def test_what_arguments_say_is_searched_for_benchmarks_and_by_filters(tmp_path):
    question = "Which of the seven rivers of this country reaches the northern sea first?"
    item = {"id": "i", "source": "s", "task": "t", "messages": [{"role": "user", "content": question}], "verifier": {"name": "v"}}
    row = {"id": "r", "source": "s", "messages": QUESTION, "template_arguments": {"python_tools": [{"description": f"Asks: {question}"}]}}
    for turns, found in ((("system", "user"), 1), (("user",), 0)):
        assert len(Index({"b": [item]}, 8, turns).overlaps([row], 0.5)[0]) == found
    said = {"messages": [*QUESTION, {"role": "assistant", "content": "2"}], "chat_template_kwargs": {"custom_instructions": "Swear."}}
    with pytest.raises(StageError, match=r"no row is left of 1 \(dropped: \{'keywords': 1\}\)"):
        prepared(tmp_path / "swearing", "conversation", said, filters=[{"type": "keywords", "words": ["swear"]}])
