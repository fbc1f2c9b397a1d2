r"""Read a mathematical answer, all of it or nothing, as what it is.

An answer is an expression of sympy, or a node of another kind:

    quantity       an expression with a unit, a percent sign or money
    about          a value and its rounded value after ≈
    ratio          expressions with colons between them
    relation       a chain of one or several (sign, left, right): equations and inequalities
    member         x ∈ set
    list, any      values separated by commas or "and", or by "or"
    group          values in (), [], (], [), {} or <>: pairs, intervals, sets, vectors
    union          sets joined by one of ∪ ∩ ∖
    matrix         rows
    congruence     two sides and their modulus
    choice         what a letter of multiple choice stands for, with the letter: `(A) 5`
    large          an expression with a number too large to compute
    text           what cannot be read as any of these, in one spelling

`2\frac{1}{3}` and `2 1/3` are mixed numbers. What has two readings is not read:
`1/2x`, `\ln 2/3`, `\sin(x)^2`, `2^3^2`, `\sqrt 12`, `1/2/2020`.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from sympy import Expr, Rational, oo

from pedigree.stages.verifiers import units
from pedigree.stages.verifiers.tokens import FUNCTIONS, GREEK, Token, UnreadableError, plain, tokens, unwrapped

DEEPEST = 25
"""Levels of brackets."""
BITS = 1 << 15
"""Of an exact number: 2^32768 has ten thousand digits."""
LARGEST = 10_000
"""An exponent."""
LARGEST_FACTORIAL = 1000
RELATIONS = "=<>≤≥≠"
CLOSING = {"(": ")]", "[": ")]", r"\{": (r"\}",), "langle": ("rangle",)}
CONSTANTS = {"e": sympy.E, "i": sympy.I, "pi": sympy.pi, "infty": oo, "infinity": oo}
LOG_BASE = sympy.Symbol("base of log", positive=True)
"""`log` without a base may be the natural or the decimal one."""
NAME = re.compile(r"(?![xznkm])[A-Za-z]'*(?:_\w+|_\{\w+\})?(?:\^\{-1\})?\(\w+(?:,\w+)*\)|[A-Z]{2,4}")


class TooLargeError(Exception):
    """A number too large to compute."""


@dataclass(frozen=True)
class Reading:
    """No tuple: sympy would evaluate the texts in a tuple that it compares with an expression."""

    kind: str
    value: Any
    form: Any = None
    """Brackets of a group, sign of a union, unit of a quantity, name of a member, sides of ≈."""


REALS = Reading("group", (-oo, oo), "()")
EMPTY = Reading("group", (), "{}")
PHRASES: dict[str, Reading] = {
    "all real numbers": REALS, "all reals": REALS, "does not exist": Reading("text", "DNE"), "no solutions": Reading("text", "no solution"),
    "no real solutions": Reading("text", "no real solution"), "no real roots": Reading("text", "no real root"),
}  # fmt: skip


CHOICE = re.compile(
    r"(?:\\(?:text(?:bf|rm)?|math(?:bf|rm))\{ *\(([A-J])\) *\}|(?:\(([A-J])\)(?=[\s~\\])|([A-J])\)(?=\s))(?!\s*[+−-]|\s*\\[pm]{2}))"
    r"(?:[\s~]|\\[ ,;:]|\\quad)*((?!.*\([A-J]\))\S.*)",
    re.DOTALL,
)
"""A letter in a bold or Roman font, or in plain text where no sum begins, and what it stands for."""


@lru_cache(maxsize=4096)
def read(text: str) -> Any:
    """The value of a text."""
    if found := CHOICE.fullmatch(unwrapped(text)):
        value = read(found[4])
        if not isinstance(value, sympy.Symbol) and (found[1] or kind(value) != "text"):
            return Reading("choice", value, found[1] or found[2] or found[3])
    try:
        parser = _Parser(tokens(text))
        value = _both_signs(parser.values(()))
        parser.end()
    except UnreadableError:
        return PHRASES.get(plain(text), Reading("text", plain(text)))
    except TooLargeError:
        return Reading("large", plain(text))
    return value


def kind(node: Any) -> str:
    return node.kind if isinstance(node, Reading) else "expression"


def letter(name: str) -> Expr:
    return sympy.Symbol(name, real=True)


def letters(node: Any) -> set[str]:
    """The names of all letters."""
    return {symbol.name for part in _expressions(node) for symbol in part.free_symbols - {LOG_BASE}}


def _expressions(node: Any) -> Iterator[Any]:
    if isinstance(node, Expr):
        yield node
    elif isinstance(node, (Reading, tuple)):
        for part in (node.value, node.form) if isinstance(node, Reading) else node:
            yield from _expressions(part)


def infinite(part: Any) -> bool:
    return part in (oo, -oo)


def made(operation: str, *parts: Any) -> Any:
    """An expression, computed if its parts are numbers; a matrix times a factor."""
    given = [part.value[0] if kind(part) == "group" and part.form == "[]" and len(part.value) == 1 else part for part in parts]
    kinds = [kind(part) for part in given]
    if operation == "*" and sorted(kinds) == ["expression", "matrix"]:
        factor, matrix = given if kinds[1] == "matrix" else given[::-1]
        return Reading("matrix", tuple(tuple(made("*", factor, one) for one in row) for row in matrix.value))
    if {*kinds} != {"expression"}:
        raise UnreadableError("arithmetic of what is no number")
    if any(map(infinite, given)) and not (operation == "*" and given[0] == -1):
        raise UnreadableError("arithmetic of infinity")
    value = _OPERATIONS[operation](*given)
    if value.has(sympy.zoo, sympy.nan):
        raise UnreadableError("division by zero")
    if _bits(value) > BITS:
        raise TooLargeError
    return value


def _negative(value: Any) -> Any:
    return made("*", Rational(-1), value)


def _bits(value: Expr) -> int:
    """Of a number, or of the number before an expression."""
    factor = value.as_coeff_Mul()[0]
    return max(factor.p.bit_length(), factor.q.bit_length()) if isinstance(factor, Rational) else 0


def _power(base: Expr, exponent: Expr) -> Expr:
    if base == 0 and exponent.is_number and not exponent.is_positive:
        raise UnreadableError("a power of zero")
    if isinstance(exponent, Rational) and abs(base) != 1:
        inner = base.as_base_exp()[1] if not isinstance(base, Rational) else Rational(0)
        if abs(exponent) * _bits(base) > BITS or (inner.is_Rational and abs(exponent * inner) > LARGEST):
            raise TooLargeError
    return base ** _small(exponent)


def _small(value: Expr, largest: int = LARGEST) -> Expr:
    """The value, unless it is a number too large for an exponent or a factorial."""
    if value.is_number and not (value.is_Rational and largest == LARGEST) and value.is_finite and abs(sympy.N(value, 15)) > largest:
        raise TooLargeError
    return value


def _factorial(function: Callable[[Expr], Expr], value: Expr) -> Expr:
    if value.is_Rational and not (value.is_integer and value >= 0):
        raise UnreadableError("factorial of no natural number")
    return function(_small(value, LARGEST_FACTORIAL))


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": lambda one, other: one + other, "*": lambda one, other: one * other, "/": lambda one, other: one / other, "^": _power,
    "abs": sympy.Abs, "floor": sympy.floor, "ceil": sympy.ceiling,
    "factorial": lambda value: _factorial(sympy.factorial, value), "factorial2": lambda value: _factorial(sympy.factorial2, value),
    "binom": lambda *given: sympy.binomial(*(_small(value, LARGEST_FACTORIAL) for value in given)),
    **{name: getattr(sympy, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp")},
    "arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan, "ln": sympy.log, "lg": lambda value: sympy.log(value, 10),
    "log": lambda value: sympy.log(value) / LOG_BASE,
}  # fmt: skip


class _Parser:
    def __init__(self, found: list[Token]):
        self.found, self.place, self.depth, self.bars, self.angles, self.signs, self.conditions = found, 0, 0, 0, 0, 0, 0

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

    def values(self, closing: tuple[str, ...] | str) -> Any:
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
        if "or" in words and any(isinstance(one, sympy.Symbol) for one in found):
            raise UnreadableError("letters of choices, of which one is right")
        if "or" in words or (len(names) == 1 and names != {""}):  # x = 1, x = 2
            return Reading("any", tuple(found))
        if all(kind(one) == "relation" for one in found):
            return Reading("relation", tuple(link for one in found for link in one.value))
        return Reading("list", tuple(found))

    def value(self) -> Any:
        """A chain of relations, a membership, or a single side."""
        left, chain = self.name() or self.side(), []
        if self.peek() == ":" and not self.conditions:
            return self.ratio(left)
        if self.accept("∈"):
            return Reading("member", self.side(), left)
        if self.accept("≡"):
            return self.congruence(left)
        while sign := self.accept(*RELATIONS):
            right = self.side()
            chain.append((sign, left, right))
            left = right
        value = Reading("relation", tuple(chain)) if chain else left
        return Reading("about", value, (left, self.side())) if self.accept("≈") else value

    def name(self) -> Any:
        """All of f(x), f^{-1}(2) or AB before an equals sign."""
        before = []
        for token in self.found[self.place : self.place + 12]:
            if token.text == "=" and NAME.fullmatch("".join(before)):
                self.place += len(before)
                return letter("".join(before))
            before.append(token.text)
        return None

    def congruence(self, left: Any) -> Any:
        right = self.side()
        self.take("bmod")
        modulus = self.argument()
        if not kind(left) == kind(right) == "expression" or not modulus.is_positive:
            raise UnreadableError("a congruence of what is no number")
        return Reading("congruence", (left, right % modulus if right.is_Integer else right), modulus)

    def ratio(self, first: Any) -> Any:
        parts = [first]
        while self.accept(":"):
            if self.kind() == "number" and len(self.peek()) > 1 and self.peek().isdigit():
                raise UnreadableError("a time, or a ratio")
            parts.append(self.sum())
        if any(kind(part) != "expression" or part == 0 for part in parts):
            raise UnreadableError("a ratio of what is no number")
        return Reading("ratio", tuple(parts))

    def side(self) -> Any:
        """Sets joined by ∪, ∩ or ∖, or an expression with its unit."""
        parts, signs = [self.quantity()], set[str]()
        while sign := self.accept("∪", "∩", "∖"):
            signs.add(sign)
            parts.append(self.quantity())
        if len(parts) == 1:
            return parts[0]
        if len(signs) > 1 or any(kind(part) != "group" and not isinstance(part, sympy.Symbol) for part in parts):
            raise UnreadableError("what is joined")
        return Reading("union", tuple(parts), signs.pop())

    def quantity(self) -> Any:
        minus = self.peek() == "-" and self.kind(1) == "sign" and self.peek(1) in units.PREFIXES and self.take()
        money = self.accept(*units.PREFIXES)
        value = self.sum()
        value = _negative(value) if minus else value
        words = self.unit()
        if not money and not words:
            return value
        found = self.money(money, words) if money else units.unit(words)
        if found is None or kind(value) != "expression" or isinstance(value, sympy.Symbol):  # "a solution" is no quantity
            raise UnreadableError(f"{words} is no unit")
        if found.scale != 1:  # a million dollars
            value, found = made("*", value, Rational(found.scale)), found._replace(scale=Fraction(1))
        if self.kind(self.peek() == "and") != "number" or money or not found.base:
            return Reading("quantity", value, found)
        self.accept("and")
        smaller = self.quantity()  # 1 hour and 30 minutes
        if kind(smaller) != "quantity" or smaller.form.base != found.base or smaller.form.factor >= found.factor:
            raise UnreadableError("two quantities")
        value = made("*", value, Rational(found.factor / smaller.form.factor))
        return Reading("quantity", made("+", value, smaller.value), smaller.form)

    def unit(self) -> list[str | int]:
        words: list[str | int] = []
        while text := self.peek():
            named = (self.kind() == "word" and (text in units.WORDS or units.counted(text))) or text in units.PREFIXES
            per = text == "/" and (words or self.kind(1) == "word")
            if named or per or (words and self.kind() == "letter" and text in units.NAMES):
                words.append(self.take())
                if text == "°" and self.peek() in ("C", "F"):
                    words[-1] = text + self.take()
            elif words and self.accept("^"):
                braced = self.accept("{")
                minus = self.accept("-")
                words.append(int(minus + self.take(*"123456789")))
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

    def sum(self) -> Any:
        """Terms with signs before them; ± is a factor, see `_both_signs`."""
        sign = self.accept("+", "-", "±", "∓")
        value = self.signed(sign, self.term())
        while sign := self.accept("+", "-", "±", "∓"):
            value = made("+", value, self.signed(sign, self.term()))
        return value

    def signed(self, sign: str, term: Reading) -> Any:
        if sign and sign in "±∓":
            self.signs += 1
            term = made("*", letter(f"±{self.signs}"), term)
        return _negative(term) if sign and sign in "-∓" else term

    def term(self) -> Any:
        value = self.mixed() or self.factor()
        divided = False
        while self.peek():
            if self.peek() == "/" and self.kind(1) == "word" and self.peek(1) in units.NAMES:
                break  # $5/hour
            if sign := self.accept("*", "/"):
                if divided and sign == "/":
                    raise UnreadableError("a date, or a quotient of a quotient")
                divided = sign == "/"
                minus = self.accept("-")
                factor = self.mixed() or self.factor()
                value = made(sign, value, _negative(factor) if minus else factor)
            elif self.starts():
                if divided and not (isinstance(value, Rational) and self.found[self.place].spaced):
                    raise UnreadableError("a product after a slash")
                if self.kind() == "number" and self.peek(-1) != "!":
                    raise UnreadableError("a number after a factor")
                value = made("*", value, self.factor())
            else:
                break
        return value

    def starts(self) -> bool:
        """Whether a factor begins here, multiplied without a sign."""
        text = self.peek()
        if self.kind() == "word":
            return (text in _ATOMS and (text != "sec" or bool(self.peek(1)))) or text in GREEK
        return self.kind() in ("number", "letter") or text in ("(", "[", "{") or (text == "|" and not self.bars)

    def mixed(self) -> Any:
        """A mixed number: a whole number followed by a fraction of whole numbers."""
        if self.kind() != "number" or not self.peek().isdigit():
            return None
        begun, whole = self.place, self.plain_number()
        if self.peek() == "frac":
            fraction = self.factor()
            over = self.found[begun + 2 : self.place]
            if any(one.text not in "{}" and not one.text.isdigit() for one in over):
                self.place = begun
                return None
        elif self.kind() == "number" and self.peek().isdigit() and self.found[self.place].spaced and self.peek(1) == "/":
            over = self.plain_number()
            self.take("/")
            fraction = made("/", over, self.plain_number())
            if self.starts() or self.peek() in ("^", "/", "!"):
                raise UnreadableError("a mixed number in a product")
        else:
            self.place = begun
            return None
        if not 0 < fraction < 1 or self.peek() in ("^", "!"):
            raise UnreadableError("a mixed number with an improper fraction")
        return made("+", whole, fraction)

    def plain_number(self) -> Any:
        if self.kind() != "number":
            raise UnreadableError("no number")
        text = self.take()
        whole, repeats, digits = text.partition(r"\overline")
        digits = digits.strip("{}")
        found = Fraction(f"0{whole}" if whole[-1:].isdigit() else f"0{whole}0")
        if repeats:
            found += Fraction(int(digits), (10 ** len(digits) - 1) * 10 ** len(whole.partition(".")[2]))
        if _bits(Rational(found)) > BITS:
            raise TooLargeError
        return Rational(found)

    def factor(self) -> Any:
        """An atom with its exponent and exclamation marks."""
        value = self.atom()
        if self.accept("^"):
            value = made("^", value, self.exponent())
            if self.peek() in ("^", "!"):
                raise UnreadableError("what the exponent is")
        if self.accept("!"):
            value = made("factorial2" if self.accept("!") else "factorial", value)
            if self.peek() == "!":
                raise UnreadableError("many exclamation marks")
        if self.angles and self.accept("°"):
            value = made("*", value, sympy.pi / 180)
        return value

    def exponent(self) -> Any:
        minus = self.accept("-")
        value = self.atom()
        return _negative(value) if minus else value

    def argument(self) -> Any:
        r"""What `\frac` or `\sqrt` applies to: a group in braces, a single digit, or another atom."""
        if self.kind() == "number":
            digits = self.peek()
            if len(digits) > 1 and digits.isdigit():  # \frac12
                self.found[self.place : self.place + 1] = [Token("number", digits[0], False), Token("number", digits[1:], False)]
            return self.plain_number()
        return self.atom()

    def atom(self) -> Any:
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
            value = EMPTY
        elif text == "|":
            value = self.bar()
        else:
            raise UnreadableError(f"{text!r} begins nothing")
        self.depth -= 1
        return value

    def letter(self) -> Any:
        text = self.take()
        while self.peek() == "'":
            text += self.take()
        if self.peek() == "_":
            return self.subscripted(text, None)
        if text[0] in "fg" and self.peek() == "(":
            argument = self.atom()
            if kind(argument) != "expression":
                raise UnreadableError("a function of what is no number")
            return sympy.Function(text)(argument)
        if text == "mathbb R":
            return REALS
        return CONSTANTS[text] if text in ("e", "i") else letter(text)

    def subscripted(self, name: str, value: Any) -> Any:
        """A name with its subscript; a number with one is a numeral in that base."""
        if not self.accept("_"):
            return letter(name) if value is None else value
        if self.accept("{"):
            parts = []
            while self.peek() != "}":
                parts.append(self.take())
            self.take("}")
        else:
            parts = [self.take()]
        return letter(f"{name}_{' '.join(parts)}")

    def group(self) -> Any:
        opening = self.take()
        if opening == r"\{" and self.accept(r"\}"):
            return EMPTY
        before = self.bars, self.conditions
        self.bars = self.conditions = opening == r"\{"
        value = self.values((*CLOSING[opening], "|", ":") if opening == r"\{" else CLOSING[opening])
        if opening == r"\{" and self.accept("|", ":"):
            self.bars, self.conditions = before
            return self.condition(value)
        self.bars, self.conditions = before
        closing = self.take(*CLOSING[opening])
        brackets = {r"\{": "{}", "langle": "<>"}.get(opening, opening + closing)
        items = value.value if kind(value) == "list" else (value,)
        if kind(value) in ("any", "about", "ratio") or (kind(value) == "relation" and len(value.value) > 1):
            raise UnreadableError("alternatives or a system in brackets")
        if len(items) == 1 and (brackets == "()" or (brackets == "[]" and kind(value) == "matrix")):
            return value
        return Reading("group", items, brackets)

    def condition(self, name: Any) -> Any:
        r"""Of a set `\{x ∈ ℝ | x > 2\}`."""
        if kind(name) == "member" and name.value == REALS:
            name = name.form
        value = self.values((r"\}",))
        self.take(r"\}")
        if not isinstance(name, sympy.Symbol) or kind(value) not in ("relation", "any") or letters(value) != {name.name}:
            raise UnreadableError("the condition of a set")
        return value

    def braces(self) -> Any:
        self.take("{")
        value = self.values("}")
        self.take("}")
        return Reading("group", value.value, "{}") if kind(value) == "list" else value

    def bar(self) -> Any:
        self.take("|")
        self.bars += 1
        value = made("abs", self.sum())
        self.bars -= 1
        self.take("|")
        return value

    # words

    def fraction(self, _: str) -> Any:
        above = self.argument()
        below = self.argument()
        if self.kind() == "number" and not self.found[self.place].spaced:
            raise UnreadableError("a digit after a fraction")
        return made("/", above, below)

    def root(self, name: str) -> Any:
        degree = Rational(2)
        if self.accept("["):
            degree = self.sum()
            self.take("]")
        value = self.argument() if name == "sqrt" else self.atom()
        exponent = made("/", Rational(1), degree)
        if isinstance(value, Rational) and isinstance(degree, Rational) and value < 0 and degree % 2 == 1:  # the real root
            return -made("^", -value, exponent)
        return made("^", value, exponent)

    def binomial(self, _: str) -> Any:
        return made("binom", self.argument(), self.argument())

    def rounded(self, name: str) -> Any:
        value = self.sum()
        self.take(f"r{name[1:]}")
        return made(name[1:], value)

    def constant(self, name: str) -> Any:
        return CONSTANTS[name]

    def vector(self, _: str) -> Any:
        self.place -= 1
        return self.group()

    def absolute(self, _: str) -> Any:
        if self.peek() != "(":
            raise UnreadableError("abs of nothing")
        return made("abs", self.atom())

    def function(self, name: str) -> Any:
        base = power = None
        if name == "log" and self.accept("_"):
            base = self.argument()
        if self.accept("^"):
            power = self.exponent()
        self.angles += 1
        value = self.applied()
        self.angles -= 1
        if power == -1 and name in ("sin", "cos", "tan"):
            name, power = f"arc{name}", None
        elif power is not None and not (isinstance(power, Rational) and power >= 0):
            raise UnreadableError("a power of a function")
        value = made(name, value) if base is None else made("/", made("ln", value), made("ln", base))
        return value if power is None else made("^", value, power)

    def applied(self) -> Any:
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

    def matrix(self, _: str) -> Any:
        name = self.take("pmatrix", "bmatrix", "Bmatrix", "matrix", "smallmatrix", "array", "vmatrix", "cases")
        rows: list[list[Any]] = [[]]
        while self.peek() != "end":
            rows[-1].append(self.value() if name == "cases" else self.sum())
            if name == "cases":
                self.accept(",")
            if self.accept(r"\\"):
                rows.append([])
            elif self.peek() != "end":
                self.take("&")
        self.take("end")
        self.take(name)
        found = [tuple(row) for row in rows if row]
        if not found or len({len(row) for row in found}) > 1:
            raise UnreadableError("rows of a matrix")
        if name == "cases":
            if len(found[0]) > 1 or any(kind(row[0]) != "relation" for row in found):
                raise UnreadableError("cases that are no system of equations")
            return Reading("relation", tuple(link for row in found for link in row[0].value))
        if name == "vmatrix":
            if len(found) != len(found[0]) or len(found) > 4 or {*map(kind, sum(found, ()))} != {"expression"}:
                raise UnreadableError("a determinant")
            return sympy.Matrix(found).det()
        return Reading("matrix", tuple(found))


_ATOMS: dict[str, Callable[[_Parser, str], Any]] = {
    "frac": _Parser.fraction, "sqrt": _Parser.root, "surd": _Parser.root, "binom": _Parser.binomial, "abs": _Parser.absolute,
    "lfloor": _Parser.rounded, "lceil": _Parser.rounded, "langle": _Parser.vector, "begin": _Parser.matrix,
    **dict.fromkeys(("pi", "infty", "infinity"), _Parser.constant), **dict.fromkeys(FUNCTIONS, _Parser.function),
}  # fmt: skip


def _assigned(one: Any) -> str:
    """The name in an equation `name = value`, or nothing."""
    if kind(one) == "relation" and len(one.value) == 1 and one.value[0][0] == "=" and isinstance(one.value[0][1], sympy.Symbol):
        return one.value[0][1].name
    return ""


def _named(found: list[Any]) -> list[Any]:
    """`x = 1, 2` with its name before each."""
    if _assigned(found[0]) and all(isinstance(one, Expr) for one in found[1:]):
        return [found[0], *(Reading("relation", (("=", found[0].value[0][1], one),)) for one in found[1:])]
    return found


def _both_signs(value: Any) -> Any:
    """A value, or its two values if it has one ±."""
    if (kind(value) == "group" and value.form == "{}") or kind(value) in ("list", "any"):
        spread = [_both_signs(one) for one in value.value]
        if any(kind(one) == "any" and one != given for one, given in zip(spread, value.value, strict=True)):
            found = tuple(one for several in spread for one in (several.value if kind(several) == "any" else (several,)))
            return Reading("group" if kind(value) == "group" else "any", found, value.form)
        return value
    signs = [name for name in letters(value) if name.startswith("±")]
    if len(signs) > 1:
        raise UnreadableError("several ±")
    return Reading("any", tuple(_replaced(value, {letter(signs[0]): Rational(sign)}) for sign in (1, -1))) if signs else value


def _replaced(part: Any, new: dict[Expr, Expr]) -> Any:
    if isinstance(part, Expr):
        return part.xreplace(new)
    if isinstance(part, Reading):
        return Reading(part.kind, _replaced(part.value, new), part.form)
    return tuple(_replaced(one, new) for one in part) if isinstance(part, tuple) else part
