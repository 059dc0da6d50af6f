"""The engine: admission, scheduling, running and accounting of requests; no gRPC, no Redis."""
