"""Text of a mathematical answer as tokens: LaTeX, plain text and Unicode signs in one spelling."""

import re
from typing import NamedTuple

from pedigree.stages.verifiers import units


class UnreadableError(Exception):
    """The text is not a mathematical answer that is read here."""


class Token(NamedTuple):
    kind: str
    """`number`, `letter`, `word` or `sign`."""
    text: str
    spaced: bool
    """White space precedes it."""


SIGNS = {
    **dict.fromkeys("−–‐‑﹣－", "-"), **dict.fromkeys("·⋅∙×∗", "*"), **dict.fromkeys("÷∕⁄", "/"),
    "π": r"\pi ", "∞": r"\infty ", "√": r"\surd ", "∛": r"\surd[3]", "∜": r"\surd[4]", "≡": r"\equiv ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "±": r"\pm ", "∓": r"\mp ",
    "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ", "φ": r"\phi ", "ω": r"\omega ", "º": "°",
    "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅛": r"\frac{1}{8}",
    "\u202f": r"\,", "\u2009": r"\,", "\u00a0": "~", "≈": r"\approx ", "ℝ": r"\mathbb{R}", "…": r"\ldots ", "“": '"', "”": '"', "’": "'",
}  # fmt: skip
RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
COMMANDS = {
    "le": "≤", "leq": "≤", "leqslant": "≤", "ge": "≥", "geq": "≥", "geqslant": "≥", "ne": "≠", "neq": "≠", "lt": "<", "gt": ">",
    "cdot": "*", "times": "*", "ast": "*", "div": "/", "pm": "±", "mp": "∓", "in": "∈", "cup": "∪", "cap": "∩", "setminus": "∖",
    "vert": "|", "lvert": "|", "rvert": "|", "mid": "|", "emptyset": "∅", "varnothing": "∅", "lbrack": "[", "rbrack": "]", "degree": "°",
    "lbrace": r"\{", "rbrace": r"\}", "%": "%", "{": r"\{", "}": r"\}", "$": "$", "&": "&",
    "approx": "≈", "equiv": "≡", "colon": ":", "euro": "€", "pounds": "£",
}  # fmt: skip
GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon phi varphi chi psi"
    " omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell"
).split()
FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln lg log exp".split()
KEPT = {*GREEK, *FUNCTIONS, *"frac sqrt surd binom bmod pi infty lfloor rfloor lceil rceil langle rangle".split()}
"""Commands that become words of the same name."""
WORDS = {*FUNCTIONS, *(word for word in units.WORDS if len(word) > 1), "sqrt", "pi", "infty", "infinity", "and", "or", "abs"}
"""Words that are read without `\\text`."""
TEXTS = "text textbf textit textrm textnormal mathrm mathit mathsf mbox operatorname rm bf mathbf emph textup boldsymbol".split()
DECORATED = ("vec", "hat", "overline", "mathbb", "mathcal", "tilde", "widehat", "overrightarrow", "mathbf", "boldsymbol", "bf")
CURRENCIES = {"USD": "$", "EUR": "€", "GBP": "£", "INR": "₹", "Rs": "₹", "Rs.": "₹"}
SCALES = {"k": "thousand", "K": "thousand", "M": "million", "B": "billion"}
AMBIGUOUS = re.compile(
    r"""\d(?:st|nd|rd|th)(?![A-Za-z])|(?<!\d)0[xXbBoO][\dA-Fa-f]|(?<!\d)\d{4}-\d\d-\d\d(?!\d)    # an ordinal, a numeral, a date
    |€[ ]?\d{1,3}\.\d{3}(?![\d.,])|(?<![\d.,])\d{1,3}\.\d{3}[ ]?€                              # a thousand euros, or one
    |\\frac\{(?:\\mathrm\{d\}|d)(?:\^\{?\d\}?)?[ ]?[A-Za-z]?\}[ ]?\{(?:\\mathrm\{d\}|d)[ ]?[A-Za-z]    # a derivative
    |\bd[A-Za-z]?/d[A-Za-z]""",
    re.VERBOSE,
)
SPELLINGS = [
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"\\bar(?![A-Za-z])", r"\\overline"),
        (
            r"\(?\s*\\?(?:(?<![A-Za-z])[bp]?mod|(?:text|mathrm)\{\s*mod\s*\})(?![A-Za-z])\s*(?:\{\s*(\d+)\s*\}|(\d+))\s*\)?",
            r"\\bmod{\1\2}",
        ),
        (r"\A([A-Z])[):]\Z", r"\1"),
        (r"\A(\d+)'\s*(\d+)(?:\"|'')\Z", r"\1 feet \2 inches"),
        (r"(?<=\d) ?([hmg]) (?=\d+ ?(?:min|cm|mm|g)(?![A-Za-z]))", r"\\text{ \1 }"),
        (r"(?<=years) old(?![A-Za-z])", ""),
        (r"(?<=[)\]]) *U *(?=[(\[])", r"\\cup "),
        (r"\+ ?/ ?-", r"\\pm "),
        (r"(?<![A-Za-z])US ?(?=\\?\$)", ""),
        (r"(?<![A-Za-z])(USD|EUR|GBP|INR|Rs\.?) ?(?=\d)", lambda found: CURRENCIES[found[1]]),
        (r"([$€£₹] ?\d[\d,]*(?:\.\d+)?) ?([kKMB])(?![A-Za-z])", lambda found: rf"{found[1]}\text{{ {SCALES[found[2]]} }}"),
        (
            r"(?:(?<=€)|(?<=€ ))[1-9]\d{0,2}(?:\.\d{3})+,\d\d?(?!\d)|(?<![\d.,])[1-9]\d{0,2}(?:\.\d{3})+,\d\d?(?= ?(?:€|euro))",
            lambda found: found[0].replace(".", "").replace(",", "."),
        ),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))", "°"),
        (r"(?<=\d)(?:,?\\!|\\[,:; ]|\\thinspace|[~'])(?=\d{3}(?!\d))", "{,}"),
        (r"(\.\d*)(?:\\(?:overline|dot) *\{?(\d+)\}?|\((\d+)\))", r"\1\\overline{\2\3}"),
        (r"(\.\d*?)(?:(\d)\2\2+|(\d{2,9}?)\3+)(?:\.\.\.|\\[lc]?dots(?![A-Za-z]))", r"\1\\overline{\2\3}"),
        (r"\\[lc]?dots(?![A-Za-z])", "..."),
        (r"(?<=\d) *[xX] *(?=10 *\^)", r"\\times "),
        (r"\\left *\\\{\s*\\begin\{(array|aligned)\}(?:\{[lcr]*\})?(.*?)\\end\{\1\}\s*\\right *\.?", r"\\begin{cases}\2\\end{cases}"),
        (r"&\s*=", "="),
        (r"\\frac\{\s*(\\(?:text|mathrm)\{[^{}]*\})\s*\}\{\s*(\\(?:text|mathrm)\{[^{}]*\})\s*\}", r"\1/\2"),
        (r"(?<=\d)(?::00)?(?:\s|~|\\ |\\text\{)*([apAP])(?:\. ?)?[mM]\.?\}?\Z", lambda found: rf"\text{{ {found[1].lower()}m}}"),
    )
]
"""Patterns of what has several spellings, in order."""
VOWELS = set("aeiouAEIOU")

_DROPPED = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\.?|\\(?:displaystyle|textstyle|limits|nolimits)(?![A-Za-z])|\\!|\\hspace\*?\{[^{}]*\}"
)
_SPACE = re.compile(r"(?:\s|~|(?<!\\)\\[,;:> ]|\\q?quad(?![A-Za-z]))+")
_GROUPS = r"\d{1,3}(?:(?:%s)\d{3})+(?!\d)(?:\.\d+)?"
_ALWAYS, _COMMAS = (re.compile(_GROUPS % between) for between in (r"\{,\}", r"\{,\}|,"))
_INDIAN = re.compile(r"[1-9]\d?(?:,\d\d)+,\d{3}(?![\d,])")
_REPEATING = re.compile(r"\d*\.\d*\\overline\s*\{\d+\}")
_SCIENTIFIC = re.compile(r"(?:(?:1|\d*\.\d+)[eE][+-]?|\d+[eE])\d{1,3}(?![\w.])")
_PRODUCT_OR_SCIENTIFIC = re.compile(r"\d+[eE][+-]\d")
_NUMBER = re.compile(r"\d+\.\d+|\.\d+|\d+")
_LETTERS = re.compile(r"[A-Za-z]+")
_COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)
_ENVIRONMENT = re.compile(r"\s*\{([A-Za-z]+)\}(?:\s*\{[clr|@. ]*\})?")
_ARGUMENT = re.compile(r"\s*\{((?:[^{}]|\{[^{}]*\})*)\}|\s+([A-Za-z])(?![A-Za-z])")


def unwrapped(text: str) -> str:
    """A text without what surrounds an answer: dollar signs of LaTeX in pairs, a final period, asterisks of Markdown."""
    text = text.strip()
    for _ in range(4):
        text = re.sub(r"(?<=[^.])\.\Z", "", text).strip()
        for begin, end in (("**", "**"), ("$$", "$$"), (r"\(", r"\)"), (r"\[", r"\]"), ("$", "$"), ("`", "`")):
            if len(text) > len(begin + end) and text.startswith(begin) and text.endswith(end) and not text.endswith(rf"\{end}"):
                text = text[len(begin) : -len(end)].strip()
    dollars = re.findall(r"(?<!\\)\$", text)
    return re.sub(r"(?<!\\)\$", "", text) if len(dollars) % 2 == 0 else text


def spelled(text: str) -> str:
    """A text with one spelling for what has several, and nothing left out that a reader would see."""
    text = unwrapped(text)
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda raised: "^{" + raised.group().translate(RAISED) + "}", text)
    text = re.sub(r"[₀₁₂₃₄₅₆₇₈₉]+", lambda lowered: "_{" + lowered.group().translate(LOWERED) + "}", text)
    text = "".join(SIGNS.get(character, character) for character in text)
    if r"\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z{}])", r"\\", text)
    for pattern, spelling in SPELLINGS:
        text = pattern.sub(spelling, text)
    return _DROPPED.sub(" ", text).strip()


def plain(text: str) -> str:
    """A text for comparison as text: white space only where it separates words or numbers, and without LaTeX's frames of words."""
    text = spelled(text)
    text = re.sub(rf"\\(?:{'|'.join(TEXTS)})\s*\{{([^{{}}]*)\}}", r"\1", text)
    text = re.sub(r"([\^_])\{(\w)\}", r"\1\2", _SPACE.sub(" ", text)).strip().removesuffix(".")
    text = re.sub(r"\A([\"'])(.*)\1\Z", r"\2", text)
    text = re.sub(r"(?<=\w) +(?=\w)", "\0", text).replace(" ", "").replace("\0", " ")
    words = not re.search(r"[\\\d^_{}=<>+]", text)
    return re.sub(r"[A-Za-z]{2,}", lambda word: word.group() if word.group().isupper() else word.group().lower(), text) if words else text


def tokens(text: str) -> list[Token]:
    """The tokens of a text.

    Raises:
        UnreadableError: a word or sign has no meaning here.
    """
    text = spelled(text)
    if AMBIGUOUS.search(text):
        raise UnreadableError("an ordinal number, a numeral, a date, a derivative, or a thousand euros")
    if re.fullmatch(r"[A-Za-z\s,.;'()-]+", text):
        for run in re.findall(r"[A-Za-z]{2,}", text):
            if run not in WORDS and (VOWELS & {*run} or not run.islower()):
                raise UnreadableError(f"word {run!r}")
    return _Scanner(text).run()


class _Scanner:
    def __init__(self, text: str, *, words: bool = False, spaced: bool = False):
        self.text, self.words, self.spaced = text, words, spaced
        self.place, self.depth = 0, 0
        self.found: list[Token] = []
        self.commas_divide = ", " not in text

    def add(self, kind: str, text: str, after: int) -> None:
        self.found.append(Token(kind, text, self.spaced))
        self.spaced, self.place = False, after

    def run(self) -> list[Token]:
        while self.place < len(self.text):
            if space := _SPACE.match(self.text, self.place):
                self.place, self.spaced = space.end(), True
                continue
            character = self.text[self.place]
            if character == "." and self.found and self.found[-1].text in units.WORDS and self.text[self.place + 1 : self.place + 2] != ".":
                self.place += 1
            elif re.match(r"\.?\d|\.\\overline", self.text[self.place : self.place + 10], re.ASCII):
                self.number()
            elif letters := _LETTERS.match(self.text, self.place):
                self.letters(letters)
            elif character == "\\":
                self.command()
            elif character in "+-*/^_()[]{},;:=<>!|'%°&∖" or character in units.PREFIXES or character == "¢":
                self.sign(character, self.place + 1)
            else:
                raise UnreadableError(f"sign {character!r}")
        return self.found

    def sign(self, sign: str, after: int) -> None:
        pair = sign + self.text[after : after + 1]
        if pair in ("<=", ">=", "**", "=="):
            sign, after = {"<=": "≤", ">=": "≥", "**": "^", "==": "="}[pair], after + 1
        self.depth += (sign in ("(", "[", r"\{")) - (sign in (")", "]", r"\}"))
        self.add("word" if sign in ("%", "°", "¢") else "sign", sign, after)

    def number(self) -> None:
        at = self.place
        if _PRODUCT_OR_SCIENTIFIC.match(self.text, at) and not _SCIENTIFIC.match(self.text, at):
            raise UnreadableError("a product or scientific notation")
        grouped = _COMMAS if self.depth == 0 or not self.commas_divide else _ALWAYS
        groups = grouped.match(self.text, at) or self.indian(at)
        if groups and not groups.group().startswith("0"):
            self.add("number", re.sub(r"[^\d.]", "", groups.group()), groups.end())
            return
        if at and self.text[at - 1] == "," and re.match(r"0\d", self.text[at:]):
            raise UnreadableError("a list or thousands")
        found = _REPEATING.match(self.text, at) or _SCIENTIFIC.match(self.text, at) or _NUMBER.match(self.text, at)
        if found is None:
            raise UnreadableError("a repeating decimal without digits")
        self.add("number", re.sub(r"\s", "", found.group()), found.end())

    def indian(self, at: int) -> re.Match[str] | None:
        """Groups as in 12,34,567, where they are no list: after ₹, or with a group that begins with 0."""
        found = _INDIAN.match(self.text, at) if self.depth == 0 else None
        return found if found and (",0" in found.group() or self.text[:at].rstrip().endswith("₹")) else None

    def letters(self, run: re.Match[str]) -> None:
        word = run.group()
        if word in WORDS or (self.words and word in units.WORDS) or ((self.words or self.spaced) and units.counted(word)):
            self.add("word", word, run.end())
        elif len(word) == 1:
            self.add("letter", word, run.end())
        elif self.words or len(word) > 3 or (self.spaced and self.found and self.found[-1].kind == "number" and VOWELS & {*word}):
            raise UnreadableError(f"word {word!r}")
        else:
            for place, letter in enumerate(word):
                self.add("letter", letter, run.start() + place + 1)

    def command(self) -> None:
        command = _COMMAND.match(self.text, self.place)
        if command is None:
            raise UnreadableError("a backslash at the end")
        name, after = command.group(1), command.end()
        if name in TEXTS or name in DECORATED:
            self.framed(name, after)
        elif name == "\\":
            self.add("sign", r"\\", after)
        elif name in ("begin", "end"):
            environment = _ENVIRONMENT.match(self.text, after)
            if environment is None:
                raise UnreadableError("a nameless environment")
            self.add("word", name, after)
            self.add("sign", environment.group(1), environment.end())
        elif name in COMMANDS:
            self.sign(COMMANDS[name], after)
        elif name in KEPT:
            self.add("word", name, after)
        else:
            raise UnreadableError(f"command {name!r}")

    def framed(self, name: str, after: int) -> None:
        argument = _ARGUMENT.match(self.text, after)
        if argument is None:
            raise UnreadableError(f"what {name!r} applies to")
        content = argument[1] or argument[2] or ""
        if name in DECORATED and (name not in TEXTS or re.fullmatch(r"\s*[A-Za-z]\s*", content)):
            if not re.fullmatch(r"\s*[A-Za-z]{1,2}\s*", content):
                raise UnreadableError(f"what {name!r} applies to")
            name = "vec" if content.strip() in ("i", "j", "k") else name  # unit vectors
            self.add("letter", f"{name} {content.strip()}", argument.end())
            return
        self.found += _Scanner(content, words=True, spaced=self.spaced).run()
        self.place, self.spaced = argument.end(), content[-1:].isspace()
