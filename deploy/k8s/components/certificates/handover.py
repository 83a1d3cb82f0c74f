"""Writes the mounted certificate into the Secret seqgate-rebuild-tls of REBUILD_NAMESPACE, if that
namespace and the Secret exist."""

import base64
import json
import os
import ssl
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

NOT_FOUND = 404

ACCOUNT = Path(os.environ.get("ACCOUNT", "/var/run/secrets/kubernetes.io/serviceaccount"))
TLS = Path(os.environ.get("TLS", "/etc/seqgate/tls"))
SERVER = os.environ.get("SERVER", "https://kubernetes.default.svc")


def main() -> int:
    """Returns the exit status."""
    namespace = os.environ["REBUILD_NAMESPACE"]
    files = ("ca.crt", "tls.crt", "tls.key")
    data = {name: base64.b64encode((TLS / name).read_bytes()).decode() for name in files}
    request = Request(  # noqa: S310 - the API server's address
        f"{SERVER}/api/v1/namespaces/{namespace}/secrets/seqgate-rebuild-tls",
        data=json.dumps({"data": data}).encode(),
        headers={
            "Authorization": "Bearer " + (ACCOUNT / "token").read_text(),
            "Content-Type": "application/merge-patch+json",
        },
        method="PATCH",
    )
    trusted = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    try:
        with urlopen(request, timeout=30, context=trusted):  # noqa: S310
            return 0
    except HTTPError as error:
        # Without the rebuild's manifests nobody may write there, and nothing is there.
        missing = error.code == NOT_FOUND
        sys.stderr.write(f"{namespace}: {error.code} {error.reason}\n")
        return 0 if missing else 1


if __name__ == "__main__":
    sys.exit(main())
