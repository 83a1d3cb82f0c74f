"""Some methods of a service, without the others: for stand-ins."""

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass


def handlers(service: ServiceDescriptor, **methods: Callable[..., Any]) -> grpc.GenericRpcHandler:
    """Serve these methods, which answer with streams; all others are UNIMPLEMENTED."""
    found = {}
    for name, method in methods.items():
        described = service.methods_by_name[name]
        make = (
            grpc.stream_stream_rpc_method_handler
            if described.client_streaming
            else grpc.unary_stream_rpc_method_handler
        )
        found[name] = make(
            method,
            request_deserializer=GetMessageClass(described.input_type).FromString,
            response_serializer=GetMessageClass(described.output_type).SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service.full_name, found)
