"""The HTTP front end: bodies received into the ring, answers as JSON or server-sent events."""

from api.http.app import create_app
from api.http.settings import Settings

__all__ = ["Settings", "create_app"]
