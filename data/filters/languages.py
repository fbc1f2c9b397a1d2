"""Language detection with langdetect, seeded to be deterministic."""

from typing import Any


def language(text: str) -> str | None:
    """The ISO 639-1 code of a text's language; None if undetected."""
    detector = _seeded()
    try:
        return detector.detect(text)
    except detector.LangDetectException:
        return None


def language_above(text: str, certainty: float) -> str | None:
    """Like `language`, but None also if its probability is below `certainty`."""
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
