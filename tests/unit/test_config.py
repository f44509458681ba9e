"""The settings: every key read, every mistake named with its path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zmq

from fmq import Config, ConfigError, Endpoint, EndpointManager, QueueNameError, ShmqError, SocketOptions
from fmq.config import parse

EVERYTHING = {
    "ipc_root": "/run/serve",
    "io_threads": 2,
    "copy": True,
    "endpoints": {
        "q_a2e": {"protocol": "tcp", "address": "10.0.0.1:5555", "io_threads": 3, "copy": False},
        "q_e2w": {
            "protocol": "ipc",
            "address": "/run/other/tasks",
            "ring_size": 1 << 20,
            "spill_limit": 0,
            "put_timeout": 1.5,
            "codec": "msgpack",
            "policy": "drop",
            "patience": 0,
        },
    },
    "socket_config": {"sndhwm": 1, "rcvhwm": 2, "linger": 250, "sndbuf": 3, "rcvbuf": 4, "immediate": 0},
    "namespace": "east",
    "ring_size": 1 << 26,
    "spill_limit": 1 << 30,
    "put_timeout": 2,
    "close_timeout": 3.5,
    "codec": "msgpack",
    "policy": "skip",
    "patience": 0.5,
}


@pytest.fixture(autouse=True)
def nothing_was_read_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FMQ_CONFIG_JSON", raising=False)
    monkeypatch.setattr(EndpointManager, "config", None)


def test_every_setting_is_read_and_endpoints_are_endpoints() -> None:
    assert parse(json.dumps(EVERYTHING)) == Config(
        ipc_root="/run/serve",
        io_threads=2,
        copy=True,
        endpoints={
            "q_a2e": Endpoint("tcp", "10.0.0.1:5555", io_threads=3, copy=False),
            "q_e2w": Endpoint(
                "ipc",
                "/run/other/tasks",
                ring_size=1 << 20,
                spill_limit=0,
                put_timeout=1.5,
                codec="msgpack",
                policy="drop",
                patience=0.0,
            ),
        },
        socket_config=SocketOptions(1, 2, 250, 3, 4, 0),
        namespace="east",
        ring_size=1 << 26,
        spill_limit=1 << 30,
        put_timeout=2.0,
        close_timeout=3.5,
        codec="msgpack",
        policy="skip",
        patience=0.5,
    )


def test_without_settings_there_are_the_defaults() -> None:
    assert EndpointManager.load_config() == Config() == parse("{}")
    assert Config().put_timeout == 30
    assert Config().codec == "pickle"
    assert Config().socket_config == SocketOptions(0, 0, -1, 32 << 20, 32 << 20, 1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ring_sise": 1}, r"\$\.ring_sise is no setting \(did you mean ring_size\?\)"),
        ({"zzz": 1}, r"\$\.zzz is no setting; those here are ipc_root, "),
        ({"ring_size": "64M"}, r"\$\.ring_size is '64M': expected `int`, got `str`"),
        ({"ring_size": 65535}, r"\$\.ring_size is 65535: expected `int` >= 65536"),
        ({"ring_size": (64 << 30) + 1}, r"\$\.ring_size is .*: expected `int` <= "),
        ({"ring_size": True}, r"\$\.ring_size is True: expected `int`, got `bool`"),
        ({"copy": 1}, r"\$\.copy is 1: expected `bool`"),
        ({"io_threads": 0}, r"\$\.io_threads is 0"),
        ({"codec": "json"}, r"\$\.codec is 'json': expected one of 'pickle', 'msgpack'"),
        ({"namespace": "a/b"}, r"\$\.namespace is 'a/b'"),
        ({"ipc_root": ""}, r"\$\.ipc_root is ''"),
        ({"put_timeout": -1}, r"\$\.put_timeout is -1"),
        ({"put_timeout": None}, r"\$\.put_timeout is None: expected `float`, got `null`"),
        ({"socket_config": []}, r"\$\.socket_config has to be an object, not an array"),
        ({"socket_config": {"sndhwn": 1}}, r"\$\.socket_config\.sndhwn is no setting \(did you mean sndhwm\?\)"),
        ({"socket_config": {"linger": -2}}, r"\$\.socket_config\.linger is -2"),
        ({"socket_config": {"immediate": 2}}, r"\$\.socket_config\.immediate is 2"),
        ({"endpoints": ["q"]}, r"\$\.endpoints has to be an object, not an array"),
        ({"endpoints": {"q": "ipc:///x"}}, r"\$\.endpoints\.q has to be an object, not a string"),
        ({"endpoints": {"a b": {}}}, r"\$\.endpoints\.a b is 'a b'"),
        ({"endpoints": {"q": {"address": "/x/q"}}}, r"\$\.endpoints\.q\.protocol is missing"),
        ({"endpoints": {"q": {"protocol": "ipc"}}}, r"\$\.endpoints\.q\.address is missing"),
        (
            {"endpoints": {"q_a2e": {"protocol": "udp", "address": "x"}}},
            r"\$\.endpoints\.q_a2e\.protocol is 'udp': expected one of 'ipc', 'tcp'",
        ),
        (
            {"endpoints": {"q": {"protocol": "tcp", "address": "host"}}},
            r"\$\.endpoints\.q\.address has to be \"host:port\", not 'host'",
        ),
        (
            {"endpoints": {"q": {"protocol": "ipc", "address": "/x/"}}},
            r"\$\.endpoints\.q\.address, whose last part names the queue, is ''",
        ),
        (
            {"endpoints": {"q": {"protocol": "ipc", "address": "/x/q", "codec": "xml"}}},
            r"\$\.endpoints\.q\.codec is 'xml': expected one of 'pickle', 'msgpack'",
        ),
    ],
)
def test_a_mistake_is_one_error_that_names_its_path(settings: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FMQ_CONFIG_JSON", json.dumps(settings))
    with pytest.raises(ConfigError, match=rf"^FMQ_CONFIG_JSON: {said}"):
        EndpointManager.load_config()
    assert EndpointManager.config is None


@pytest.mark.parametrize("text", ["{", "nonsense", '{"copy": tru}', "\udcff"])
def test_what_is_not_json_is_called_so(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FMQ_CONFIG_JSON", text)
    with pytest.raises(ConfigError, match=r"FMQ_CONFIG_JSON is not JSON"):
        EndpointManager.load_config()


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"'])
def test_settings_are_an_object(text: str) -> None:
    with pytest.raises(ConfigError, match=r"\$ has to be an object, not "):
        parse(text)


def test_a_config_error_is_a_value_error_and_one_of_this_package() -> None:
    assert issubclass(ConfigError, ShmqError)
    assert issubclass(ConfigError, ValueError)


def test_an_empty_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FMQ_CONFIG_JSON", " ")
    assert EndpointManager.load_config() == Config()


def test_a_file_that_is_named_is_read_instead_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FMQ_CONFIG_JSON", '{"namespace": "environment"}')
    path = tmp_path / "settings.json"
    path.write_text('{"namespace": "file"}')
    assert EndpointManager.load_config(path).namespace == "file"
    assert EndpointManager.load_config().namespace == "environment"
    path.write_text("")
    with pytest.raises(ConfigError, match=r"settings.json is not JSON"):
        EndpointManager.load_config(path)
    with pytest.raises(ConfigError, match=r"missing.json can't be read"):
        EndpointManager.load_config(tmp_path / "missing.json")


def test_an_endpoint_that_is_not_configured_lies_in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FMQ_CONFIG_JSON", '{"ipc_root": "/run/serve", "copy": true}')
    found = EndpointManager.get_endpoint("q_e2a")
    assert (found.protocol, found.address) == ("ipc", "/run/serve/q_e2a")
    assert found.copy is True
    assert found.put_timeout == 30


def test_an_endpoint_has_what_is_its_own_and_the_rest_from_all() -> None:
    config = parse(json.dumps(EVERYTHING))
    first, second = config.endpoint("q_a2e"), config.endpoint("q_e2w")
    assert (first.io_threads, first.copy, first.ring_size) == (3, False, 1 << 26)
    assert (second.io_threads, second.copy, second.ring_size) == (2, True, 1 << 20)
    assert (second.spill_limit, second.put_timeout, second.codec) == (0, 1.5, "msgpack")


def test_what_get_endpoint_gives_names_the_same_queue_when_it_is_configured(tmp_path: Path) -> None:
    plain = Config(ipc_root=str(tmp_path))
    again = Config(ipc_root="/elsewhere", endpoints={"renamed": plain.endpoint("q")})
    assert again.place("renamed") == plain.place("q") == ("q", str(tmp_path))


def test_the_directory_of_an_address_takes_the_place_of_the_root_and_its_last_part_names_the_queue() -> None:
    config = parse(
        '{"ipc_root": "/run/a", "endpoints": {"q": {"protocol": "ipc", "address": "ipc:///run/b/fmq_q.ipc"}, '
        '"r": {"protocol": "ipc", "address": "bare"}}}'
    )
    assert config.place("q") == ("fmq_q.ipc", "/run/b")
    assert config.place("r") == ("bare", "/run/a")
    assert config.place("s") == ("s", "/run/a")


def test_a_root_that_others_may_write_to_holds_a_directory_for_this_user() -> None:
    assert Config(ipc_root="/dev/shm").place("q") == ("q", f"/dev/shm/fmq-{os.getuid()}")


def test_without_a_root_the_place_is_that_of_every_other_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FMQ_RUNTIME_DIR", "/run/everything")
    assert Config().place("q") == ("q", "/run/everything")


def test_what_can_not_be_a_name_is_no_endpoint() -> None:
    with pytest.raises(QueueNameError):
        Config().endpoint("a/b")


def test_linger_is_how_long_closing_waits_if_it_is_no_less_than_zero() -> None:
    assert Config(close_timeout=7.0).closing == 7
    assert Config(close_timeout=7.0, socket_config=SocketOptions(linger=250)).closing == 0.25
    assert Config(close_timeout=7.0, socket_config=SocketOptions(linger=0)).closing == 0


@pytest.mark.parametrize("is_producer", [True, False])
def test_socket_options_are_set_on_a_socket(is_producer: bool) -> None:
    options = SocketOptions(sndhwm=11, rcvhwm=12, linger=13, sndbuf=1400, rcvbuf=1500, immediate=1)
    with zmq.Context() as context, context.socket(zmq.PUSH if is_producer else zmq.PULL) as socket:
        options.apply(socket, is_producer)
        assert socket.getsockopt(zmq.LINGER) == 13
        assert socket.getsockopt(zmq.IMMEDIATE) == 1
        if is_producer:
            assert (socket.getsockopt(zmq.SNDHWM), socket.getsockopt(zmq.SNDBUF)) == (11, 1400)
        else:
            assert (socket.getsockopt(zmq.RCVHWM), socket.getsockopt(zmq.RCVBUF)) == (12, 1500)


def test_importing_reads_no_settings_and_makes_nothing() -> None:
    script = (
        "import sys, threading, zmq, fmq, fmq.fastdeploy.sync\n"
        "assert fmq.EndpointManager.config is None\n"
        "assert fmq.FMQ._instance is None\n"
        "assert zmq.Context._instance is None\n"
        "assert threading.active_count() == 1\n"
        "assert not {'paddle', 'prometheus_client', 'zmq.asyncio', 'torch'} & sys.modules.keys()\n"
    )
    environment = {**os.environ, "FMQ_CONFIG_JSON": "wrong"}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
