"""The record of one request: who asked, what was asked, and all that happened. Written by the path,
read once at the end by telemetry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Dialect(StrEnum):
    """Whose shapes an endpoint speaks: of its errors, its stream events and its usage."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    OTHER = "other"
