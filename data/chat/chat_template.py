"""Rendering of chat templates, and the assistant's turns in the rendered text.

Where a template does not mark turns with their ends (`{% generation %}`), a turn begins where the prompt for it ends: the messages before
it are rendered with the generation prompt, and must be a prefix of the whole. It ends with the end-of-turn token.

Templates receive calls and tools in OpenAI's form (`data/chat/tools.py`), as in servers, and always the same date, for equal tokens.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from pedigree.configs.base.jinja import MARKS
from pedigree.configs.base.problems import PedigreeError
from pedigree.data.chat.tools import OFFERED, arguments_of, turns_of
from pedigree.data.records.messages import CALL, MARKED, RESULT, divided
from pedigree.data.records.records import Message, ended, texts_within

PROBE: list[Message] = [
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
]

CONTROL = re.compile(r"<\|\w+\|>|<bos>|<(?:start|end)_of_turn>|</?s>|\[/?(?:INST|AVAILABLE_TOOLS|TOOL_RESULTS)\]|\[TOOL_CALLS\]")
"""Control tokens as written in templates: the common form, Gemma's, Mistral's. In templates whose turns end with the EOS token they are
plain text, as in Tülu's."""
GIVEN = {"messages", "add_generation_prompt"}
"""Variables of every template, besides token names such as `eos_token`."""
CALLS_OF_TOOLS, RESULTS_OF_TOOLS = re.compile(r"\btool_calls\b"), re.compile(rf"['\"]{RESULT}['\"]")
"""Found in templates that support calls and results. Other templates drop them silently, or use a form unknown to the model."""
TODAY = date(2024, 7, 26)
"""The date for templates that read the clock: what Llama 3's assume without one."""
BETWEEN = re.compile(r"</?think>|\s+")
"""What templates add to an answer or take from it: whitespace around it, and the bounds of a thought, even of an empty one."""
OPENED, CLOSED = re.compile(r"<think>(\s*)\Z"), "</think>"
"""The end of a prompt that begins the thought of its answer, and the end of a thought."""
OTHER = "x"
"""Added to a system turn, to see whether a template reads it."""
Arguments = Mapping[str, Any] | None
"""Template variable → value."""
Turn = Mapping[str, Any]
"""A turn as returned by `turns_of`."""
Stretch = tuple[str, int]
"""(part of a rendered text, number of the assistant's turn that it is, or 0)."""


class ChatError(PedigreeError):
    """A tokenizer, chat template or text cannot be trained on; the message has the reason and the remedy."""


class ChatTemplate:
    """The chat template of one model.

    Attributes:
        text: its source.
        end: the end-of-turn token.
        marked: whether it marks the assistant's turns with their ends.
        control: matches control tokens.
    """

    def __init__(self, folder: Path, text: str, tokens: Mapping[str, Any], control: Collection[str]) -> None:
        """`tokens` are the tokenizer's special tokens by name, `control` the texts of all control tokens.

        Raises:
            ChatError: it cannot be rendered, or the assistant's turns cannot be found in what it renders or do not end.
        """
        self.folder, self.text, self._tokens, self._control = folder, text, tokens, sorted(control)
        self.end: str = tokens["eos_token"]
        self.control = re.compile("|".join(map(re.escape, self._control)) or "(?!)")
        self.marked = MARKS.search(text) is not None
        rendered, spans = self._rendered(PROBE, False, None)
        self.marked = [rendered[start:end] for start, end in spans] == [turn["content"] + self.end for turn in PROBE[1::2]]
        whole = self._rendered(PROBE[:3], True, None)[0] + PROBE[3]["content"] + self.end
        if not _bare(rendered).startswith(_bare(whole)):
            same = next((place for place, (one, other) in enumerate(zip(rendered, whole, strict=False)) if one != other), len(rendered))
            shown = slice(max(same - 20, 0), same + 60)
            raise ChatError(
                f"the chat template in {folder} writes a conversation otherwise than the prompt for turn 2 of the assistant, its text "
                f"and the end-of-turn token {self.end!r}: {rendered[shown]!r} instead of {whole[shown]!r}; use another template"
            )

    @cached_property
    def variables(self) -> set[str]:
        """Template arguments that a row may have."""
        return variables_of(self.text)

    def pieces(self, messages: Sequence[Message], ask: bool, arguments: Arguments = None) -> list[Stretch]:
        """The rendered text, split where the assistant's turns begin and end."""
        turns = turns_of(messages)
        text, spans = self._rendered(turns, ask, arguments)
        marked = ((start, end, number) for number, (start, end) in enumerate(spans, 1))
        found = marked if self.marked else self._found(turns, text, arguments)
        pieces: list[Stretch] = []
        cursor = 0
        for start, end, number in found:
            pieces += [(text[cursor:start], 0), (text[start:end], number)]
            cursor = end
        return [(piece, number) for piece, number in [*pieces, (text[cursor:], 0)] if piece]

    def trained_pieces(
        self, messages: Sequence[Message], turns: Sequence[Turn], trained: Sequence[bool], arguments: Arguments, as_asked: bool
    ) -> list[Stretch]:
        """As `pieces`, of a conversation whose assistant's `turns` are `trained` or not; see `Chat.conversation`."""
        before, last_turn = divided(messages)
        self.refuse(before, arguments)
        self._refuse_tools(last_turn)
        pieces = self.pieces(messages, ask=False, arguments=arguments)
        texts = {number: text for text, number in pieces if number}
        lost = last_turn and len(turns) not in texts and "tool_calls" not in turns[-1]
        if lost and as_asked and not self.marked and not any(trained[:-1]):
            pieces = self._continued(before, turns, arguments)
            texts = {number: text for text, number in pieces if number}
        self._refuse_lost(turns, texts, trained, last_turn)
        self._refuse_changed((turn, texts.get(number, "")) for number, turn in enumerate(turns, 1) if trained[number - 1])
        if any(trained[:-1]) and self.marked:
            self._refuse_other_openings(messages, pieces, turns, trained, arguments)
            self._refuse_tools_elsewhere(messages, pieces, turns, trained, arguments)
        return pieces

    def answered_pieces(self, messages: Sequence[Message], text: str, arguments: Arguments) -> tuple[list[Stretch], Stretch]:
        """(`pieces` of a prompt, the piece with `text` as its answer); see `Chat.answered`."""
        asked = self.pieces(messages, ask=True, arguments=arguments)
        answer: Message = {"role": "assistant", "content": text}
        pieces = self.pieces([*messages, answer], ask=False, arguments=arguments)
        if not self.marked:
            self._refuse_other_prompt(_bare(_joined(pieces)).startswith(_bare(_joined(asked))))
            pieces = [*asked, (f"{text}{self.end}", 1)]
        last = max(place for place, (_, number) in enumerate(pieces) if number)
        self._refuse_other_prompt(_joined(pieces[:last]) == _joined(asked))
        self._refuse_changed([(answer, pieces[last][0])])
        return asked, pieces[last]

    def after(self, messages: Sequence[Message], text: str, added: Sequence[Message], arguments: Arguments) -> str:
        """The rendered text after the answer `text` to `messages`, which `added` follows; see `Chat.following`."""
        answer: Message = {"role": "assistant", "content": text}
        asked, pieces = (self.pieces(some, True, arguments) for some in (messages, [*messages, answer, *added]))
        turns = sum(turn["role"] == "assistant" for turn in turns_of([*messages, answer]))
        last = next((place for place, (_, number) in enumerate(pieces) if number == turns), 0)
        if _joined(pieces[:last]) != _joined(asked) or _bare(pieces[last][0]) != _bare(text + self.end):
            raise ChatError(
                f"the chat template in {self.folder} renders a conversation otherwise once more follows, as some do that drop earlier "
                f"thoughts or move the system's text (before or in the answer {text[:80]!r}): use a template that only adds to it, or "
                "answers without thoughts"
            )
        return _joined(pieces[last + 1 :])

    def _continued(self, before: Sequence[Message], turns: Sequence[Turn], arguments: Arguments) -> list[Stretch]:
        """As `pieces`, the last turn directly after its prompt, which may have opened its thought.

        Raises:
            ChatError: the turn ended and does not close that thought.
        """
        asked, text = self.pieces(before, True, arguments), turns[-1]["content"]
        opened = OPENED.search(_joined(asked))
        if opened and ended(turns[-1]) and CLOSED not in text:
            instead = (
                "set the template argument enable_thinking to false" if "enable_thinking" in self.variables else "use another template"
            )
            raise ChatError(
                f"the chat template in {self.folder} asks for an answer with {opened[0]!r}, and the turn {text[:80]!r} has no {CLOSED!r}: "
                f"train on answers with thoughts, or {instead}"
            )
        if opened and text.lstrip().startswith("<think>"):
            text = text.lstrip().removeprefix("<think>").removeprefix(opened[1])
        return [*asked, (text + self.end, len(turns))]

    def _found(self, turns: Sequence[Turn], text: str, arguments: Arguments) -> Iterator[tuple[int, int, int]]:
        """(start, end, number) of the assistant's turns in a rendered text, up to and with the end-of-turn token; none of a turn before
        which something differs from its prompt."""
        token, number = self.end, 0
        for place, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            number += 1
            asked, _ = self._rendered(turns[:place], True, arguments)
            content, last = turn["content"].strip(), place == len(turns) - 1
            begin = text.find(content, len(asked)) + len(content) if last and content in text[len(asked) :] else len(asked)
            end = text.rfind(token) if last and "tool_calls" in turn else text.find(token, begin)  # the last turn may spell it out
            if text.startswith(asked) and end >= len(asked):
                yield len(asked), end + len(token), number

    def _rendered(self, turns: Sequence[Turn], ask: bool, arguments: Arguments) -> tuple[str, list[tuple[int, int]]]:
        """(text, spans that the template marks). Raises ChatError for a conversation that it does not render, or without a system turn."""
        text, spans = self._output(turns, ask, arguments)
        lost = next((turn["content"] for turn in turns[1:] if turn["role"] == "system" and turn["content"].strip() not in text), None)
        if lost is not None:
            raise ChatError(
                f"the chat template in {self.folder} leaves out a system turn that is not the first ({lost[:80]!r}): use another template, "
                "or `out_of_turn: {late_system: join}` where the rows are read"
            )
        first = turns[0] if turns else {}
        if first.get("role") == "system" and first["content"].strip() not in text:  # it may be a mode that is written otherwise
            other = {**first, "content": f"{first['content']} {OTHER}"}
            if self._output([other, *turns[1:]], ask, arguments)[0] == text:
                raise ChatError(
                    f"the chat template in {self.folder} leaves out the system turn ({first['content'][:80]!r}): use another template, "
                    "leave system turns out, or, if it is left out where the assistant begins, set `out_of_turn: {assistant_first: cut}` "
                    "where the rows are read"
                )
        return text, spans

    def _output(self, turns: Sequence[Turn], ask: bool, arguments: Arguments) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            (text,), spans = cast(Any, render_jinja_template)(
                conversations=[turns],
                chat_template=self.text,
                return_assistant_tokens_mask=self.marked,
                add_generation_prompt=ask,
                strftime_now=TODAY.strftime,
                **self._tokens,
                **arguments_of(arguments),
            )
        except Exception as error:  # a template is a program: it may raise anything
            begins = f"a conversation that begins with {str(turns[0]['content'])[:80]!r}" if turns else "no messages"
            raise ChatError(f"the chat template in {self.folder} does not render {begins}: {type(error).__name__}: {error}") from error
        return text, spans[0] if self.marked else []

    def refuse(self, messages: Sequence[Message], arguments: Arguments = None) -> None:
        """Reject control tokens in messages and arguments, which would forge turns, and arguments that the template ignores."""
        unread = sorted(arguments.keys() - self.variables) if arguments else []
        if unread:
            raise ChatError(
                f"the chat template in {self.folder} reads no template argument {', '.join(unread)}, which a row has (it reads "
                f"{', '.join(sorted(self.variables)) or 'none'}): leave the column out by `columns` of the source, or take a template that "
                "reads it"
            )
        self._refuse_tools(messages)
        texts = [(message["role"], message["content"]) for message in messages]
        texts += [(None, text) for text in texts_within(arguments)]
        for role, text in texts:
            if self.control.search(text):
                found = next(token for token in self._control if token in text)
                part = f"a message of role {role}" if role else "a template argument"
                raise ChatError(f"{part} spells out the control token {found!r} ({text[:80]!r}): drop such rows when the data is prepared")

    def _refuse_tools(self, messages: Sequence[Message]) -> None:
        """Reject calls and results if the template does not support them."""
        roles = {message["role"] for message in messages}
        for role, form, what in ((CALL, CALLS_OF_TOOLS, "calls of tools"), (RESULT, RESULTS_OF_TOOLS, "results of tools")):
            if role in roles and not form.search(self.text):
                raise ChatError(
                    f"the chat template in {self.folder} has no form for {what}, which a row has: take a template that has one "
                    "(docs/chat-templates.md), or leave such rows out"
                )

    def _refuse_other_prompt(self, same: bool) -> None:
        if not same:
            raise ChatError(
                f"the chat template in {self.folder} renders a prompt otherwise when an answer follows (it strips or adds text): "
                "use a template whose generation prompt is a prefix of the whole conversation"
            )

    def _refuse_lost(self, turns: Sequence[Turn], texts: Mapping[int, str], trained: Sequence[bool], last_turn: Sequence[Message]) -> None:
        """Reject trained turns that were not found in the rendered conversation."""
        if self.marked and len(texts) != len(turns):
            raise ChatError(
                f"the chat template in {self.folder} marks {len(texts)} stretches of a conversation with {len(turns)} "
                "turns of the assistant: put each turn between one `{% generation %}` and `{% endgeneration %}`"
            )
        for number, (turn, wanted) in enumerate(zip(turns, trained, strict=True), 1):
            last = number == len(turns) and bool(last_turn)
            if number not in texts and (wanted or last):
                remedy = "use another template" if last else "set `train_on: last_turn`"
                raise ChatError(
                    f"the chat template in {self.folder} renders what comes before turn {number} of the assistant "
                    f"({(turn['content'] or 'a call')[:80]!r}) otherwise once more follows, so that it would be trained in another context "
                    f"than it is asked for in: {remedy}"
                )

    def _refuse_changed(self, trained: Iterable[tuple[Turn, str]]) -> None:
        """Reject trained turns, each with its rendered text, of which the template drops a part, such as thoughts."""
        for turn, text in trained:
            parts = [turn["content"].strip(), *(call["function"]["name"] for call in turn.get("tool_calls", ()))]
            same = self.marked or "tool_calls" in turn or _bare(turn["content"] + self.end) == _bare(text)
            if not (same and all(part in text if self.marked else _bare(part) in _bare(text) for part in parts)):
                raise ChatError(
                    f"the chat template in {self.folder} leaves out part of what the assistant says ({turn['content'][:80]!r}), as some do "
                    "with thoughts, so it would be trained otherwise than it was said: set `train_on: last_turn` where it is an earlier "
                    "turn, else use a template that leaves it whole"
                )

    def _refuse_other_openings(
        self, messages: Sequence[Message], pieces: Sequence[Stretch], turns: Sequence[Turn], trained: Sequence[bool], arguments: Arguments
    ) -> None:
        """Reject trained turns that the template opens differently than its generation prompt."""
        begins = [place for place in range(1, len(messages)) if messages[place]["role"] in MARKED and messages[place - 1]["role"] == "user"]
        if not begins:  # no turn is one that a user asked for
            return
        end = begins[0]
        without, asked = (_joined(self.pieces(messages[:end], ask, arguments)) for ask in (False, True))
        opening = asked.removeprefix(without)  # it may depend on the system's text, but not on later turns
        places = [place for place, (_, number) in enumerate(pieces) if number]
        for place, turn, is_trained in zip(places, turns, trained, strict=True):
            if is_trained and not (pieces[place - 1][0] if place else "").endswith(opening):
                raise ChatError(
                    f"the chat template in {self.folder} asks for an answer with {opening!r}, and has something else before "
                    f"{turn['content'][:80]!r}, so that it would be trained in another context than it is asked for in: set "
                    "`train_on: last_turn`"
                )

    def _refuse_tools_elsewhere(
        self, messages: Sequence[Message], pieces: Sequence[Stretch], turns: Sequence[Turn], trained: Sequence[bool], arguments: Arguments
    ) -> None:
        """Reject templates that place tools only before the last question, if earlier turns are trained."""
        if OFFERED not in (arguments or {}):
            return
        roles = [message["role"] for message in messages]
        begins = [place for place, role in enumerate(roles) if role == "assistant" or (role == CALL and roles[place - 1] not in MARKED)]
        first = trained.index(True)
        asked = _joined(self.pieces(messages[: begins[first]], True, arguments))
        if not _joined(pieces).startswith(asked):
            raise ChatError(
                f"the chat template in {self.folder} has something else before an answer once more is asked, as some do that offer tools "
                f"before the last question alone, so that {(turns[first]['content'] or 'a call')[:80]!r} would be trained in another "
                "context than it is asked for in: set `train_on: last_turn`, or mark turns after the last question alone"
            )


def _joined(pieces: Iterable[Stretch]) -> str:
    return "".join(text for text, _ in pieces)


def _bare(text: str) -> str:
    """A text without what templates add to an answer or take from it."""
    return BETWEEN.sub("", text)


def variables_of(template: str) -> set[str]:
    """A template's arguments: variables that it reads and does not set, except those of every conversation.

    Raises:
        ChatError: it is not a valid template.
    """
    from jinja2 import TemplateError, TemplateSyntaxError, meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        environment = _compile_jinja_template(template).environment
        found = meta.find_undeclared_variables(environment.parse(template))
    except TemplateError as error:
        line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise ChatError(f"the chat template cannot be read{line}: {type(error).__name__}: {error}") from error
    return {name for name in found - environment.globals.keys() - GIVEN if not name.endswith("_token")}


def end_of_turn(template: str, special: Iterable[str] = ()) -> str | None:
    """The token with which a template ends the assistant's turns, of these or in a usual form; None if it is the tokenizer's EOS token, or
    was not found."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    content, eos = "what it says", "the EOS token"
    conversation = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": content}]
    try:
        (text,), _ = cast(Any, render_jinja_template)(conversations=[conversation], chat_template=template, bos_token="", eos_token=eos)
    except TemplateError:
        return None  # `Chat` reports the problem
    after = text.partition(content)[2].lstrip()
    known = [token for token in special if token and after.startswith(token)]
    found = CONTROL.match(after)
    return max(known, key=len) if known else found.group() if found else None
