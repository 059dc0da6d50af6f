"""The edge to gRPC that worker and client share: errors as statuses, request ids."""
