"""Messages to token ids for one model folder; the only place that renders chat templates.

A conversation is rendered; the text is split where the assistant's turns begin and end, and each piece is tokenized separately without
further special tokens. So no token spans prompt and answer, the trainer sees the sampler's tokens, and an answer's end-of-turn token is
part of the answer, unless the answer was cut off.

Where a template does not mark turns with their ends (`{% generation %}`), a turn begins where the prompt for it ends: the messages before
it are rendered with the generation prompt, and must be a prefix of the whole. It ends with the end-of-turn token. A conversation is then
trained as the template writes it, for example with an empty thought, and an answer to a prompt as it was sampled.

Prompts equal those of vLLM's server, with one exception: an earlier answer that begins with whitespace keeps its own tokens, which a server
that receives text may merge with the template's.

Template arguments are values for further variables of a template, such as `enable_thinking`. Sampling and training use the same ones.

Templates receive calls and tools in OpenAI's form (`data/chat/tools.py`), as in servers, and always the same date, for equal tokens.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

from pedigree.configs.base.jinja import MARKS
from pedigree.configs.base.problems import PedigreeError
from pedigree.configs.methods.training import TrainOn
from pedigree.data.chat.tools import OFFERED, arguments_of, turns_of
from pedigree.data.host.process import uncollected
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
HALF_CHARACTER = "\ufffd"
"""Decoding of a character whose last bytes were cut off."""
Arguments = Mapping[str, Any] | None
"""Template variable → value."""
Turn = Mapping[str, Any]
"""A turn as returned by `turns_of`."""


class ChatError(PedigreeError):
    """A tokenizer, chat template or text cannot be trained on; the message has the reason and the remedy."""


class Piece(NamedTuple):
    """A part of a conversation that is tokenized separately."""

    text: str
    plain: bool
    """Whether control tokens in it are plain characters, since a model may output any text."""
    ends: bool
    """Whether the end-of-turn token follows."""
    trained: bool


class Chat:
    """Tokenizer and chat template of one model.

    Attributes:
        tokenizer: the transformers tokenizer.
        eos_id: the token that ends an answer.
        pad_id: padding token; differs from `eos_id` if the vocabulary allows it. Masks come from lengths, never from comparing ids.
    """

    def __init__(self, model_folder: Path) -> None:
        """Load and check the tokenizer of a Hugging Face folder.

        Raises:
            ChatError: there is no template, the assistant's turns cannot be found in what it renders or do not end, BOS is doubled, the
                tokens do not decode to the text, or tokenizing the pieces differs from tokenizing the whole.
        """
        with uncollected():
            from transformers import AutoTokenizer

        self.folder = Path(model_folder)
        tokenizer: Any = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        self.tokenizer: Any = tokenizer
        if not tokenizer.chat_template:
            raise ChatError(f"{self.folder} has no chat template: name one of Pedigree's as `chat_template` of its source_model stage")
        if tokenizer.eos_token_id is None:
            raise ChatError(f"the tokenizer in {self.folder} has no eos_token: name the token that ends a turn as eos_token")
        self.template: str = tokenizer.chat_template
        self.eos_id: int = tokenizer.eos_token_id
        candidates = [tokenizer.pad_token_id, tokenizer.unk_token_id, *sorted(tokenizer.all_special_ids)]
        self.pad_id = next((token for token in candidates if token is not None and token != self.eos_id), self.eos_id)
        self._control = sorted({str(added) for added in tokenizer.added_tokens_decoder.values() if added.special})
        self._any_control = re.compile("|".join(map(re.escape, self._control)) or "(?!)")
        self._named: dict[str, Any] = tokenizer.special_tokens_map  # the tokenizer rebuilds it at each call
        self._check()

    @property
    def highest_id(self) -> int:
        """Highest token id. Scans the whole vocabulary."""
        return max(self.tokenizer.get_vocab().values())

    @cached_property
    def variables(self) -> set[str]:
        """Template arguments that a row may have."""
        return variables_of(self.template)

    def prompt(self, messages: Sequence[Message], arguments: Arguments = None) -> list[int]:
        """Ids of a prompt, ending where the assistant's answer begins; see `prompt_pieces`."""
        return [token for piece in self.prompt_pieces(messages, arguments) for token in self.ids(piece)]

    def prompt_pieces(self, messages: Sequence[Message], arguments: Arguments = None) -> list[Piece]:
        """The pieces of a prompt.

        Raises:
            ChatError: a message contains a control token, or the template does not read an argument or does not support tools.
        """
        self._refuse(messages, arguments)
        return [self._piece(*piece, has_calls(messages)) for piece in self._pieces(messages, ask=True, arguments=arguments)]

    def prefilled(self, messages: Sequence[Message], beginning: str) -> list[int]:
        """Ids of a prompt followed by the `beginning` of the assistant's answer.

        Raises:
            ChatError: a message or the beginning contains a control token.
        """
        self._refuse([{"role": "assistant", "content": beginning}])
        return [*self.prompt(messages), *self.response_ids(beginning)]

    def following(self, messages: Sequence[Message], text: str, said: Sequence[Message], arguments: Arguments = None) -> list[int]:
        """Ids of what the template puts after the answer `text` to `messages`, whose tokens end with the end-of-turn token: its own
        separators, the messages `said`, and the beginning of the next answer.

        Raises:
            ChatError: the template renders what is there already otherwise once more follows; or as in `prompt`.
        """
        self._refuse(said, arguments)
        answer: Message = {"role": "assistant", "content": text}
        asked, pieces = (self._pieces(some, True, arguments) for some in (messages, [*messages, answer, *said]))
        turns = sum(turn["role"] == "assistant" for turn in turns_of([*messages, answer]))
        last = next((place for place, (_, number) in enumerate(pieces) if number == turns), 0)
        before, after = ("".join(piece for piece, _ in part) for part in (pieces[:last], pieces[last + 1 :]))
        if before != "".join(piece for piece, _ in asked) or _bare(pieces[last][0]) != _bare(text + self._named["eos_token"]):
            raise ChatError(
                f"the chat template in {self.folder} renders a conversation otherwise once more follows, as some do that drop earlier "
                f"thoughts or move the system's text (before or in the answer {text[:80]!r}): use a template that only adds to it, or "
                "answers without thoughts"
            )
        return self.text_ids(after, False)

    def response_ids(self, text: str) -> list[int]:
        """Ids of an assistant's text without end-of-turn token; control tokens in it are plain characters."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def plain(self, text: str) -> list[int]:
        """Ids of a text without chat template, including tokens such as BOS that the tokenizer adds.

        Raises:
            ChatError: the text contains a control token.
        """
        self._refuse([{"role": "user", "content": text}])
        return self.tokenizer(text)["input_ids"]

    def training(
        self, messages: Sequence[Message], train_on: TrainOn = "assistant", arguments: Arguments = None
    ) -> tuple[list[int], list[bool]]:
        """(ids of a whole conversation, training mask); see `conversation`."""
        ids: list[int] = []
        mask: list[bool] = []
        for piece in self.conversation(messages, train_on, arguments):
            tokens = self.ids(piece)
            ids += tokens
            mask += [piece.trained] * len(tokens)
        return ids, mask

    def conversation(
        self, messages: Sequence[Message], train_on: TrainOn = "assistant", arguments: Arguments = None, *, as_asked: bool = True
    ) -> list[Piece]:
        """The pieces of a whole conversation; an assistant turn is its text, its calls and its end-of-turn token.

        A last turn that was cut off has no end-of-turn token, and nothing follows it. Control tokens in a final answer become plain
        characters, as in `answered`.

        `as_asked`: if only the last turn is trained, and the template renders a finished turn differently from the prompt for it, the turn
        continues the prompt, as when it is sampled.

        Raises:
            ChatError: another message contains a control token; the template does not read an argument, does not support tools, does not
                mark exactly one span per assistant turn, renders what comes before a trained turn differently once more follows, drops part
                of a trained turn, opens a trained turn differently than its generation prompt, or places the row's tools elsewhere.
        """
        before, last_turn = divided(messages)
        self._refuse(before, arguments)
        self._refuse_tools(last_turn)
        turns = [turn for turn in turns_of(messages) if turn["role"] == "assistant"]
        pieces = self._pieces(messages, ask=False, arguments=arguments)
        said = {number: text for text, number in pieces if number}
        trained = trained_turns(turns, train_on)
        lost = last_turn and len(turns) not in said and "tool_calls" not in turns[-1]
        if lost and as_asked and not self._marked and not any(trained[:-1]):
            pieces = self._continued(before, turns, arguments)
            said = {number: text for text, number in pieces if number}
        self._refuse_lost(turns, said, trained, last_turn)
        self._refuse_changed((turn, said.get(number, "")) for number, turn in enumerate(turns, 1) if trained[number - 1])
        if any(trained[:-1]) and self._marked:
            self._refuse_other_openings(messages, pieces, turns, trained, arguments)
            self._refuse_tools_elsewhere(messages, pieces, turns, trained, arguments)
        whole = not turns or ended(turns[-1])
        last = max((place for place, (_, said) in enumerate(pieces) if said), default=-1)
        called = has_calls(messages)
        plain = last if called and last_turn and self._spells_control(turns[-1], pieces[last][0]) else None
        return [
            self._piece(text, number, called and place != plain, whole or place != last, [train_on == "all", *trained][number])
            for place, (text, number) in enumerate(pieces if whole else pieces[: last + 1])
        ]

    def answer(
        self, messages: Sequence[Message], text: str, *, ended: bool = True, arguments: Arguments = None, scored: bool = False
    ) -> tuple[list[int], list[int]]:
        """(ids of the prompt, ids of `text` as its answer); see `answered` and `scored`."""
        prompt: list[int] = []
        answer: list[int] = []
        for piece in (self.scored if scored else self.answered)(messages, text, ended=ended, arguments=arguments):
            (answer if piece.trained else prompt).extend(self.ids(piece))
        return prompt, answer

    def answered(self, messages: Sequence[Message], text: str, *, ended: bool = True, arguments: Arguments = None) -> list[Piece]:
        """The pieces of a prompt, followed by `text` as its answer, with the end-of-turn token if it `ended`.

        Control tokens in `text` become plain characters, because sampled texts may contain anything.

        Raises:
            ChatError: the template renders the prompt differently once an answer follows, so that training and sampling contexts would
                differ; it drops part of the answer; or as in `prompt`.
        """
        self._refuse(messages, arguments)
        asked = self._pieces(messages, ask=True, arguments=arguments)
        answer: Message = {"role": "assistant", "content": text}
        pieces = self._pieces([*messages, answer], ask=False, arguments=arguments)
        if not self._marked:
            whole, context = ("".join(piece for piece, _ in part) for part in (pieces, asked))
            self._refuse_other_prompt(_bare(whole).startswith(_bare(context)))
            pieces = [*asked, (f"{text}{self._named['eos_token']}", 1)]
        last = max(place for place, (_, said) in enumerate(pieces) if said)
        self._refuse_other_prompt("".join(piece for piece, _ in pieces[:last]) == "".join(piece for piece, _ in asked))
        self._refuse_changed([(answer, pieces[last][0])])
        prompt = [self._piece(part, said, has_calls(messages)) for part, said in asked]
        return [*prompt, self._piece(*pieces[last], called=False, ended=ended, trained=True)]

    def scored(self, messages: Sequence[Message], text: str, *, ended: bool = True, arguments: Arguments = None) -> list[Piece]:
        """The pieces of a prompt and its answer as `apply_chat_template` renders and tokenizes the whole, at whose last token a score is
        read. All from the answer on counts as trained.

        An answer that did not end is cut after its text. Control tokens in `text` become plain characters, as in `answered`.

        Raises:
            ChatError: as in `conversation`, for `train_on: last_turn`.
        """
        answer: Message = {"role": "assistant", "content": text, "finish_reason": "stop" if ended else "length"}
        pieces = self.conversation([*messages, answer], "last_turn", arguments, as_asked=False)
        last = next(place for place, piece in enumerate(pieces) if piece.trained)
        if self._any_control.search(text):
            return [*pieces[:last], *(piece._replace(trained=True) for piece in pieces[last:])]
        whole = "".join(piece.text + self._named["eos_token"] * piece.ends for piece in pieces)
        begin = len(whole) - sum(len(piece.text + self._named["eos_token"] * piece.ends) for piece in pieces[last:])
        if whole[begin : begin + 1].isspace():  # a token may span the border
            ids = self.text_ids(whole, False)
            places = range(begin, -1, -1)
            begin = next(place for place in places if self.text_ids(whole[:place], False) + self.text_ids(whole[place:], False) == ids)
        return [Piece(whole[:begin], False, False, False), Piece(whole[begin:], False, False, True)]

    def ids(self, piece: Piece) -> list[int]:
        """The tokens of one piece."""
        ids = self.text_ids(piece.text, piece.plain)
        return [*ids, self.eos_id] if piece.ends else ids

    def text_ids(self, text: str, plain: bool) -> list[int]:
        """The tokens of a bare text; `plain`: treat control tokens in it as plain characters."""
        split = {"split_special_tokens": True} if plain else {}
        return list(self.tokenizer(text, add_special_tokens=False, **split)["input_ids"])

    def bulk_ids(self, pieces: Iterable[Piece]) -> dict[Piece, list[int]]:
        """`text_ids` of many pieces, by one call of the tokenizer."""
        distinct = dict.fromkeys(pieces)
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:  # a tokenizer in Python
            return {piece: self.text_ids(piece.text, piece.plain) for piece in distinct}
        found: dict[Piece, list[int]] = {}
        for plain in (False, True):
            some = [piece for piece in distinct if piece.plain == plain]
            backend.encode_special_tokens = plain  # transformers sets it before each of its own calls
            encodings = backend.encode_batch_fast([piece.text for piece in some], add_special_tokens=False)
            found |= {piece: encoding.ids for piece, encoding in zip(some, encodings, strict=True)}
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _pieces(self, messages: Sequence[Message], ask: bool, arguments: Arguments = None) -> list[tuple[str, int]]:
        """The rendered text, split into (text, number of the assistant's turn, or 0)."""
        turns = turns_of(messages)
        text, spans = self._rendered(turns, ask, arguments)
        marked = ((start, end, number) for number, (start, end) in enumerate(spans, 1))
        found = marked if self._marked else self._found(turns, text, arguments)
        pieces: list[tuple[str, int]] = []
        cursor = 0
        for start, end, number in found:
            pieces += [(text[cursor:start], 0), (text[start:end], number)]
            cursor = end
        return [(piece, number) for piece, number in [*pieces, (text[cursor:], 0)] if piece]

    def _continued(self, before: Sequence[Message], turns: Sequence[Turn], arguments: Arguments) -> list[tuple[str, int]]:
        """As `_pieces`, the last turn directly after its prompt, which may have opened its thought.

        Raises:
            ChatError: the turn ended and does not close that thought.
        """
        asked, text = self._pieces(before, True, arguments), turns[-1]["content"]
        opened = OPENED.search("".join(piece for piece, _ in asked))
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
        return [*asked, (text + self._named["eos_token"], len(turns))]

    def _found(self, turns: Sequence[Turn], text: str, arguments: Arguments) -> Iterator[tuple[int, int, int]]:
        """(start, end, number) of the assistant's turns in a rendered text, up to and with the end-of-turn token; none of a turn before
        which something differs from its prompt."""
        token, number = self._named["eos_token"], 0
        for place, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            number += 1
            asked, _ = self._rendered(turns[:place], True, arguments)
            said, last = turn["content"].strip(), place == len(turns) - 1
            begin = text.find(said, len(asked)) + len(said) if last and said in text[len(asked) :] else len(asked)
            end = text.rfind(token) if last and "tool_calls" in turn else text.find(token, begin)  # the last turn may spell it out
            if text.startswith(asked) and end >= len(asked):
                yield len(asked), end + len(token), number

    def _rendered(self, turns: Sequence[Turn], ask: bool, arguments: Arguments) -> tuple[str, list[tuple[int, int]]]:
        """(text, spans that the template marks)."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            (text,), spans = cast(Any, render_jinja_template)(
                conversations=[turns],
                chat_template=self.template,
                return_assistant_tokens_mask=self._marked,
                add_generation_prompt=ask,
                strftime_now=TODAY.strftime,
                **self._named,
                **arguments_of(arguments),
            )
        except Exception as error:  # a template is a program: it may raise anything
            begins = f"a conversation that begins with {str(turns[0]['content'])[:80]!r}" if turns else "no messages"
            raise ChatError(f"the chat template in {self.folder} does not render {begins}: {type(error).__name__}: {error}") from error
        lost = next((turn["content"] for turn in turns[1:] if turn["role"] == "system" and turn["content"].strip() not in text), None)
        if lost is not None:
            raise ChatError(
                f"the chat template in {self.folder} leaves out a system turn that is not the first ({lost[:80]!r}): use another template, "
                "or `out_of_turn: {late_system: join}` where the rows are read"
            )
        return text, spans[0] if self._marked else []

    def _piece(self, text: str, said: int, called: bool, ended: bool = True, trained: bool = False) -> Piece:
        """In the assistant's text, only the end of turn is a control token; if it may have `called` tools, also the tokens around
        calls."""
        if said and text.endswith(self._named["eos_token"]):
            body = text.removesuffix(self._named["eos_token"])
            return Piece(body if ended else body.rstrip(HALF_CHARACTER), not called, ended, trained)
        return Piece(text, False, False, trained)

    def _spells_control(self, turn: Turn, rendered: str) -> bool:
        """Whether the assistant's last turn contains control tokens as text.

        Raises:
            ChatError: the template also writes control tokens in that turn, so that the two cannot be distinguished.
        """
        texts = [turn["content"], *texts_within(turn.get("tool_calls", []))]
        spelled = [token for text in texts for token in self._any_control.findall(text)]
        if spelled and len(spelled) < len(self._any_control.findall(rendered.removesuffix(self._named["eos_token"]))):
            raise ChatError(
                f"a turn with a call spells out the control token {spelled[0]!r}, and the chat template in {self.folder} writes some of "
                "its own around calls: drop such rows when the data is prepared"
            )
        return bool(spelled)

    def _refuse(self, messages: Sequence[Message], arguments: Arguments = None) -> None:
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
            if self._any_control.search(text):
                found = next(token for token in self._control if token in text)
                said = f"a message of role {role}" if role else "a template argument"
                raise ChatError(f"{said} spells out the control token {found!r} ({text[:80]!r}): drop such rows when the data is prepared")

    def _refuse_tools(self, messages: Sequence[Message]) -> None:
        """Reject calls and results if the template does not support them."""
        roles = {message["role"] for message in messages}
        for role, form, what in ((CALL, CALLS_OF_TOOLS, "calls of tools"), (RESULT, RESULTS_OF_TOOLS, "results of tools")):
            if role in roles and not form.search(self.template):
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

    def _refuse_lost(self, turns: Sequence[Turn], said: Mapping[int, str], trained: Sequence[bool], last_turn: Sequence[Message]) -> None:
        """Reject trained turns that were not found in the rendered conversation."""
        if self._marked and len(said) != len(turns):
            raise ChatError(
                f"the chat template in {self.folder} marks {len(said)} stretches of a conversation with {len(turns)} "
                "turns of the assistant: put each turn between one `{% generation %}` and `{% endgeneration %}`"
            )
        for number, (turn, wanted) in enumerate(zip(turns, trained, strict=True), 1):
            last = number == len(turns) and bool(last_turn)
            if number not in said and (wanted or last):
                remedy = "use another template" if last else "set `train_on: last_turn`"
                raise ChatError(
                    f"the chat template in {self.folder} renders what comes before turn {number} of the assistant "
                    f"({(turn['content'] or 'a call')[:80]!r}) otherwise once more follows, so that it would be trained in another context "
                    f"than it is asked for in: {remedy}"
                )

    def _refuse_changed(self, trained: Iterable[tuple[Turn, str]]) -> None:
        """Reject trained turns, each with its rendered text, of which the template drops a part, such as thoughts."""
        for turn, text in trained:
            said = [turn["content"].strip(), *(call["function"]["name"] for call in turn.get("tool_calls", ()))]
            same = self._marked or "tool_calls" in turn or _bare(turn["content"] + self._named["eos_token"]) == _bare(text)
            if not (same and all(part in text if self._marked else _bare(part) in _bare(text) for part in said)):
                raise ChatError(
                    f"the chat template in {self.folder} leaves out part of what the assistant says ({turn['content'][:80]!r}), as some do "
                    "with thoughts, so it would be trained otherwise than it was said: set `train_on: last_turn` where it is an earlier "
                    "turn, else use a template that leaves it whole"
                )

    def _refuse_other_openings(
        self,
        messages: Sequence[Message],
        pieces: Sequence[tuple[str, int]],
        turns: Sequence[Turn],
        trained: Sequence[bool],
        arguments: Arguments,
    ) -> None:
        """Reject trained turns that the template opens differently than its generation prompt."""
        begins = [place for place in range(1, len(messages)) if messages[place]["role"] in MARKED and messages[place - 1]["role"] == "user"]
        if not begins:  # no turn is one that a user asked for
            return
        end = begins[0]
        without, asked = ("".join(text for text, _ in self._pieces(messages[:end], ask, arguments)) for ask in (False, True))
        opening = asked.removeprefix(without)  # it may depend on the system's text, but not on later turns
        places = [place for place, (_, said) in enumerate(pieces) if said]
        for place, turn, is_trained in zip(places, turns, trained, strict=True):
            if is_trained and not (pieces[place - 1][0] if place else "").endswith(opening):
                raise ChatError(
                    f"the chat template in {self.folder} asks for an answer with {opening!r}, and has something else before "
                    f"{turn['content'][:80]!r}, so that it would be trained in another context than it is asked for in: set "
                    "`train_on: last_turn`"
                )

    def _refuse_tools_elsewhere(
        self,
        messages: Sequence[Message],
        pieces: Sequence[tuple[str, int]],
        turns: Sequence[Turn],
        trained: Sequence[bool],
        arguments: Arguments,
    ) -> None:
        """Reject templates that place tools only before the last question, if earlier turns are trained."""
        if OFFERED not in (arguments or {}):
            return
        roles = [message["role"] for message in messages]
        begins = [place for place, role in enumerate(roles) if role == "assistant" or (role == CALL and roles[place - 1] not in MARKED)]
        first = trained.index(True)
        asked = "".join(text for text, _ in self._pieces(messages[: begins[first]], True, arguments))
        if not "".join(text for text, _ in pieces).startswith(asked):
            raise ChatError(
                f"the chat template in {self.folder} has something else before an answer once more is asked, as some do that offer tools "
                f"before the last question alone, so that {(turns[first]['content'] or 'a call')[:80]!r} would be trained in another "
                "context than it is asked for in: set `train_on: last_turn`, or mark turns after the last question alone"
            )

    def _check(self) -> None:
        self._marked = MARKS.search(self.template) is not None
        text, spans = self._rendered(PROBE, False, None)
        end_of_turn = self._named["eos_token"]
        self._marked = [text[start:end] for start, end in spans] == [turn["content"] + end_of_turn for turn in PROBE[1::2]]
        whole = self._rendered(PROBE[:3], True, None)[0] + PROBE[3]["content"] + end_of_turn
        if not _bare(text).startswith(_bare(whole)):
            same = next((place for place, (one, other) in enumerate(zip(text, whole, strict=False)) if one != other), len(text))
            shown = slice(max(same - 20, 0), same + 60)
            raise ChatError(
                f"the chat template in {self.folder} writes a conversation otherwise than the prompt for turn 2 of the assistant, its text "
                f"and the end-of-turn token {end_of_turn!r}: {text[shown]!r} instead of {whole[shown]!r}; use another template"
            )
        written = (PROBE[1]["content"] + end_of_turn, 1) in self._pieces(PROBE[:3], ask=True)
        asked = PROBE[: 3 if written else 1]  # an empty thought before the text may begin with whitespace
        pieces = self.answered(asked, PROBE[3]["content"])
        ids = [token for piece in pieces for token in self.ids(piece)]
        whole = "".join(piece.text + end_of_turn * piece.ends for piece in pieces)
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise ChatError(f"the chat template in {self.folder} begins with two BOS tokens: remove one from the template")
        read = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if "".join(read.split()).lower() != "".join(whole.split()).lower():  # some tokenizers read small letters alone
            raise ChatError(f"the tokenizer in {self.folder} reads {whole!r} as {read!r}: its files are incomplete, or another model's")
        if ids != self.tokenizer(whole, add_special_tokens=False)["input_ids"]:
            raise ChatError(
                f"the tokenizer in {self.folder} gives other tokens for a conversation cut at its turns than for the whole (a prefix "
                "space, or a token across the boundary): use a tokenizer without prefix space and a template that ends turns with "
                "special tokens"
            )


def _bare(text: str) -> str:
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

    said, eos = "what it says", "the EOS token"
    conversation = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": said}]
    try:
        (text,), _ = cast(Any, render_jinja_template)(conversations=[conversation], chat_template=template, bos_token="", eos_token=eos)
    except TemplateError:
        return None  # `Chat` reports the problem
    after = text.partition(said)[2].lstrip()
    known = [token for token in special if token and after.startswith(token)]
    found = CONTROL.match(after)
    return max(known, key=len) if known else found.group() if found else None


def has_calls(messages: Sequence[Message]) -> bool:
    """Whether tools are called; templates such as Mistral's write control tokens around calls."""
    return any(message["role"] == CALL for message in messages)


def trained_turns(turns: Sequence[Turn], train_on: TrainOn) -> list[bool]:
    """Which of the assistant's turns are trained. With `marked`, turns without a mark are not."""
    match train_on:
        case "assistant" | "all":
            return [True] * len(turns)
        case "last_turn":
            return [number == len(turns) - 1 for number in range(len(turns))]
        case "marked":
            return [turn.get("train", False) for turn in turns]
