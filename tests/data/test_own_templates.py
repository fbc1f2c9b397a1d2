"""Templates as the instruct models of the hub bring them, without marks: what is trained is found by rendering the prompt of each turn."""

import importlib.util
import re
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pytest
from test_chat import CHATML, PROBE, QUESTION, save_tokenizer

from pedigree.configs.base.jinja import MARKS
from pedigree.configs.rows.source_models import TEMPLATES as SHIPPED
from pedigree.data.chat.chat import Chat
from pedigree.data.chat.chat_template import ChatError, end_of_turn

SYSTEM = [{"role": "system", "content": "Be brief."}]
SAID = "<think>\nA sum.\n</think>\n\n4"
THOUGHT = [*PROBE[:3], {"role": "assistant", "content": SAID}]
THOUGHT_BEFORE = [PROBE[0], {"role": "assistant", "content": "<think>\nHm.\n</think>\n\n2"}, *THOUGHT[2:]]

UNMARKED = re.sub(r"\{% (?:end)?generation %\}", "", CHATML)
HALF_MARKED = CHATML.replace(" + '<|im_end|>' }}{% endgeneration %}", " }}{% endgeneration %}{{ '<|im_end|>' }}")
QWEN3 = """\
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role != 'assistant' -%}
    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
  {%- else -%}
    {%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m.content else '' -%}
    {%- set words = m.content.split('</think>')[-1].lstrip('\\n') -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if loop.index0 > ns.last -%}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}{%- endif -%}
    {{- words + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' + OPENED -}}{%- endif -%}"""
UNTHINKING = "('<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking else '')"
HYBRID, THINKING = QWEN3.replace("OPENED", UNTHINKING), QWEN3.replace("OPENED", "'<think>\\n'")
LLAMA = """\
{{- bos_token -}}
{%- if not date_string is defined -%}{%- set date_string = strftime_now('%d %b %Y') -%}{%- endif -%}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date_string + '\\n\\n' + system + '<|eot_id|>' -}}
{%- for m in messages if m.role != 'system' -%}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"""
GEMMA = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{- raise_exception('Roles must alternate') -}}{%- endif -%}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"""
MISTRAL = """\
{{- bos_token -}}
{%- set said = messages | rejectattr('role', 'equalto', 'system') | list -%}
{%- for m in said -%}
{%- if m.role == 'user' -%}
{{- '[INST]' + (messages[0].content + '\\n\\n' if (loop.last or loop.index == said | length - 1 and said[-1].role == 'assistant')
    and messages[0].role == 'system' else '') + m.content + '[/INST]' -}}
{%- else -%}{{- m.content + eos_token -}}{%- endif -%}
{%- endfor -%}"""
PHI = """\
{%- for m in messages -%}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- else -%}{{- eos_token -}}{%- endif -%}"""
DEEPSEEK = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<｜User｜>' + m.content -}}
{%- else -%}{{- '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜>' + OPENED -}}{%- endif -%}"""
R1, V3 = DEEPSEEK.replace("OPENED", "'<think>\\n'"), DEEPSEEK.replace("OPENED", "''")
OLMO = """\
{{- bos_token -}}
{%- for m in messages -%}
{{- '<|' + m.role + '|>\\n' + m.content + (eos_token if m.role == 'assistant' else '') -}}
{{- '' if loop.last and m.role == 'assistant' else '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"""
GRANITE = """\
{{- '<|start_of_role|>system<|end_of_role|>Today is ' + strftime_now('%B %d, %Y') + '.<|end_of_text|>\\n' -}}
{%- for m in messages -%}{{- '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_of_role|>assistant<|end_of_role|>' -}}{%- endif -%}"""
TEMPLATES = {
    "unmarked": UNMARKED, "half marked": HALF_MARKED, "hybrid": HYBRID, "thinking": THINKING, "llama": LLAMA, "gemma": GEMMA,
    "mistral": MISTRAL, "phi": PHI, "r1": R1, "v3": V3, "olmo": OLMO, "granite": GRANITE,
}  # fmt: skip
SPECIAL = tuple(
    "<|start_header_id|> <|end_header_id|> <|eot_id|> <start_of_turn> <end_of_turn> [INST] [/INST] <｜User｜> <｜Assistant｜> "
    "<｜end▁of▁sentence｜> <|end|> <|user|> <|assistant|> <|system|> <|start_of_role|> <|end_of_role|> <|end_of_text|>".split()
)


def chat_of(folder, template, special=SPECIAL):
    return Chat(save_tokenizer(folder, template, special=special, eos=end_of_turn(template, special) or "<|im_end|>"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return {name: chat_of(tmp_path_factory.mktemp("own"), template) for name, template in TEMPLATES.items()}


def trained(chat, messages, train_on="assistant", arguments=None):
    """The trained stretches of a conversation, without the end-of-turn tokens."""
    tokens = zip(*chat.training(messages, train_on, arguments), strict=True)
    stretches = [[token for token, _ in some] for one, some in groupby(tokens, itemgetter(1)) if one]
    assert all(stretch[-1] == chat.eos_id for stretch in stretches)
    return [chat.tokenizer.decode(stretch[:-1]) for stretch in stretches]


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in ("thinking", "hybrid", "r1")])
def test_every_turn_of_a_models_own_template_is_trained_with_its_end_and_nothing_else(chats, name):
    chat = chats[name]
    assert trained(chat, PROBE) == ["2", "It is 4."] and trained(chat, PROBE, "last_turn") == ["It is 4."]
    assert trained(chat, [PROBE[0], {**PROBE[1], "train": True}, *PROBE[2:]], "marked") == ["2"]
    assert trained(chat, PROBE[:2]) == ["2"]


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "r1"])
def test_the_tokens_are_those_that_the_template_itself_gives_and_the_prompt_is_what_is_asked(chats, name):
    chat, clock = chats[name], {"strftime_now": datetime(2024, 7, 26).strftime}
    for messages in (PROBE, PROBE[:2], THOUGHT):
        if messages is not THOUGHT or name != "v3":
            own = chat.tokenizer.apply_chat_template(messages, tokenize=False, **clock)
            assert chat.tokenizer.decode(chat.training(messages, "last_turn")[0]) == own
        prompt, answer = chat.answer(messages[:-1], messages[-1]["content"])
        assert prompt == chat.prompt(messages[:-1]) and answer == [*chat.response_ids(messages[-1]["content"]), chat.eos_id]
        asked = chat.tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True, **clock)
        assert chat.tokenizer.decode(prompt) == asked


def test_what_was_sampled_is_trained_as_it_was_whatever_a_template_makes_of_it(chats):
    """R1's takes thoughts out of answers, Qwen 3's puts empty ones in, Llama's trims: the sampler's tokens are trained."""
    for name in TEMPLATES:
        for text in (" 4\n", "Hm.</think>4", "<think>Hm.</think>  4", "4<|im_end|>"):
            prompt, answer = chats[name].answer(QUESTION, text)
            assert (prompt, answer) == (chats[name].prompt(QUESTION), [*chats[name].response_ids(text), chats[name].eos_id])
            assert chats[name].answer(QUESTION, text, ended=False)[1] == answer[:-1]


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "r1"])
def test_a_score_is_read_where_the_template_itself_ends_a_conversation(chats, name):
    """Qwen 3's puts an empty thought into the answer, Llama's trims it, and white space shares a token with the end of the header."""
    chat, clock = chats[name], {"strftime_now": datetime(2024, 7, 26).strftime}
    for text in ("4", " 4\n", "\n\n  4", "4<|im_end|>", ""):
        prompt, answer = chat.answer(PROBE[:3], text, scored=True)
        whole = [*PROBE[:3], {"role": "assistant", "content": text}]
        own = chat.tokenizer.apply_chat_template(whole, tokenize=False, **clock)
        assert chat.tokenizer.decode(prompt + answer) == own
        if "<|im_end|>" not in text:  # a control token in an answer is plain text here alone
            assert prompt + answer == chat.tokenizer(own, add_special_tokens=False)["input_ids"]
        cut = [token for part in chat.answer(PROBE[:3], text, scored=True, ended=False) for token in part]
        assert chat.eos_id not in cut[len(prompt) :] and own.startswith(chat.tokenizer.decode(cut))


def test_thoughts_are_trained_where_the_template_keeps_them_and_where_it_asks_for_them(chats):
    assert trained(chats["hybrid"], THOUGHT) == ["2", SAID]
    assert trained(chats["hybrid"], THOUGHT_BEFORE, "last_turn") == [SAID]
    assert trained(chats["thinking"], THOUGHT, "last_turn") == [SAID.removeprefix("<think>\n")]  # the prompt opens the thought
    with pytest.raises(ChatError, match=r"leaves out part of what the assistant says \('<think>\\nHm.*`train_on: last_turn`"):
        chats["hybrid"].training(THOUGHT_BEFORE)
    unthinking = {"enable_thinking": False}
    assert trained(chats["hybrid"], PROBE[:2], arguments=unthinking) == ["2"]
    assert trained(chats["hybrid"], PROBE, "last_turn", unthinking) == ["It is 4."]


@pytest.mark.parametrize(
    ("name", "messages", "arguments", "turn"),
    [
        ("hybrid", PROBE, {"enable_thinking": False}, "turn 1 of the assistant ('2')"),  # asked for with an empty thought
        ("thinking", PROBE, {}, "turn 1 of the assistant ('2')"),
        ("mistral", [*SYSTEM, *PROBE], {}, "turn 1 of the assistant ('2')"),  # the system's text moves to the last question
        ("r1", PROBE, {}, "turn 1 of the assistant ('2')"),  # no answer has the thought that its prompt opens
    ],
)
def test_a_turn_that_would_be_trained_in_another_context_is_refused_by_its_number(chats, name, messages, arguments, turn):
    with pytest.raises(ChatError, match=f"renders what comes before {re.escape(turn)} otherwise once more follows"):
        chats[name].training(messages, "assistant", arguments)


def test_the_last_turn_is_trained_where_earlier_ones_cannot_be(chats):
    assert trained(chats["mistral"], [*SYSTEM, *PROBE], "last_turn") == ["It is 4."]
    assert "Be brief.\n\nAnd 2 + 2?" in chats["mistral"].tokenizer.decode(chats["mistral"].prompt([*SYSTEM, *PROBE[:3]]))
    assert trained(chats["llama"], [*SYSTEM, *PROBE]) == ["2", "It is 4."]
    with pytest.raises(ChatError, match="System role not supported"):
        chats["gemma"].training([*SYSTEM, *PROBE])


@pytest.mark.parametrize("said", [SAID, SAID.removeprefix("<think>\n"), SAID.removeprefix("<think>")])
def test_a_last_turn_continues_the_thought_that_its_prompt_opens(chats, said):
    """R1's own rendering has no thought at all; the tokens are those that are sampled."""
    chat, continued = chats["r1"], "A sum.\n</think>\n\n4" if not said.startswith("\n") else "\nA sum.\n</think>\n\n4"
    ended = {"role": "assistant", "content": said}
    for messages, train_on in (([*PROBE[:3], ended], "last_turn"), ([PROBE[0], ended], "assistant")):
        asked = chat.prompt(messages[:-1])
        ids, mask = chat.training(messages, train_on)
        assert chat.tokenizer.decode(asked).endswith("<｜Assistant｜><think>\n")
        assert ids == [*asked, *chat.response_ids(continued), chat.eos_id] and mask == [False] * len(asked) + [True] * (
            len(ids) - len(asked)
        )
    cut = {**ended, "content": "<think>\nA", "finish_reason": "length"}
    assert chat.training([*PROBE[:3], cut], "last_turn")[0] == [*chat.prompt(PROBE[:3]), *chat.response_ids("A")]
    with pytest.raises(ChatError, match=r"with '<think>\\n', and the turn 'It is 4.' has no '</think>': train on answers"):
        chat.training(PROBE, "last_turn")
    with pytest.raises(ChatError, match="renders what comes before turn 2 of the assistant"):  # others would read another score
        chat.answer(PROBE[:3], "4", scored=True)


def test_no_token_depends_on_the_clock(chats):
    for name, today in (("llama", "26 Jul 2024"), ("granite", "July 26, 2024")):
        assert today in chats[name].tokenizer.decode(chats[name].prompt(QUESTION))
    told = chats["llama"].tokenizer.decode(chats["llama"].prompt(QUESTION, {"date_string": "1 May 2025"}))
    assert "Today Date: 1 May 2025" in told


@pytest.mark.parametrize("name", ["hybrid", "phi", "olmo"])
def test_a_last_turn_that_spells_out_its_end_or_was_cut_off_ends_where_it_ends(chats, name):
    chat = chats[name]
    end = chat.tokenizer.eos_token
    said = [*PROBE[:3], {"role": "assistant", "content": f"{SAID} {end} and on"}]
    ids, mask = chat.training(said, "last_turn")
    assert sum(trained and token == chat.eos_id for token, trained in zip(ids, mask, strict=True)) == 1
    cut = [*PROBE[:3], {"role": "assistant", "content": SAID, "finish_reason": "length"}]
    ids, mask = chat.training(cut, "last_turn")
    assert mask[-1] and chat.tokenizer.decode(ids).endswith(SAID)


def test_the_end_of_a_turn_is_any_special_token_of_the_tokenizer():
    assert {name: end_of_turn(template, SPECIAL) for name, template in TEMPLATES.items()} == {
        **dict.fromkeys(("unmarked", "half marked", "hybrid", "thinking"), "<|im_end|>"), "llama": "<|eot_id|>", "gemma": "<end_of_turn>",
        "mistral": None, "phi": "<|end|>", "r1": "<｜end▁of▁sentence｜>", "v3": "<｜end▁of▁sentence｜>", "olmo": None,
        "granite": "<|end_of_text|>",
    }  # fmt: skip


OF_TRL = [
    "cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "gemma4", "lfm2", "llama3", "llama3_1", "llama3_2",
    "nemotron_3_nano", "phi3", "phi3_5", "qwen2_5", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8",
    "qwen3_instruct_2507",
]  # fmt: skip


@pytest.mark.parametrize("name", OF_TRL)
def test_the_templates_that_models_of_the_hub_bring_can_be_asked_and_trained(tmp_path, name):
    """As copied by TRL. Prompts of R1's and Nemotron's open a thought, which answers must close."""
    folder = Path(str(importlib.util.find_spec("trl").origin)).parent / "chat_templates"  # pyright: ignore[reportOptionalMemberAccess]
    template = (folder / f"{name}.jinja").read_text()
    special = tuple(dict.fromkeys(re.findall(r"<[|｜][^<>'\"]+[|｜]>|<\w+_turn>|<turn\|>|<\|turn>", template)))
    chat = chat_of(tmp_path, template, special)
    prompt, answer = chat.answer(PROBE[:3], "4")
    assert prompt == chat.prompt(PROBE[:3]) and answer == [*chat.response_ids("4"), chat.eos_id]
    if name in ("deepseek_r1_distill", "deepseekv3", "nemotron_3_nano"):
        with pytest.raises(ChatError, match="has no '</think>': train on answers with thoughts"):
            chat.training(PROBE, "last_turn")
        assert trained(chat, THOUGHT, "last_turn") == [SAID.removeprefix("<think>\n")]
    else:
        assert trained(chat, PROBE, "last_turn")[0].removeprefix("\n</think>\n\n").removeprefix("<think>\n\n</think>\n\n") == "It is 4."


CALLED = [
    *QUESTION, {"role": "call", "content": '{"name": "add", "arguments": {"a": 1, "b": 1}}'}, {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "2"}, {"role": "user", "content": "And 2 + 2?"},
]  # fmt: skip
LAST_CALL = [*CALLED[:4], CALLED[4], {**CALLED[1], "content": CALLED[1]["content"].replace('"a": 1', '"a": "<|im_end|>"')}]
ROWS = [PROBE, PROBE[:2], [*SYSTEM, *PROBE], THOUGHT, [*CALLED, *PROBE[3:]], LAST_CALL]


@pytest.mark.parametrize("name", sorted(path.stem for path in SHIPPED.glob("*.jinja")))
def test_turns_are_found_without_marks_where_the_marks_are(tmp_path, name):
    """Mistral's moves the system's text to the last question, which is refused here; tools are where the template has a form for them."""
    marked = (SHIPPED / f"{name}.jinja").read_text()
    special = tuple({*SPECIAL, *re.findall(r"<\|\w+\|>|<s>|</s>|\[/?[A-Z_]+\]", marked)} - ({"<|user|>"} if name == "tulu" else set()))
    one, other = (chat_of(tmp_path / word, template, special) for word, template in (("a", marked), ("b", MARKS.sub("", marked))))
    compared = 0
    for messages in ROWS:
        try:
            expected = one.training(messages)
        except ChatError:
            continue
        if name == "mistral" and messages[0]["role"] == "system":
            with pytest.raises(ChatError, match="turn 1 of the assistant"):
                other.training(messages)
            continue
        assert other.training(messages) == expected
        assert other.prompt(messages[:-1]) == one.prompt(messages[:-1]) and other.answer(messages[:-1], "4") == one.answer(
            messages[:-1], "4"
        )
        compared += 1
    assert compared == (6 if name in ("qwen", "llama3_1") else 4)


def test_a_system_turn_that_a_template_leaves_out_is_refused_and_a_mode_that_it_writes_otherwise_is_not(tmp_path):
    deaf = chat_of(tmp_path / "deaf", UNMARKED.replace("for message in messages", "for message in messages if message.role != 'system'"))
    assert trained(deaf, PROBE) == ["2", "It is 4."]
    with pytest.raises(ChatError, match=r"leaves out the system turn \('Be brief\.'\): use another template, leave system turns out"):
        deaf.training([*SYSTEM, *PROBE], "assistant")
    smollm3 = chat_of(tmp_path / "smollm3", (SHIPPED / "smollm3.jinja").read_text())
    for mode in ("/think", "/no_think"):
        text = smollm3.tokenizer.decode(smollm3.training([{"role": "system", "content": mode}, *PROBE], "assistant")[0])
        assert f"Reasoning Mode: {mode}\n" in text
