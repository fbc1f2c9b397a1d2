"""Whether two answers are equal as what they are, for use in a separate process (`worker`): algebra may take forever."""

import itertools
import random
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import sympy
from sympy import Rational, oo
from sympy.core.function import AppliedUndef

from pedigree.stages.verifiers.expressions import LOG_BASE, Reading, TooLargeError, infinite, kind, letter, letters, made, read
from pedigree.stages.verifiers.units import NAMES

DIGITS = 40
"""Of the values that show two expressions to be different; equal ones are proved equal."""
BINARY_DIGITS = 140
CLOSE = 1e-30
POINTS = 3
MOST_PIECES = 20
"""Of a union: sympy takes time with their square."""
LETTERED = {name: of for name, of in NAMES.items() if len(name) == 1 and name.isalpha()}
"""Units of one letter, which may also be variables."""
FLIPPED = {">": "<", "≥": "≤"}
Answer = bool | None
"""None: only the question tells, or it cannot be computed."""


def equal(one: str, other: str) -> Answer:
    """Whether two texts are equal answers; None if that cannot be decided."""
    try:
        return same(read(one), read(other))
    except (TooLargeError, RecursionError, ArithmeticError):  # hundreds of operations, or digits
        return None


def same(one: Any, other: Any) -> Answer:
    """Whether two values are equal, whichever of them is the right answer."""
    if one == other:
        return True
    kinds = {kind(one), kind(other)}
    if "large" in kinds:
        return None if kinds <= {"large", "quantity", "relation", "expression"} else False
    if kinds == {"expression"}:
        return _same_expression(one, other)
    for rule in (_chosen, _alike, _rounded, _with_unit, _named, _listed, _interval):
        for given in ((one, other), (other, one)):
            found = rule(*given)
            if found is not NotImplemented:
                return found
    return False


def _every(answers: Sequence[Answer]) -> Answer:
    return False if False in answers else None if None in answers else True


def _some(answers: Sequence[Answer]) -> Answer:
    return True if True in answers else None if None in answers else False


def _ordered(ones: Sequence[Any], others: Sequence[Any]) -> Answer:
    return _every([same(one, other) for one, other in zip(ones, others, strict=True)]) if len(ones) == len(others) else False


def _members(ones: Sequence[Any], others: Sequence[Any], equals: Callable[[Any, Any], Answer] = same) -> Answer:
    """Whether each of the ones is among the others, and each of those among these."""
    table = [[equals(one, other) for other in others] for one in ones]
    return _every([_some(row) for row in [*table, *zip(*table, strict=True)]]) if bool(ones) == bool(others) else False


def _alike(one: Any, other: Any) -> Any:
    """Two values of one kind."""
    if kind(one) != kind(other):
        return NotImplemented
    ones, others = one.value, other.value
    match one.kind:
        case "list":
            return _ordered(ones, others) or (None if _members(ones, others) is not False and len(ones) == len(others) else False)
        case "any":
            return _members(ones, others)
        case "group" if one.form == other.form:
            return _members(ones, others) if one.form == "{}" else _ordered(ones, others)
        case "union" if one.form == other.form and (found := (_ordered if one.form == "∖" else _members)(ones, others)):
            return found
        case "matrix":
            return _ordered(sum(ones, ()), sum(others, ())) if len(ones) == len(others) else False
        case "ratio":
            return _ordered(*([made("/", part, parts[0]) for part in parts] for parts in (ones, others)))
        case "quantity":
            return one.form[0] == other.form[0] and _same_expression(_sized(one), _sized(other))
        case "relation":
            return _members(_coordinates(one), _coordinates(other), _same_relation)
        case "member":
            return _every([same(ones, others), same(one.form, other.form)])
    return NotImplemented


def _chosen(one: Any, other: Any) -> Any:
    """`(A) 5` is A, and 5."""
    if kind(one) != "choice":
        return NotImplemented
    if kind(other) == "choice":
        return one.form == other.form and same(one.value, other.value)
    return other == letter(one.form) or same(one.value, other)


def _rounded(one: Any, other: Any) -> Any:
    """`√2 ≈ 1.41` is √2 if this rounds to it."""
    if kind(one) != "about":
        return NotImplemented
    exact, decimal = (side.value if kind(side) == "quantity" else side for side in one.form)
    if not kind(exact) == kind(decimal) == "expression" or not decimal.is_Rational or 10**40 % decimal.q or not (exact - decimal).is_number:
        return False
    last_place = next(place for place in itertools.count() if 10**place % decimal.q == 0)
    error = sympy.N(10**last_place * (abs(exact) - abs(decimal)), DIGITS)
    return same(one.value, other) if error.is_extended_real and -1 < 2 * error < 2 else False  # rounded or cut off


def _sized(quantity: Any) -> Any:
    return made("*", quantity.value, Rational(quantity.form.factor))


def _with_unit(one: Any, other: Any) -> Any:
    """A quantity and a number: a unit may be missing, because questions give it. A percentage is a number."""
    if kind(one) != "quantity" or kind(other) != "expression":
        return NotImplemented
    bare, base = _same_expression(one.value, other), one.form.base
    if not base:
        return _same_expression(_sized(one), other) or (False if bare is False else None)
    if bare is False and base == (("degree", 1),):
        return _same_expression(made("*", one.value, sympy.pi / 180), other)
    if bare is False and letters(other) & LETTERED.keys():  # 5 m/s, read as a product
        units = {letter(name): Rational(size) * letter(named) for name, (named, size) in LETTERED.items()}
        return _same_expression(_sized(one) * sympy.Mul(*(letter(named) ** power for named, power in base)), other.xreplace(units))
    return bare


def _named(one: Any, other: Any) -> Any:
    """`x = 5` and 5, `f(x) = x + 1` and x + 1, `x ∈ [1, 2]` and [1, 2]; `2 + 3 = 5` is 5."""
    if kind(one) == "member" and kind(other) in ("group", "union") and isinstance(one.form, sympy.Symbol):
        return same(one.value, other)
    if kind(one) != "relation" or kind(other) in ("relation", "any", "member", "list"):
        return NotImplemented
    links = _links(one)
    if not letters(one) and kind(other) == "expression" and all(link[0] == "=" and same(*link[1:]) for link in links):
        return same(links[-1][2], other)
    if len(links) == 1 and links[0][0] == "=" and _is_name(links[0][1]):
        return same(links[0][2], other)
    assigned = {link[1].name: link[2] for link in links if link[0] == "=" and isinstance(link[1], sympy.Symbol)}
    if kind(other) == "group" and other.form == "()" and len(assigned) == len(links) == len(other.value):
        return False if _ordered([value for _, value in sorted(assigned.items())], other.value) is False else None
    return NotImplemented


def _is_name(side: Any) -> bool:
    """Whether a side is x, f(x) or (x, y)."""
    return all(isinstance(one, sympy.Symbol) for one in (side.value if kind(side) == "group" else (side,)))


def _listed(one: Any, other: Any) -> Any:
    """Values in a row and values that are alternatives; next to brackets, only the question tells what is meant."""
    if kind(one) == "any" and kind(other) == "list":
        return _members(one.value, other.value) if len(one.value) == len(other.value) else False
    if kind(one) in ("any", "list") and kind(other) == "group":
        found = (_members if other.form == "{}" or kind(one) == "any" else _ordered)(one.value, other.value)
        return False if found is False else None
    if kind(other) == "group" and other.form == "{}" and len(other.value) == 1 and kind(one) in ("expression", "quantity"):
        return False if same(one, other.value[0]) is False else None
    return NotImplemented


# sets of numbers


def _interval(one: Any, other: Any) -> Any:
    """`1 < x < 2`, `x ∈ (1, 2)` and (1, 2), which may also be a pair."""
    conditions = [node for node in (one, other) if kind(node) in ("relation", "any", "member")]
    names = {*map(letter, letters(tuple(node.form for node in conditions if kind(node) == "member") or tuple(conditions)))}
    if len(names) != bool(conditions):
        return NotImplemented
    ones, others = (_solutions(node, *names) for node in (one, other))
    if ones is None or others is None or ones.is_empty:  # (2, 1) is a pair
        return NotImplemented
    found = _same_set(ones, others)
    pair = any(kind(node) == "group" and node.form in ("()", "[]") and not any(map(infinite, node.value)) for node in (one, other))
    return None if found and pair and conditions else found


@lru_cache(maxsize=4096)
def _solutions(node: Any, name: Any = None) -> Any:
    """The real numbers that a node describes; None if it does not describe any."""
    match node:
        case Reading("group", values, "{}") if all(kind(value) == "expression" for value in values):
            return sympy.FiniteSet(*values)
        case Reading("group", (low, high), "()" | "[]" | "[)" | "(]" as brackets) if kind(low) == kind(high) == "expression":
            if not (low.is_extended_real and high.is_extended_real):
                return None
            parts, join = (
                [sympy.Interval(low, oo, brackets[0] == "("), sympy.Interval(-oo, high, False, brackets[1] == ")")],
                sympy.Intersection,
            )
        case Reading("member", values):
            return _solutions(values)
        case Reading("relation"):
            parts, join = [_half_line(name, *link) for link in _links(node)], sympy.Intersection
        case Reading("union", values, sign):
            join = {"∪": sympy.Union, "∩": sympy.Intersection, "∖": sympy.Complement}[sign]
            parts = [_solutions(value) for value in values]
        case Reading("any", values):
            parts, join = [_solutions(value, name) if kind(value) == "relation" else None for value in values], sympy.Union
        case _:
            return None
    return None if None in parts or len(parts) > MOST_PIECES else join(*parts)


def _half_line(name: Any, sign: str, left: Any, right: Any) -> Any:
    """The solutions of a relation between a letter and a value."""
    if right == name:
        sign, left, right = {"<": ">", "≤": "≥", ">": "<", "≥": "≤"}.get(sign, sign), right, left
    if left != name or kind(right) != "expression" or not right.is_extended_real or name in right.free_symbols:
        return None
    if sign in "=≠":
        return sympy.FiniteSet(right) if sign == "=" else sympy.Complement(sympy.S.Reals, sympy.FiniteSet(right))
    return sympy.Interval(-oo, right, False, sign == "<") if sign in "<≤" else sympy.Interval(right, oo, sign == ">")


def _same_set(one: Any, other: Any) -> Answer:
    """Whether two sets are equal, each of them a union of intervals and numbers."""
    if one == other or not one.args or not other.args:
        return one == other
    if one.func != other.func:
        return False
    if isinstance(one, sympy.Interval):
        return one.args[2:] == other.args[2:] and _ordered(one.args[:2], other.args[:2])
    return _members(one.args, other.args, same if isinstance(one, sympy.FiniteSet) else _same_set)


# relations


def _links(relation: Any) -> list[Any]:
    """The single relations, `x = 10/2 = 5` as `x = 5` and `-∞ < x < 2` as `x < 2`."""
    found: list[Any] = []
    finite = [link for link in relation.value if not (infinite(link[1]) or infinite(link[2]))]
    for sign, left, right in finite or relation.value:
        last = found[-1] if found else None
        if sign == "=" and last and last[0] == "=" and last[2] == left and not letters(left) and same(left, right):
            continue
        found.append((sign, left, right))
    return found


def _coordinates(relation: Any) -> list[Any]:
    """The single relations, `(x, y) = (1, 2)` as one for each letter."""
    links = _links(relation)
    if len(links) == 1 and links[0][0] == "=" and all(kind(side) == "group" and side.form == "()" for side in links[0][1:]):
        _, names, values = links[0]
        if _is_name(names) and len(names.value) == len(values.value):
            return [("=", *pair) for pair in zip(names.value, values.value, strict=True)]
    return links


def _same_relation(one: Any, other: Any) -> Answer:
    """Whether two relations are equal: the sides are, or their differences up to a factor, which is positive for inequalities."""
    (sign, *sides), (its, *others) = ((FLIPPED[link[0]], link[2], link[1]) if link[0] in FLIPPED else link for link in (one, other))
    if sign != its:
        return False
    if _ordered(sides, others):
        return True
    expressions = all(kind(side) == "expression" for side in (*sides, *others))
    if not (expressions and letters(tuple(sides)) and letters(tuple(others))):
        return _ordered(sides[::-1], others) if sign in "=≠" else False
    ones, its = (left - right for left, right in (sides, others))
    ratios = {_ratio(_value(ones, point), _value(its, point)) for point in range(POINTS)} - {None}
    if len(ratios) > 1:
        return False
    ratio = sympy.simplify(ones / its)
    if not ratio.is_number:
        return None if ratios else False
    return bool(ratio.is_nonzero) if sign in "=≠" else bool(ratio.is_positive)


def _ratio(one: Any, other: Any) -> Any:
    if one is None or other is None or abs(other) < CLOSE or abs(one) < CLOSE:
        return None
    return complex(one / other).__format__(".12g")


# expressions


def _same_expression(one: Any, other: Any) -> Answer:
    """Whether two expressions are equal for all values of their letters: numbers show a difference, algebra proves equality."""
    if one == other:
        return True
    if (one.is_Rational and other.is_Rational) or infinite(one) or infinite(other):
        return False
    if one.has(AppliedUndef) or other.has(AppliedUndef):  # f(2), of which nothing is known
        return sympy.expand(one - other) == 0
    names = one.free_symbols | other.free_symbols
    real = bool(names) and not (one.has(sympy.I) or other.has(sympy.I))
    undefined = False
    for point in range(POINTS):
        ones, others = _value(one, point), _value(other, point)
        if ones is None or others is None:
            continue
        if real and ones.imag and others.imag:  # outside of where they are real functions
            undefined = True
            continue
        scale = max(abs(ones), abs(others))
        if scale > CLOSE**3 and abs(ones - others) > CLOSE * scale:
            return False
    if undefined:
        positive = {name: sympy.Symbol(name.name, positive=True) for name in names}
        one, other = one.xreplace(positive), other.xreplace(positive)
    return _proved(one, other)


def _proved(one: Any, other: Any) -> Answer:
    if one == other:
        return True
    difference = one - other
    if difference.is_number:
        found = difference.evalf(2, maxn=1000).as_real_imag()
        if any(part.is_Float and part._prec > 1 and part != 0 for part in found):  # significant digits
            return False
    for simpler in (sympy.expand, sympy.simplify, _expanded, partial(sympy.factor, deep=True)):
        if simpler(difference) == 0:
            return True
    return True if difference.is_number and difference.equals(0) else None


def _expanded(difference: Any) -> Any:
    """With binomial coefficients and factorials of sums written out."""
    return sympy.simplify(sympy.expand_func(difference))


@lru_cache(maxsize=4096)
def _value(node: Any, point: int) -> Any:
    """An expression's value where each letter has a number of its own; None where it has none."""
    places = {symbol: _place(symbol.name, point) for symbol in node.free_symbols}
    value = sympy.N(node.xreplace(places), DIGITS)
    return value._to_mpmath(BINARY_DIGITS) if value.is_number and value.is_finite else None


def _place(name: str, point: int) -> Any:
    """A number between 1/5 and 9/5, negative for some letters at some points."""
    draw = random.Random(f"{name}/{point}")
    sign = 1 if point == 0 or name == LOG_BASE.name else draw.choice((-1, 1)) if point == 1 else -1
    return sympy.Rational(sign * draw.randrange(2001, 17999), 10007)
