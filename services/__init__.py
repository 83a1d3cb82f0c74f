"""What Seqgate runs: one folder a service, and what they all stand on.

In a checkout seqgate/services is a symbolic link to this folder; a wheel has it as a folder. Either
way the package is seqgate.services: docs/decisions/services-in-the-wheel.md.
"""

import os

if __name__ != "seqgate.services":
    # Found by its folder, in the root of a checkout: every module would be loaded a second time.
    raise ImportError(f"this package is seqgate.services, not {__name__}")

# gRPC's C core writes lines of its own to standard error; what matters of it reaches us as errors.
if not os.environ.get("GRPC_VERBOSITY"):
    os.environ["GRPC_VERBOSITY"] = "NONE"
