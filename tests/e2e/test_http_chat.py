"""/v1/chat/completions and /v1/models, by OpenAI's own client, as it is."""

from __future__ import annotations

import asyncio
import base64
import io
import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from tests.e2e.servers import PATIENCE, Server, Site, shared_memory_fixture

__all__ = ["shared_memory_fixture"]

MODEL = "small-but-honest"
WORDS = "These are seven words to say again"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Site() as site:
        server = site.serve("--workers", "2", "--model", MODEL)
        server.until_ready(2)
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0) as client:
        yield client


def asked(content: Any = WORDS, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **more}


def picture() -> tuple[str, str]:
    """A picture as a data URI, and what Echo says of it."""
    pixels = np.random.default_rng(3).integers(0, 256, (48, 64, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return uri, f"[picture of 64x48, crc32 {zlib.crc32(pixels.tobytes()):08x}]"


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_a_completion_is_answered_with_its_usage(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(**asked(temperature=0.5, top_p=0.9, seed=7, stop=["x"]))
    assert completion.object == "chat.completion"
    assert completion.model == MODEL
    assert completion.id.startswith("chatcmpl-")
    [choice] = completion.choices
    assert (choice.index, choice.finish_reason) == (0, "stop")
    assert (choice.message.role, choice.message.content) == ("assistant", WORDS)
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == completion.usage.completion_tokens == 7
    assert completion.usage.total_tokens == 14


def test_the_last_of_several_messages_is_answered(client: openai.OpenAI) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "And this?"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "one two"}, {"type": "text", "text": "three"}]},
    ]
    arguments: dict[str, Any] = {"model": MODEL, "messages": messages}
    completion = client.chat.completions.create(**arguments)
    assert completion.choices[0].message.content == "one two three"
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 7


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize(("limit", "reason"), [(3, "length"), (7, "stop"), (100, "stop")])
def test_an_answer_ends_at_the_limit_of_tokens(client: openai.OpenAI, name: str, limit: int, reason: str) -> None:
    completion = client.chat.completions.create(**asked(**{name: limit}))
    assert completion.choices[0].message.content == " ".join(WORDS.split()[:limit])
    assert completion.choices[0].finish_reason == reason
    assert completion.usage is not None
    assert completion.usage.completion_tokens == min(limit, 7)


def test_n_completions_are_n_choices(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(**asked(n=2))
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert [choice.message.content for choice in completion.choices] == [WORDS, WORDS]
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 14


def test_a_stream_has_a_chunk_for_each_word_and_the_usage_at_the_end(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(**asked(stream=True, stream_options={"include_usage": True}))
    chunks = list(stream)
    *pieces, last = chunks
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert [piece.choices[0].delta.content for piece in pieces] == ["These", *(f" {w}" for w in WORDS.split()[1:])]
    assert [piece.choices[0].delta.role for piece in pieces] == ["assistant"] + [None] * 6
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * 6 + ["stop"]
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (7, 7, 14)


def test_a_stream_without_usage_has_none(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(**asked(stream=True, max_tokens=2)))
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "length"]
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_of_two_choices_has_the_words_of_both(client: openai.OpenAI) -> None:
    texts = {0: "", 1: ""}
    for chunk in client.chat.completions.create(**asked(stream=True, n=2)):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: WORDS, 1: WORDS}


def test_the_client_that_collects_a_stream_has_the_whole_message(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**asked()) as stream:
        assert stream.get_final_completion().choices[0].message.content == WORDS


def test_a_picture_arrives_as_its_pixels(client: openai.OpenAI) -> None:
    uri, said = picture()
    content = [{"type": "text", "text": "What is this?"}, image_part(uri)]
    completion = client.chat.completions.create(**asked(content))
    assert completion.choices[0].message.content == f"What is this? {said}"


def test_several_pictures_arrive_each_in_its_place(client: openai.OpenAI) -> None:
    uri, said = picture()
    content = [image_part(uri), {"type": "text", "text": "and"}, image_part(uri)]
    completion = client.chat.completions.create(**asked(content))
    assert completion.choices[0].message.content == f"{said} and {said}"


def test_the_client_for_asyncio_has_answers_and_streams_at_the_same_time(server: Server) -> None:
    async def complete(client: openai.AsyncOpenAI, number: int) -> str | None:
        completion = await client.chat.completions.create(**asked(f"number {number}"))
        content: str | None = completion.choices[0].message.content
        return content

    async def stream(client: openai.AsyncOpenAI, number: int) -> str:
        pieces = await client.chat.completions.create(**asked(f"stream number {number}", stream=True))
        return "".join([piece.choices[0].delta.content or "" async for piece in pieces])

    async def ask() -> tuple[list[str | None], list[str], list[str]]:
        options: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "none", "timeout": PATIENCE}
        async with openai.AsyncOpenAI(max_retries=0, **options) as client:
            whole = asyncio.gather(*(complete(client, number) for number in range(20)))
            streamed = asyncio.gather(*(stream(client, number) for number in range(20)))
            return await whole, await streamed, [model.id async for model in client.models.list()]

    whole, streamed, models = asyncio.run(ask())
    assert whole == [f"number {number}" for number in range(20)]
    assert streamed == [f"stream number {number}" for number in range(20)]
    assert models == [MODEL]


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    [model] = client.models.list()
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "shmq")
    assert model.created > 0


def test_an_answer_has_the_id_of_its_request(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(**asked(), extra_headers={"X-Request-Id": "mine"})
    assert completion.id == "chatcmpl-mine"
    assert completion._request_id == "mine"


# -- errors -----------------------------------------------------------------------------------------------------------


def error_of(client: openai.OpenAI, **arguments: Any) -> dict[str, Any]:
    """What the client's BadRequestError has in its body."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**arguments)
    assert isinstance(caught.value.body, dict)
    body: dict[str, Any] = caught.value.body
    assert body["type"] == "invalid_request_error"
    assert caught.value.request_id == body["request_id"]
    assert caught.value.param == body["param"]
    return body


def test_another_model_is_a_bad_request_that_names_this_one(client: openai.OpenAI) -> None:
    error = error_of(client, **{**asked(), "model": "gpt-none"})
    assert error["param"] == "$.model"
    assert "gpt-none" in error["message"]
    assert MODEL in error["message"]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:9/a.png",
        "https://example.invalid/a.png",
        "file:///etc/passwd",
        "data:text/html;base64,AAAA",
        "data:image/png,AAAA",
        "",
    ],
)
def test_a_picture_that_would_have_to_be_fetched_is_a_bad_request(client: openai.OpenAI, url: str) -> None:
    content = [{"type": "text", "text": "this?"}, image_part(url)]
    error = error_of(client, **asked(content))
    assert error["param"] == "$.messages[0].content[1].image_url.url"
    assert "fetches nothing" in error["message"]


def damaged() -> str:
    """The first half of a picture."""
    head, comma, data = picture()[0].partition(",")
    return head + comma + data[: len(data) // 8 * 4]


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("data:image/png;base64,", "no picture"),
        ("data:image/png;base64,AAAA", "no picture"),
        ("data:image/png;base64,%%%%", "base64"),
        ("data:image/png;base64,AAA", "base64"),
        (damaged(), "damaged"),
    ],
)
def test_a_damaged_picture_is_a_bad_request_with_its_place(client: openai.OpenAI, uri: str, message: str) -> None:
    error = error_of(client, **asked([image_part(uri)]))
    assert error["param"] == "$.messages[0].content[0].image_url.url"
    assert message in error["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 0}, "$.n"),
        ({"n": 129}, "$.n"),
        ({"n": 1.5}, "$.n"),
        ({"max_tokens": 0}, "$.max_tokens"),
        ({"max_tokens": -1}, "$.max_tokens"),
        ({"messages": []}, "$.messages"),
        ({"messages": [{"role": "pope", "content": "x"}]}, "$.messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "$.messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "$.messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "$.messages[0].content[0]"),
        ({"temperature": "hot"}, "$.temperature"),
        ({"stream_options": 5}, "$.stream_options"),
    ],
)
def test_a_wrong_value_is_a_bad_request_with_its_place(
    client: openai.OpenAI, change: dict[str, Any], param: str
) -> None:
    # msgspec has dots for the index of a list, where it does not know it.
    assert error_of(client, **{**asked(), **change})["param"].replace("[...]", "[0]") == param


def test_a_body_that_is_no_object_is_a_bad_request(server: Server) -> None:
    for body in (b"", b"[]", b"5", b"null", b"{", b"{}", b'{"model": 1}', b"\xff"):
        answer = server.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, body
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_message_without_words_is_answered_with_none(client: openai.OpenAI) -> None:
    for content in ("", "   ", []):
        completion = client.chat.completions.create(**asked(content))
        assert completion.choices[0].message.content == ""
        assert completion.choices[0].finish_reason == "stop"
    messages = [{"role": "user", "content": None}]
    arguments: dict[str, Any] = {"model": MODEL, "messages": messages}
    assert client.chat.completions.create(**arguments).choices[0].message.content == ""


def test_what_is_not_known_goes_unseen(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(**asked(), user="me", extra_body={"not_known": {"at": ["all"]}})
    assert completion.choices[0].message.content == WORDS


def test_a_client_that_leaves_a_stream_does_not_disturb_the_next(client: openai.OpenAI) -> None:
    long = " ".join(f"word{number}" for number in range(5000))
    stream = client.chat.completions.create(**asked(long, stream=True))
    assert next(iter(stream)).choices[0].delta.content == "word0"
    stream.close()
    assert client.chat.completions.create(**asked()).choices[0].message.content == WORDS


def test_a_wrong_path_is_the_clients_not_found_error(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v2", api_key="none", max_retries=0, http_client=httpx.Client())
    with client, pytest.raises(openai.NotFoundError):
        client.models.list()
