"""The kinds of load; alone in its file, so that the command's flags cost no other import."""

import enum


class Dataset(enum.StrEnum):
    """What is sent."""

    SHARED_PREFIX = "shared-prefix"
    CHAT = "chat"
    PROMPTS = "prompts"
    TRACE = "trace"
