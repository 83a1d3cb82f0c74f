"""What is run and never imported by what we publish: stack, demo, bench, dev."""

import os

# gRPC's own fork handlers are for children that go on to use it; ours only exec.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
