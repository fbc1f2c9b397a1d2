"""Whether two answers are equal as what they are, for use in a separate process (`worker`): algebra may take forever."""

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import sympy

from pedigree.stages.verifiers.expressions import EXPRESSIONS, LARGEST, Node, TooLargeError, infinite, made, number, read
from pedigree.stages.verifiers.units import NAMES

DIGITS = 40
"""Of the values that show two expressions to be different; equal ones are proved equal."""
BINARY_DIGITS = 140
CLOSE = 1e-30
POINTS = 3
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": sympy.Abs, "floor": sympy.floor, "factorial": sympy.factorial, "binom": sympy.binomial, "ln": sympy.log,
    **{name: getattr(sympy, name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")},
    "arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan,
}  # fmt: skip
CONSTANTS = {"e": sympy.E, "pi": sympy.pi, "i": sympy.I}
LOG_BASE = sympy.Symbol("base of log", positive=True)
"""`log` without a base may be the natural or the decimal one."""
LETTERED = {name: of for name, of in NAMES.items() if len(name) == 1 and name.isalpha()}
"""Units of one letter, which may also be variables."""
FLIPPED = {">": "<", "≥": "≤"}
Answer = bool | None
"""None: only the question tells, or it cannot be computed."""


def equal(one: str, other: str) -> Answer:
    """Whether two texts are equal answers; None if that cannot be decided."""
    try:
        return same(read(one), read(other))
    except (TooLargeError, RecursionError):  # an exponent that is no rational number, or hundreds of operations
        return None


def same(one: Node, other: Node) -> Answer:
    """Whether two values are equal, whichever of them is the right answer."""
    if one == other:
        return True
    if {"large"} & {one[0], other[0]}:
        return None if {one[0], other[0]} <= {"large", "quantity", "relation", *EXPRESSIONS} else False
    if one[0] in EXPRESSIONS and other[0] in EXPRESSIONS:
        return _same_expression(one, other)
    for rule in (_alike, _with_unit, _named, _listed, _interval):
        for given in ((one, other), (other, one)):
            found = rule(*given)
            if found is not NotImplemented:
                return found
    return False


def _every(answers: Sequence[Answer]) -> Answer:
    return False if False in answers else None if None in answers else True


def _some(answers: Sequence[Answer]) -> Answer:
    return True if True in answers else None if None in answers else False


def _ordered(ones: Sequence[Node], others: Sequence[Node]) -> Answer:
    return _every([same(one, other) for one, other in zip(ones, others, strict=True)]) if len(ones) == len(others) else False


def _members(ones: Sequence[Node], others: Sequence[Node], equals: Callable[[Any, Any], Answer] = same) -> Answer:
    """Whether each of the ones is among the others, and each of those among these."""
    table = [[equals(one, other) for other in others] for one in ones]
    return _every([_some(row) for row in [*table, *zip(*table, strict=True)]]) if bool(ones) == bool(others) else False


def _alike(one: Node, other: Node) -> Any:
    """Two values of one kind."""
    if one[0] != other[0]:
        return NotImplemented
    match one[0]:
        case "list":
            return _ordered(one[1], other[1]) or (
                None if _members(one[1], other[1]) is not False and len(one[1]) == len(other[1]) else False
            )
        case "any":
            return _members(one[1], other[1])
        case "group" if one[1] == other[1]:
            return _members(one[2], other[2]) if one[1] == "{}" else _ordered(one[2], other[2])
        case "union" if one[1] == other[1]:
            return _ordered(one[2], other[2]) if one[1] == "∖" else _members(one[2], other[2])
        case "matrix":
            rows = len(one[1]) == len(other[1]) and len(one[1][0]) == len(other[1][0])
            return _every([_ordered(*pair) for pair in zip(one[1], other[1], strict=True)]) if rows else False
        case "quantity":
            if one[2].base != other[2].base:
                return False
            return _same_expression(*(made("*", given[1], number(given[2].factor)) for given in (one, other)))
        case "relation":
            return _members(_coordinates(one), _coordinates(other), _same_relation)
        case "member":
            return _every([same(one[1], other[1]), same(one[2], other[2])])
    return False


def _with_unit(one: Node, other: Node) -> Any:
    """A quantity and a number: a unit may be missing, because questions give it. A percentage is a number."""
    if one[0] != "quantity" or other[0] not in EXPRESSIONS:
        return NotImplemented
    _, value, unit = one
    bare = _same_expression(value, other)
    if not unit.base:
        return _same_expression(made("*", value, number(unit.factor)), other) or (False if bare is False else None)
    if bare is False and unit.base == (("degree", 1),):
        return _same_expression(made("*", value, made("/", ("constant", "pi"), number(180))), other)
    if bare is False and _letters(other) & LETTERED.keys():  # 5 m/s, read as a product
        product = made("*", value, number(unit.factor))
        for base, power in unit.base:
            product = made("*", product, made("^", ("letter", base), number(power)))
        return _same_expression(product, _lettered(other))
    return bare


def _lettered(part: Any) -> Any:
    """An expression with its letters as units."""
    if part[0] == "letter" and part[1] in LETTERED:
        base, factor = LETTERED[part[1]]
        return made("*", number(factor), ("letter", base))
    return tuple(_lettered(one) if isinstance(one, tuple) else one for one in part)


def _named(one: Node, other: Node) -> Any:
    """`x = 5` and 5, `f(x) = x + 1` and x + 1, `x ∈ [1, 2]` and [1, 2]; `2 + 3 = 5` is 5."""
    if one[0] == "member" and other[0] in ("group", "union") and one[1][0] == "letter":
        return same(one[2], other)
    if one[0] != "relation" or other[0] in ("relation", "any", "member", "text", "list"):
        return NotImplemented
    links = _links(one)
    if not _letters(one) and other[0] in EXPRESSIONS and all(link[0] == "=" and same(*link[1:]) for link in links):
        return same(links[-1][2], other)
    if len(links) == 1 and links[0][0] == "=" and _is_name(links[0][1]):
        return same(links[0][2], other)
    assigned = {link[1][1]: link[2] for link in links if link[0] == "=" and link[1][0] == "letter"}
    if other[0] == "group" and other[1] == "()" and len(assigned) == len(links) == len(other[2]):
        return False if _ordered([value for _, value in sorted(assigned.items())], other[2]) is False else None
    return NotImplemented


def _is_name(side: Node) -> bool:
    """Whether a side is x, f(x) or (x, y)."""
    if side[0] == "group":
        return all(one[0] == "letter" for one in side[2])
    return side[0] == "letter" or (side[0] == "*" and all(one[0] == "letter" for one in side[1:]) and side[1][1] in "fghyFG")


def _listed(one: Node, other: Node) -> Any:
    """Values in a row and values that are alternatives; next to brackets, only the question tells what is meant."""
    if one[0] == "any" and other[0] == "list":
        return _members(one[1], other[1]) if len(one[1]) == len(other[1]) else False
    if one[0] in ("any", "list") and other[0] == "group":
        found = _members(one[1], other[2]) if other[1] == "{}" or one[0] == "any" else _ordered(one[1], other[2])
        return False if found is False else None
    if other[:2] == ("group", "{}") and len(other[2]) == 1 and one[0] in EXPRESSIONS | {"quantity"}:
        return False if same(one, other[2][0]) is False else None
    return NotImplemented


def _interval(one: Node, other: Node) -> Any:
    """`1 < x < 2`, `x ∈ (1, 2)` and (1, 2), which may also be a pair."""
    if one[0] not in ("relation", "member", "any") or other[0] not in ("group", "union", "member", "relation", "any"):
        return NotImplemented
    if one[0] == "member":
        if one[1][0] != "letter" or (pieces := _pieces(one[1], one[2])) is None:
            return NotImplemented
        return same(pieces, other)
    names = _letters(one)
    if other[0] in ("relation", "any", "member") or len(names) != 1:
        return NotImplemented
    pieces = _pieces(("letter", *names), other)
    if pieces is None:
        return NotImplemented
    found = same(one, pieces)
    pair = other[0] == "group" and other[1] in ("()", "[]") and not any(map(infinite, other[2]))
    return None if found and pair else found


def _pieces(name: Node, chosen: Node) -> Node | None:
    """An interval, or a union of intervals, as inequalities of a name."""
    if chosen[0] == "union":
        pieces = [_pieces(name, one) for one in chosen[2]] if chosen[1] == "∪" else [None]
        return None if None in pieces else ("any", tuple(pieces))
    if chosen[0] != "group" or chosen[1] not in ("()", "[]", "[)", "(]") or len(chosen[2]) != 2:
        return None
    low, high = chosen[2]
    if not {low[0], high[0]} <= EXPRESSIONS:
        return None
    links = []
    if not infinite(low):
        links.append(("<" if chosen[1][0] == "(" else "≤", low, name))
    if not infinite(high):
        links.append(("<" if chosen[1][1] == ")" else "≤", name, high))
    return ("relation", tuple(links))


def _letters(part: Any, kind: str = "letter") -> set[str]:
    """The names of letters, or of constants."""
    if not isinstance(part, tuple):
        return set()
    return {part[1]} if part[:1] == (kind,) else set[str]().union(*(_letters(one, kind) for one in part))


# relations


def _links(relation: Node) -> list[Node]:
    """The single relations, `x = 10/2 = 5` as `x = 5` and `-∞ < x < 2` as `x < 2`."""
    found: list[Node] = []
    finite = [link for link in relation[1] if not (infinite(link[1]) or infinite(link[2]))]
    for sign, left, right in finite or relation[1]:
        last = found[-1] if found else None
        if sign == "=" and last and last[0] == "=" and last[2] == left and not _letters(left) and same(left, right):
            continue
        found.append((sign, left, right))
    return found


def _coordinates(relation: Node) -> list[Node]:
    """The single relations, `(x, y) = (1, 2)` as one for each letter."""
    links = _links(relation)
    if len(links) == 1 and links[0][0] == "=" and all(side[:2] == ("group", "()") for side in links[0][1:]):
        _, names, values = links[0]
        if _is_name(names) and len(names[2]) == len(values[2]):
            return [("=", *pair) for pair in zip(names[2], values[2], strict=True)]
    return links


def _same_relation(one: Node, other: Node) -> Answer:
    """Whether two relations are equal: the sides are, or their differences up to a factor, which is positive for inequalities."""
    (sign, *sides), (its, *others) = ((FLIPPED[link[0]], link[2], link[1]) if link[0] in FLIPPED else link for link in (one, other))
    if sign != its:
        return False
    if _ordered(sides, others):
        return True
    if not {side[0] for side in (*sides, *others)} <= EXPRESSIONS:
        return _ordered(sides[::-1], others) if sign in "=≠" else False
    if not _letters(tuple(sides)) or not _letters(tuple(others)):
        return _ordered(sides[::-1], others) if sign in "=≠" else False
    ones, its = (made("+", left, made("*", number(-1), right)) for left, right in (sides, others))
    ratios = {_ratio(_value(ones, point), _value(its, point)) for point in range(POINTS)} - {None}
    if len(ratios) > 1:
        return False
    ratio = sympy.simplify(_symbolic(ones) / _symbolic(its))
    if not ratio.is_number:
        return None if ratios else False
    return bool(ratio.is_nonzero) if sign in "=≠" else bool(ratio.is_positive)


def _ratio(one: Any, other: Any) -> Any:
    if one is None or other is None or abs(other) < CLOSE or abs(one) < CLOSE:
        return None
    return complex(one / other).__format__(".12g")


# expressions


def _same_expression(one: Node, other: Node) -> Answer:
    """Whether two expressions are equal for all values of their letters: numbers show a difference, algebra proves equality."""
    if one == other:
        return True
    if one[0] == other[0] == "number" or infinite(one) or infinite(other):
        return False
    real = "i" not in _letters((one, other), "constant")
    undefined = False
    for point in range(POINTS):
        ones, others = _value(one, point), _value(other, point)
        if ones is None or others is None:
            continue
        if real and ones.imag and others.imag and (_letters(one) or _letters(other)):  # outside of where they are real functions
            undefined = True
            continue
        scale = max(abs(ones), abs(others))
        if scale > CLOSE**3 and abs(ones - others) > CLOSE * scale:
            return False
    ones, others = _symbolic(one), _symbolic(other)
    if undefined:
        positive = {letter: sympy.Symbol(letter.name, positive=True) for letter in ones.free_symbols | others.free_symbols}
        ones, others = ones.xreplace(positive), others.xreplace(positive)
    return _proved(ones, others)


def _proved(one: Any, other: Any) -> Answer:
    if one == other:
        return True
    difference = one - other
    if difference.is_number:
        found = difference.evalf(2, maxn=1000).as_real_imag()
        if any(part.is_Float and part._prec > 1 and part != 0 for part in found):  # significant digits
            return False
    for simpler in (sympy.expand, sympy.simplify, _expanded):
        if simpler(difference) == 0:
            return True
    return True if difference.is_number and difference.equals(0) else None


def _expanded(difference: Any) -> Any:
    """With binomial coefficients and factorials of sums written out."""
    return sympy.simplify(sympy.expand_func(difference))


@lru_cache(maxsize=4096)
def _value(node: Node, point: int) -> Any:
    """An expression's value where each letter has a number of its own; None where it has none."""
    expression = _symbolic(node)
    places = {letter: _place(letter.name, point) for letter in expression.free_symbols}
    value = sympy.N(expression.xreplace(places), DIGITS)
    return value._to_mpmath(BINARY_DIGITS) if value.is_number and value.is_finite else None


def _place(name: str, point: int) -> Any:
    """A number between 1/5 and 9/5, negative for some letters at some points."""
    draw = random.Random(f"{name}/{point}")
    sign = 1 if point == 0 or name == LOG_BASE.name else draw.choice((-1, 1)) if point == 1 else -1
    return sympy.Rational(sign * draw.randrange(2001, 17999), 10007)


@lru_cache(maxsize=4096)
def _symbolic(node: Node) -> Any:
    match node:
        case "number", value:
            return sympy.Rational(value.numerator, value.denominator)
        case "letter", name:
            return sympy.Symbol(name, real=True)
        case "constant", name:
            return CONSTANTS[name]
        case "+", *parts:
            return sympy.Add(*map(_symbolic, parts))
        case "*", *parts:
            return sympy.Mul(*map(_symbolic, parts))
        case "/", above, below:
            return _symbolic(above) / _symbolic(below)
        case "^", base, exponent:
            return _symbolic(base) ** _small(_symbolic(exponent))
        case "function", "log", value:
            return sympy.log(_symbolic(value)) / LOG_BASE
        case "function", name, *values:
            given = [_symbolic(value) for value in values]
            return FUNCTIONS[name](*([_small(value) for value in given] if name in ("factorial", "binom") else given))
    raise AssertionError(node)


def _small(value: Any) -> Any:
    """The value, unless it is a number too large for an exponent."""
    if value.is_number and not value.is_Rational and value.is_finite and abs(sympy.N(value, 15)) > LARGEST:
        raise TooLargeError
    return value
