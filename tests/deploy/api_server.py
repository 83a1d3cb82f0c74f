"""A small API server, for Spark: it keeps pods, runs each new one as a process of this machine, and
remembers what was asked of it."""

import json
import re
import ssl
import subprocess
import threading
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from tests.deploy.manifests import Document, selected
from tests.support.authority import Authority

PATH = re.compile(r"/api/v1/namespaces/(?P<namespace>[^/]+)/(?P<kind>[^/?]+)(?:/(?P<name>[^/?]+))?")
START_TIME = "2026-01-01T00:00:00Z"


class Asked(NamedTuple):
    """A request, in the words of a Role."""

    verb: str
    resource: str
    namespace: str
    token: str


class ApiServer:
    """Use as a context manager. `run` starts a pod's process, given the pod and its address."""

    def __init__(
        self, folder: Path, run: Callable[[Document, str], subprocess.Popen[bytes]]
    ) -> None:
        self.authority = Authority(folder)
        files = self.authority.issue("api-server", hosts=["127.0.0.1"])
        self.asked: list[Asked] = []
        self.pods: dict[str, Document] = {}
        self.ever: list[Document] = []
        self.secrets: dict[str, dict[str, bytes]] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.changed = threading.Condition()
        self._run = run
        self._events: list[Document] = []
        self._ordinals = count(10)
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate, files.key)
        # A handshake is part of a request, and does not hold up others.
        self._http.socket = context.wrap_socket(
            self._http.socket, server_side=True, do_handshake_on_connect=False
        )
        self.is_over = False

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> "ApiServer":
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self.changed:
            self.is_over = True
            self.changed.notify_all()
        self._http.shutdown()
        self._http.server_close()
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()

    def add(self, pod: Document) -> Document:
        """Keep a pod that runs already."""
        ordinal = next(self._ordinals)
        meta = pod["metadata"]
        meta |= {"uid": f"uid-{ordinal}", "creationTimestamp": START_TIME}
        address = f"127.0.0.{ordinal}"
        pod["status"] = {"phase": "Running", "podIP": address, "startTime": START_TIME}
        pod["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
        with self.changed:
            self.pods[meta["name"]] = pod
            self.ever.append(pod)
            self._tell("ADDED", pod)
        return pod

    def create(self, pod: Document) -> Document:
        added = self.add(pod)
        process = self._run(added, added["status"]["podIP"])
        self.processes[added["metadata"]["name"]] = process
        threading.Thread(target=self._wait, args=(added, process), daemon=True).start()
        return added

    def delete(self, name: str) -> Document | None:
        with self.changed:
            pod = self.pods.pop(name, None)
            if pod is None:
                return None
            self._tell("DELETED", pod)
        if name in self.processes:
            self.processes[name].terminate()
        return pod

    def chosen(self, query: Mapping[str, list[str]]) -> list[Document]:
        """The pods that a query's selector selects."""
        selector = dict(each.split("=") for each in _words(query, "labelSelector") if "=" in each)
        return [
            pod
            for pod in self.pods.values()
            if selected(selector, pod["metadata"].get("labels", {}))
        ]

    def events(self, after: int) -> Iterator[Document]:
        """What happens to pods after so many events, until the end."""
        while True:
            with self.changed:
                while not self.is_over and len(self._events) <= after:
                    self.changed.wait()
                if self.is_over:
                    return
                news = self._events[after:]
            after += len(news)
            yield from news

    @property
    def version(self) -> int:
        return len(self._events)

    def _wait(self, pod: Document, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        state = {"terminated": {"exitCode": status, "finishedAt": START_TIME}}
        name = pod["spec"]["containers"][0]["name"]
        with self.changed:
            pod["status"]["phase"] = "Failed" if status else "Succeeded"
            pod["status"]["containerStatuses"] = [{"name": name, "state": state}]
            if self.pods.get(pod["metadata"]["name"]) is pod:
                self._tell("MODIFIED", pod)

    def _tell(self, kind: str, pod: Document) -> None:
        pod["metadata"]["resourceVersion"] = str(len(self._events) + 1)
        self._events.append(json.loads(json.dumps({"type": kind, "object": pod})))
        self.changed.notify_all()


def _words(query: Mapping[str, list[str]], name: str) -> list[str]:
    return [word for each in query.get(name, ()) for word in each.split(",") if word]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, api: ApiServer, *of_request: Any) -> None:
        self._api = api
        super().__init__(*of_request)

    def do_GET(self) -> None:
        query = self._asked("get")
        if self.kind != "pods":
            self._answer({"kind": "List", "apiVersion": "v1", "metadata": {}, "items": []})
        elif query.get("watch") == ["true"] and "Upgrade" in self.headers:
            self._answer({"kind": "Status"}, 503)  # no WebSockets: it asks again without
        elif query.get("watch") == ["true"]:
            self._watch(query)
        elif self.name:
            pod = self._api.pods.get(self.name)
            self._answer(pod) if pod else self._missing()
        else:
            version = {"resourceVersion": str(self._api.version)}
            items = self._api.chosen(query)
            self._answer(
                {"kind": "PodList", "apiVersion": "v1", "metadata": version, "items": items}
            )

    def do_POST(self) -> None:
        self._asked("create")
        self._answer(self._api.create(self._body()), 201)

    def do_PATCH(self) -> None:
        self._asked("patch")
        body = self._body()
        if self.kind == "secrets" and self.name in self._api.secrets:
            data = {key: b64decode(each) for key, each in body["data"].items()}
            self._api.secrets[self.name] |= data
            self._answer({"kind": "Secret"})
            return
        pod = self._api.pods.get(self.name)
        self._answer(pod) if pod else self._missing()

    def do_DELETE(self) -> None:
        query = self._asked("delete")
        self._body()
        names = (
            [self.name]
            if self.name
            else [each["metadata"]["name"] for each in self._api.chosen(query)]
        )
        gone = [self._api.delete(name) for name in names if self.kind == "pods"]
        self._answer(gone[0]) if gone and gone[0] else self._answer(
            {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        )

    def _asked(self, verb: str) -> dict[str, list[str]]:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        found = PATH.fullmatch(parts.path)
        assert found is not None, self.path
        self.kind, self.name = found["kind"], found["name"] or ""
        if verb == "get" and not self.name:
            verb = "watch" if query.get("watch") == ["true"] else "list"
        if verb == "delete" and not self.name:
            verb = "deletecollection"
        token = self.headers.get("Authorization", "")
        self._api.asked.append(Asked(verb, self.kind, found["namespace"], token))
        return query

    def _body(self) -> Any:
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return json.loads(text) if text else {}

    def _missing(self) -> None:
        self._answer({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}, 404)

    def _answer(self, document: Any, status: int = 200) -> None:
        text = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _watch(self, query: dict[str, list[str]]) -> None:
        after = int(query.get("resourceVersion", ["0"])[0] or 0)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        selector = dict(each.split("=") for each in _words(query, "labelSelector") if "=" in each)
        with suppress(OSError):
            for event in self._api.events(after):
                if selected(selector, event["object"]["metadata"].get("labels", {})):
                    line = json.dumps(event).encode() + b"\n"
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
                    self.wfile.flush()
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass
