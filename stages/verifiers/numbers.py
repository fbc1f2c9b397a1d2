"""Answers that are numbers.

`arithmetic` {answer}   the last number of the reply is the answer ("17 + 25 = 42." counts, "42, since 17 + 25" does not).
`gsm` {answer}          the first number after the last `####`, as in GSM8K; without one, the last number.
`gsm8k` {answer}        the last number as text, without thousands separators: the rule of open-instruct at e6c3044, for which Tülu 3's
                        scores were published. It takes the 4 of "3/4" for an answer, so training uses `gsm`.

Only one number counts, so that a reply cannot score by listing many. Whatever has digits in that place is read whole, with sign, currency,
unit and scale ("-$1,234.50", "42km", "42k", "3 million", "2 1/2", "1e5"), or the answer is wrong: a part of something else (a version, a
date, a range, an operand, one of several alternatives) equals nothing, and no earlier number takes its place.
"""

import re
import unicodedata
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from pedigree.stages.verifiers.verdict import Verdict, VerifierError, exactly

FULL_WIDTH = {chr(code + 0xFEE0): chr(code) for code in range(0x21, 0x7F)}
INVISIBLE = dict.fromkeys(map(chr, (0xAD, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFEFF)))
SIGNS = str.maketrans(
    {**FULL_WIDTH, **INVISIBLE, **dict.fromkeys("−–‐‑﹣", "-"), "⁄": "/", "∗": "*", "～": "~", "º": "°", "℃": "°C", "℉": "°F"}
)
PREPARED = (
    (re.compile(r"\\(?:text[a-z]*|math[a-z]*|underline)\s*\{([^{}\n]*)\}"), r"\1"),
    (re.compile(r"\\(?:left|right|[bB]igg?[lr]?|(?:text)?color\{\w*\})(?![a-zA-Z])"), ""),
    (re.compile(r"\\(?:boxed|f(?:rame)?box|displaystyle|q?quad|item|newline)(?![a-zA-Z])"), " "),
    (re.compile(r"\\(?:approx|sim|implies|to|[Rr]ightarrow|therefore)(?![a-zA-Z])"), "→"),
    (re.compile(r"(?<=\d)(?=[¼-¾⅐-⅞]|\\[cdt]?frac)"), " "),
    (re.compile(r"\\[cdt]?frac\s*(?:(\d)|\{(-?\d+)\})\s*(?:(\d)|\{(\d+)\})"), lambda found: "{}/{}".format(*filter(None, found.groups()))),
    (re.compile("[¼-¾⅐-⅞]"), lambda found: unicodedata.normalize("NFKC", found[0]).replace("⁄", "/")),
    (re.compile(r"\{,\}|\\!,|,\\!"), ","),
    (re.compile(r"(?<=\d)\\,(?=\d)"), "\u2009"),
    (re.compile(r"\\[,:; ]"), " "),
    (re.compile(r"\\(?:times|cdot|div|pm|mp)(?![a-zA-Z])"), "×"),
    (re.compile(r"\\(?:le|leq|lt|ge|geq|gt|ne|neq)(?![a-zA-Z])|[<>]=|<>|(?<!\d)!="), "≠"),
    (re.compile(r"\^\{?\\circ\}?"), "°"),
    (re.compile(r"\\(?=[$%#])"), ""),
    (re.compile(r"(?<=\d)([ \t]{0,3}(?:[cdkm]?m|ft|in|yd|mi)(?:(?:/|[ ])?s|/h)?)(?:\^?\{?-?[123]\}?|⁻?[¹²³])(?!\w)"), r"\1"),
)
"""Pattern → how it is written without LaTeX. Powers of units are left out; operators, comparisons and arrows that are treated alike are
one."""
ITEM = re.compile(r"^[ \t]*(\d{1,3})[.)][ \t]+(?=\S)", re.MULTILINE)
"""The number of an item, where items of a list have numbers in order."""

SPACES = "\u2009\u202f\xa0"
"""Spaces within numbers."""
GROUPED = rf"[1-9]\d{{0,2}}(?:(?:,\d{{3}})+|(?:[{SPACES}]\d{{3}})+)|[1-9]\d?(?:,\d\d)+,\d{{3}}"
"""Digits in groups of three, or as in India: 12,34,567."""
EUROPEAN = re.compile(r"[1-9]\d{0,2}(?:(?:\.\d{3}){2,}(?:,\d+)?|\.\d{3},\d\d?)")
"""1.234.567 and 1.234,50; but 1.234 may be either."""
NUMBER = re.compile(
    rf"(?P<plain>(?:(?:{GROUPED}|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,3}})?)|(?:(?P<whole>\d+) +(?:and +)?)?(?P<over>\d+)/(?P<under>\d+)"
)
TOKEN = re.compile(
    rf"(?:\d{{1,9}} {{1,3}}(?:and )?(?=\d{{1,9}}/\d))?(?:(?<![\w.)\]}}])\.)?\d(?:\d|[.,:/'’{SPACES}](?=\d))*(?:[eE][-+]?\d+(?!\w))?"
)
"""Digits with what joins them; a number if `NUMBER` matches all of it."""
LONGEST = 400
"""Maximum characters of a number."""
AROUND = 48
"""Characters before and after digits that are read."""

SIGNED = re.compile(r"([-+])?(?:(?:US|CA|AU|[CAR])?[$€£¥₹][ \t]?|\b(?:USD|EUR|GBP|CHF|Rs\.?)[ \t]*)?([-+])?\Z")
"""Sign and currency before a number."""
SPACED = re.compile(r"(.*)([-+])[ \t]+")
EQUALS = re.compile(r"[=(][ \t]*\Z")
OPERAND = re.compile(r"[\d)\]}%°|][ \t]*\Z")
WORDS = re.compile(r"\b(?:minus|negative)[ \t]+\Z", re.IGNORECASE)
MARKUP = re.compile(r"[*_`$(\[{ \t]+\Z")
LETTER = r"[A-Za-z0-9\u00c0-\u024f\u0370-\u03ff\u0400-\u04ff]"
"""Letters of languages with spaces between words."""
START = re.compile(r"""(?:\A|\.\.|[\s(\[{<>"'`“‘„«‹*_~#=:;,|!?→⇒⟹≈≡∴•·—…$]|[^\x00-\u2fff])\Z""")
"""What may be before a number, its sign and its currency."""
PART = re.compile(
    rf"""(?:
        (?:{LETTER}|[)\]}}%°])[ \t]*[-+/×÷·][ \t]*                          # an operand: 3 + _, x/_
        |[\d)\]}}][ \t]*\*+[ \t]*|\w[ ]\*[ ]                                # a factor: 3*_, x * _
        |[\^±≠<≤≥√÷×/@&][ \t]*\{{?                                          # an exponent, bound or root: x^_, ≤ _, √_
        |(?:\A[ \t]*|[\w)][ \t]+)>[ \t]*|\A[^<]*[\w)]>                      # a bound, and no end of a tag: x > _
        |{LETTER}_\{{?                                                      # an index: a_n
        |\\[A-Za-z]+(?:\[[^\]]*\])?[ \t]*\{{?|\}}[ \t]*\{{|{LETTER}[('’"°]   # an argument: \sqrt[3]_, f(_, 5'_
        |\d[).]\(|[负負第年月]                                              # an ordinal: 第_
        |(?:twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|hundred|thousand|million)(?:[ ]and)?[- ]
    )\Z""",
    re.VERBOSE,
)
"""What before digits makes them a part of something: `_` stands for the digits."""
FRACTIONS = "fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth"
MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
PART_IN_WORDS = re.compile(
    rf"""(?:
        \d[ \t]+                                                            # 3 _
        |\d[ \t]*,?[ \t]*(?:                                                # 3 choose _, 3 to the nearest _
            [&xX]|[~—…]|\.{{2,}}|R|r|remainder|mod|modulo|div|choose|less|minus|to[ ]the(?:[ ]nearest)?|in|per|for[ ](?:every|each)
            |give[ ]or[ ]take|with[ ]remainder
        )[ \t]*
        |\d[ \t]*(?:%|[a-z]+)?[ \t]*,?[ \t]*                                # a range or alternatives: 3 km to _, 3 and _
            \b(?:and|to|through|till|until|vs\.?|versus|(?:out[ ])?of|by|[xX])[ \t]+
        |\d[ \t]*(?:                                                        # the smaller unit: 3 hours _
            h|hrs?|hours?|m|min(?:ute)?s?|days?|weeks?|months?|years?|yrs?|ft|feet|foot|yards?|miles?|lbs?|pounds?|k?g|k?m|meters?
            |L|lit(?:er|re)s?|dollars?
        )[ \t]+
        |=[ \t]*-?[\d.]+[ \t]*,?[ \t]*(?:or|and)[ \t]+[a-z][ \t]*=[ \t]*    # the second of two values: x = 3 or y = _
        |\d(?:st|nd|rd|th)?[ ](?:of[ ])?(?:{MONTHS})[a-z]*,?[ ]             # a date: 3rd of May _
        |[\d)%][*_`$]*[ \t]*[-+/×÷·^%][ \t]*                                # an operand: 3** + _
        |(?:\A|\bis|\bof|\bratio)[ \t]*[\d.]+[ \t]+:[ \t]*                  # a ratio: is 3 : _
        |\b(?:
            or(?:[ ](?:equal[ ]to|maybe|possibly|perhaps|even))?            # an alternative
            |than|plus|times|(?:divided|multiplied|divisible)[ ]by          # an operand
            |at[ ](?:least|most)                                            # a bound, or an approximation
            |(?<!add[ ])(?<!adds[ ])(?<!sum[ ])(?<!sums[ ])(?<!comes[ ])up[ ]to|over|under|above|below|beyond|exceed(?:s|ing)?
            |nearly|almost|close[ ]to|as[ ](?:many|much|long|far|high)[ ]as|(?:minimum|maximum|min\.?|max\.?)(?:[ ]of)?
            |(?:any|all|every|no)(?:thing|one)?[ ]but|except|without|unlike # excluded
            |twice|thrice|double|triple|half                                # a multiple, a part or a power
            |(?:half|thirds?|quarters?|(?:{FRACTIONS})s?|root|square|cube|power|instead|multiples?|factors?|divisors?)[ ]of
            |log|base|ln|sin|cos|tan|sqrt|modulo                            # an argument
            |step|question|problem|exercise|equation|chapter|section|figure|table|example
        )[ \t]+
        |(?:\b(?:not|cannot|never)|n['’]t)[ \t]+                            # denied: it is not equal to _
            (?:(?:be|equal|to|exactly|think|believe|that|it|is|the|answer)[ \t]+)*
    )\Z""",
    re.IGNORECASE | re.VERBOSE,
)
"""The same in words, without markup."""
LISTED = re.compile(r"\d[ \t]*[,;][ \t]+\Z")

LINE_END = re.compile(r"[*_`$)\]}.]*[ \t]*(?:\n|\Z)")

SCALES = {
    "dozen": 12, "hundred": 100, "lakh": 10**5, "crore": 10**7, **dict.fromkeys(("k", "thousand"), 1000),
    **dict.fromkeys(("m", "mn", "mln", "million"), 10**6), **dict.fromkeys(("b", "bn", "billion"), 10**9), "trillion": 10**12,
}  # fmt: skip
"""Letters or word → factor."""
SCALE = re.compile(r"[ \t]?(k|K|M|B|mn|mln|bn)(?!\w)|[-\s]*(?i:(dozen|hundred|thousand|lakh|million|crore|billion|trillion))s?(?!\w)")
UNITS = (
    "[mcdknµμ]?m|in|ft|yd|mi|[mµμk]?g|t|lbs?|oz|[mcdk]?[lL]|gal|[mnµμ]?s|secs?|mins?|h|hrs?|d|yrs?|wks?|mph|kph|kmh|fps|rpm|[kMG]?Hz"
    "|[kMG]?Wh?|k?J|V|m?A|N|k?Pa|k?cal|[kKMGT]B|USD|EUR|GBP|CHF|kr|am|pm|AM|PM|pts?|px|[CF]|(?!teen|fold)[a-z]{4,}"
)
UNIT = re.compile(rf"[ \t]?[%°¢$€£¥₹](?:[CF](?!\w))?|(?:{UNITS})(?:/[a-z]+|⁻?[¹²³])*(?![\w^])")
END = re.compile(r"\Z|\s|[)\]}>\"'`”’»*_~|;:!?,…—=<$→]|\.(?![a-z])|-[A-Za-z]|/[ ]?[A-Za-z]|[^\x00-\u2fff]|\\(?:l?dots|[)\]}\\])")
"""What may follow a number and its unit."""
CONTINUED = re.compile(
    rf"""[*_`$]*(?:
        [ \t]*[-+*/×÷·^x,;]?[ \t]+[-+$]?\d|[ \t]*[-+*/×÷·^%][ \t]*[\d(]     # an operand, or one of several numbers: _ + 3, _ 3
        |[ \t]+:[ \t]*\d                                                    # a ratio: _ : 3
        |\.\(                                                               # a repeating decimal: _.(3)
        |[ \t·*]*\\?(?:pi|sqrt|π|√)(?![a-z])|[ \t]+[xyz](?!\w)              # a factor: _ π, _ x
        |[ \t]*[十百千万萬亿億兆십백천만억조≤≥≠±]|[ \t]+[<>][ \t]|[<>][a-z](?![\w>])
        |[ \t]+(?:
            squared|cubed|choose|mod|base|th|to[ ]the[ ]\w+[ ]power|at[ ](?:least|most)|or[ ](?:more|less|fewer|greater)
            |and[ ](?:a|one)[ ](?:half|third|quarter)
        )\b
        |[ \t]+(?:half(?!-)|decimals?|d\.?p|significant)\b                  # _ decimals
        |[- \t]+(?:halves|thirds|(?:{FRACTIONS})s|tens|fold)\b              # _ thirds, _-fold
        |[^\n\d]{{0,12}}\bbelow[ ]zero\b
        |[^\n\d]{{0,24}}\b(?i:or|and|to|of|than|no|wait|actually|sorry)\b[^\n\d]{{0,12}}\d     # _ or 3, _? No, 3
        |[ \t]*(?:h|hours?|ft|feet|foot|lbs?|pounds?|days?|weeks?|months?|years?)[ \t]+\d       # the larger unit: _ hours 3
    )""",
    re.VERBOSE,
)
"""What after digits makes them a part of something."""


def check(verifier: Mapping[str, Any]) -> None:
    """Raise VerifierError if the answer is missing or not a number."""
    exactly(verifier, {"name", "answer"})
    if not isinstance(verifier["answer"], str) or number(verifier["answer"]) is None:
        raise VerifierError(f"verifier {verifier['name']}: answer {verifier['answer']!r:.80} must be a number written as a text, e.g. '42'")


def number(text: str) -> Fraction | None:
    """The value of a text that is a single number, as for `read`, with markup at most, and without a unit other than a currency or %."""
    plain = _prepared(text).strip()
    found = TOKEN.search(plain)
    alone = found and not SIGNED.sub("", plain[: found.start()]).strip("*_`{$ ") and not plain[found.end() :].strip("*_`}.%$€£ ")
    return _read(plain, found) if found and alone else None


def read(text: str, first: bool = False) -> tuple[str, Fraction | None] | None:
    """The last (or `first`) digits of a text as written, and the number that they are; None if there are none."""
    plain = _prepared(text)
    *_, found = [None, TOKEN.search(plain)] if first else [None, *TOKEN.finditer(plain)]
    return (found.group(), _read(plain, found)) if found else None


def _prepared(text: str) -> str:
    text = text.translate(SIGNS)
    for pattern, plain in PREPARED:
        text = pattern.sub(plain, text)
    items = set(map(int, ITEM.findall(text)))
    return ITEM.sub(lambda item: "" if items & {int(item[1]) - 1, int(item[1]) + 1} else item[0], text)


def _read(text: str, found: re.Match[str]) -> Fraction | None:
    """The number at this place; None if the digits are a part of something else, or of no known form."""
    value = _value(found.group())
    if "€" in text[max(0, found.start() - 2) : found.end() + 2] and re.fullmatch(r"\d{1,3}\.\d{3}", found.group()):
        return None  # a thousand euros, or one
    after = text[found.end() : found.end() + AROUND]
    sign = _sign(text[max(0, found.start() - AROUND) : found.start()].rpartition("\n")[2], after)
    if value is None or sign is None or CONTINUED.match(after):
        return None
    if scale := SCALE.match(after):
        value, after = value * SCALES[scale[scale.lastindex or 0].lower()], after[scale.end() :]
    elif unit := UNIT.match(after):
        after = after[unit.end() :]
    return sign * value if END.match(after) and not CONTINUED.match(after) else None


def _value(digits: str) -> Fraction | None:
    if EUROPEAN.fullmatch(digits):
        digits = digits.replace(".", "").replace(",", ".")
    found = NUMBER.fullmatch(digits) if len(digits) <= LONGEST else None
    if found is None:
        return None
    if found["plain"]:
        return Fraction(Decimal(re.sub(f"[,{SPACES}]", "", digits)))
    return int(found["whole"] or 0) + Fraction(int(found["over"]), int(found["under"])) if int(found["under"]) else None


def _sign(before: str, after: str) -> int | None:
    """1 or -1 for what is before a number on its line; None if it makes the number a part of something else."""
    found = SIGNED.search(before)
    assert found is not None  # it also matches nothing
    before, signs = before[: found.start()], [one for one in found.groups() if one]
    if spaced := not signs and SPACED.fullmatch(before):
        before, sign = spaced.groups()
        if before.strip():  # otherwise it is an item of a list
            signs = [sign] if EQUALS.search(before) else [sign, sign]
    bare = MARKUP.sub(" ", before)
    if word := WORDS.search(bare):
        bare, signs = bare[: word.start()], [*signs, "-"]
    if len(signs) > 1 or (signs and OPERAND.search(bare)) or not START.search(before) or PART.search(before) or PART_IN_WORDS.search(bare):
        return None
    return None if LISTED.search(bare) and LINE_END.match(after) else -1 if signs == ["-"] else 1


def _verdict(found: tuple[str, Fraction | None] | None, expected: str) -> Verdict:
    if found is None:
        return Verdict(0.0, None, "no number")
    digits, value = found
    if value is None:
        return Verdict(0.0, None, f"{digits[:80]} is part of something that is not read as a number")
    right = value == number(expected)
    return Verdict(float(right), digits, "right" if right else f"{digits} instead of {expected}")


def arithmetic(verifier: Mapping[str, Any], text: str) -> Verdict:
    return _verdict(read(text), verifier["answer"])


def in_gsms_place(text: str) -> tuple[str, Fraction | None] | None:
    """As `read`, in the place where `gsm` expects the answer."""
    _, marker, tail = text.rpartition("####")
    return read(tail, first=True) if marker else read(text)


def gsm(verifier: Mapping[str, Any], text: str) -> Verdict:
    return _verdict(in_gsms_place(text), verifier["answer"])


PLAIN = re.compile(r"[-+]?(?:\d*\.\d+|\d+)")
"""A number as parsed by `gsm8k`: with any sign before it, and possibly part of a word."""


def gsm8k(verifier: Mapping[str, Any], text: str) -> Verdict:
    numbers = PLAIN.findall(re.sub(r"(\d),(\d)", r"\1\2", text))
    found = numbers[-1] if numbers else text
    right = found.lower() == verifier["answer"].replace(",", "").lower()  # some rows have commas, which no reply could match
    return Verdict(float(right), found if numbers else None, "right" if right else f"{found} instead of {verifier['answer']}")
