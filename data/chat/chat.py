"""Messages to token ids, for one model folder: the only place that renders chat templates.

A conversation is rendered to text once; the text is cut where the assistant's turns begin and end (`{% generation %}`), and
each piece is tokenised by itself without further special tokens. So no token straddles the border between prompt and answer,
what a trainer sees is what the sampler saw, and an answer's end-of-turn token is part of the answer, unless the answer was cut off.

A prompt is what vLLM's server makes of the same messages, with one exception: an earlier answer that begins with white space keeps the
tokens that it was given with, where a server that gets it as text may merge them with the template's.

Template arguments are values for variables that a template reads besides the messages, such as `enable_thinking`. An answer is asked for
and trained under the same ones.

Templates are given calls and tools as OpenAI has them (`data/chat/tools.py`), as servers give them.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

from configs.base.problems import PedigreeError
from configs.methods.training import TrainOn
from data.chat.tools import OFFERED, arguments_of, turns_of
from data.host.process import uncollected
from data.records.messages import CALL, MARKED, RESULT, divided
from data.records.records import Message, ended, texts_within

PROBE: list[Message] = [
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
]

CONTROL = re.compile(r"<\|\w+\|>|<bos>|<(?:start|end)_of_turn>|</?s>|\[/?(?:INST|AVAILABLE_TOOLS|TOOL_RESULTS)\]|\[TOOL_CALLS\]")
"""How templates write control tokens: most of them, Gemma's, Mistral's. Where turns end with the tokenizer's EOS token these are plain
text, as in Tülu's template."""
GIVEN = {"messages", "add_generation_prompt"}
"""What every template is given, besides names of tokens such as `eos_token`."""
CALLS_OF_TOOLS, RESULTS_OF_TOOLS = re.compile(r"\btool_calls\b"), re.compile(rf"['\"]{RESULT}['\"]")
"""What a template reads that has a form for them. Others leave them out without a word, or write them as nobody has been taught."""
HALF_CHARACTER = "\ufffd"
"""What a character is decoded to whose last bytes were cut off."""


Arguments = Mapping[str, Any] | None
"""Name of a variable of the template → its value."""
Turn = Mapping[str, Any]
"""One as `turns_of` makes it."""


class ChatError(PedigreeError):
    """A tokenizer, chat template or text that cannot be trained on as it is; the message says why and what to do."""


class Piece(NamedTuple):
    """A stretch of a conversation that is tokenised by itself."""

    text: str
    plain: bool
    """Control tokens in it are plain characters: a model may say anything."""
    ends: bool
    """The end-of-turn token comes after it."""
    trained: bool


class Chat:
    """Tokenizer and chat template of one model.

    Attributes:
        tokenizer: the transformers tokenizer.
        eos_id: the token that ends an answer.
        pad_id: fills batches; another token than `eos_id` wherever the vocabulary has one.
    """

    def __init__(self, model_folder: Path) -> None:
        """Loads and checks the tokenizer of a Hugging Face folder.

        Raises:
            ChatError: no template, a template that does not mark or does not end the assistant's turns, a doubled BOS, or a
                tokenizer that gives other tokens for the pieces than for the whole.
        """
        with uncollected():
            from transformers import AutoTokenizer

        self.folder = Path(model_folder)
        tokenizer: Any = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        self.tokenizer: Any = tokenizer
        if not tokenizer.chat_template:
            raise ChatError(f"{self.folder} has no chat template: source the model with `chat_template: chatml`")
        if tokenizer.eos_token_id is None:
            raise ChatError(f"the tokenizer in {self.folder} has no eos_token: name the token that ends a turn as eos_token")
        self.template: str = tokenizer.chat_template
        self.eos_id: int = tokenizer.eos_token_id
        self.pad_id = self._pad()
        self._control = sorted({str(added) for added in tokenizer.added_tokens_decoder.values() if added.special})
        self._any_control = re.compile("|".join(map(re.escape, self._control)) or "(?!)")
        self._named: dict[str, Any] = tokenizer.special_tokens_map  # the tokenizer makes it anew at each call
        self._check()

    @property
    def highest_id(self) -> int:
        """No token has a higher one. Looks through the whole vocabulary."""
        return max(self.tokenizer.get_vocab().values())

    @cached_property
    def variables(self) -> set[str]:
        """The template arguments that a row may have."""
        return variables_of(self.template)

    def prompt(self, messages: Sequence[Message], arguments: Arguments = None) -> list[int]:
        """Ids of a conversation that an answer is asked for, by the user's turn or a result, up to where the assistant begins to speak: see
        `asked`."""
        return [token for piece in self.asked(messages, arguments) for token in self.ids(piece)]

    def asked(self, messages: Sequence[Message], arguments: Arguments = None) -> list[Piece]:
        """The pieces of a prompt.

        Raises:
            ChatError: a message spells out a control token, the template does not read an argument, or has no form for tools.
        """
        self._refuse(messages, arguments)
        return [self._piece(*piece, has_calls(messages)) for piece in self._pieces(messages, ask=True, arguments=arguments)]

    def begun(self, messages: Sequence[Message], beginning: str) -> list[int]:
        """Ids of a conversation up to where the assistant has said `beginning`, and goes on.

        Raises:
            ChatError: a message or the beginning spells out a control token.
        """
        self._refuse([{"role": "assistant", "content": beginning}])
        return [*self.prompt(messages), *self.said(beginning)]

    def said(self, text: str) -> list[int]:
        """Ids of a text as the assistant says it, without the end of its turn; control tokens in it are plain characters."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def plain(self, text: str) -> list[int]:
        """Ids of a text without a chat template, with what the tokenizer puts before every text.

        Raises:
            ChatError: the text spells out a control token.
        """
        self._refuse([{"role": "user", "content": text}])
        return self.tokenizer(text)["input_ids"]

    def training(
        self, messages: Sequence[Message], train_on: TrainOn = "assistant", arguments: Arguments = None
    ) -> tuple[list[int], list[bool]]:
        """Ids of a whole conversation, and which of them are trained: see `conversation`."""
        ids: list[int] = []
        mask: list[bool] = []
        for piece in self.conversation(messages, train_on, arguments):
            tokens = self.ids(piece)
            ids += tokens
            mask += [piece.trained] * len(tokens)
        return ids, mask

    def conversation(self, messages: Sequence[Message], train_on: TrainOn = "assistant", arguments: Arguments = None) -> list[Piece]:
        """The pieces of a whole conversation; a turn of the assistant is its text, its calls and its end-of-turn token.

        A last turn that was cut off has no end-of-turn token, and nothing comes after it.

        Control tokens spelled out in an answer that comes last become plain characters, as in `answered`.

        Raises:
            ChatError: another message spells out a control token, the template does not read an argument, has no form for tools, does not
                mark one stretch for each of the assistant's turns, leaves out part of a turn that is to be trained, begins it otherwise
                than it asks for it, or offers the row's tools elsewhere.
        """
        before, last_turn = divided(messages)
        self._refuse(before, arguments)
        self._refuse_tools(last_turn)
        turns = [turn for turn in turns_of(messages) if turn["role"] == "assistant"]
        pieces = self._pieces(messages, ask=False, arguments=arguments)
        if sum(said for _, said in pieces) != len(turns):
            raise ChatError(
                f"the chat template in {self.folder} marks {sum(said for _, said in pieces)} stretches of a conversation with {len(turns)} "
                "turns of the assistant: put each turn between one `{% generation %}` and `{% endgeneration %}`"
            )
        self._refuse_changed(turns, [text for text, said in pieces if said], train_on)
        if any(trained_turns(turns, train_on)[:-1]):
            self._refuse_other_openings(messages, pieces, train_on, arguments)
            self._refuse_tools_elsewhere(messages, pieces, train_on, arguments)
        trained = iter(trained_turns(turns, train_on))
        whole = not turns or ended(turns[-1])
        last = max((place for place, (_, said) in enumerate(pieces) if said), default=-1)
        called = has_calls(messages)
        plain = last if called and last_turn and self._spells_control(turns[-1], pieces[last][0]) else None
        return [
            self._piece(text, said, called and place != plain, whole or place != last, next(trained) if said else train_on == "all")
            for place, (text, said) in enumerate(pieces if whole else pieces[: last + 1])
        ]

    def answer(
        self, messages: Sequence[Message], text: str, *, ended: bool = True, arguments: Arguments = None
    ) -> tuple[list[int], list[int]]:
        """(ids of the prompt, ids of `text` as its answer): see `answered`."""
        *prompt, answer = self.answered(messages, text, ended=ended, arguments=arguments)
        return [token for piece in prompt for token in self.ids(piece)], self.ids(answer)

    def answered(self, messages: Sequence[Message], text: str, *, ended: bool = True, arguments: Arguments = None) -> list[Piece]:
        """The pieces of a prompt, and last `text` as its answer with the end-of-turn token; without it where the answer has not ended.

        Control tokens spelled out in `text` (a sampled text may hold any characters) become plain characters.

        Raises:
            ChatError: the template renders the prompt otherwise once an answer follows, so the answer would be trained in
                another context than it is asked for in; it leaves out part of the answer; or as `prompt` says.
        """
        self._refuse(messages, arguments)
        asked = self._pieces(messages, ask=True, arguments=arguments)
        answer: Message = {"role": "assistant", "content": text}
        pieces = self._pieces([*messages, answer], ask=False, arguments=arguments)
        last = max(place for place, (_, said) in enumerate(pieces) if said)
        if "".join(piece for piece, _ in pieces[:last]) != "".join(piece for piece, _ in asked):
            raise ChatError(
                f"the chat template in {self.folder} renders a prompt otherwise when an answer follows (it strips or adds text): "
                "use a template whose generation prompt is a prefix of the whole conversation"
            )
        self._refuse_changed([answer], [pieces[last][0]], "last_turn")
        prompt = [self._piece(*piece, has_calls(messages)) for piece in asked]
        return [*prompt, self._piece(*pieces[last], called=False, ended=ended, trained=True)]

    def ids(self, piece: Piece) -> list[int]:
        """The tokens of one piece."""
        ids = self.text_ids(piece.text, piece.plain)
        return [*ids, self.eos_id] if piece.ends else ids

    def text_ids(self, text: str, plain: bool) -> list[int]:
        """The tokens of a text, with nothing around it; `plain`: control tokens in it are plain characters."""
        split = {"split_special_tokens": True} if plain else {}
        return list(self.tokenizer(text, add_special_tokens=False, **split)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _pieces(self, messages: Sequence[Message], ask: bool, arguments: Arguments = None) -> list[tuple[str, bool]]:
        """The rendered text, cut into (text, said by the assistant)."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered, spans = cast(Any, render_jinja_template)(
                conversations=[turns_of(messages)],
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                add_generation_prompt=ask,
                **self._named,
                **arguments_of(arguments),
            )
        except Exception as error:  # a template is a program: it may raise anything
            begins = f"a conversation that begins with {messages[0]['content'][:80]!r}" if messages else "no messages"
            raise ChatError(f"the chat template in {self.folder} does not render {begins}: {type(error).__name__}: {error}") from error
        text, cursor = rendered[0], 0
        pieces: list[tuple[str, bool]] = []
        for start, end in spans[0]:
            pieces += [(text[cursor:start], False), (text[start:end], True)]
            cursor = end
        pieces.append((text[cursor:], False))
        return [(piece, said) for piece, said in pieces if piece]

    def _piece(self, text: str, said: bool, called: bool, ended: bool = True, trained: bool = False) -> Piece:
        """In what the assistant said, only the end of the turn is a control token; where it may have `called`, also what a template writes
        around calls."""
        if said and text.endswith(self._named["eos_token"]):
            body = text.removesuffix(self._named["eos_token"])
            return Piece(body if ended else body.rstrip(HALF_CHARACTER), not called, ended, trained)
        return Piece(text, False, False, trained)

    def _spells_control(self, turn: Turn, rendered: str) -> bool:
        """Whether the assistant spells out control tokens in its last turn.

        Raises:
            ChatError: and the template writes some of its own in that turn, from which they could not be told.
        """
        said = [turn["content"], *texts_within(turn.get("tool_calls", []))]
        spelled = [token for text in said for token in self._any_control.findall(text)]
        if spelled and len(spelled) < len(self._any_control.findall(rendered.removesuffix(self._named["eos_token"]))):
            raise ChatError(
                f"a turn with a call spells out the control token {spelled[0]!r}, and the chat template in {self.folder} writes some of "
                "its own around calls: drop such rows when the data is prepared"
            )
        return bool(spelled)

    def _refuse(self, messages: Sequence[Message], arguments: Arguments = None) -> None:
        """A control token written out in a message or an argument would forge turns; what a template does not read would have no effect."""
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
        """A template without a form for calls or results would leave them out, or write them as its model has never seen them."""
        roles = {message["role"] for message in messages}
        for role, form, what in ((CALL, CALLS_OF_TOOLS, "calls of tools"), (RESULT, RESULTS_OF_TOOLS, "results of tools")):
            if role in roles and not form.search(self.template):
                raise ChatError(
                    f"the chat template in {self.folder} has no form for {what}, which a row has: take a template that has one "
                    "(docs/recipes.md, Chat templates), or leave such rows out"
                )

    def _refuse_changed(self, turns: Sequence[Turn], rendered: Sequence[str], train_on: TrainOn) -> None:
        """A turn whose thoughts a template takes out would be trained as if it had been said without them."""
        for turn, text, trained in zip(turns, rendered, trained_turns(turns, train_on), strict=True):
            said = [turn["content"].strip(), *(call["function"]["name"] for call in turn.get("tool_calls", ()))]
            if trained and not all(part in text for part in said):
                raise ChatError(
                    f"the chat template in {self.folder} leaves out part of what the assistant says ({turn['content'][:80]!r}), as some do "
                    "with thoughts, so it would be trained otherwise than it was said: set `train_on: last_turn` where it is an earlier "
                    "turn, else use a template that leaves it whole"
                )

    def _refuse_other_openings(
        self, messages: Sequence[Message], pieces: Sequence[tuple[str, bool]], train_on: TrainOn, arguments: Arguments
    ) -> None:
        """A turn would be trained in another context than it is asked for in, where a template begins earlier turns in another way."""
        turns = [turn for turn in turns_of(messages) if turn["role"] == "assistant"]
        opening = self._opening(messages, arguments)
        places = [place for place, (_, said) in enumerate(pieces) if said]
        for place, turn, trained in zip(places, turns, trained_turns(turns, train_on), strict=True):
            if trained and not (pieces[place - 1][0] if place else "").endswith(opening):
                raise ChatError(
                    f"the chat template in {self.folder} asks for an answer with {opening!r}, and has something else before "
                    f"{turn['content'][:80]!r}, so that it would be trained in another context than it is asked for in: set "
                    "`train_on: last_turn`"
                )

    def _refuse_tools_elsewhere(
        self, messages: Sequence[Message], pieces: Sequence[tuple[str, bool]], train_on: TrainOn, arguments: Arguments
    ) -> None:
        """Calls would be trained where nothing is offered, by a template that offers tools before the last question alone."""
        if OFFERED not in (arguments or {}):
            return
        turns = [turn for turn in turns_of(messages) if turn["role"] == "assistant"]
        roles = [message["role"] for message in messages]
        begins = [place for place, role in enumerate(roles) if role in MARKED and (not place or roles[place - 1] not in MARKED)]
        first = trained_turns(turns, train_on).index(True)
        asked = "".join(text for text, _ in self._pieces(messages[: begins[first]], True, arguments))
        if not "".join(text for text, _ in pieces).startswith(asked):
            raise ChatError(
                f"the chat template in {self.folder} has something else before an answer once more is asked, as some do that offer tools "
                f"before the last question alone, so that {(turns[first]['content'] or 'a call')[:80]!r} would be trained in another "
                "context than it is asked for in: set `train_on: last_turn`, or mark turns after the last question alone"
            )

    def _opening(self, messages: Sequence[Message], arguments: Arguments) -> str:
        """What the template puts between a prompt and the answer that it asks for. A system's text may decide it, later turns do not."""
        end = next(place for place, message in enumerate(messages) if message["role"] in MARKED)
        told, asked = ("".join(text for text, _ in self._pieces(messages[:end], ask, arguments)) for ask in (False, True))
        return asked.removeprefix(told)

    def _pad(self) -> int:
        """Masks come from lengths, never from comparing ids with the pad, so a model whose only special is eos works too."""
        tokenizer = self.tokenizer
        candidates = [tokenizer.pad_token_id, tokenizer.unk_token_id, *sorted(tokenizer.all_special_ids)]
        return next((token for token in candidates if token is not None and token != self.eos_id), self.eos_id)

    def _check(self) -> None:
        pieces = self._pieces(PROBE, ask=False)
        answers = [piece for piece, said in pieces if said]
        if len(answers) != 2:
            raise ChatError(
                f"the chat template in {self.folder} marks {len(answers)} of 2 assistant turns: put what the assistant says between "
                "`{% generation %}` and `{% endgeneration %}`, or source the model with `chat_template: chatml`"
            )
        for text, message in zip(answers, PROBE[1::2], strict=True):
            if text != message["content"] + self.tokenizer.eos_token:
                raise ChatError(
                    f"the chat template in {self.folder} marks {text!r} as the assistant's turn instead of its text and the end-of-turn "
                    f"token {self.tokenizer.eos_token!r}: without it no model learns to stop; put both between "
                    "`{% generation %}` and `{% endgeneration %}`"
                )
        ids, _ = self.training(PROBE, "last_turn")  # what earlier turns are trained with is the data's matter
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise ChatError(f"the chat template in {self.folder} begins with two BOS tokens: take one out of the template")
        whole = self.tokenizer("".join(piece for piece, _ in pieces), add_special_tokens=False)["input_ids"]
        if ids != whole:
            raise ChatError(
                f"the tokenizer in {self.folder} gives other tokens for a conversation cut at its turns than for the whole (a prefix "
                "space, or a token across the border): use a tokenizer without prefix space and a template that ends turns with "
                "special tokens"
            )
        self.answer(PROBE[:3], "4")


def variables_of(template: str) -> set[str]:
    """The arguments of a template: what it reads, does not set itself and is not given with every conversation.

    Raises:
        ChatError: it is no template.
    """
    from jinja2 import TemplateError, meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        environment = _compile_jinja_template(template).environment
        found = meta.find_undeclared_variables(environment.parse(template))
    except TemplateError as error:
        raise ChatError(f"the chat template cannot be read: {type(error).__name__}: {error}") from error
    return {name for name in found - environment.globals.keys() - GIVEN if not name.endswith("_token")}


def end_of_turn(template: str) -> str | None:
    """The token with which a template ends the assistant's turns; None where that is the tokenizer's EOS token, or is not to be found."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    said, eos = "what it says", "the EOS token"
    conversation = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": said}]
    try:
        (text,), _ = cast(Any, render_jinja_template)(conversations=[conversation], chat_template=template, bos_token="", eos_token=eos)
    except TemplateError:
        return None  # `Chat` says what is wrong with it
    found = CONTROL.match(text.partition(said)[2])
    return found.group() if found else None


def has_calls(messages: Sequence[Message]) -> bool:
    """Whether tools are called: templates write control tokens of their own around calls, as Mistral's does."""
    return any(message["role"] == CALL for message in messages)


def trained_turns(turns: Sequence[Turn], train_on: TrainOn) -> list[bool]:
    """Which of the assistant's turns are trained. A turn without a mark is not, where marks decide."""
    match train_on:
        case "assistant" | "all":
            return [True] * len(turns)
        case "last_turn":
            return [number == len(turns) - 1 for number in range(len(turns))]
        case "marked":
            return [turn.get("train", False) for turn in turns]
