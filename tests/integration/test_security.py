"""Authentication over real TLS: certificates, tokens, their renewal, and refusals.

The service is the filter service: it has no state, and a stream.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import jwt
import pytest
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from seqgate import watched
from seqgate.api.filter.v1 import filter_pb2 as pb
from seqgate.api.filter.v1 import filter_pb2_grpc
from seqgate.client._channel import Security, open_channel
from seqgate.dev.ports import free_ports
from seqgate.errors import AuthenticationError
from seqgate.services.filter.adapters.cel import CelEngine
from seqgate.services.filter.config import FilterConfig
from seqgate.services.filter.core.memo import Memo
from seqgate.services.filter.rights import RIGHTS
from seqgate.services.filter.service import Filters
from seqgate.services.filter.servicer import FilterServicer
from seqgate.services.ledger.config import LedgerConfig
from seqgate.services.runtime.channels import peer_channel
from seqgate.services.runtime.drain import Drain
from seqgate.services.runtime.server import grpc_server
from seqgate.tls import TLS, BearerToken
from tests.integration.refusals import refused
from tests.support.authority import Authority, Files, Issuer, replace
from tests.support.waiting import eventually

SERVICE = "spiffe://example/dispatcher"
USER = "spiffe://example/user"

ACCESS = f"""
[services]
dispatcher = ["uri:{SERVICE}"]

[[rules]]
principals = ["uri:{USER}", "dns:user.example", "cn:user", "sub:user"]
verbs = ["read"]
topics = ["a/b/c"]

[[rules]]
principals = ["uri:spiffe://example/operator"]
verbs = ["administer"]
topics = ["*/*/*"]
"""


@pytest.fixture(autouse=True)
def always_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are checked at every use, so that no test waits for the next check."""
    monkeypatch.setattr(watched.Watched.__init__, "__kwdefaults__", {"interval_s": 0.0})


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path / "keys.json")


@pytest.fixture
def access(tmp_path: Path) -> Path:
    file = tmp_path / "access.toml"
    replace(file, ACCESS.encode())
    return file


class Served:
    def __init__(self, port: int, authority: Authority) -> None:
        self.port = port
        self._authority = authority

    @asynccontextmanager
    async def stub(
        self,
        shown: Files | None = None,
        token: BearerToken | None = None,
        ca_file: Path | None = None,
        host: str = "localhost",
    ) -> AsyncIterator[Any]:
        """A stub that presents these credentials."""
        tls = TLS(
            ca_file or self._authority.file,
            None if shown is None else shown.certificate,
            None if shown is None else shown.key,
        )
        async with open_channel(f"{host}:{self.port}", Security(tls, token)) as channel:
            yield filter_pb2_grpc.FilterServiceStub(channel)


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[int]:
    config = FilterConfig(**{"listen": "127.0.0.1:0", **settings})
    drain = Drain()
    service = Filters(
        CelEngine(),
        Memo(10, 10_000),
        programs_max=10,
        program_bytes_max=1 << 20,
        chain_bytes_max=2**20,
    )

    def register(server: aio.Server) -> None:
        filter_pb2_grpc.add_FilterServiceServicer_to_server(FilterServicer(service, drain), server)

    async with grpc_server(
        config, drain, register=register, services=[], checks={}, rights=RIGHTS
    ) as port:
        yield port


def certified(authority: Authority) -> dict[str, Path]:
    files = authority.issue("server", hosts=["localhost", "127.0.0.1"])
    return {"tls_certificate_file": files.certificate, "tls_key_file": files.key}


def of_tokens(issuer: Issuer) -> dict[str, Any]:
    return {
        "jwt_keys_file": issuer.file,
        "jwt_audience": issuer.AUDIENCE,
        "jwt_issuer": issuer.NAME,
    }


@pytest.fixture
async def mutual(authority: Authority, access: Path) -> AsyncIterator[Served]:
    """Callers present certificates."""
    files = certified(authority)
    async with serving(
        **files, tls_client_ca_file=authority.file, access_file=access, reflection=True
    ) as port:
        yield Served(port, authority)


@pytest.fixture
async def tokens(authority: Authority, issuer: Issuer, access: Path) -> AsyncIterator[Served]:
    """Callers present tokens."""
    async with serving(**certified(authority), **of_tokens(issuer), access_file=access) as port:
        yield Served(port, authority)


async def ask(stub: Any) -> None:
    await stub.Compile(pb.CompileRequest(expression="true"), timeout=10, wait_for_ready=True)


async def unreachable(stub: Any) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await stub.Compile(pb.CompileRequest(expression="true"), timeout=5)
    assert caught.value.code() is StatusCode.UNAVAILABLE


def set_chain(request_id: int = 1) -> pb.EvaluateRequest:
    chain = pb.Chain(topic="a/b/c", filters=[pb.Filter(name="f", version=1, expression="true")])
    return pb.EvaluateRequest(request_id=request_id, set_chain=pb.SetChain(chain_id=0, chain=chain))


async def exchange(stream: Any, request_id: int) -> pb.EvaluateResponse:
    await stream.write(set_chain(request_id))
    response: pb.EvaluateResponse = await stream.read()
    assert response.request_id == request_id
    return response


# ---- certificates


@pytest.mark.parametrize(
    "names",
    [{"uris": [USER]}, {"hosts": ["other.example", "user.example"]}, {"cn": "user"}],
    ids=["uri", "dns", "cn"],
)
async def test_a_certificate_identifies_the_caller(
    mutual: Served, authority: Authority, names: dict[str, Any]
) -> None:
    async with mutual.stub(authority.issue("caller", **names)) as stub:
        await ask(stub)


@pytest.mark.parametrize(
    ("names", "principal"),
    [
        ({"uris": ["spiffe://example/nobody"], "cn": "user"}, "uri:spiffe://example/nobody"),
        ({"hosts": ["nobody.example"], "cn": "user"}, "dns:nobody.example"),
        ({"cn": USER}, f"cn:{USER}"),
        ({"cn": "uri:" + USER}, f"cn:uri:{USER}"),
    ],
    ids=["uri", "dns", "cn", "cn_like_uri"],
)
async def test_names_of_different_kinds_do_not_match(
    mutual: Served, authority: Authority, names: dict[str, Any], principal: str
) -> None:
    async with mutual.stub(authority.issue("caller", **names)) as stub:
        with refused(StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED") as details:
            await ask(stub)
    assert details["principal"] == principal


async def test_a_certificate_of_another_authority_is_rejected(
    mutual: Served, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path / "elsewhere")
    async with mutual.stub(stranger.issue("caller", uris=[USER])) as stub:
        await unreachable(stub)


async def test_an_expired_certificate_is_rejected(mutual: Served, authority: Authority) -> None:
    files = authority.issue("caller", uris=[USER], ends=timedelta(seconds=-1))
    async with mutual.stub(files) as stub:
        await unreachable(stub)


async def test_a_caller_without_a_required_certificate_is_rejected(
    mutual: Served,
) -> None:
    async with mutual.stub() as stub:
        await unreachable(stub)
    async with open_channel(f"127.0.0.1:{mutual.port}") as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await filter_pb2_grpc.FilterServiceStub(channel).Compile(
                pb.CompileRequest(expression="true"), timeout=5
            )
    assert caught.value.code() is StatusCode.UNAVAILABLE


async def test_a_client_rejects_an_untrusted_service(
    authority: Authority, access: Path, tmp_path: Path
) -> None:
    mine = authority.issue("caller", uris=[USER])
    stranger = Authority(tmp_path / "elsewhere")
    wrong = {
        "of another authority": stranger.issue("server", hosts=["localhost"]),
        "of another name": authority.issue("named", hosts=["elsewhere.example"]),
        "expired": authority.issue("old", hosts=["localhost"], ends=timedelta(seconds=-1)),
    }
    for files in wrong.values():
        async with (
            serving(
                tls_certificate_file=files.certificate,
                tls_key_file=files.key,
                tls_client_ca_file=authority.file,
                access_file=access,
            ) as port,
            Served(port, authority).stub(mine) as stub,
        ):
            await unreachable(stub)


async def test_a_service_renews_its_certificate_without_ending_streams(
    mutual: Served, authority: Authority
) -> None:
    mine = authority.issue("dispatcher", uris=[SERVICE])
    before = await shown_by(mutual.port, authority, mine)
    async with mutual.stub(mine) as stub:
        stream = stub.Evaluate()
        await exchange(stream, 1)
        certified(authority)  # replacing the old one

        assert await shown_by(mutual.port, authority, mine) != before
        assert (await exchange(stream, 2)).HasField("chain_set")
        await stream.done_writing()
    async with mutual.stub(mine) as stub:
        await ask(stub)


async def test_a_service_keeps_its_certificate_while_the_new_one_is_invalid(
    mutual: Served, authority: Authority, tmp_path: Path
) -> None:
    mine = authority.issue("caller", uris=[USER])
    before = await shown_by(mutual.port, authority, mine)
    key = (tmp_path / "server.key").read_bytes()
    for broken in (b"", b"no key", Authority(tmp_path / "x").issue("y").key.read_bytes()):
        replace(tmp_path / "server.key", broken)
        assert await shown_by(mutual.port, authority, mine) == before
    (tmp_path / "server.key").unlink()
    assert await shown_by(mutual.port, authority, mine) == before
    replace(tmp_path / "server.key", key)
    assert await shown_by(mutual.port, authority, mine) == before
    certified(authority)
    assert await shown_by(mutual.port, authority, mine) != before


async def test_a_service_replaces_its_trusted_authorities(
    mutual: Served, authority: Authority, tmp_path: Path
) -> None:
    new = Authority(tmp_path / "new")
    old_files = authority.issue("caller", uris=[USER])
    new_files = new.issue("caller", uris=[USER])
    old_ca = authority.file.read_bytes()
    (tmp_path / "old.pem").write_bytes(old_ca)
    replace(authority.file, new.file.read_bytes())

    async with mutual.stub(new_files, ca_file=tmp_path / "old.pem") as stub:
        await ask(stub)
    async with mutual.stub(old_files, ca_file=tmp_path / "old.pem") as stub:
        await unreachable(stub)


async def test_a_client_uses_a_renewed_certificate_for_the_next_call(
    mutual: Served, authority: Authority
) -> None:
    mine = authority.issue("renewed", uris=["spiffe://example/nobody"])
    async with mutual.stub(mine) as stub:
        with refused(StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"):
            await ask(stub)
        authority.issue("renewed", uris=[USER])
        await ask(stub)


async def test_a_stream_survives_the_renewal_of_its_clients_certificate(
    mutual: Served, authority: Authority
) -> None:
    mine = authority.issue("renewed", uris=[SERVICE])
    async with mutual.stub(mine) as stub:
        stream = stub.Evaluate()
        await exchange(stream, 1)
        authority.issue("renewed", uris=[USER])

        with refused(StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED") as details:
            other = stub.Evaluate()
            await exchange(other, 1)
        assert details["principal"] == f"uri:{USER}"
        assert (await exchange(stream, 2)).HasField("chain_set")
        await stream.done_writing()


async def test_a_client_keeps_its_certificate_while_the_new_one_is_invalid(
    mutual: Served, authority: Authority
) -> None:
    mine = authority.issue("renewed", uris=[USER])
    async with mutual.stub(mine) as stub:
        await ask(stub)
        replace(mine.key, b"half a ke")
        await ask(stub)


# ---- tokens


async def test_a_token_identifies_the_caller(
    tokens: Served, issuer: Issuer, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text(f"{issuer.token('user')}\n")
    for token in (issuer.token("user"), file, lambda: issuer.token("user")):
        async with tokens.stub(token=token) as stub:
            await ask(stub)
            await ask(stub)


async def test_a_token_file_is_reread_when_it_changes(
    tokens: Served, issuer: Issuer, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text(issuer.token("user", ends=timedelta(minutes=-5)))
    async with tokens.stub(token=file) as stub:
        with refused(StatusCode.UNAUTHENTICATED, "TOKEN_EXPIRED"):
            await ask(stub)
        replace(file, issuer.token("user").encode())
        await ask(stub)
        replace(file, b"not a token at all")  # the previous token remains in use
        await ask(stub)


def forged(issuer: Issuer, tmp_path: Path) -> str:
    return Issuer(tmp_path / "forger.json", issuer.key_id).token("user")


def unsigned(issuer: Issuer, tmp_path: Path) -> str:
    return jwt.encode({"sub": "user", "aud": issuer.AUDIENCE}, "", algorithm="none")


def altered(issuer: Issuer, tmp_path: Path) -> str:
    mine, others = issuer.token("nobody").split("."), issuer.token("user").split(".")
    return ".".join((mine[0], others[1], mine[2]))


def symmetric(issuer: Issuer, tmp_path: Path) -> str:
    """A token signed with the public key as if it were a symmetric secret."""

    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    claims = {"sub": "user", "aud": issuer.AUDIENCE, "iss": issuer.NAME, "exp": 2**40}
    said = f"{part({'alg': 'HS256', 'kid': issuer.key_id})}.{part(claims)}"
    signature = hmac.new(issuer.pem, said.encode(), hashlib.sha256).digest()
    return f"{said}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (None, "MISSING_CREDENTIALS"),
        (forged, "INVALID_TOKEN"),
        (unsigned, "INVALID_TOKEN"),
        (altered, "INVALID_TOKEN"),
        (symmetric, "INVALID_TOKEN"),
        (lambda *_: "rubbish", "INVALID_TOKEN"),
        (lambda issuer, _: issuer.token("user", ends=timedelta(minutes=-5)), "TOKEN_EXPIRED"),
        (lambda issuer, _: issuer.token("user", nbf=2**33), "TOKEN_NOT_YET_VALID"),
        (lambda issuer, _: issuer.token("user", aud="another"), "WRONG_AUDIENCE"),
        (lambda issuer, _: issuer.token("user", iss="https://another"), "WRONG_ISSUER"),
        (lambda issuer, _: issuer.token("user", exp=None), "INVALID_TOKEN"),
        (lambda issuer, _: issuer.token("user", aud=None), "INVALID_TOKEN"),
        (lambda issuer, _: issuer.token("user", iss=None), "INVALID_TOKEN"),
        (lambda issuer, _: issuer.token(None), "INVALID_TOKEN"),
        (lambda issuer, _: issuer.token(""), "INVALID_TOKEN"),
        (lambda issuer, _: issuer.token("two\nlines"), "INVALID_TOKEN"),
    ],
)
async def test_an_invalid_token_is_refused_with_a_specific_reason(
    tokens: Served,
    issuer: Issuer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make: Any,
    reason: str,
) -> None:
    token = None if make is None else make(issuer, tmp_path)
    async with tokens.stub(token=token) as stub:
        with refused(StatusCode.UNAUTHENTICATED, reason) as details:
            await ask(stub)
    assert details == {}
    said = "".join(capsys.readouterr())
    assert reason in said
    assert token is None or token not in said


async def test_malformed_authorization_metadata_is_refused(tokens: Served, issuer: Issuer) -> None:
    token = issuer.token("user")
    wrong = [
        [("authorization", "Basic dXNlcjp4")],
        [("authorization", "Bearer")],
        [("authorization", token)],
        [("authorization", f"Bearer {token}"), ("authorization", f"Bearer {token}")],
    ]
    async with tokens.stub() as stub:
        for metadata in wrong:
            with refused(StatusCode.UNAUTHENTICATED, "INVALID_TOKEN"):
                await stub.Compile(pb.CompileRequest(), metadata=metadata, timeout=5)
        await stub.Compile(
            pb.CompileRequest(), metadata=[("authorization", f"bearer {token}")], timeout=5
        )


async def test_rotated_keys_replace_the_old_ones(
    tokens: Served, issuer: Issuer, tmp_path: Path
) -> None:
    new = Issuer(tmp_path / "new.json", "k2")
    async with (
        tokens.stub(token=issuer.token("user")) as old_stub,
        tokens.stub(token=new.token("user")) as new_stub,
    ):
        await ask(old_stub)
        with refused(StatusCode.UNAUTHENTICATED, "INVALID_TOKEN"):
            await ask(new_stub)
        issuer.publish(new)
        await ask(old_stub)
        await ask(new_stub)
        replace(issuer.file, b"{broken")
        await ask(old_stub)
        replace(issuer.file, new.file.read_bytes())
        await ask(new_stub)
        with refused(StatusCode.UNAUTHENTICATED, "INVALID_TOKEN"):
            await ask(old_stub)


async def test_a_token_takes_precedence_over_a_certificate(
    authority: Authority, issuer: Issuer, access: Path
) -> None:
    async with serving(
        **certified(authority),
        **of_tokens(issuer),
        tls_client_ca_file=authority.file,
        access_file=access,
    ) as port:
        served = Served(port, authority)
        user = authority.issue("caller", uris=[USER])
        nobody = authority.issue("nobody", uris=["spiffe://example/nobody"])
        async with served.stub(user) as stub:
            await ask(stub)
        async with served.stub(nobody, issuer.token("user")) as stub:
            await ask(stub)
        async with served.stub(user, issuer.token("nobody")) as stub:
            with refused(StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"):
                await ask(stub)
        async with served.stub(user, "rubbish") as stub:
            with refused(StatusCode.UNAUTHENTICATED, "INVALID_TOKEN"):
                await ask(stub)


async def test_a_service_can_authenticate_to_peers_with_a_token(
    tokens: Served, authority: Authority, issuer: Issuer, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    replace(file, issuer.token("nobody").encode())
    config = LedgerConfig(peer_ca_file=authority.file, peer_token_file=file)
    target = f"localhost:{tokens.port}"
    async with peer_channel(target, keepalive_s=5, as_caller=config) as channel:
        stub: Any = filter_pb2_grpc.FilterServiceStub(channel)
        with refused(StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED") as details:
            await ask(stub)
        assert details["principal"] == "sub:nobody"
        replace(file, issuer.token("user").encode())
        await ask(stub)
    with pytest.raises(ValueError, match="without TLS"):
        async with peer_channel(
            "ledger.example:7702", keepalive_s=5, as_caller=LedgerConfig(peer_token_file=file)
        ):
            pass


async def test_a_token_is_not_sent_to_another_machine_unencrypted() -> None:
    with pytest.raises(ValueError, match="without TLS"):
        open_channel("ledger.example:7702", Security(token="t.t.t"))


async def test_a_token_is_accepted_on_loopback_without_tls(issuer: Issuer, access: Path) -> None:
    async with (
        serving(**of_tokens(issuer), access_file=access) as port,
        open_channel(f"127.0.0.1:{port}", Security(token=issuer.token("user"))) as known,
        open_channel(f"127.0.0.1:{port}") as unknown,
    ):
        await ask(filter_pb2_grpc.FilterServiceStub(known))
        with refused(StatusCode.UNAUTHENTICATED, "MISSING_CREDENTIALS"):
            await ask(filter_pb2_grpc.FilterServiceStub(unknown))


async def test_a_failing_token_function_fails_only_its_call(tokens: Served, issuer: Issuer) -> None:
    given: list[str] = []
    async with tokens.stub(token=lambda: given[0]) as stub:
        with pytest.raises(AuthenticationError, match="no valid bearer token"):
            await ask(stub)
        given.append(issuer.token("user"))
        await ask(stub)


# ---- rules


async def test_reread_rules_apply_to_open_streams(
    mutual: Served, authority: Authority, access: Path
) -> None:
    user = authority.issue("user", uris=[USER])
    async with mutual.stub(user) as stub:
        with refused(StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED") as details:
            await exchange(stub.Evaluate(), 1)
        assert details == {"principal": f"uri:{USER}", "verb": "keep", "topic": "a/b/c"}

        replace(access, ACCESS.replace('"read"', '"read", "keep"').encode())
        stream = stub.Evaluate()
        await exchange(stream, 1)
        replace(access, b"[[rules]]\nprincipals = 7\n")
        await exchange(stream, 2)  # the previous rules remain in force
        replace(access, ACCESS.encode())
        with refused(StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"):
            await exchange(stream, 3)


async def test_a_revoked_role_denies_the_next_request_of_an_open_stream(
    mutual: Served, authority: Authority, access: Path
) -> None:
    async with mutual.stub(authority.issue("dispatcher", uris=[SERVICE])) as stub:
        stream = stub.Evaluate()
        await exchange(stream, 1)
        replace(access, ACCESS.replace(SERVICE, "spiffe://example/another").encode())
        with refused(StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"):
            await exchange(stream, 2)


async def test_a_stream_whose_first_request_names_no_topic_is_denied(
    mutual: Served, authority: Authority, access: Path
) -> None:
    replace(access, ACCESS.replace('"read"', '"keep"').encode())
    async with mutual.stub(authority.issue("user", uris=[USER])) as stub:
        stream = stub.Evaluate()
        with refused(StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"):
            await stream.write(pb.EvaluateRequest(request_id=1, batch=pb.Batch(chain_id=0)))
            await stream.read()


async def test_a_service_that_allows_everyone_logs_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with serving() as port, open_channel(f"127.0.0.1:{port}") as channel:
        await ask(filter_pb2_grpc.FilterServiceStub(channel))
    assert "INSECURE" not in capsys.readouterr().out
    async with (
        serving(listen="0.0.0.0:0", allow_insecure=True) as port,
        open_channel(f"127.0.0.1:{port}") as channel,
    ):
        await ask(filter_pb2_grpc.FilterServiceStub(channel))
    assert "INSECURE: unauthenticated callers have full access" in capsys.readouterr().out


async def test_a_malformed_request_is_refused_before_authorization(
    mutual: Served, authority: Authority
) -> None:
    files = authority.issue("user", uris=[USER])
    security = Security(TLS(authority.file, files.certificate, files.key))
    async with open_channel(f"localhost:{mutual.port}", security) as channel:
        call: Any = channel.stream_stream("/seqgate.api.filter.v1.FilterService/Evaluate")
        stream = call()
        with refused(StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST"):
            await stream.write(b"\xff\xff")
            await stream.read()


async def test_health_needs_no_rights_beyond_the_handshake(
    tokens: Served, authority: Authority
) -> None:
    security = Security(TLS(authority.file))
    async with open_channel(f"localhost:{tokens.port}", security) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=5)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_plaintext_probes_have_a_port_of_their_own(
    authority: Authority, access: Path
) -> None:
    (port,) = free_ports(1)
    async with (
        serving(
            **certified(authority),
            tls_client_ca_file=authority.file,
            access_file=access,
            health_listen=f"127.0.0.1:{port}",
        ),
        open_channel(f"127.0.0.1:{port}") as channel,
    ):
        health: Any = health_pb2_grpc.HealthStub(channel)

        async def serves() -> bool:
            reply = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

        await eventually(serves)
        with pytest.raises(aio.AioRpcError) as caught:
            await filter_pb2_grpc.FilterServiceStub(channel).Compile(pb.CompileRequest(), timeout=5)
        assert caught.value.code() is StatusCode.UNIMPLEMENTED


async def test_reflection_requires_the_right_to_administer(
    mutual: Served, authority: Authority
) -> None:
    async def names(uri: str) -> Any:
        files = authority.issue("reflecting", uris=[uri])
        security = Security(TLS(authority.file, files.certificate, files.key))
        async with open_channel(f"localhost:{mutual.port}", security) as channel:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
            call = stub.ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            return await call.read()

    assert (await names("spiffe://example/operator")).HasField("list_services_response")
    with refused(StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"):
        await names(USER)


async def shown_by(port: int, authority: Authority, mine: Files) -> bytes:
    """The certificate that a service presents now."""
    context = ssl.create_default_context(cafile=str(authority.file))
    context.load_cert_chain(mine.certificate, mine.key)
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("localhost", port, ssl=context, family=2)
    try:
        shown: Any = writer.get_extra_info("ssl_object")
        return bytes(shown.getpeercert(binary_form=True))
    finally:
        writer.close()
