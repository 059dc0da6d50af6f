from collections.abc import AsyncIterator, Iterator

import pytest

from prefixcache import AsyncClient, Client
from tests.fakes.recording_servicer import RecordingServicer, serving, serving_in_thread


@pytest.fixture
def servicer() -> RecordingServicer:
    return RecordingServicer()


@pytest.fixture
def address(servicer: RecordingServicer) -> Iterator[str]:
    with serving_in_thread(servicer) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address, timeout=10, retries=0) as client:
        yield client


@pytest.fixture
async def async_client(servicer: RecordingServicer) -> AsyncIterator[AsyncClient]:
    async with serving(servicer) as address, AsyncClient(address, timeout=10, retries=0) as client:
        yield client
