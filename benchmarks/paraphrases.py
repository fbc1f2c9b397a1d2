"""Paraphrase a text by rules for words and sentences of English, without a language model or data set."""

import random
import re
from functools import partial

OTHER_WORDS = {
    "bought": "purchased", "buys": "purchases", "buy": "purchase", "gave": "handed", "gives": "hands", "made": "produced",
    "makes": "produces", "make": "produce", "sold": "disposed of", "sells": "disposes of",
    "sell": "dispose of", "spent": "paid out", "spends": "pays out", "spend": "pay out", "wants": "would like", "wanted": "wished",
    "needs": "requires", "needed": "required", "need": "require", "eats": "consumes", "ate": "consumed", "eat": "consume",
    "found": "came across", "lost": "mislaid", "gets": "receives", "got": "received", "get": "receive", "went": "travelled",
    "goes": "travels", "works": "labours", "worked": "laboured", "earns": "brings in", "earned": "brought in", "collected": "gathered",
    "collects": "gathers", "started": "began", "starts": "begins", "decides": "chooses", "decided": "chose", "uses": "employs",
    "used": "employed", "plans": "intends", "planned": "intended", "reads": "studies", "brought": "carried along",
    "received": "was handed", "charges": "asks for", "costs": "is priced at", "cost": "price", "runs": "jogs", "ran": "jogged",
    "each": "every single", "every": "each", "twice": "two times", "half": "one half", "total": "sum", "altogether": "all told",
    "together": "jointly", "left": "remaining", "remaining": "leftover", "rest": "remainder", "also": "in addition", "only": "merely",
    "day": "24 hours", "days": "times 24 hours", "week": "seven days", "weeks": "times seven days", "month": "calendar month",
    "year": "twelve months", "years": "times twelve months", "people": "persons", "children": "kids", "kids": "children",
    "friends": "pals", "friend": "pal", "mother": "mum", "father": "dad", "brother": "male sibling", "sister": "female sibling",
    "house": "home", "home": "house", "store": "shop", "shop": "store", "car": "automobile", "money": "cash", "dollars": "bucks",
    "box": "carton", "boxes": "cartons", "bag": "sack", "bags": "sacks", "pieces": "bits", "piece": "bit", "big": "large",
    "small": "little", "group": "team", "book": "volume", "books": "volumes", "students": "pupils", "student": "pupil",
    "teacher": "instructor", "price": "cost", "amount": "quantity", "number": "count", "job": "post", "party": "celebration",
    "then": "after that", "if": "supposing", "because": "since", "so": "therefore", "but": "yet", "when": "at the time that",
    "while": "whereas", "after": "following", "before": "ahead of", "during": "in the course of", "until": "up to the time that",
    "more": "additional", "less": "fewer", "many": "numerous", "all": "the whole of", "same": "identical", "new": "brand-new",
    "old": "aged", "first": "initial", "last": "final", "next": "following", "morning": "forenoon", "night": "late evening",
    "for": "in return for", "and": "as well as", "from": "out of", "on": "upon", "with": "along with",
}  # fmt: skip
"""Word → synonym."""
KEPT = frozenset("and from on with for more".split())
"""Words that are kept two times in three: replacing all of them would not be English."""
SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen "
    "twenty"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_sentence = re.compile(r"(?<=[.?!])\s+")
_number = re.compile(r"(?<![\d.,$/%])\b(1?\d|20)\b(?![\d.,]*\d|[/%])")
_asked = re.compile(r"^(?:and )?how (many|much)\b ?(.*?) ?\b(does|do|did|will|would|can|are|is|were|was|has|have)\b (.+)\?$", re.IGNORECASE)
_condition = re.compile(r"^If ([^,]+), (.+)\?$")
_opening = re.compile(r"^((?:On|In|At|After|During|For|Every|Each) [^,]{3,40}), ([A-Z]?.+?)([.!])$")


def paraphrased(text: str, draw: random.Random) -> str:
    """Paraphrase a text: sentences reordered, then numbers in words, then other words."""
    return " ".join(_said(_turned(sentence), draw) for sentence in _sentence.split(text.strip()))


def _turned(sentence: str) -> str:
    """Make a condition a sentence, a question a request, and move the opening of a sentence to its end."""
    if found := _condition.match(sentence):
        return f"Suppose that {found[1]}. {_turned(_capital(found[2] + '?'))}"
    if found := _asked.match(sentence):
        many, what, verb, rest = found.groups()
        verb = "" if verb in ("do", "does", "did") else f" {verb}"
        return f"Please work out the {'number' if many == 'many' else 'amount'}{' of ' * bool(what)}{what} that {rest}{verb}."
    if found := _opening.match(sentence):
        return f"{_capital(found[2])} {found[1][0].lower()}{found[1][1:]}{found[3]}"
    return sentence


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _said(sentence: str, draw: random.Random) -> str:
    sentence = _number.sub(lambda one: SMALL[int(one[0])], sentence)
    return _capital(re.sub(r"[A-Za-z]+", partial(_other, draw), sentence))


def _other(draw: random.Random, one: re.Match[str]) -> str:
    word = one[0].lower()
    if word not in OTHER_WORDS or (word in KEPT and draw.random() < 2 / 3):
        return one[0]
    return OTHER_WORDS[word]
