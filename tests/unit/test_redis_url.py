"""Addresses of Redis, as URLs."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from seqgate.services.dedup.config import DedupConfig
from seqgate.services.dedup.redis_url import Node, RedisUrl, Served, parse_redis_url

TLS = {"ssl": True}


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("redis://here", RedisUrl(Served.SERVER, (Node("here", 6379),))),
        ("redis://here:1/2", RedisUrl(Served.SERVER, (Node("here", 1),), database=2)),
        ("redis://[::1]:7/", RedisUrl(Served.SERVER, (Node("::1", 7),))),
        (
            "rediss://me:s%40id%2F@here?ssl_ca_certs=/a%20b&ssl_check_hostname=false",
            RedisUrl(
                Served.SERVER,
                (Node("here", 6379),),
                options={
                    "username": "me",
                    "password": "s@id/",
                    "ssl_ca_certs": "/a b",
                    "ssl_check_hostname": False,
                    **TLS,
                },
            ),
        ),
        (
            "redis://:word@here",
            RedisUrl(Served.SERVER, (Node("here", 6379),), options={"password": "word"}),
        ),
        ("unix:///run/redis.sock", RedisUrl(Served.SOCKET, path="/run/redis.sock")),
        (
            "unix://:word@/a?db=3",
            RedisUrl(Served.SOCKET, path="/a", database=3, options={"password": "word"}),
        ),
        (
            "redis+sentinel://one,two:5/master/4",
            RedisUrl(
                Served.SENTINEL, (Node("one", 26379), Node("two", 5)), master="master", database=4
            ),
        ),
        (
            "rediss+sentinel://u:p@one/m?sentinel_username=s&sentinel_password=q&ssl_keyfile=/k",
            RedisUrl(
                Served.SENTINEL,
                (Node("one", 26379),),
                master="m",
                options={"username": "u", "password": "p", "ssl_keyfile": "/k", **TLS},
                sentinel={"username": "s", "password": "q", "ssl_keyfile": "/k", **TLS},
            ),
        ),
        (
            "redis+cluster://one:1,two",
            RedisUrl(Served.CLUSTER, (Node("one", 1), Node("two", 6379))),
        ),
        ("rediss+cluster://one/0", RedisUrl(Served.CLUSTER, (Node("one", 6379),), options=TLS)),
    ],
)
def test_valid_urls_are_parsed(text: str, meant: RedisUrl) -> None:
    assert parse_redis_url(text) == meant


@pytest.mark.parametrize(
    "text",
    [
        "",
        "here:6379",
        "http://here",
        "redis+sentinels://here/m",
        "redis://",
        "redis://here:0",
        "redis://here:65536",
        "redis://here:port",
        "redis://here:6379:1",
        "redis://one,two",
        "redis://here/one",
        "redis://here/0/1",
        "redis://here/-1",
        "redis://he re",
        "redis://here?socket_timeout=3",
        "redis://here?ssl_ca_certs=/a",
        "redis://here?db=1",
        "rediss://here?ssl_cert_reqs=perhaps",
        "rediss://here?ssl_check_hostname=maybe",
        "rediss://here?ssl_keyfile=/a&ssl_keyfile=/b",
        "rediss://here?sentinel_password=p",
        "redis+sentinel://here",
        "redis+sentinel://here/",
        "redis+sentinel://one,,two/m",
        "redis+sentinel://here/m/n",
        "redis+cluster://",
        "redis+cluster://one,",
        "redis+cluster://one/1",
        "unix://",
        "unix://host/path",
        "unix:///path?db=a",
        "redis+sentinel://me:secret@word@here/m",
    ],
)
def test_an_invalid_url_is_refused_without_quoting_it(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    with pytest.raises(ValueError):
        parse_redis_url(text)
    monkeypatch.setenv("SEQGATE_DEDUP_REDIS_URL", text.replace("://", "://me:secret@", 1))
    with pytest.raises(ValueError, match="redis_url") as refused:
        DedupConfig()
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:word@localhost",
        "redis+sentinel://localhost/name?sentinel_password=word",
    ],
)
def test_a_password_is_in_the_url_or_in_a_file(url: str, tmp_path: Path) -> None:
    assert DedupConfig(redis_url=url).redis_password_file is None
    with pytest.raises(ValidationError, match="both name a password"):
        DedupConfig(redis_url=url, redis_password_file=tmp_path)
    DedupConfig(redis_url="redis://me@localhost", redis_password_file=tmp_path)
