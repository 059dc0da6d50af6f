"""The remote tier over TLS with client certificates, and as a user whom an ACL lets do no more than it needs.

The server itself speaks no TLS; a proxy in front of it does.
"""

import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from prefixcache.errors import ConfigError, TierUnavailable
from prefixcache.storage.remote import RemoteTier
from prefixcache.storage.remote_options import RemoteOptions
from prefixcache.storage.tier import Tier
from tests.fakes.certificates import Authority, Certificate
from tests.fakes.proxy import Proxy
from tests.fakes.valkey import Valkey, age_all_keys, running_valkey
from tests.storage.tier_contract import ROOT, Advance, TierContract, chain

USER, PASSWORD = "worker", "a secret: with/signs@"
COMMANDS = "+ping +get +getrange +set +strlen +exists +pttl +pexpire +unlink"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with running_valkey(tmp_path_factory.mktemp("valkey")) as started:
        with started.client() as client:
            rules = ["on", f">{PASSWORD}", "~prefixcache:*", "-@all", *COMMANDS.split()]
            client.execute_command("ACL", "SETUSER", USER, *rules)
            client.execute_command("ACL", "SETUSER", "reader", "on", f">{PASSWORD}", "~*", "-@all", "+ping")
        yield started


@pytest.fixture(scope="module")
def client_certificate(authority: Authority) -> Certificate:
    return authority.issue("worker")


@contextmanager
def tls_in_front(server: Valkey, authority: Authority, certificate: Certificate) -> Iterator[Proxy]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate, certificate.key)
    context.load_verify_locations(authority.ca_file)
    context.verify_mode = ssl.CERT_REQUIRED
    with Proxy(server.port, tls=context) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def front(server: Valkey, authority: Authority) -> Iterator[Proxy]:
    with tls_in_front(server, authority, authority.issue("server")) as proxy:
        yield proxy


@pytest.fixture
def options(front: Proxy, authority: Authority, client_certificate: Certificate) -> RemoteOptions:
    return RemoteOptions(
        f"rediss://127.0.0.1:{front.port}/0",
        username=USER,
        password=PASSWORD,
        ca_file=authority.ca_file,
        certificate_file=client_certificate.certificate,
        key_file=client_certificate.key,
        deadline_s=5,
    )


class TestOverTlsWithAnAcl(TierContract):
    @pytest.fixture(autouse=True)
    def _empty(self, server: Valkey) -> None:
        with server.client() as client:
            client.flushall()

    @pytest.fixture
    async def tier(self, options: RemoteOptions) -> AsyncIterator[Tier]:
        tier = RemoteTier(options)
        yield tier
        await tier.close()

    @pytest.fixture
    def advance(self, server: Valkey) -> Advance:
        async def let_pass(seconds: float) -> None:
            with server.client() as client:
                age_all_keys(client, seconds)

        return let_pass


async def fault_of(options: RemoteOptions) -> str:
    tier = RemoteTier(options)
    try:
        with pytest.raises(TierUnavailable) as raised:
            await tier.lookup(ROOT, chain(1))
    finally:
        await tier.close()
    return str(raised.value)


async def test_a_server_without_passwords_is_asked_at_once(options: RemoteOptions) -> None:
    for _ in range(5):
        tier = RemoteTier(replace(options, username=None, password=None))
        assert await tier.lookup(bytes(32), chain(1)) == 0
        await tier.close()


async def test_a_wrong_password_is_said_and_not_shown(options: RemoteOptions) -> None:
    fault = await fault_of(replace(options, password="wrong secret"))
    assert "password" in fault
    assert "wrong secret" not in fault


async def test_a_command_the_acl_forbids_is_said(options: RemoteOptions) -> None:
    assert "permission" in await fault_of(replace(options, username="reader"))


async def test_a_server_of_another_authority_is_refused(
    options: RemoteOptions, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = Authority(tmp_path_factory.mktemp("other"))
    assert "certificate verify failed" in await fault_of(replace(options, ca_file=other.ca_file))


async def test_an_expired_server_certificate_is_refused(
    server: Valkey, authority: Authority, options: RemoteOptions
) -> None:
    with tls_in_front(server, authority, authority.issue("old-server", is_expired=True)) as proxy:
        fault = await fault_of(replace(options, url=f"rediss://127.0.0.1:{proxy.port}"))
    assert "expired" in fault


async def test_an_expired_client_certificate_is_refused(authority: Authority, options: RemoteOptions) -> None:
    old = authority.issue("old-worker", is_expired=True)
    assert await fault_of(replace(options, certificate_file=old.certificate, key_file=old.key))


async def test_a_server_without_tls_is_refused(server: Valkey, options: RemoteOptions) -> None:
    assert await fault_of(replace(options, url=f"rediss://127.0.0.1:{server.port}", deadline_s=0.5))


def test_a_missing_certificate_file_is_said_at_once(options: RemoteOptions) -> None:
    assert options.ca_file is not None
    missing = options.ca_file.with_name("nothing.pem")
    with pytest.raises(ConfigError, match=r"nothing\.pem"):
        RemoteTier(replace(options, ca_file=missing))
