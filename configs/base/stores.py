"""Validation of object store and shared folder URLs in recipes and profiles. URLs never contain credentials."""

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


def store_url(value: str) -> str:
    """Validate `s3://BUCKET/PREFIX` or `file:///FOLDER`; strips trailing slashes."""
    parts = urlsplit(value)
    if "@" in parts.netloc or parts.query or parts.fragment:  # omit the value from the message: it may contain a password
        raise ValueError("a URL must not contain credentials or options: set them in the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, ...)")
    if parts.scheme == "s3" and BUCKET.fullmatch(parts.netloc):
        return value.rstrip("/")
    if parts.scheme == "file" and not parts.netloc and parts.path.strip("/"):
        return value.rstrip("/")
    raise ValueError(f"{value!r} is neither s3://BUCKET/PREFIX nor file:///FOLDER")


def s3_object(value: str) -> str:
    """Validate `s3://BUCKET/KEY`."""
    if not store_url(value).startswith("s3://") or not urlsplit(value).path.strip("/"):
        raise ValueError(f"{value!r} is not s3://BUCKET/KEY")
    return value


StoreUrl = Annotated[str, AfterValidator(store_url)]
ObjectUrl = Annotated[str, AfterValidator(s3_object)]
