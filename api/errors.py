"""What can go wrong on the API side. Every error of this package is an ``ApiError``."""

from __future__ import annotations


class ApiError(Exception):
    """The root of all errors of api."""


class PictureError(ApiError, ValueError):
    """A picture can't be cut into patches."""
