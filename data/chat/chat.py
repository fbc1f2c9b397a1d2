"""Messages to token ids for one model folder.

A conversation is rendered (`data/chat/chat_template.py`); the text is split where the assistant's turns begin and end, and each piece is
tokenized separately without further special tokens. So no token spans prompt and answer, the trainer sees the sampler's tokens, and an
answer's end-of-turn token is part of the answer, unless the answer was cut off.

Where a template does not mark turns, a conversation is trained as the template writes it, for example with an empty thought, and an answer
to a prompt as it was sampled.

Prompts equal those of vLLM's server, with one exception: an earlier answer that begins with whitespace keeps its own tokens, which a server
that receives text may merge with the template's.

Template arguments are values for further variables of a template, such as `enable_thinking`. Sampling and training use the same ones.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pedigree.configs.methods.training import TrainOn
from pedigree.data.chat.chat_template import PROBE, Arguments, ChatError, ChatTemplate, Turn
from pedigree.data.chat.tools import turns_of
from pedigree.data.host.process import uncollected
from pedigree.data.records.messages import CALL, divided
from pedigree.data.records.records import Message, ended, texts_within

HALF_CHARACTER = "\ufffd"
"""Decoding of a character whose last bytes were cut off."""
TOKENIZERS = {
    "llama": ("TokenizersBackend", "GPT2Tokenizer", "LlamaTokenizer"),
    "qwen2": ("Qwen2Tokenizer",),
    "qwen3": ("Qwen2Tokenizer",),
}
"""Type of a model → classes of tokenizers that `AutoTokenizer` takes where tokenizer_config.json names them."""


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
        self.folder = Path(model_folder)
        tokenizer = tokenizer_class(self.folder).from_pretrained(self.folder, local_files_only=True)
        self.tokenizer: Any = tokenizer
        if not tokenizer.chat_template:
            raise ChatError(f"{self.folder} has no chat template: name one of Pedigree's as `chat_template` of its source_model stage")
        if tokenizer.eos_token_id is None:
            raise ChatError(f"the tokenizer in {self.folder} has no eos_token: name the token that ends a turn as eos_token")
        self.eos_id: int = tokenizer.eos_token_id
        candidates = [tokenizer.pad_token_id, tokenizer.unk_token_id, *sorted(tokenizer.all_special_ids)]
        self.pad_id = next((token for token in candidates if token is not None and token != self.eos_id), self.eos_id)
        control = {str(added) for added in tokenizer.added_tokens_decoder.values() if added.special}
        self._template = ChatTemplate(self.folder, tokenizer.chat_template, tokenizer.special_tokens_map, control)
        self._check()

    @property
    def highest_id(self) -> int:
        """Highest token id. Scans the whole vocabulary."""
        return max(self.tokenizer.get_vocab().values())

    @property
    def template(self) -> str:
        """The text of its chat template."""
        return self._template.text

    def prompt(self, messages: Sequence[Message], arguments: Arguments = None) -> list[int]:
        """Ids of a prompt, ending where the assistant's answer begins; see `prompt_pieces`."""
        return [token for piece in self.prompt_pieces(messages, arguments) for token in self.ids(piece)]

    def prompt_pieces(self, messages: Sequence[Message], arguments: Arguments = None) -> list[Piece]:
        """The pieces of a prompt.

        Raises:
            ChatError: a message contains a control token, or the template does not read an argument or does not support tools.
        """
        self._template.refuse(messages, arguments)
        return [self._piece(*piece, has_calls(messages)) for piece in self._template.pieces(messages, ask=True, arguments=arguments)]

    def prefilled(self, messages: Sequence[Message], beginning: str) -> list[int]:
        """Ids of a prompt followed by the `beginning` of the assistant's answer.

        Raises:
            ChatError: a message or the beginning contains a control token.
        """
        self._template.refuse([{"role": "assistant", "content": beginning}])
        return [*self.prompt(messages), *self.response_ids(beginning)]

    def following(self, messages: Sequence[Message], text: str, added: Sequence[Message], arguments: Arguments = None) -> list[int]:
        """Ids of what the template puts after the answer `text` to `messages`, whose tokens end with the end-of-turn token: its own
        separators, the messages `added`, and the beginning of the next answer.

        Raises:
            ChatError: the template renders what is there already otherwise once more follows; or as in `prompt`.
        """
        self._template.refuse(added, arguments)
        return self.text_ids(self._template.after(messages, text, added, arguments), False)

    def response_ids(self, text: str) -> list[int]:
        """Ids of an assistant's text without end-of-turn token; control tokens in it are plain characters."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def plain(self, text: str) -> list[int]:
        """Ids of a text without chat template, including tokens such as BOS that the tokenizer adds.

        Raises:
            ChatError: the text contains a control token.
        """
        self._template.refuse([{"role": "user", "content": text}])
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
        turns = [turn for turn in turns_of(messages) if turn["role"] == "assistant"]
        trained = trained_turns(turns, train_on)
        pieces = self._template.trained_pieces(messages, turns, trained, arguments, as_asked)
        whole = not turns or ended(turns[-1])
        last = max((place for place, (_, turn) in enumerate(pieces) if turn), default=-1)
        called = has_calls(messages)
        plain = last if called and divided(messages)[1] and self._spells_control(turns[-1], pieces[last][0]) else None
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
        self._template.refuse(messages, arguments)
        asked, answer = self._template.answered_pieces(messages, text, arguments)
        prompt = [self._piece(part, turn, has_calls(messages)) for part, turn in asked]
        return [*prompt, self._piece(*answer, called=False, ended=ended, trained=True)]

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
        if self._template.control.search(text):
            return [*pieces[:last], *(piece._replace(trained=True) for piece in pieces[last:])]
        whole = "".join(piece.text + self._template.end * piece.ends for piece in pieces)
        begin = len(whole) - sum(len(piece.text + self._template.end * piece.ends) for piece in pieces[last:])
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

    def _piece(self, text: str, turn: int, called: bool, ended: bool = True, trained: bool = False) -> Piece:
        """In the assistant's text, only the end of turn is a control token; if it may have `called` tools, also the tokens around
        calls."""
        if turn and text.endswith(self._template.end):
            body = text.removesuffix(self._template.end)
            return Piece(body if ended else body.rstrip(HALF_CHARACTER), not called, ended, trained)
        return Piece(text, False, False, trained)

    def _spells_control(self, turn: Turn, rendered: str) -> bool:
        """Whether the assistant's last turn contains control tokens as text.

        Raises:
            ChatError: the template also writes control tokens in that turn, so that the two cannot be distinguished.
        """
        texts = [turn["content"], *texts_within(turn.get("tool_calls", []))]
        spelled = [token for text in texts for token in self._template.control.findall(text)]
        if spelled and len(spelled) < len(self._template.control.findall(rendered.removesuffix(self._template.end))):
            raise ChatError(
                f"a turn with a call spells out the control token {spelled[0]!r}, and the chat template in {self.folder} writes some of "
                "its own around calls: drop such rows when the data is prepared"
            )
        return bool(spelled)

    def _check(self) -> None:
        written = (PROBE[1]["content"] + self._template.end, 1) in self._template.pieces(PROBE[:3], ask=True)
        asked = PROBE[: 3 if written else 1]  # an empty thought before the text may begin with whitespace
        pieces = self.answered(asked, PROBE[3]["content"])
        ids = [token for piece in pieces for token in self.ids(piece)]
        whole = "".join(piece.text + self._template.end * piece.ends for piece in pieces)
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


def tokenizer_class(folder: Path) -> Any:
    """The class that `AutoTokenizer` takes for a folder, or `AutoTokenizer`, which imports torch and most of transformers: eight seconds
    of every job that samples, counts tokens or asks a judge, and needs neither."""
    with uncollected():
        import transformers

        with suppress(OSError, ValueError, LookupError, TypeError):  # `AutoTokenizer` reports what is wrong with these files
            config, own = (json.loads((folder / name).read_text()) for name in ("config.json", "tokenizer_config.json"))
            if "auto_map" not in own and own["tokenizer_class"] in TOKENIZERS[config["model_type"]]:
                return getattr(transformers, own["tokenizer_class"])
        return transformers.AutoTokenizer


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
