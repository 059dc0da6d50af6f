"""``ModelWorker``: generation, tokenizing and the model's description.

First hop of a request: validated and tokenized here, then run by the engine.
The engine's generator is pulled one message at a time, so a slow caller slows
its own request alone, and it is closed however the call ends.
"""

from collections.abc import AsyncIterator
from contextlib import aclosing

from model_worker.engine.request import GenerateRequest
from model_worker.rpc.backend import Backend
from model_worker.rpc.bounds import LONG_PROMPT_IDS, check_cache_salt, check_priority, check_request_id
from model_worker.rpc.messages import fill, response_of
from model_worker.rpc.options import check_model, read_sampling, read_stopping
from model_worker.rpc.prompts import resolve_prompt
from prefixcache.pb.v1 import worker_pb2, worker_pb2_grpc
from prefixcache.rpc.interceptors import Context, current_request_id, remaining_s


class GenerateServicer(worker_pb2_grpc.ModelWorkerServicer):
    """Serves ``ModelWorker`` from a backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def Generate(  # noqa: N802 -- gRPC's name
        self,
        request: worker_pb2.GenerateRequest,
        context: Context,
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        """Stream Started, Progress, Tokens and Finished of one request."""
        async with aclosing(self._backend.generate(await self._read(request, context))) as events:
            async for event in events:
                yield response_of(event)

    async def _read(self, request: worker_pb2.GenerateRequest, context: Context) -> GenerateRequest:
        description = self._backend.description
        check_model(request.model, description)
        check_cache_salt(request.cache_salt)
        check_priority(request.priority)
        sampling = read_sampling(request.sampling, description)
        stopping = read_stopping(request.stopping, description)
        prompt = await resolve_prompt(request.prompt, self._backend, max_tokens=description.max_model_len - 1)
        return GenerateRequest(
            request_id=current_request_id(),
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            stopping=stopping,
            cache_salt=request.cache_salt,
            bypass_prefix_cache=request.bypass_prefix_cache,
            report_progress=request.report_progress,
            timeout_s=remaining_s(context),
            priority=request.priority,
        )

    async def Abort(self, request: worker_pb2.AbortRequest, context: object) -> worker_pb2.AbortResponse:  # noqa: N802
        """End a request by its id."""
        check_request_id(request.request_id)
        self._backend.abort(request.request_id)
        return worker_pb2.AbortResponse()

    async def Tokenize(self, request: worker_pb2.TokenizeRequest, context: object) -> worker_pb2.TokenizeResponse:  # noqa: N802
        """Render and tokenize a prompt as Generate would."""
        prompt = await resolve_prompt(request.prompt, self._backend)
        text = prompt.text
        if text is None:
            run = self._backend.run_io if len(prompt.token_ids) <= LONG_PROMPT_IDS else self._backend.run_long_io
            text = await run(self._backend.tokenizer.decode, prompt.token_ids)
        return worker_pb2.TokenizeResponse(ids=prompt.token_ids, text=text)

    async def GetModelInfo(  # noqa: N802
        self, request: worker_pb2.GetModelInfoRequest, context: object
    ) -> worker_pb2.GetModelInfoResponse:
        """Describe the model served."""
        return fill(worker_pb2.GetModelInfoResponse, self._backend.description)
