"""What Seqgate runs: one folder a service, and what they all stand on."""

import os

# gRPC's C core writes lines of its own to standard error; what matters of it reaches us as errors.
if not os.environ.get("GRPC_VERBOSITY"):
    os.environ["GRPC_VERBOSITY"] = "NONE"
