r"""Read a mathematical answer, all of it or nothing, as what it is.

A node is a tuple whose first item is its kind:

    number, letter, constant, + * / ^, function   expressions; rational numbers are exact, and arithmetic of numbers is carried out
    quantity       an expression with a unit, a percent sign or money
    relation       a chain of one or several (sign, left, right): equations and inequalities
    member         x ∈ set
    list, any      values separated by commas or "and", or by "or"
    group          values in (), [], (], [), {} or <>: pairs, intervals, sets, vectors
    union          sets joined by one of ∪ ∩ ∖
    matrix         rows
    large          an expression with a number too large to compute
    text           what cannot be read as any of these, in one spelling

`2\frac{1}{3}` and `2 1/3` are mixed numbers. What has two readings is not read:
`1/2x`, `\ln 2/3`, `\sin(x)^2`, `2^3^2`, `\sqrt 12`, `1/2/2020`.
"""

from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from math import comb, factorial, floor
from typing import Any

from pedigree.stages.verifiers import units
from pedigree.stages.verifiers.tokens import FUNCTIONS, GREEK, Token, UnreadableError, plain, tokens

Node = tuple[Any, ...]

DEEPEST = 25
"""Levels of brackets."""
BITS = 1 << 15
"""Of an exact number: 2^32768 has ten thousand digits."""
LARGEST = 10_000
"""An exponent."""
LARGEST_FACTORIAL = 1000
EXPRESSIONS = {"number", "letter", "constant", "+", "*", "/", "^", "function"}
RELATIONS = "=<>≤≥≠"
INFINITY = ("constant", "infty")
BOTH_SIGNS = ("letter", "±")
CLOSING = {"(": ")]", "[": ")]", r"\{": (r"\}",), "langle": ("rangle",)}


class TooLargeError(Exception):
    """A number too large to compute."""


@lru_cache(maxsize=4096)
def read(text: str) -> Node:
    """The value of a text."""
    try:
        parser = _Parser(tokens(text))
        value = _both_signs(parser.values(()))
        parser.end()
    except UnreadableError:
        return ("text", plain(text))
    except TooLargeError:
        return ("large", plain(text))
    return value


def number(value: Fraction | int) -> Node:
    return ("number", Fraction(value))


def infinite(part: Node) -> bool:
    return part in (INFINITY, ("*", number(-1), INFINITY))


def made(kind: str, *parts: Any) -> Node:
    """An expression, computed if its parts are numbers."""
    given = [part[2][0] if isinstance(part, tuple) and part[:2] == ("group", "[]") and len(part[2]) == 1 else part for part in parts]
    inner = [part for part in given if isinstance(part, tuple)]
    if any(part[0] not in EXPRESSIONS for part in inner):
        raise UnreadableError("arithmetic of what is no number")
    if any(infinite(part) for part in inner) and not (kind == "*" and given[0] == number(-1)):
        raise UnreadableError("arithmetic of infinity")
    if all(part[0] == "number" for part in inner):
        value = _computed(kind, [part[1] if isinstance(part, tuple) else part for part in given])
        if value is not None:
            return number(value)
    if kind == "^" and given[1][0] == "number" and abs(given[1][1]) > LARGEST:
        raise TooLargeError
    return (kind, *given)


def _computed(kind: str, given: list[Any]) -> Fraction | None:
    match kind, given:
        case "+", [one, other]:
            found = one + other
        case "*", [one, other]:
            found = one * other
        case "/", [one, other]:
            if other == 0:
                raise UnreadableError("division by zero")
            found = one / other
        case "^", [base, exponent]:
            return _power(base, exponent)
        case "function", ["abs", one]:
            found = abs(one)
        case "function", ["floor", one]:
            found = Fraction(floor(one))
        case "function", ["factorial", one]:
            if one.denominator != 1 or one < 0:
                raise UnreadableError("factorial of no natural number")
            if one > LARGEST_FACTORIAL:
                raise TooLargeError
            found = Fraction(factorial(int(one)))
        case "function", ["binom", one, other] if one.denominator == other.denominator == 1 and 0 <= other <= one:
            if one > LARGEST_FACTORIAL:
                raise TooLargeError
            found = Fraction(comb(int(one), int(other)))
        case _:
            return None
    return _bounded(found)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > BITS:
        raise TooLargeError
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if base == 0 and exponent <= 0:
        raise UnreadableError("a power of zero")
    if exponent.denominator != 1:
        return None
    if abs(base) not in (0, 1) and abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length()) > BITS:
        raise TooLargeError
    return base ** int(exponent) if abs(base) != 1 else Fraction(1 if base == 1 or exponent % 2 == 0 else -1)


class _Parser:
    def __init__(self, found: list[Token]):
        self.found, self.place, self.depth, self.bars, self.angles = found, 0, 0, 0, 0

    # tokens

    def peek(self, ahead: int = 0) -> str:
        place = self.place + ahead
        return self.found[place].text if place < len(self.found) else ""

    def kind(self, ahead: int = 0) -> str:
        place = self.place + ahead
        return self.found[place].kind if place < len(self.found) else ""

    def take(self, *expected: str) -> str:
        text = self.peek()
        if not text or (expected and text not in expected):
            raise UnreadableError(f"{text!r} instead of {' or '.join(expected)}")
        self.place += 1
        return text

    def accept(self, *expected: str) -> str:
        return self.take() if self.peek() and self.peek() in expected else ""

    def end(self) -> None:
        if self.peek():
            raise UnreadableError(f"{self.peek()!r} is left over")

    # values

    def values(self, closing: tuple[str, ...] | str) -> Node:
        """Values up to a closing bracket, which is not taken: a single one, or several."""
        found, words = [self.value()], set[str]()
        while self.peek() and self.peek() not in closing:
            sign = self.take(",", ";", "and", "or")
            words.add((sign in ",;" and self.accept("and", "or")) or sign)
            found.append(self.value())
        if len(found) == 1:
            return found[0]
        if words >= {"and", "or"}:
            raise UnreadableError("and next to or")
        found = _named(found)
        names = {_assigned(one) for one in found}
        if "or" in words or (len(names) == 1 and names != {""}):  # x = 1, x = 2
            return ("any", tuple(found))
        if all(one[0] == "relation" for one in found):
            return ("relation", tuple(link for one in found for link in one[1]))
        return ("list", tuple(found))

    def value(self) -> Node:
        """A chain of relations, a membership, or a single side."""
        left, chain = self.side(), []
        if self.accept("∈"):
            return ("member", left, self.side())
        while sign := self.accept(*RELATIONS):
            right = self.side()
            chain.append((sign, left, right))
            left = right
        return ("relation", tuple(chain)) if chain else left

    def side(self) -> Node:
        """Sets joined by ∪, ∩ or ∖, or an expression with its unit."""
        parts, signs = [self.quantity()], set[str]()
        while sign := self.accept("∪", "∩", "∖"):
            signs.add(sign)
            parts.append(self.quantity())
        if len(parts) == 1:
            return parts[0]
        if len(signs) > 1 or any(part[0] not in ("group", "letter") for part in parts):
            raise UnreadableError("what is joined")
        return ("union", signs.pop(), tuple(parts))

    def quantity(self) -> Node:
        minus = self.peek() == "-" and self.kind(1) == "sign" and self.peek(1) in units.PREFIXES and self.take()
        money = self.accept(*units.PREFIXES)
        value = self.sum()
        if minus:
            value = made("*", number(-1), value)
        words = self.unit()
        if not money and not words:
            return value
        found = self.money(money, words) if money else units.unit(words)
        if found is None or value[0] not in EXPRESSIONS - {"letter"}:  # "a solution" is no quantity
            raise UnreadableError(f"{words} is no unit")
        return ("quantity", value, found)

    def unit(self) -> list[str | int]:
        words: list[str | int] = []
        while text := self.peek():
            named = text in units.WORDS and (self.kind() == "word" or text in units.PREFIXES)
            if named or (words and (text == "/" or (self.kind() == "letter" and text in units.NAMES))):
                words.append(self.take())
            elif words and self.accept("^"):
                braced = self.accept("{")
                words.append(int(self.take(*"123456789")))
                if braced:
                    self.take("}")
            elif not (words and self.accept("*")):
                break
        return words

    @staticmethod
    def money(sign: str, words: list[str | int]) -> units.Unit | None:
        """Of `$5`, `$5 million` or `$5 per hour`."""
        place = next((place for place, word in enumerate(words) if word in ("per", "/")), len(words))
        return units.unit([*words[:place], sign, *words[place:]])

    # expressions

    def sum(self) -> Node:
        """Terms with signs before them; ± is a factor, see `_both_signs`."""
        sign = self.accept("+", "-", "±", "∓")
        value = _signed(sign, self.term())
        while sign := self.accept("+", "-", "±", "∓"):
            value = made("+", value, _signed(sign, self.term()))
        return value

    def term(self) -> Node:
        value = self.mixed() or self.factor()
        divided = False
        while self.peek():
            if sign := self.accept("*", "/"):
                if divided and sign == "/":
                    raise UnreadableError("a date, or a quotient of a quotient")
                divided = sign == "/"
                minus = self.accept("-")
                factor = self.mixed() or self.factor()
                if minus:
                    factor = made("*", number(-1), factor)
                value = made(sign, value, factor)
            elif self.starts():
                if divided:
                    raise UnreadableError("a product after a slash")
                if self.kind() == "number":
                    raise UnreadableError("a number after a factor")
                value = made("*", value, self.factor())
            else:
                break
        return value

    def starts(self) -> bool:
        """Whether a factor begins here, multiplied without a sign."""
        text = self.peek()
        if self.kind() == "word":
            return text in _ATOMS or text in GREEK
        return self.kind() in ("number", "letter") or text in ("(", "[", "{") or (text == "|" and not self.bars)

    def mixed(self) -> Node | None:
        """A mixed number: a whole number followed by a fraction of whole numbers."""
        if self.kind() != "number" or not self.peek().isdigit():
            return None
        begun, whole = self.place, self.plain_number()
        if self.peek() == "frac":
            fraction = self.factor()
            over = self.found[begun + 2 : self.place]
            if fraction[0] != "number" or any(one.text not in "{}" and not one.text.isdigit() for one in over):
                self.place = begun
                return None
        elif (
            self.kind() == "number"
            and self.peek().isdigit()
            and self.found[self.place].spaced
            and self.peek(1) == "/"
            and self.kind(2) == "number"
        ):
            over = self.plain_number()
            self.take("/")
            fraction = made("/", over, self.plain_number())
            if self.starts() or self.peek() in ("^", "/", "!"):
                raise UnreadableError("a mixed number in a product")
        else:
            self.place = begun
            return None
        if not 0 < fraction[1] < 1 or self.peek() in ("^", "!"):
            raise UnreadableError("a mixed number with an improper fraction")
        return made("+", whole, fraction)

    def plain_number(self) -> Node:
        if self.kind() != "number":
            raise UnreadableError("no number")
        text = self.take()
        whole, repeats, digits = text.partition(r"\overline")
        if not repeats:
            return number(_bounded(Fraction(text)))
        length, digits = len(digits.strip("{}")), digits.strip("{}")
        after = len(whole.partition(".")[2])
        return number(Fraction(whole + "0" if whole.endswith(".") else whole) + Fraction(int(digits), (10**length - 1) * 10**after))

    def factor(self) -> Node:
        """An atom with its exponent and exclamation marks."""
        value = self.atom()
        if self.accept("^"):
            value = made("^", value, self.exponent())
            if self.peek() in ("^", "!"):
                raise UnreadableError("what the exponent is")
        while self.accept("!"):
            value = made("function", "factorial", value)
        if self.angles and self.accept("°"):
            value = made("*", value, made("/", ("constant", "pi"), number(180)))
        return value

    def exponent(self) -> Node:
        minus = self.accept("-")
        value = self.atom()
        return made("*", number(-1), value) if minus else value

    def argument(self) -> Node:
        r"""What `\frac` or `\sqrt` applies to: a group in braces, a single digit, or another atom."""
        if self.kind() == "number":
            digits = self.peek()
            if len(digits) > 1 and digits.isdigit():  # \frac12
                self.found[self.place : self.place + 1] = [Token("number", digits[0], False), Token("number", digits[1:], False)]
            return self.plain_number()
        return self.atom()

    def atom(self) -> Node:
        self.depth += 1
        if self.depth > DEEPEST:
            raise UnreadableError("too many levels")
        kind, text = self.kind(), self.peek()
        if kind == "number":
            value = self.plain_number()
            value = self.subscripted(text, value) if self.peek() == "_" else value
        elif kind == "letter":
            value = self.letter()
        elif kind == "word" and text in GREEK:
            value = self.subscripted(self.take(), None)
        elif kind == "word" and text in _ATOMS:
            value = _ATOMS[text](self, self.take())
        elif text in ("(", "[", r"\{"):
            value = self.group()
        elif text == "{":
            value = self.braces()
        elif text == "∅":
            self.take()
            value = ("group", "{}", ())
        elif text == "|":
            value = self.bar()
        else:
            raise UnreadableError(f"{text!r} begins nothing")
        self.depth -= 1
        return value

    def letter(self) -> Node:
        text = self.take()
        while self.peek() == "'":
            text += self.take()
        if self.peek() == "_":
            return self.subscripted(text, None)
        if text == "mathbb R":
            return ("group", "()", (made("*", number(-1), INFINITY), INFINITY))
        return ("constant", text) if text in ("e", "i") else ("letter", text)

    def subscripted(self, name: str, value: Node | None) -> Node:
        """A name with its subscript; a number with one is a numeral in that base."""
        if not self.accept("_"):
            return value or ("letter", name)
        if self.accept("{"):
            parts = []
            while self.peek() != "}":
                parts.append(self.take())
            self.take("}")
        else:
            parts = [self.take()]
        return ("letter", f"{name}_{' '.join(parts)}")

    def group(self) -> Node:
        opening = self.take()
        if opening == r"\{" and self.accept(r"\}"):
            return ("group", "{}", ())
        bars, self.bars = self.bars, 0
        value = self.values(CLOSING[opening])
        self.bars = bars
        closing = self.take(*CLOSING[opening])
        brackets = {r"\{": "{}", "langle": "<>"}.get(opening, opening + closing)
        items = value[1] if value[0] == "list" else (value,)
        if value[0] == "any" or (value[0] == "relation" and len(value[1]) > 1):
            raise UnreadableError("alternatives or a system in brackets")
        return value if len(items) == 1 and brackets == "()" else ("group", brackets, items)

    def braces(self) -> Node:
        self.take("{")
        value = self.values("}")
        self.take("}")
        return ("group", "{}", value[1]) if value[0] == "list" else value

    def bar(self) -> Node:
        self.take("|")
        self.bars += 1
        value = made("function", "abs", self.sum())
        self.bars -= 1
        self.take("|")
        return value

    # words

    def fraction(self, _: str) -> Node:
        above = self.argument()
        below = self.argument()
        if self.kind() == "number" and not self.found[self.place].spaced:
            raise UnreadableError("a digit after a fraction")
        return made("/", above, below)

    def root(self, name: str) -> Node:
        degree = number(2)
        if name == "sqrt" and self.accept("["):
            degree = self.sum()
            self.take("]")
        value = self.argument() if name == "sqrt" else self.atom()
        if value[0] == degree[0] == "number" and value[1] < 0 and degree[1] % 2 == 1:  # the real root
            return made("*", number(-1), made("^", number(-value[1]), number(1 / degree[1])))
        return made("^", value, made("/", number(1), degree))

    def binomial(self, _: str) -> Node:
        return made("function", "binom", self.argument(), self.argument())

    def rounded(self, name: str) -> Node:
        value = self.sum()
        self.take("rfloor" if name == "lfloor" else "rceil")
        if name == "lfloor":
            return made("function", "floor", value)
        return made("*", number(-1), made("function", "floor", made("*", number(-1), value)))

    def constant(self, name: str) -> Node:
        return INFINITY if name == "infinity" else ("constant", name)

    def vector(self, _: str) -> Node:
        self.place -= 1
        return self.group()

    def absolute(self, _: str) -> Node:
        if self.peek() != "(":
            raise UnreadableError("abs of nothing")
        return made("function", "abs", self.atom())

    def function(self, name: str) -> Node:
        base = power = None
        if name == "log" and self.accept("_"):
            base = self.argument()
        if self.accept("^"):
            power = self.exponent()
        self.angles += 1
        value = self.applied()
        self.angles -= 1
        if power == number(-1) and name in ("sin", "cos", "tan"):
            name, power = f"arc{name}", None
        elif power is not None and (power[0] != "number" or power[1] < 0):
            raise UnreadableError("a power of a function")
        value = _function(name, base, value)
        return value if power is None else made("^", value, power)

    def applied(self) -> Node:
        """A function's argument: a group, or a product without signs up to the next function."""
        if self.peek() in ("(", "{", "["):
            value = self.atom()
            if self.peek() in ("^", "!"):
                raise UnreadableError("what the exponent is of")
            return value
        value = self.mixed() or self.factor()
        while self.starts() and self.peek() not in FUNCTIONS and self.peek() not in ("(", "["):
            value = made("*", value, self.factor())
        if self.peek() == "/" or self.peek() in ("(", "["):
            raise UnreadableError("where the argument of a function ends")
        return value

    def matrix(self, _: str) -> Node:
        kind = self.take("pmatrix", "bmatrix", "Bmatrix", "matrix", "smallmatrix", "array")
        rows: list[list[Node]] = [[]]
        while self.peek() != "end":
            rows[-1].append(self.sum())
            if self.accept(r"\\"):
                rows.append([])
            elif self.peek() != "end":
                self.take("&")
        self.take("end")
        self.take(kind)
        found = [tuple(row) for row in rows if row]
        if not found or len({len(row) for row in found}) > 1:
            raise UnreadableError("rows of a matrix")
        return ("matrix", tuple(found))


_ATOMS: dict[str, Callable[[_Parser, str], Node]] = {
    "frac": _Parser.fraction, "sqrt": _Parser.root, "surd": _Parser.root, "binom": _Parser.binomial, "abs": _Parser.absolute,
    "lfloor": _Parser.rounded, "lceil": _Parser.rounded, "langle": _Parser.vector, "begin": _Parser.matrix,
    **dict.fromkeys(("pi", "infty", "infinity"), _Parser.constant), **dict.fromkeys(FUNCTIONS, _Parser.function),
}  # fmt: skip


def _function(name: str, base: Node | None, value: Node) -> Node:
    if name == "exp":
        return made("^", ("constant", "e"), value)
    if base is not None:
        return made("/", made("function", "ln", value), made("function", "ln", base))
    return made("function", name, value)


def _signed(sign: str, term: Node) -> Node:
    if sign in ("", "+"):
        return term
    if sign in "±∓":
        term = made("*", BOTH_SIGNS, term)
    return term if sign == "±" else made("*", number(-1), term)


def _assigned(one: Node) -> str:
    """The name in an equation `name = value`, or nothing."""
    if one[0] == "relation" and len(one[1]) == 1 and one[1][0][0] == "=" and one[1][0][1][0] == "letter":
        return one[1][0][1][1]
    return ""


def _named(found: list[Node]) -> list[Node]:
    """`x = 1, 2` with its name before each."""
    if _assigned(found[0]) and all(one[0] in EXPRESSIONS for one in found[1:]):
        return [found[0], *(("relation", (("=", found[0][1][0][1], one),)) for one in found[1:])]
    return found


def _both_signs(value: Node) -> Node:
    """A value, or its two values if it has one ±."""
    if value[:2] == ("group", "{}") or value[0] in ("list", "any"):
        spread = [_both_signs(one) for one in value[-1]]
        if any(one[0] == "any" and one != given for one, given in zip(spread, value[-1], strict=True)):
            found = tuple(one for several in spread for one in (several[1] if several[0] == "any" else (several,)))
            return (*value[:-1], found) if value[0] == "group" else ("any", found)
        return value
    match _count_signs(value):
        case 0:
            return value
        case 1:
            return ("any", (_with_sign(value, 1), _with_sign(value, -1)))
        case _:
            raise UnreadableError("several ±")


def _count_signs(part: Any) -> int:
    return 0 if not isinstance(part, tuple) else 1 if part == BOTH_SIGNS else sum(map(_count_signs, part))


def _with_sign(part: Any, sign: int) -> Any:
    if not isinstance(part, tuple) or isinstance(part, units.Unit):
        return part
    if part == BOTH_SIGNS:
        return number(sign)
    found = [_with_sign(one, sign) for one in part]
    return made(*found) if part and part[0] in ("+", "*", "/", "^", "function") and isinstance(part[1], (tuple, str)) else tuple(found)
