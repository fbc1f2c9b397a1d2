"""The one door to langdetect: which language a text is in. The same for the same text, for what it draws is seeded."""

from typing import Any


def language(text: str) -> str | None:
    """The ISO 639-1 code of a text's language; None where it cannot be told."""
    detector = _seeded()
    try:
        return detector.detect(text)
    except detector.LangDetectException:
        return None


def told(text: str, certainty: float) -> str | None:
    """The same; None also where the probability of the likeliest language is lower."""
    detector = _seeded()
    try:
        found = detector.detect_langs(text)
    except detector.LangDetectException:
        return None
    return found[0].lang if found and found[0].prob >= certainty else None


def _seeded() -> Any:
    import langdetect

    langdetect.DetectorFactory.seed = 0
    return langdetect
