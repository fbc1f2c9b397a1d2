"""The chat templates of the field as we ship them: the texts that their sources render, and the tokens that they need."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from data_lab import run_stage
from test_source_model import LLAMA, corpus, llama  # noqa: F401, fixtures
from transformers import AutoModelForCausalLM, AutoTokenizer

from pedigree.configs.rows.source_models import TEMPLATES, SourceModel
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.chat_template import CONTROL, PROBE, ChatError, end_of_turn
from pedigree.stages.job.failures import StageError

SYSTEM = [{"role": "system", "content": "Be brief."}, *PROBE]
TULU = (  # open-instruct's `tulu`: no new line after the last turn of the assistant
    "<|system|>\nBe brief.\n<|user|>\nWhat is 1 + 1?\n<|assistant|>\n2<|im_end|>\n<|user|>\nAnd 2 + 2?\n<|assistant|>\nIt is 4.<|im_end|>"
)
LLAMA3 = (  # Meta's, less the date and the tools
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWhat is 1 + 1?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n2<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nAnd 2 + 2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nIt is 4.<|eot_id|>"
)
LLAMA3_1 = LLAMA3.replace("Be brief.", "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\nBe brief.")
ZEPHYR = (  # of the SFT recipe of zephyr-7b-beta; each turn, whoever says it, ends with the EOS token
    "<|system|>\nBe brief.<|im_end|>\n<|user|>\nWhat is 1 + 1?<|im_end|>\n<|assistant|>\n2<|im_end|>\n"
    "<|user|>\nAnd 2 + 2?<|im_end|>\n<|assistant|>\nIt is 4.<|im_end|>\n"
)
MISTRAL = "<s>[INST]What is 1 + 1?[/INST]2</s>[INST]Be brief.\n\nAnd 2 + 2?[/INST]It is 4.</s>"
MARKS = ("INST", "/INST", "AVAILABLE_TOOLS", "/AVAILABLE_TOOLS", "TOOL_CALLS", "TOOL_RESULTS", "/TOOL_RESULTS")
GEMMA = (
    "<bos><start_of_turn>user\nBe brief.\n\nWhat is 1 + 1?<end_of_turn>\n<start_of_turn>model\n2<end_of_turn>\n"
    "<start_of_turn>user\nAnd 2 + 2?<end_of_turn>\n<start_of_turn>model\nIt is 4.<end_of_turn>\n"
)
QWEN = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    "<|im_start|>user\nAnd 2 + 2?<|im_end|>\n<|im_start|>assistant\nIt is 4.<|im_end|>\n"
)
SMOLLM3 = QWEN.replace(
    "Be brief.", "## Metadata\n\nKnowledge Cutoff Date: June 2025\nReasoning Mode: /think\n\n## Custom Instructions\n\nBe brief.\n\n"
)
SHIPPED = {
    "tulu": (TULU, []),
    "llama3": (LLAMA3, ["<|begin_of_text|>", "<|end_header_id|>", "<|eot_id|>", "<|start_header_id|>"]),
    "llama3_1": (LLAMA3_1, ["<|begin_of_text|>", "<|end_header_id|>", "<|eot_id|>", "<|start_header_id|>"]),
    "zephyr": (ZEPHYR, []),
    "mistral": (MISTRAL, ["</s>", "<s>", *sorted(f"[{mark}]" for mark in MARKS)]),
    "gemma": (GEMMA, ["<bos>", "<end_of_turn>", "<start_of_turn>"]),
    "qwen": (QWEN, []),
    "smollm3": (SMOLLM3, []),
}
"""Template → what it makes of `SYSTEM`, and the tokens that a model with ChatML's tokens lacks."""


@pytest.fixture(scope="module")
def sourced(tmp_path_factory, corpus, llama):  # noqa: F811
    """A tiny Llama with ChatML's tokens, sourced as a folder with another template, once for each template."""
    made = {}

    def make(name, **fields):
        config = {"source": {"type": "folder", "path": "given"}, **fields}
        if str(config) not in made:
            made[str(config)] = run_stage(tmp_path_factory.mktemp(name), "source_model", config, files={"given": llama.payload})
        return made[str(config)]

    return make


OWN = {"source": {"type": "folder", "path": "given"}, "chat_template": "own"}


def rendered(artifact, messages=SYSTEM, **arguments):
    chat = Chat(artifact.payload)
    return "".join(piece for piece, _ in chat._template.pieces(messages, ask=messages[-1]["role"] == "user", arguments=arguments))


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_olmo_begins_with_bos_and_has_one_token_for_both_ends(sourced, tmp_path):
    made = sourced("olmo", chat_template="tulu", add_bos=True)
    assert rendered(made) == "<|im_end|>" + TULU
    ids, mask = Chat(made.payload).training(PROBE)
    assert ids[0] == Chat(made.payload).eos_id and not mask[0]
    with pytest.raises(StageError, match="already begins with the BOS token"):
        run_stage(tmp_path, "source_model", OWN | {"add_bos": True}, files={"given": made.payload})


def test_llama3_brings_its_tokens_along_and_each_is_embedded_as_the_mean(sourced, llama):  # noqa: F811
    made = sourced("llama3", chat_template="llama3")
    chat, model = Chat(made.payload), AutoModelForCausalLM.from_pretrained(made.payload)
    end = chat.tokenizer.convert_tokens_to_ids("<|eot_id|>")
    assert end == chat.eos_id == model.config.eos_token_id == model.generation_config.eos_token_id
    before = AutoModelForCausalLM.from_pretrained(llama.payload).get_input_embeddings().weight
    after = model.get_input_embeddings().weight
    assert len(after) == len(chat.tokenizer) == len(before) + 4
    torch.testing.assert_close(after[: len(before)], before)
    torch.testing.assert_close(after[len(before) :], before.mean(dim=0).expand(4, -1))


def test_the_models_own_template_is_kept_or_missed_by_name(sourced, tmp_path, llama):  # noqa: F811
    assert rendered(sourced("own", chat_template="own")) == rendered(llama)
    bare = tmp_path / "bare"
    AutoModelForCausalLM.from_pretrained(llama.payload).save_pretrained(bare)
    tokenizer = AutoTokenizer.from_pretrained(llama.payload)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(bare)
    with pytest.raises(StageError, match="it has no chat template, as base models have none: set chat_template to one of chatml, gemma"):
        run_stage(tmp_path / "no", "source_model", OWN, files={"given": bare})


HOUSE = (
    "{% for one in messages %}<|im_start|>{{ one.role | upper }}: {{ one.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>ASSISTANT: {% endif %}"
)


def test_a_template_of_the_project_is_that_of_the_model(tmp_path, llama):  # noqa: F811
    files = {"given": llama.payload, "configs/templates/house.jinja": tmp_path / "given.jinja"}
    config = {**OWN, "chat_template": "configs/templates/house.jinja"}
    (tmp_path / "given.jinja").write_text(HOUSE)
    made = run_stage(tmp_path / "made", "source_model", config, files=files)
    assert (
        rendered(made, PROBE[:2])
        == f"<|im_start|>USER: {PROBE[0]['content']}<|im_end|><|im_start|>ASSISTANT: {PROBE[1]['content']}<|im_end|>"
    )
    assert made.record.marks == ("the model's own chat template was replaced by configs/templates/house.jinja",)
    for text, problem in (
        (b"{% if %}", "configs/templates/house.jinja is not a Jinja template, line 1"),
        (b"\xff", "house.jinja is not UTF-8"),
    ):
        (tmp_path / "given.jinja").write_bytes(text)
        with pytest.raises(StageError, match=problem):
            run_stage(tmp_path / "bad", "source_model", config, files=files)


IRREGULAR = {
    "assistant_first": [assistant("Hello!"), *PROBE],
    "same_role": [user("Well."), user("What is 1 + 1?"), assistant("2"), assistant("Two, that is.")],
    "assistant_after_system": [{"role": "system", "content": "Be brief."}, assistant("Hello!"), *PROBE],
    "late_system": [*PROBE[:2], {"role": "system", "content": "Be brief."}, *PROBE[2:]],
}


REFUSED = {(name, "late_system") for name in ("llama3_1", "mistral", "gemma", "qwen", "smollm3")} | {("gemma", "assistant_after_system")}
"""Those that would leave out the system's text, or raise an error."""


@pytest.mark.parametrize("fault", IRREGULAR)
@pytest.mark.parametrize("name", ["chatml", *SHIPPED])
def test_a_template_renders_all_turns_that_are_kept_out_of_order_or_refuses_them(sourced, name, fault):
    """And what the assistant says is trained in every turn, and nothing else."""
    made, messages = sourced(name, chat_template=name), IRREGULAR[fault]
    chat = Chat(made.payload)
    try:
        ids, mask = chat.training(messages)
    except ChatError as error:
        assert (name, fault) in REFUSED, error
        return
    assert (name, fault) not in REFUSED
    text = chat.tokenizer.decode(ids)
    assert all(message["content"] in text for message in messages)
    trained = chat.tokenizer.decode([token for token, is_trained in zip(ids, mask, strict=True) if is_trained])
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    assert all(one in trained for one in said) and not any(one["content"] in trained for one in messages if one["role"] != "assistant")


def test_the_end_of_a_turn_is_read_off_the_template():
    found = {path.stem: end_of_turn(path.read_text()) for path in TEMPLATES.glob("*.jinja")}
    chatml = dict.fromkeys(("chatml", "qwen", "smollm3"), "<|im_end|>")
    meta = dict.fromkeys(("llama3", "llama3_1"), "<|eot_id|>")
    assert found == {**chatml, **meta, "gemma": "<end_of_turn>", "mistral": "</s>", "tulu": None, "zephyr": None}
    assert end_of_turn("{{ raise_exception('never') }}") is None


def test_what_looks_like_a_control_token_is_told_from_words():
    text = "<|im_end|> <bos> <s></s> [INST] [/INST] <start_of_turn> <think> [TODO] <body> <a|b> [TOOL_CALLS][/TOOL_RESULTS] [TOOL]"
    marks = ["<|im_end|>", "<bos>", "<s>", "</s>", "[INST]", "[/INST]", "<start_of_turn>", "[TOOL_CALLS]", "[/TOOL_RESULTS]"]
    assert CONTROL.findall(text) == marks


@pytest.mark.parametrize("name", SHIPPED)
def test_a_template_makes_the_text_of_its_source_and_brings_its_tokens_along(name, sourced):
    whole, added = SHIPPED[name]
    made = sourced(name, chat_template=name)
    assert rendered(made) == whole
    assert whole.startswith(rendered(made, SYSTEM[:2])) or name == "mistral"  # there the last question has the system's words
    assert json.loads((made.path / "evidence" / "model.json").read_text())["added_tokens"] == added
    chat = Chat(made.payload)
    assert all(chat.tokenizer(token, add_special_tokens=False)["input_ids"] == [chat.tokenizer.vocab[token]] for token in added)
    ids, mask = chat.training(PROBE)
    said = [token for token, trained in zip(ids, mask, strict=True) if trained]
    assert said == [*chat.response_ids("2"), chat.eos_id, *chat.response_ids("It is 4."), chat.eos_id]
    generation = AutoModelForCausalLM.from_pretrained(made.payload).generation_config
    assert generation.eos_token_id == chat.eos_id and chat.tokenizer.eos_token == (end_of_turn(chat.template) or "<|im_end|>")


def of_trl(name):
    origin = importlib.util.find_spec("trl").origin
    return (Path(origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def of_mistral():
    """As Mistral's own package renders for tokenizers V3-Tekken."""
    from mistral_common.integrations.chat_templates.template_generator import TemplateConfig, build_chat_template
    from mistral_common.tokens.tokenizers.base import TokenizerVersion

    return build_chat_template(TemplateConfig(version=TokenizerVersion.v3))


def text_of(template, messages, **arguments):
    from transformers.utils.chat_template_utils import render_jinja_template

    ask = messages[-1]["role"] != "assistant"
    tokens = {"bos_token": "<|begin_of_text|>" if "date_string" in template else "<bos>", "eos_token": "</s>"}
    (text,), _ = render_jinja_template(conversations=[messages], chat_template=template, add_generation_prompt=ask, **tokens, **arguments)
    return text


THOUGHT = "<think>\nA sum of\n\nsmall numbers.\n</think>\n\nIt is 4."
CONVERSATIONS = [SYSTEM[:2], SYSTEM[1:4], SYSTEM[:4], SYSTEM, [user("  Two lines,\n\nand space. \n"), assistant("Yes."), user("日本?")]]
THINKING = [
    ([user("And 2 + 2?")], {"enable_thinking": False}),
    ([user("And 2 + 2?")], {"enable_thinking": True}),
    ([user("And 2 + 2?"), assistant(THOUGHT)], {}),
    ([user("And 2 + 2?"), assistant(THOUGHT), user("Why?"), assistant(THOUGHT)], {"enable_thinking": True}),
    ([*SYSTEM[:2], assistant(THOUGHT), user("Why?"), assistant("So.")], {"enable_thinking": False}),
    ([*SYSTEM[:2], assistant(THOUGHT), user("Why?")], {"enable_thinking": False}),
]
REFERENCES = [
    *((name, make, messages, {}) for name, make in (("gemma", "gemma3"), ("mistral", None)) for messages in CONVERSATIONS),
    *(("llama3_1", "llama3_1", messages, {"date_string": "1 May 2025"}) for messages in CONVERSATIONS),
    *(("qwen", "qwen3", messages, {}) for messages in CONVERSATIONS if messages[-1]["role"] == "user"),
    *(("qwen", "qwen3", messages, {"enable_thinking": False}) for messages in CONVERSATIONS),
    *(("qwen", "qwen3", messages, arguments) for messages, arguments in THINKING),
]


@pytest.mark.parametrize(("name", "reference", "messages", "arguments"), REFERENCES)
def test_the_text_is_that_of_the_templates_that_others_ship(name, reference, messages, arguments):
    """TRL's copies of Qwen 3's, Llama 3.1's and Gemma 3's, and what Mistral's package generates."""
    template = of_trl(reference) if reference else of_mistral()
    assert text_of((TEMPLATES / f"{name}.jinja").read_text(), messages, **arguments) == text_of(template, messages, **arguments)


SMOLLM3_PLAIN = "You are a helpful AI assistant named SmolLM, trained by Hugging Face."


@pytest.mark.parametrize(
    ("messages", "arguments", "mode", "says"),
    [
        ([user("Hi.")], {"enable_thinking": False}, "/no_think", SMOLLM3_PLAIN),
        ([user("Hi.")], {"enable_thinking": True, "custom_instructions": "Rhyme."}, "/think", "Rhyme."),
        ([{"role": "system", "content": "Rhyme. /no_think"}, user("Hi.")], {}, "/no_think", "Rhyme."),
        ([{"role": "system", "content": "/think"}, user("Hi.")], {"enable_thinking": False}, "/think", f"{SMOLLM3_PLAIN} Your role as"),
    ],
)
def test_smollm3_says_whether_to_think_and_asks_accordingly(messages, arguments, mode, says):
    text = text_of((TEMPLATES / "smollm3.jinja").read_text(), messages, today="07 July 2025", **arguments)
    head = "<|im_start|>system\n## Metadata\n\nKnowledge Cutoff Date: June 2025\nToday Date: 07 July 2025\nReasoning Mode: "
    assert text.startswith(f"{head}{mode}\n\n## Custom Instructions\n\n{says}")
    unthinking = "<think>\n\n</think>\n" if mode == "/no_think" else ""
    assert text.endswith(f"\n\n<|im_end|>\n<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n{unthinking}")


def test_smollm3_leaves_all_to_a_system_that_overrides_it():
    text = text_of((TEMPLATES / "smollm3.jinja").read_text(), [{"role": "system", "content": "Rhyme. /system_override"}, user("Hi.")])
    assert text == "<|im_start|>system\nRhyme.<|im_end|>\n<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", ["qwen", "smollm3"])
@pytest.mark.parametrize(("arguments", "said"), [({}, THOUGHT), ({"enable_thinking": False}, "It is 4."), ({}, "It is 4.")])
def test_an_answer_is_trained_after_what_was_asked_with_thoughts_and_without(name, arguments, said, sourced):
    chat = Chat(sourced(name, chat_template=name).payload)
    asked = [*SYSTEM[:2], assistant(THOUGHT), user("And 2 + 2?")]
    prompt, answer = chat.answer(asked, said, arguments=arguments)
    assert prompt == chat.prompt(asked, arguments)
    ids, mask = chat.training([*asked, assistant(said)], "last_turn", arguments)
    assert ids[: len(prompt + answer)] == prompt + answer and mask[: len(prompt + answer)] == [False] * len(prompt) + [True] * len(answer)
    assert answer == [*chat.response_ids(said), chat.eos_id]


def test_thoughts_that_a_template_takes_out_of_earlier_turns_are_not_trained_away(sourced):
    chat = Chat(sourced("qwen", chat_template="qwen").payload)
    twice = [user("1 + 1?"), assistant("<think>\nHm.\n</think>\n\n2"), user("And 2 + 2?"), assistant(THOUGHT)]
    for train_on in ("assistant", "all"):
        with pytest.raises(ChatError, match=r"leaves out part of what the assistant says .* `train_on: last_turn`"):
            chat.training(twice, train_on)
    assert "Hm." not in chat.tokenizer.decode(chat.training(twice, "last_turn")[0])


@pytest.mark.parametrize("name", ["chatml", *SHIPPED])
@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}])
def test_an_earlier_turn_is_trained_after_what_it_is_asked_for_with_or_not_at_all(name, arguments, sourced):
    chat = Chat(sourced(name, chat_template=name).payload)
    given = {key: value for key, value in arguments.items() if key in chat._template.variables}
    for messages in (PROBE, SYSTEM, [{"role": "system", "content": "Be brief. /no_think"}, *PROBE]):
        if (name, given) == ("qwen", {"enable_thinking": False}):
            for train_on in ("assistant", "all"):
                with pytest.raises(ChatError, match=r"asks for an answer with .*<think>.* before '2', so .* `train_on: last_turn`"):
                    chat.training(messages, train_on, given)
        else:
            assert any(chat.training(messages, "assistant", given)[1])
        assert any(chat.training(messages, "last_turn", given)[1]) and any(chat.training(messages[:-2], "assistant", given)[1])


def test_what_a_recipe_says_stands_where_a_row_says_nothing(sourced):
    made = sourced("qwen", chat_template="qwen", template_arguments={"enable_thinking": False}, add_bos=True)
    unthinking = "<|im_end|><|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert rendered(made, [user("Hi.")]) == unthinking
    assert rendered(made, [user("Hi.")], enable_thinking=True) == unthinking.removesuffix("<think>\n\n</think>\n\n")
    assert text_of(Chat(made.payload).template, [user("Hi.")]).endswith("</think>\n\n")  # whoever serves the exported model


@pytest.mark.parametrize(
    ("template", "reads"), [("chatml", "none"), ("smollm3", "custom_instructions, enable_thinking, python_tools, today, xml_tools")]
)
def test_an_argument_that_the_template_does_not_read_is_refused(template, reads, sourced):
    with pytest.raises(StageError, match=rf"the template {template} does not use eos_token, think \(it uses {reads}\)"):
        sourced("unread", chat_template=template, template_arguments={"think": True, "eos_token": "x"})
    chat = Chat(sourced("read", chat_template=template).payload)
    for refused in (chat.prompt, lambda given, arguments: chat.answer(given, "2", arguments=arguments)):
        with pytest.raises(ChatError, match=rf"reads no template argument think, which a row has \(it reads {reads}\)"):
            refused([user("Hi.")], {"think": True})


@pytest.mark.parametrize("value", [None, float("nan"), {"a": None}, [float("inf")]])
def test_what_no_template_can_hold_is_no_argument(value):
    """Nor are tools, which templates receive from each conversation."""
    with pytest.raises(ValueError, match="template_arguments enable_thinking: each must be an identifier with"):
        SourceModel.model_validate(OWN | {"template_arguments": {"enable_thinking": value}})
    with pytest.raises(ValueError, match=r"template_arguments\.tools has no effect"):
        SourceModel.model_validate(OWN | {"template_arguments": {"tools": []}})


def test_a_text_of_any_characters_is_written_into_a_template_as_it_is(sourced):
    odd = "a\n\"'\\ }} %} {# {{ 🙂 é\t"
    made = sourced("odd", chat_template="smollm3", template_arguments={"custom_instructions": odd})
    assert f"## Custom Instructions\n\n{odd}\n\n<|im_end|>" in rendered(made, [user("Hi.")])


def test_an_argument_cannot_forge_a_turn(sourced):
    chat = Chat(sourced("smollm3", chat_template="smollm3").payload)
    for forged in ("<|im_end|>", {"deep": ["<|im_start|>user"]}):
        with pytest.raises(ChatError, match="a template argument spells out the control token"):
            chat.prompt([user("Hi.")], {"custom_instructions": forged})
