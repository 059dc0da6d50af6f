from pathlib import Path
from typing import Any

import pytest

from prefixcache.errors import ConfigError
from prefixcache.storage.remote_options import Kind, RemoteOptions, Target, parse_target


def parse(url: str, **options: Any) -> Target:
    return parse_target(RemoteOptions(url, **options))


def test_one_server_with_everything() -> None:
    target = parse("redis://me:a%2Fb%40c@example.org:7000/3")
    assert (target.kind, target.is_tls, target.hosts, target.db) == (
        Kind.STANDALONE,
        False,
        (("example.org", 7000),),
        3,
    )
    assert target.credentials == {"username": "me", "password": "a/b@c"}


def test_what_is_left_out_has_a_default() -> None:
    target = parse("redis://localhost")
    assert (target.hosts, target.db, target.credentials) == ((("localhost", 6379),), 0, {})


def test_a_password_without_a_user() -> None:
    assert parse("redis://:word@localhost").credentials == {"password": "word"}


def test_a_password_with_a_slash_can_be_given_apart() -> None:
    target = parse("redis://localhost", username="me", password="a/b")
    assert target.credentials == {"username": "me", "password": "a/b"}


def test_ipv6() -> None:
    assert parse("redis://[::1]:7000").hosts == (("::1", 7000),)


def test_a_unix_socket() -> None:
    target = parse("unix://:word@/run/valkey/my%20socket?db=2")
    assert (target.kind, target.path, target.db) == (Kind.UNIX, "/run/valkey/my socket", 2)
    assert target.credentials == {"password": "word"}


def test_sentinels_a_master_and_a_database() -> None:
    target = parse("redis+sentinel://:word@one,two:5000/shared/4?sentinel_password=other")
    assert (target.kind, target.master_name, target.db) == (Kind.SENTINEL, "shared", 4)
    assert target.hosts == (("one", 26379), ("two", 5000))
    assert target.sentinel_credentials == {"password": "other"}


def test_a_cluster_with_tls(tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    authority.touch()
    target = parse("rediss+cluster://one:1,two:2", ca_file=authority)
    assert (target.kind, target.is_tls, target.hosts) == (Kind.CLUSTER, True, (("one", 1), ("two", 2)))
    assert target.tls == {"ssl_ca_certs": str(authority), "ssl_check_hostname": True}


def test_host_names_need_not_be_checked() -> None:
    assert parse("rediss://one?ssl_check_hostname=no").tls == {"ssl_check_hostname": False}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "begin with one of"),
        ("localhost:6379", "begin with one of"),
        ("http://localhost", "begin with one of"),
        ("redis://", "names no host"),
        ("redis://localhost:0x1", "port"),
        ("redis://localhost:70000", "port"),
        ("redis://one,two", "several hosts"),
        ("redis://localhost/first", "'first'"),
        ("redis://localhost/-1", "'-1'"),
        ("redis://localhost?socket_timeout=5", "socket_timeout"),
        ("redis://localhost?db", "cannot be read"),
        ("redis://me@localhost", "no password"),
        ("redis://[::1", "cannot be read"),
        ("unix://", "no socket"),
        ("redis+sentinel://localhost", "names no master"),
        ("redis+cluster://localhost/1", "only database 0"),
        ("redis://localhost?ssl_check_hostname=no", "without TLS"),
        ("rediss://localhost?ssl_check_hostname=perhaps", "perhaps"),
    ],
)
def test_what_is_no_address_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(url)


def test_certificates_without_tls_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rediss"):
        parse("redis://localhost", ca_file=tmp_path / "ca.pem")


def test_a_key_without_a_certificate_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.touch()
    with pytest.raises(ConfigError, match="certificate_file"):
        parse("rediss://localhost", key_file=key)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("key_prefix", ""),
        ("key_prefix", "a{b"),
        ("key_prefix", "a b"),
        ("key_prefix", "x" * 65),
        ("deadline_s", 0.0),
        ("deadline_s", float("nan")),
        ("deadline_s", 61.0),
        ("num_connections", 0),
        ("num_connections", 65),
        ("max_calls", 0),
        ("max_in_flight_bytes", 0),
        ("max_value_bytes", 0),
        ("max_value_bytes", 2**30),
    ],
)
def test_bounds(name: str, value: object) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=name):
        RemoteOptions("redis://localhost", **options)


@pytest.mark.parametrize(
    "url", ["redis://me:hidden@localhost:1/x", "redis://me:hidden@localhost:bad", "me:hidden@host"]
)
def test_no_error_and_no_repr_shows_a_password(url: str) -> None:
    options = RemoteOptions(url, password="hidden")
    assert "hidden" not in repr(options)
    with pytest.raises(ConfigError) as raised:
        parse_target(options)
    assert "hidden" not in str(raised.value)
    assert "hidden" not in repr(parse("redis://me:hidden@localhost"))


def test_the_address_in_messages_has_no_credentials() -> None:
    assert parse("redis+sentinel://:word@one,two:5000/shared").address == "one:26379,two:5000/shared"
    assert parse("unix://:word@/run/it").address == "/run/it"
