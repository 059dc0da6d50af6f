"""Admission to the worker's own services, and its one-way end.

``Gate`` counts open calls, refuses too many, and once draining refuses all new
ones while the open ones run on. Owner of the set of open calls. Health and
reflection pass it by: they answer until the socket closes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import grpc
from grpc import aio

from prefixcache.errors import CapacityExceeded, EngineStopped
from prefixcache.rpc.interceptors import Context, Continuation, Handler, wrap_handler

_OWN_SERVICES: Final = "/prefixcache."
_CUT_S: Final = 5.0
_LOGGER: Final = logging.getLogger(__name__)


class Gate(aio.ServerInterceptor):
    """Lets at most ``max_calls`` calls be open at once; ``drain`` closes it for good."""

    def __init__(self, *, max_calls: int) -> None:
        self._max_calls = max_calls
        self._calls: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False
        self._is_cut = False

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Put the gate before the handlers of the worker's own services."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_OWN_SERVICES):
            return handler
        return wrap_handler(handler, self._pass)

    async def drain(self, grace_s: float) -> None:
        """Refuse new calls, give open ones ``grace_s`` seconds, then end them as EngineStopped."""
        self._is_draining = True
        if not await self._is_idle_within(grace_s):
            self._is_cut = True
            for call in self._calls:
                call.cancel()
            if not await self._is_idle_within(_CUT_S):
                _LOGGER.error("%d calls did not end %g s after they were cancelled", len(self._calls), _CUT_S)

    async def _is_idle_within(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    @asynccontextmanager
    async def _pass(self, context: Context) -> AsyncIterator[None]:
        self._check_admission()
        call = asyncio.current_task()
        assert call is not None
        self._calls.add(call)
        self._idle.clear()
        try:
            yield
        except asyncio.CancelledError:
            if not self._is_cut:
                raise
            call.uncancel()
            raise EngineStopped("the worker stopped before the answer was complete; try again elsewhere") from None
        finally:
            self._calls.discard(call)
            if not self._calls:
                self._idle.set()

    def _check_admission(self) -> None:
        if self._is_draining:
            raise EngineStopped("the worker is stopping and takes no new calls; try again elsewhere or later")
        if len(self._calls) >= self._max_calls:
            raise CapacityExceeded(f"{len(self._calls)} calls are open, the most this worker takes; try again later")
