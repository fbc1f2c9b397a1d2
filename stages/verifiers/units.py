"""Units after numbers: "5 cm", "$29.00", "12 square feet", "60 mph", "25%", "5 million".

A unit is a product of powers of base units times an exact factor, so that 1 km equals 1000 m. A counted noun is its own base unit. Only
words of this table and plurals are units: any other word after a number makes the answer a text.
"""

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

_NAMES = {
    "m": "m 1 m meter meters metre metres|1/1000 mm millimeter millimeters|1/100 cm centimeter centimeters centimetre centimetres"
    "|1000 km kilometer kilometers kilometre kilometres|127/5000 in inch inches|381/1250 ft foot feet|1143/1250 yd yard yards"
    "|201168/125 mi mile miles",
    "g": "g 1 g gm gram grams|1/1000 mg milligram milligrams|1000 kg kilogram kilograms",
    "lb": "lb 1 lb lbs pound pounds|1/16 oz ounce ounces",
    "s": "s 1 s sec secs second seconds|60 min mins minute minutes|3600 h hr hrs hour hours|86400 day days|604800 week weeks",
    "month": "month 1 month months|12 yr year years",
    "L": "L 1 L liter liters litre litres|1/1000 ml mL milliliter milliliters",
    "gallon": "gallon 1 gal gallon gallons|1/4 quart quarts|1/8 pint pints|1/16 cup cups",
    "dollar": "dollar 1 $ dollar dollars USD|1/100 ¢ cent cents",
    "euro": "euro 1 € euro euros EUR",
    "sterling": "sterling 1 £ GBP",
    "yen": "yen 1 ¥ yen",
    "rupee": "rupee 1 ₹ rupee rupees INR",
    "degree": "degree 1 ° degree degrees deg",
    "celsius": "celsius 1 °C celsius",
    "fahrenheit": "fahrenheit 1 °F fahrenheit",
    "newton": "newton 1 N newton newtons",
    "joule": "joule 1 J joule joules",
    "watt": "watt 1 W watt watts|1000 kW",
    "volt": "volt 1 V volt volts",
    "radian": "radian 1 radian radians rad",
    "": "1 1/100 % percent|100 hundred|1000 thousand|1000000 million|1000000000 billion|12 dozen dozens",
}
_COUNTED = (
    "unit way integer point digit meal edge student multiple people child apple orange marble book card coin ball page step box bag game "
    " ticket egg cookie chair tree dog cat bird fish flower pencil pen bottle block tile square triangle rectangle diagonal face solution"
    " root term element factor divisor prime pair group team player girl boy man woman word letter"
)
_PLURALS = {"people": "person", "child": "children", "box": "boxes", "man": "men", "woman": "women", "fish": "fishes"}

_PLURAL = re.compile(r"[a-z]{2,}[a-rtv-z]s")
_NO_UNIT = re.compile(
    r"[a-z]*(?:fourth|fifth|sixth|seventh|eighth|ninth|tenth|teenth|hundredth|thousandth|millionth)s|thirds|quarters"
    r"|halves|ones|twos|threes|fours|fives|sixes|sevens|eights|nines|tens|hundreds|thousands|millions|billions|times"
    r"|equals|always|others|perhaps|pis|its|does|this|yes|sometimes"
)
"""Parts, multiples, and words that are no nouns."""

Base = tuple[tuple[str, int], ...]
"""Base units with their powers, sorted."""


class Unit(NamedTuple):
    base: Base
    factor: Fraction
    scale: Fraction = Fraction(1)
    """Of the number, as in 5 million dollars."""


def _table() -> dict[str, tuple[str, Fraction]]:
    found: dict[str, tuple[str, Fraction]] = {}
    for base, families in _NAMES.items():
        for place, family in enumerate(families.split("|")):
            factor, *names = family.split()[1:] if place == 0 else family.split()
            found |= {name: (base, Fraction(factor)) for name in names}
    for noun in _COUNTED.split():
        found |= {noun: (noun, Fraction(1)), _PLURALS.get(noun, noun + "s"): (noun, Fraction(1))}
    return found


NAMES = _table()
PREFIXES = "$€£¥₹"
"""Signs of money, which precede the number."""
_POWERS = {"sq": 2, "square": 2, "cubic": 3, "cu": 3}
_COMBINED: dict[str, tuple[str | int, ...]] = {"mph": ("miles", "/", "hour"), "kph": ("km", "/", "hour"), "cc": ("cubic", "cm")}
WORDS = {*NAMES, *_POWERS, *_COMBINED, "per"}


def counted(word: str) -> bool:
    """Whether a word may be the plural of what is counted, and so a unit of its own."""
    return bool(_PLURAL.fullmatch(word)) and not _NO_UNIT.fullmatch(word)


def unit(words: Sequence[str | int]) -> Unit | None:
    """The unit that words and exponents spell, e.g. `["square", "inches"]` or `["m", "/", "s", 2]`; None if they spell none."""
    words = [part for word in words for part in (_COMBINED.get(word, (word,)) if isinstance(word, str) else (word,))]
    base: Counter[str] = Counter()
    factor, scale, sign, place = Fraction(1), Fraction(1), 1, 0
    while place < len(words):
        if words[place] in ("/", "per"):
            if sign < 0 or place == 0:
                return None
            sign, place = -1, place + 1
        power = 1
        if place + 1 < len(words) and words[place] in _POWERS and isinstance(words[place + 1], str):
            power, place = _POWERS[str(words[place])], place + 1
        name = words[place] if place < len(words) else None
        if not isinstance(name, str) or (name not in NAMES and not counted(name)):
            return None
        place += 1
        if place < len(words) and isinstance(words[place], int):
            power, place = power * int(words[place]), place + 1
        if not 1 <= abs(power) <= 9:
            return None
        named, size = NAMES.get(name, (name, Fraction(1)))
        base[named] += sign * power
        if named:
            factor *= size ** (sign * power)
        else:
            scale *= size ** (sign * power)
    if not words:
        return None
    bases = tuple(sorted((name, power) for name, power in base.items() if name and power))
    return Unit(bases, factor, scale) if bases else Unit((), scale)
