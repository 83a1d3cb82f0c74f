"""Serves single methods of a service, for fakes."""

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass


def handlers(service: ServiceDescriptor, **methods: Callable[..., Any]) -> grpc.GenericRpcHandler:
    """Serve these methods; the service's others are UNIMPLEMENTED."""
    found = {}
    for name, method in methods.items():
        described = service.methods_by_name[name]
        asked, answered = (
            "stream" if streams else "unary"
            for streams in (described.client_streaming, described.server_streaming)
        )
        found[name] = getattr(grpc, f"{asked}_{answered}_rpc_method_handler")(
            method,
            request_deserializer=GetMessageClass(described.input_type).FromString,
            response_serializer=GetMessageClass(described.output_type).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service.full_name, found)
