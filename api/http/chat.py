"""POST /v1/chat/completions and GET /v1/models, in the form that OpenAI's clients speak.

What is taken is what the engine needs: messages with text and pictures (data URIs), ``n``, ``max_tokens``, ``stream``.
Other parameters go to the engine as ``sampling``, unseen. To count, a token of a prompt is a word.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec

from api.http.bodies import Loans
from api.http.errors import bad
from api.http.images import decode_data_uri
from api.http.settings import Settings
from fmq.calls import CHAT, ChatStep, Output


class ImageUrl(msgspec.Struct):
    """A picture, as a data URI."""

    url: str


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A piece of text in a message."""

    text: str


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    """A picture in a message."""

    image_url: ImageUrl


class ChatMessage(msgspec.Struct):
    """What somebody said."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | ImagePart] | None = None


class StreamOptions(msgspec.Struct):
    """What a stream has besides."""

    include_usage: bool = False


class ChatRequest(msgspec.Struct):
    """A request for the next message of a conversation."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    model: str
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None


def models(settings: Settings, created: int) -> dict[str, Any]:
    """The answer to GET /v1/models."""
    model = {"id": settings.model, "object": "model", "created": created, "owned_by": "shmq"}
    return {"object": "list", "data": [model]}


def check_model(chat: ChatRequest, settings: Settings) -> None:
    """Raises HttpError if the engine is not that model."""
    if chat.model != settings.model:
        raise bad(f"there is no model {chat.model!r} here; this server has {settings.model!r}", "$.model")


async def chat_task(chat: ChatRequest, loans: Loans, settings: Settings) -> dict[str, Any]:
    """What is sent to the engine: see ``fmq.calls.CHAT``. Pictures are decoded into the ring. Raises HttpError."""
    messages = []
    for number, message in enumerate(chat.messages):
        place = f"$.messages[{number}].content"
        content: list[dict[str, Any]] = []
        if isinstance(message.content, str):
            content.append({"type": "text", "text": message.content})
        else:
            for index, part in enumerate(message.content or ()):
                if isinstance(part, TextPart):
                    content.append({"type": "text", "text": part.text})
                else:
                    where = f"{place}[{index}].image_url.url"
                    image = await decode_data_uri(part.image_url.url, loans, settings.max_pixels, where)
                    content.append({"type": "image", "image": image})
        messages.append({"role": message.role, "content": content})
    sampling = {"temperature": chat.temperature, "top_p": chat.top_p, "seed": chat.seed, "stop": chat.stop}
    return {
        "kind": CHAT,
        "messages": messages,
        "max_tokens": chat.max_completion_tokens or chat.max_tokens,
        "sampling": {name: value for name, value in sampling.items() if value is not None},
    }


def _prompt_tokens(chat: ChatRequest) -> int:
    texts = []
    for message in chat.messages:
        if isinstance(message.content, str):
            texts.append(message.content)
        else:
            texts += [part.text for part in message.content or () if isinstance(part, TextPart)]
    return sum(len(text.split()) for text in texts)


def _step(output: Output) -> ChatStep:
    try:
        return msgspec.convert(output.value, ChatStep)
    except msgspec.ValidationError:
        # An engine for something else: what it answers is shown as it is.
        return ChatStep(str(output.value), "stop" if output.finished else None)


class Completion:
    """One conversation's answer, in OpenAI's two forms."""

    def __init__(self, chat: ChatRequest, request_id: str) -> None:
        self._chat = chat
        self._prompt_tokens = _prompt_tokens(chat)
        self._head = {"id": f"chatcmpl-{request_id}", "created": int(time.time()), "model": chat.model}
        self._tokens = 0

    def _usage(self) -> dict[str, int]:
        total = self._prompt_tokens + self._tokens
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._tokens, "total_tokens": total}

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        """The answer as one document."""
        texts: dict[int, list[str]] = {}
        reasons: dict[int, str | None] = {}
        for output in outputs:
            step = _step(output)
            texts.setdefault(output.choice, []).append(step.text)
            reasons[output.choice] = step.reason
            self._tokens += step.tokens
        choices = [
            {
                "index": choice,
                "message": {"role": "assistant", "content": "".join(texts[choice]), "refusal": None},
                "logprobs": None,
                "finish_reason": reasons[choice] or "stop",
            }
            for choice in sorted(texts)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage()}

    async def stream(self, outputs: AsyncIterator[Output]) -> AsyncIterator[dict[str, Any]]:
        """The answer in pieces."""
        begun: set[int] = set()
        async for output in outputs:
            step = _step(output)
            self._tokens += step.tokens
            delta: dict[str, str] = {"content": step.text}
            if output.choice not in begun:
                begun.add(output.choice)
                delta["role"] = "assistant"
            reason = (step.reason or "stop") if output.finished else None
            yield self._chunk([{"index": output.choice, "delta": delta, "logprobs": None, "finish_reason": reason}])
        if self._chat.stream_options is not None and self._chat.stream_options.include_usage:
            yield {**self._chunk([]), "usage": self._usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}
