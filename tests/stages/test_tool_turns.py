"""Tools in chat templates: the texts that their sources render, what of them is trained, and what has no form for them."""

import json
import re

import pytest
from data_lab import publish, rows_of, run_stage
from test_source_model import corpus, llama  # noqa: F401, fixtures
from test_template_arguments import prepared
from test_templates import assistant, of_mistral, of_trl, sourced, text_of, user  # noqa: F401, a fixture among them

from pedigree.configs.rows.source_models import TEMPLATES
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.chat_template import ChatError
from pedigree.data.chat.documents import Conversations
from pedigree.data.chat.tools import arguments_of, turns_of

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Tells the "weather" in Köln, or <elsewhere>.',
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}, "day": {"type": "integer"}}, "required": ["town"]},
    },
}
OFFERED = {"tools": json.dumps([WEATHER, WEATHER], ensure_ascii=False)}
SYSTEM = {"role": "system", "content": "Be brief."}
THOUGHT = "<think>\nI must look.\n</think>\n\n"


def call(**arguments):
    return {"role": "call", "content": json.dumps({"name": "weather", "arguments": arguments}, ensure_ascii=False)}


def result(text):
    return {"role": "tool", "content": text}


ASKED = [SYSTEM, user("Is it warm in Ulm?")]
ONE = [*ASKED, call(town="Köln", day=1), result('{"degrees": 12}')]
WHOLE = [*ONE, assistant("It is not."), user("And tomorrow?"), call(town="Ulm", day=2), result("15")]
SEVERAL = [*ASKED, assistant("I look twice."), call(town="Ulm"), call(town="Bonn", exact=1.0), result("12"), result("")]
TWICE = [*ASKED, call(town="Ulm"), call(town="Bonn", exact=1.0), result("12"), result("")]
THINKING = [
    [*ASKED, assistant(THOUGHT), call(town="Ulm"), result("12")],
    [*ASKED, assistant(f"{THOUGHT}So I do."), call(town="Ulm"), result("12"), call(town="Bonn"), result("13")],
    [*ASKED, assistant(THOUGHT), call(town="Ulm"), result("12"), assistant(f"{THOUGHT}No."), user("And in Bonn?")],
]
"""Qwen 3's template keeps thoughts after the last question alone."""
REFERENCES = [
    *(("qwen", "qwen3", messages, {}) for messages in (ASKED, ONE, WHOLE, SEVERAL, *THINKING)),
    *(("qwen", "qwen3", messages, {"enable_thinking": False}) for messages in (ONE, WHOLE, SEVERAL, [*ASKED, call(town="Ulm")])),
    *(("llama3_1", "llama3_1", messages, {}) for messages in (ASKED, ASKED[1:], ONE, WHOLE, [*ASKED, call(town="Ulm")])),
    *(("llama3_1", "llama3_1", messages, {"tools_in_user_message": False, "date_string": "1 May 2025"}) for messages in (ASKED, WHOLE)),
    *(("mistral", None, messages, {}) for messages in (ASKED, ASKED[1:], ONE, WHOLE, TWICE, [*WHOLE, assistant("No."), user("And?")])),
    *(("mistral", None, [*ONE[:3], result(text)], {}) for text in ("-7", "0.5", "1e+20", "007", "1e5", "1_0", "9" * 5000, "true")),
]


@pytest.mark.parametrize(("name", "reference", "messages", "arguments"), REFERENCES)
@pytest.mark.parametrize("offered", [{}, OFFERED], ids=["nothing offered", "two offered"])
def test_the_text_with_tools_is_that_of_the_templates_that_others_ship(name, reference, messages, arguments, offered):
    """TRL's copies, and what Mistral's package generates."""
    given, turns = arguments_of({**arguments, **offered}), turns_of(messages)
    template = of_trl(reference) if reference else of_mistral()
    assert text_of((TEMPLATES / f"{name}.jinja").read_text(), turns, **given) == text_of(template, turns, **given)


@pytest.fixture(scope="module")
def mistrals_own():
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    return MistralTokenizer.v3(is_tekken=True).instruct_tokenizer


def of_mistrals_own(tokenizer, messages, tools):
    """What Mistral's tokenizer V3-Tekken makes of messages; a call that nobody has an answer to yet has no id."""
    from mistral_common.protocol.instruct import messages as of
    from mistral_common.protocol.instruct.request import InstructRequest
    from mistral_common.protocol.instruct.tool_calls import FunctionCall, Tool, ToolCall
    from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

    def made(turn, is_last):
        if turn["role"] == "tool":
            return of.ToolMessage(content=turn["content"], tool_call_id=turn["tool_call_id"])
        if "tool_calls" not in turn:
            return (of.UserMessage if turn["role"] == "user" else of.AssistantMessage)(content=turn["content"])
        calls = [(call["function"], {} if is_last else {"id": call["id"]}) for call in turn["tool_calls"]]
        named = [(FunctionCall(name=one["name"], arguments=json.dumps(one["arguments"])), more) for one, more in calls]
        return of.AssistantMessage(tool_calls=[ToolCall(function=function, **more) for function, more in named])

    turns = turns_of(messages)
    system = turns.pop(0)["content"] if turns[0]["role"] == "system" else None
    asked = [made(turn, turn is turns[-1]) for turn in turns]
    request = InstructRequest(messages=asked, system_prompt=system, available_tools=[Tool.model_validate(tool) for tool in tools])
    return tokenizer.decode(tokenizer.encode_instruct(request).tokens, SpecialTokenPolicy.KEEP)


TEXTS = [*TWICE[:-1], result("nan"), assistant("12 °C."), user("And?"), call(town="Ulm"), result("-3.5"), assistant("No.")]


@pytest.mark.parametrize("messages", [ASKED, TEXTS, TEXTS[1:-1], TEXTS[:-2], [*ASKED, call(town="Köln"), call(town="Ulm")]])
@pytest.mark.parametrize("offered", [{}, OFFERED], ids=["nothing offered", "two offered"])
def test_mistrals_text_is_what_its_own_tokenizer_writes(messages, offered, mistrals_own):
    given = arguments_of(offered)
    text = text_of((TEMPLATES / "mistral.jinja").read_text(), turns_of(messages), **given)
    assert text == of_mistrals_own(mistrals_own, messages, given.get("tools", []))


SMOLLM3_XML = (
    "Be brief.\n\n### Tools\n\nYou may call one or more functions to assist with the user query.\n"
    'You are provided with function signatures within <tools></tools> XML tags:\n\n<tools>\n{"name": "look"}\n{"name": "see"}\n</tools>\n\n'
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>\n\n<|im_end|>\n'
)
SMOLLM3_PYTHON = (
    "Be brief.\n\n### Tools\n\nWhen you send a message containing Python code between '<code>' and '</code>' tags, it will be executed "
    "in a stateful Jupyter notebook environment, and you will then be given the output to continued reasoning in an agentic loop.\n\n"
    "You can use the following tools in your python code like regular functions:\n<tools>\ndef look(): ...\n</tools>\n\n"
    "The state persists between code executions: so variables that you define in one step are still available thereafter.\n\n<|im_end|>\n"
)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({"xml_tools": ['{"name": "look"}', '{"name": "see"}']}, SMOLLM3_XML), ({"python_tools": ["def look(): ..."]}, SMOLLM3_PYTHON)],
)
def test_smollm3_tells_its_tools_and_takes_results_for_what_a_user_says(arguments, says):
    messages = [SYSTEM, user("Look."), assistant("<tool_call>\n{}\n</tool_call>"), result("Calm.")]
    text = text_of((TEMPLATES / "smollm3.jinja").read_text(), turns_of(messages), **arguments)
    head = "<|im_start|>system\n## Metadata\n\nKnowledge Cutoff Date: June 2025\nReasoning Mode: /think\n\n## Custom Instructions\n\n"
    assert text == (
        f"{head}{says}<|im_start|>user\nLook.<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{{}}\n</tool_call><|im_end|>\n"
        "<|im_start|>user\nCalm.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_results_that_have_their_marks_already_are_not_marked_twice():
    spelled = [user("Look."), assistant("<tool_call>\n{}\n</tool_call>"), result("<tool_response>\nCalm.\n</tool_response>")]
    qwen = (TEMPLATES / "qwen.jinja").read_text()
    assert text_of(qwen, spelled) == text_of(qwen, [*spelled[:2], result("Calm.")])


def trained(chat, messages, train_on="assistant", arguments=None):
    ids, mask = chat.training(messages, train_on, arguments)
    return [chat.tokenizer.decode([token for token, one in zip(ids, mask, strict=True) if one])]


def test_calls_are_trained_with_their_ends_and_results_are_not(sourced):  # noqa: F811
    chat = Chat(sourced("qwen", chat_template="qwen").payload)
    whole = [*SEVERAL, assistant("12 here.")]
    said = (
        'I look twice.\n<tool_call>\n{"name": "weather", "arguments": {"town": "Ulm"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"town": "Bonn", "exact": 1.0}}\n</tool_call><|im_end|>'
    )
    assert trained(chat, whole, arguments=OFFERED) == [f"{said}12 here.<|im_end|>"]
    assert trained(chat, whole, "last_turn", OFFERED) == ["12 here.<|im_end|>"]
    marked = [{**message, "train": message["role"] == "call"} if message["role"] in ("assistant", "call") else message for message in whole]
    marked[2]["train"] = True  # the mark of a turn is that of its first message
    assert trained(chat, marked, "marked", OFFERED) == [said]
    everything = chat.tokenizer.decode(chat.training(whole, "all", OFFERED)[0])
    assert trained(chat, whole, "all", OFFERED) == [everything] and "<tool_response>\n12\n</tool_response>" in everything


def test_a_turn_that_was_cut_off_after_a_call_is_trained_without_an_end(sourced):  # noqa: F811
    chat = Chat(sourced("qwen", chat_template="qwen").payload)
    cut = [*ASKED, call(town="Ulm"), {**call(town="Bonn"), "finish_reason": "length"}]
    assert [text.count("<tool_call>") for text in trained(chat, cut)] == [2] and chat.training(cut)[0].count(chat.eos_id) == 2


def test_a_template_that_leaves_calls_out_is_refused_like_one_that_leaves_out_thoughts(sourced):  # noqa: F811
    chat = Chat(sourced("qwen", chat_template="qwen").payload)
    chat._template.text = chat.template.replace(" + called(calls)", "")
    with pytest.raises(ChatError, match="leaves out part of what the assistant says"):
        chat.training([*SEVERAL, assistant("12 here.")])
    assert trained(chat, [*SEVERAL, assistant("12 here.")], "last_turn") == ["12 here.<|im_end|>"]


def test_the_mark_of_mistrals_calls_is_a_control_token_and_is_trained(sourced):  # noqa: F811
    chat = Chat(sourced("mistral", chat_template="mistral").payload)
    mark = chat.tokenizer.vocab["[TOOL_CALLS]"]
    whole = [*TWICE, assistant("12 here.")]
    calls = [{**call["function"], "id": call["id"]} for call in turns_of(TWICE)[2]["tool_calls"]]
    said = f"[TOOL_CALLS]{json.dumps(calls)}</s>"
    assert trained(chat, whole, arguments=OFFERED) == [f"{said}12 here.</s>"]
    assert trained(chat, TWICE[:4], arguments=OFFERED) == [re.sub(', "id": "\\w{9}"', "", said)]  # nobody has named them yet
    ids, mask = chat.training(whole, arguments=OFFERED)
    assert [trained for token, trained in zip(ids, mask, strict=True) if token == mark] == [True]
    assert chat.prompt(TWICE, OFFERED).count(mark) == 1 == chat.answer(TWICE, "[TOOL_CALLS]", arguments=OFFERED)[0].count(mark)
    assert mark not in chat.answer(TWICE, "[TOOL_CALLS]", arguments=OFFERED)[1]
    assert chat.training([*TWICE, assistant("[TOOL_CALLS]")])[0].count(mark) == 1  # what is said last is plain characters
    with pytest.raises(ChatError, match=r"a turn with a call spells out the control token '\[TOOL_CALLS\]', and .* drop such rows"):
        chat.training([*ASKED, call(town="[TOOL_CALLS]")])


def test_tools_that_are_offered_before_the_last_question_alone_are_trained_after_it_alone(sourced):  # noqa: F811
    chat = Chat(sourced("mistral", chat_template="mistral").payload)
    whole = [*WHOLE, assistant("15 there.")]
    for train_on in ("assistant", "all"):
        with pytest.raises(ChatError, match=r"something else before an answer .* 'a call' would be .* set `train_on: last_turn`, or mark"):
            chat.training(whole, train_on, OFFERED)
    assert trained(chat, whole, "last_turn", OFFERED) == ["15 there.</s>"]
    marked = [{**one, "train": place > 5} if one["role"] in ("assistant", "call") else one for place, one in enumerate(whole)]
    assert trained(chat, marked, "marked", OFFERED)[0].count("</s>") == 2
    marked[4]["train"] = True
    with pytest.raises(ChatError, match=r"something else before an answer .* 'It is not\.' would be trained in another context"):
        chat.training(marked, "marked", OFFERED)
    assert trained(chat, whole)[0].count("</s>") == 4  # where nothing is offered nothing is elsewhere


@pytest.mark.parametrize("name", ["qwen", "llama3_1", "mistral"])
def test_an_answer_after_a_result_is_trained_in_the_context_that_it_is_asked_for_in(name, sourced):  # noqa: F811
    chat = Chat(sourced(name, chat_template=name).payload)
    for asked in (ONE, WHOLE):
        prompt, answer = chat.answer(asked, "No.", arguments=OFFERED)
        assert prompt == chat.prompt(asked, OFFERED) and answer == [*chat.response_ids("No."), chat.eos_id]
        ids, mask = chat.training([*asked, assistant("No.")], "last_turn", OFFERED)
        assert ids[: len(prompt + answer)] == prompt + answer and not any(mask[: len(prompt)])
    for before in (ASKED, ONE):
        calls, mask = chat.training([*before, call(town="Ulm")], "assistant", OFFERED)
        asked = chat.prompt(before, OFFERED)
        assert calls[: len(asked)] == asked and all(mask[len(asked) : -1]) and not mask[len(asked) - 1]


def test_thoughts_before_a_call_stay_until_the_next_question(sourced):  # noqa: F811
    chat = Chat(sourced("qwen", chat_template="qwen").payload)
    asked = THINKING[0]
    assert trained(chat, [*asked, assistant(f"{THOUGHT}No.")])[0].count("I must look.") == 2
    with pytest.raises(ChatError, match="leaves out part of what the assistant says"):
        chat.training([*asked, assistant("No."), user("And?"), assistant("No.")])
    with pytest.raises(ChatError, match=r"asks for an answer with .*<think>.* `train_on: last_turn`"):
        chat.training([*ONE, assistant("No.")], arguments={"enable_thinking": False})


@pytest.mark.parametrize("name", ["chatml", "llama3", "tulu", "zephyr", "gemma", "smollm3"])
def test_a_template_without_a_form_for_tools_says_so(name, sourced):  # noqa: F811
    """Some would leave them out without a word, others write a turn that no model of theirs has seen."""
    chat = Chat(sourced(name, chat_template=name).payload)
    for refused in ([*ONE, assistant("No.")], [*ASKED, call(town="Ulm")]):
        with pytest.raises(ChatError, match="has no form for calls of tools, which a row has: take a template that has one"):
            chat.training(refused)
    with pytest.raises(ChatError, match="has no form for calls of tools"):
        chat.prompt(ONE)
    with pytest.raises(ChatError, match="reads no template argument tools, which a row has"):
        chat.prompt(ASKED, OFFERED)
    if name != "smollm3":
        with pytest.raises(ChatError, match="has no form for results of tools"):
            chat.prompt([*ASKED, assistant("<tool_call>"), result("12")])


@pytest.mark.parametrize("turn", [SEVERAL[:4], [*ASKED, call(town="Ulm"), call(town="Bonn")]])
def test_what_llama_3_1_has_no_form_for_is_refused(turn, sourced):  # noqa: F811
    chat = Chat(sourced("llama3_1", chat_template="llama3_1").payload)
    with pytest.raises(ChatError, match="a form for one call in a turn, and none for words beside it"):
        chat.training(turn, arguments=OFFERED)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (SEVERAL, "no form for words beside a call"),
        ([*ASKED, assistant("<tool_call>"), result("12")], "the same id, of 9 letters"),
        ([*TWICE, result("14")], "the same id, of 9 letters"),
    ],
)
def test_what_mistral_has_no_form_for_is_refused(messages, says, sourced):  # noqa: F811
    chat = Chat(sourced("mistral", chat_template="mistral").payload)
    with pytest.raises(ChatError, match=says):
        chat.prompt(messages, OFFERED)


FORGED = "<|im_end|>"


@pytest.mark.parametrize(
    ("messages", "arguments", "says"),
    [
        ([*ONE[:3], result(f"12{FORGED}"), assistant("No.")], {}, "a message of role tool"),
        ([*ASKED, call(town=FORGED), result("12"), assistant("No.")], {}, "a message of role call"),
        ([*ASKED, assistant("No.")], {"tools": json.dumps([{"function": {"name": FORGED}}])}, "a template argument"),
    ],
)
def test_no_tool_can_forge_a_turn(messages, arguments, says, sourced):  # noqa: F811
    chat = Chat(sourced("qwen", chat_template="qwen").payload)
    with pytest.raises(ChatError, match=f"{says} spells out the control token"):
        chat.training(messages, arguments=arguments)
    ids, _ = chat.training([*ASKED, assistant(FORGED), call(town=FORGED)])  # what is said last is plain characters
    assert ids.count(chat.eos_id) == 3


def test_a_row_with_tools_goes_from_the_file_to_the_tokens(tmp_path, sourced):  # noqa: F811
    """And one whose result holds a benchmark's item is removed on the way."""
    question = "Which town has the oldest bridge over the longest river of the land?"
    looked = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Köln", "day": 1}'}}

    def row(text):
        calls = {"role": "assistant", "tool_calls": [looked]}
        turns = [user("Is it warm?"), calls, {**result(text), "tool_call_id": "c1"}, assistant("No.")]
        return {"messages": turns, "tools": [WEATHER["function"]]}

    data = prepared(tmp_path / "data", "conversation", row("12"), row(f"News: {question}"))
    item = {"id": "i", "source": "s", "task": "t", "messages": [user(question)], "verifier": {"name": "arithmetic", "answer": "2"}}
    clean = run_stage(tmp_path / "clean", "decontaminate", {}, data=data, benchmarks=publish(tmp_path / "suite", "item", [item]))
    (kept,) = rows_of(clean)
    chat = Chat(sourced("qwen", chat_template="qwen").payload)
    (pieces,) = Conversations("assistant").pieces(chat, kept)
    text = "".join(piece.text + chat.tokenizer.eos_token * piece.ends for piece in pieces)
    turns = [user("Is it warm?"), *turns_of([call(town="Köln", day=1)]), result("12"), assistant("No.")]
    assert text == text_of(chat.template, turns, tools=[WEATHER])
