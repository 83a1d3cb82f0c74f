"""The commands in the pods of the components redis-sentinel and redis-cluster, on real servers."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path
from signal import SIGKILL

import pytest
from redis import Redis
from redis.exceptions import RedisError

from seqgate.dev.ports import free_ports
from seqgate.dev.redis_server import redis_binary
from seqgate.services.dedup.adapters.connect import connect_redis
from tests.deploy.manifests import K8S, read
from tests.deploy.secure_valkey import PASSWORD, TLS, install, secure_valkey
from tests.support.authority import Authority
from tests.support.redis_groups import SLOTS, command, until
from tests.support.redis_server import RedisServer
from tests.support.tls_front import tls_for_valkey

SENTINEL = K8S / "components" / "redis-sentinel"
CLUSTER = K8S / "components" / "redis-cluster"
PODS = 6
TIMEOUT_S = 5.0

CLI = """\
#!{python} -ISB
import json, os, socket, sys
words = sys.argv[1:]
pod = int(words[words.index("-h") + 1].partition(".")[0].rpartition("-")[2])
words = words[words.index("-h") + 2:]
ports = json.loads(os.environ["PORTS"])
if words[:2] == ["cluster", "meet"]:
    port, bus = ports[int(words[2].rpartition(".")[2]) - 1]
    words[2:] = ["127.0.0.1", str(port), str(bus)]
with socket.create_connection(("127.0.0.1", ports[pod][0]), 2) as server:
    server.sendall(" ".join(words).encode() + b"\\r\\n")
    answers = server.makefile("rb")
    first = answers.readline()
    print((answers.read(int(first[1:])) if first[:1] == b"$" else first[1:]).decode().strip())
"""
"""The part of valkey-cli that the script needs: each pod is a port of this machine."""

GETENT = """\
#!/bin/sh
pod=${2%%.*}
echo "127.0.0.$((${pod##*-} + 1)) $2"
"""


def program(folder: Path, name: str, text: str) -> None:
    """A program that a script finds by this name."""
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("pod", "named", "follows"),
    [
        (0, "", ""),
        (1, "", "seqgate-valkey-0.seqgate-valkey"),
        (0, "seqgate-valkey-2.seqgate-valkey", "seqgate-valkey-2.seqgate-valkey"),
        (2, "seqgate-valkey-2.seqgate-valkey", ""),
        (1, "ERR No such master", "seqgate-valkey-0.seqgate-valkey"),
    ],
)
def test_a_server_follows_the_named_master(
    tmp_path: Path, pod: int, named: str, follows: str
) -> None:
    program(tmp_path, "valkey-cli", '#!/bin/sh\n[ -n "$NAMED" ] && printf "$NAMED\\n6379\\n"\n')
    program(tmp_path, "valkey-server", '#!/bin/sh\necho "$@"\n')
    name = f"seqgate-valkey-{pod}"
    done = subprocess.run(
        ["sh", SENTINEL / "start.sh"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOSTNAME": name, "NAMED": named},
        capture_output=True,
        text=True,
        check=True,
    )
    replica = f" --replicaof {follows} 6379" if follows else ""
    announced = f"/etc/valkey/valkey.conf --replica-announce-ip {name}.seqgate-valkey"
    assert done.stdout.strip() == announced + replica


def test_a_sentinel_keeps_its_identity_across_restarts(tmp_path: Path) -> None:
    """Its file is accepted, and a second start finds the state of the first."""
    port, master = free_ports(2)
    configuration = (SENTINEL / "sentinel.conf").read_text()
    assert "seqgate-valkey-0.seqgate-valkey 6379" in configuration
    here = configuration.replace("seqgate-valkey-0.seqgate-valkey 6379", f"localhost {master}")
    (tmp_path / "sentinel.conf").write_text(here.replace("port 26379", f"port {port}"))
    data = tmp_path / "data"
    data.mkdir()
    script = (SENTINEL / "sentinel.sh").read_text()
    script = script.replace("/data/", f"{data}/").replace("/etc/seqgate/", f"{tmp_path}/")
    program(tmp_path, "valkey-server", f'#!/bin/sh\nexec {redis_binary()} "$@"\n')
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOSTNAME": "localhost"}
    seen = []
    for _ in range(2):
        process = subprocess.Popen(
            ["sh", "-c", script.replace("$HOSTNAME.seqgate-valkey", "localhost")],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        try:
            with Redis(port=port, decode_responses=True) as sentinel:
                until(sentinel.ping, "the Sentinel answers")
                said = sentinel.sentinel_master("seqgate")
                seen.append(sentinel.execute_command("SENTINEL", "MYID"))
        finally:
            process.terminate()
            process.wait()
        assert (said["ip"], said["port"], said["quorum"]) == ("localhost", master, 2)
    assert seen[0] == seen[1]


async def test_dedup_reads_the_password_of_a_server_behind_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    files = authority.issue("valkey", hosts=["127.0.0.1"])
    other = Authority(tmp_path / "other")
    async with AsyncExitStack() as stack:
        plain = stack.enter_context(secure_valkey(tmp_path / "valkey"))
        port = await stack.enter_async_context(tls_for_valkey(plain, files))
        shown = tmp_path / "valkey" / "password"
        at = f"127.0.0.1:{port}/0?ssl_check_hostname=true&ssl_ca_certs="
        for url, password, accepted in (
            (f"rediss://{at}{authority.file}", shown, True),
            (f"rediss://default@{at}{authority.file}", shown, True),
            (f"rediss://:{PASSWORD}@{at}{authority.file}", None, True),
            (f"rediss://{at}{authority.file}", None, False),
            (f"rediss://nobody@{at}{authority.file}", shown, False),
            (f"rediss://{at}{authority.file}", tmp_path / "missing", False),
            (f"rediss://{at}{other.file}", shown, False),
        ):
            async with connect_redis(
                url, timeout_s=TIMEOUT_S, connections_max=1, password_file=password
            ) as client:
                if accepted:
                    assert await client.execute_command("PING")
                else:
                    with pytest.raises(RedisError):
                        await client.execute_command("PING")


def test_replicas_and_sentinels_know_the_password(tmp_path: Path) -> None:
    with ExitStack() as stack:
        master = stack.enter_context(secure_valkey(tmp_path / "master"))
        follow = ("--replicaof", "localhost", str(master))
        replica = stack.enter_context(secure_valkey(tmp_path / "replica", *follow))
        with Redis(port=replica, password=PASSWORD, decode_responses=True) as client:
            until(lambda: client.info("replication")["master_link_status"] == "up", "it follows")
        (port,) = free_ports(1)
        folder = tmp_path / "sentinel"
        path = install(folder, port)
        settings = (SENTINEL / "sentinel.conf").read_text().replace("26379", str(port))
        watched = f"localhost {master}"
        settings = settings.replace("seqgate-valkey-0.seqgate-valkey 6379", watched)
        (folder / "sentinel.conf").write_text(settings)
        process = subprocess.Popen(
            ["sh", "-c", f"exec valkey-server {folder}/sentinel.conf --sentinel"],
            env={"PATH": path},
            stdout=subprocess.DEVNULL,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        with Redis(port=port, password=PASSWORD) as client:
            until(
                lambda: client.execute_command("SENTINEL", "replicas", "seqgate"),
                "the Sentinel has the replica from the master",
            )
        with Redis(port=port) as stranger, pytest.raises(RedisError):
            stranger.ping()


def test_the_programs_find_tls_where_the_volume_has_it() -> None:
    (pod,) = read((TLS / "valkey.yaml").read_text())
    (volume,) = pod["spec"]["template"]["spec"]["volumes"]
    paths = {
        f"/opt/seqgate/{item['path']}"
        for source in volume["projected"]["sources"]
        for each in source.values()
        for item in each["items"]
    }
    for name in ("tls.conf", "valkey-server", "valkey-cli"):
        named = set(re.findall(r"/opt/seqgate/[a-z./-]+[a-z]", (TLS / name).read_text()))
        assert named - {"/opt/seqgate/bin"} <= paths


@contextmanager
def joining(folder: Path, ports: list[tuple[int, int]]) -> Iterator[None]:
    """Run the script of every pod."""
    program(folder, "valkey-cli", CLI.format(python=sys.executable))
    program(folder, "getent", GETENT)
    with ExitStack() as stack:
        for pod in range(PODS):
            process = subprocess.Popen(
                ["sh", CLUSTER / "join.sh", "0.1"],
                env={
                    "PATH": f"{folder}:{os.environ['PATH']}",
                    "HOSTNAME": f"seqgate-valkey-{pod}",
                    "PORTS": json.dumps(ports),
                },
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            stack.callback(process.wait)
            stack.callback(os.killpg, process.pid, 9)
        yield


def test_a_container_that_joins_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """By a trap: as process 1 of its container, a shell without one ignores SIGTERM."""
    program(tmp_path, "valkey-cli", '#!/bin/sh\necho asked >>"$ASKED"\n')
    program(tmp_path, "getent", "#!/bin/sh\n")
    asked = tmp_path / "asked"
    process = subprocess.Popen(
        ["sh", CLUSTER / "join.sh", "600"],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "HOSTNAME": "seqgate-valkey-0",
            "ASKED": str(asked),
        },
        start_new_session=True,
    )
    try:
        until(asked.exists, "a round")
        process.terminate()
        assert process.wait(timeout=60) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, SIGKILL)
        process.wait()


@pytest.mark.parametrize("component", ["redis-cluster", "redis-sentinel"])
def test_every_container_of_a_valkey_ends_on_sigterm(component: str) -> None:
    """Process 1 is the server, or a script that becomes it or has a trap."""
    folder = K8S / "components" / component
    (workload,) = read((folder / "valkey.yaml").read_text())
    for container in workload["spec"]["template"]["spec"]["containers"]:
        shell, script, *_ = container["command"]
        assert shell == "sh"
        text = (folder / Path(script).name).read_text()
        last = [line for line in text.splitlines() if not line.startswith((" ", "#"))][-1]
        assert last.startswith("exec valkey-server") or "\ntrap 'exit 0' TERM" in text


@pytest.mark.timeout(120)
def test_pods_form_a_cluster_and_one_without_data_rejoins(tmp_path: Path) -> None:
    numbers = free_ports(2 * PODS)
    ports = list(zip(numbers[::2], numbers[1::2], strict=True))
    servers = []
    for pod, (port, bus) in enumerate(ports):
        options = [
            *("--include", str(CLUSTER / "cluster.conf"), "--cluster-node-timeout", "1000"),
            *("--cluster-announce-hostname", f"seqgate-valkey-{pod}.seqgate-valkey"),
            *("--cluster-port", str(bus), "--repl-diskless-sync-delay", "0"),
        ]
        servers.append(RedisServer(tmp_path / str(pod), port=port, options=options))
    programs = tmp_path / "programs"
    programs.mkdir()
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.kill)
            server.start()
        stack.enter_context(joining(programs, ports))
        until(lambda: shards(servers[1]) == [2, 2, 2], "a cluster of three pairs", within_s=60)
        servers[0].kill()
        until(lambda: role(servers[3]) == "master", "the partner takes over")
        for file in (tmp_path / "0").rglob("*"):
            if file.is_file():
                file.unlink()
        servers[0].start()
        until(lambda: role(servers[0]) == "slave", "the pod comes back")
        until(lambda: shards(servers[1]) == [2, 2, 2], "as its partner's replica")
        names = {f"seqgate-valkey-{pod}.seqgate-valkey" for pod in range(PODS)}
        until(lambda: hosts(servers[1]) == names, "every pod is known by its name")


def slots(server: RedisServer) -> list[list[list[str]]]:
    """The slots and their nodes, as a server sees them."""
    seen: list[list[list[str]]] = command(server, "CLUSTER", "SLOTS")
    return seen


def hosts(server: RedisServer) -> set[str]:
    """Where a server says its cluster's nodes are; `?` for a name that it was not told yet."""
    return {host for _, _, *nodes in slots(server) for host, *_ in nodes}


def shards(server: RedisServer) -> list[int]:
    """The number of nodes of each shard; empty unless all slots are served."""
    seen: list[list[int]] = command(server, "CLUSTER", "SLOTS")
    if sum(last - first + 1 for first, last, *_ in seen) < SLOTS:
        return []
    return [len(nodes) for _, _, *nodes in seen]


def role(server: RedisServer) -> str:
    return str(command(server, "ROLE")[0])
