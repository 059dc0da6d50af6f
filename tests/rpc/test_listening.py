"""Addresses: their form, the loopback rule, and what is wrong with one."""

import socket

import pytest

from model_worker.rpc.listening import ListenAddress, check_listen, parse_listen
from prefixcache.errors import ConfigError


@pytest.mark.parametrize("listen", ["127.0.0.1:50051", "localhost:0", "[::1]:65535", "worker-1.example:1"])
def test_address_is_shown_as_it_was_given(listen: str) -> None:
    assert str(parse_listen(listen)) == listen


@pytest.mark.parametrize(
    "listen",
    ["", ":", "50051", ":50051", "127.0.0.1", "127.0.0.1:", "a:b", "a:-1", "a:65536", "a:1.0", "::1:5", "[::1]", "a:²"],
)
def test_bad_form_is_a_config_error_that_shows_a_good_one(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"give HOST:PORT, such as 127\.0\.0\.1:50051"):
        parse_listen(listen)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1"])
async def test_beyond_loopback_needs_insecure(host: str) -> None:
    with pytest.raises(ConfigError, match=r"reachable from other machines.*--insecure"):
        await check_listen(parse_listen(f"{host}:0"), insecure=False)


async def test_address_of_another_machine_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="cannot listen on 192"):
        await check_listen(parse_listen("192.0.2.1:0"), insecure=True)


async def test_unknown_host_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="the host is unknown"):
        await check_listen(parse_listen("no-such-host.invalid:0"), insecure=True)


async def test_taken_port_is_a_config_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = parse_listen(f"127.0.0.1:{taken.getsockname()[1]}")
        failure = await _failure_of_check(address)
    assert "Address already in use" in failure


async def _failure_of_check(address: ListenAddress) -> str:
    with pytest.raises(ConfigError) as caught:
        await check_listen(address, insecure=False)
    return str(caught.value)
