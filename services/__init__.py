"""The services of Seqgate, one folder each, and the code that they share.

In a checkout seqgate/services is a symbolic link to this folder; a wheel contains it as a folder.
Either way the package is seqgate.services: docs/decisions/services-in-the-wheel.md.
"""

import os

if __name__ != "seqgate.services":
    # Imported as `services` from the root of a checkout: every module would be loaded twice.
    raise ImportError(f"this package is seqgate.services, not {__name__}")

# gRPC's C core writes its own lines to standard error; relevant failures reach us as errors.
if not os.environ.get("GRPC_VERBOSITY"):
    os.environ["GRPC_VERBOSITY"] = "NONE"

# Its event engine passes a message through more threads: docs/decisions/no-event-engine.md.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
