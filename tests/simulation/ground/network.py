"""A network of connections between simulated processes.

    network = Network(loop)
    network.link("client", "ledger-0").delay = uniform(0.1, 0.3)     # one direction
    network.cut("ledger-0", "dedup-0")                               # both directions, until `heal`
    network.reset("client", "ledger-0")                              # break open connections
    network.half_open("client", "ledger-0")                          # the same, without a reset

Links join names of processes, so they survive a process's restart. A connection stands for HTTP/2
over TCP: every frame arrives once and, within a stream, in order; frames of different streams
arrive in the order of their delays. TCP retransmits lost packets, so the unit of loss is the
connection. Frames sent across a cut wait, as retransmission would have it, until the cut heals or
an end's keepalive closes the connection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any, Final, Protocol

from tests.simulation.ground.process import Process

if TYPE_CHECKING:
    from tests.simulation.ground.loop import Handle, VirtualLoop

Delay = Callable[[Random], float]
"""Draws a duration, in seconds."""

TCP_GIVES_UP_S: Final = 900.0
"""The longest that an end without an answer keeps a connection open, with or without keepalive."""

REPEATED_S: Final = 0.4
"""The longest delay between the healing of a cut and TCP's retransmission of waiting frames."""

LOCAL: Final = frozenset({"", "localhost", "127.0.0.1", "0.0.0.0", "[::]", "[::1]"})
"""Hosts that mean the process's own."""


def uniform(least_s: float, most_s: float) -> Delay:
    """Uniform between two bounds, in seconds."""
    span_s = most_s - least_s
    return lambda random: least_s + span_s * random.random()


def with_tail(usual: Delay, *, seldom: float, most_s: float) -> Delay:
    """The usual delay or, with probability `seldom`, uniform up to `most_s`."""

    def delay(random: Random) -> float:
        if random.random() < seldom:
            return random.random() * most_s
        return usual(random)

    return delay


@dataclass(slots=True)
class Link:
    """One direction between two processes. Changes apply to frames sent afterwards.

    Attributes:
        delay: of each frame.
        loss: the probability that a frame breaks its connection.
        silent: the probability that such a break leaves the connection half-open: neither end
            gets a reset.
        duplicates: the probability that a unary request arrives twice, as proxies may repeat it.
        repeated: the delay of the second copy.
        lost_replies: the probability that the reply to a unary call breaks its connection: the
            server has acted, and the client gets UNAVAILABLE.
        bytes_per_s: the bandwidth; None for unlimited.
        is_cut: nothing passes (Network.cut).
    """

    delay: Delay = field(default=uniform(0.000_1, 0.001))
    loss: float = 0.0
    silent: float = 0.0
    duplicates: float = 0.0
    repeated: Delay = field(default=uniform(0.0, 1.0))
    lost_replies: float = 0.0
    bytes_per_s: float | None = None
    is_cut: bool = False
    free_at: float = 0.0  # when the frames being sent have left


class Listener(Protocol):
    """A server as seen by connections. Called in the server's process."""

    @property
    def process(self) -> Process: ...

    @property
    def options(self) -> Mapping[str, Any]: ...

    def accept(self, connection: Connection) -> bool:
        """Accept a new connection; False refuses it."""

    def closed(self, connection: Connection) -> None:
        """A connection closed."""


class Ordered:
    """A sequence whose frames arrive in the order sent."""

    __slots__ = ("last_at",)

    def __init__(self) -> None:
        self.last_at = 0.0


class End:
    """One end of a connection."""

    __slots__ = ("closed", "doom", "is_open", "keepalive", "process")

    def __init__(self, process: Process, options: Mapping[str, Any], *, time_s: float) -> None:
        self.process = process
        self.is_open = True
        self.closed: Callable[[Connection, str], object] = _nobody
        self.doom: Handle | None = None
        given = options.get("grpc.keepalive_time_ms")
        time_s = time_s if given is None else given / 1000
        timeout_s = options.get("grpc.keepalive_timeout_ms", 20_000) / 1000
        # Unless ping_timeout_ms is set, a ping may take 60 s, whatever the keepalive's time-out.
        ping_s = options.get("grpc.http2.ping_timeout_ms", 60_000) / 1000
        self.keepalive = (time_s, max(timeout_s, ping_s))


def _nobody(connection: Connection, reason: str) -> None:
    """The `closed` callback of an end that has none yet."""


CLIENT: Final = 0
SERVER: Final = 1


class Connection:
    """One connection. Direction 0 leads from client to server, direction 1 back."""

    __slots__ = (
        "address",
        "ends",
        "held",
        "is_broken",
        "is_going_away",
        "is_silent",
        "last_at",
        "links",
        "network",
        "number",
        "port",
        "server",
        "streams",
        "unsaid",
    )

    def __init__(
        self,
        network: Network,
        number: int,
        address: str,
        client: End,
        server: End,
        listener: Listener,
    ) -> None:
        self.network = network
        self.number = number
        self.address = address
        self.port = 32_768 + number % 28_000  # the client's
        self.ends = (client, server)
        self.server = listener
        names = client.process.name, server.process.name
        self.links = network.link(*names), network.link(*reversed(names))
        self.held: tuple[list[Any], list[Any]] = ([], [])
        self.unsaid: list[str | None] = [None, None]
        self.last_at = [0.0, 0.0]  # when the last frame of each direction arrives
        self.is_broken = False
        self.is_silent = False
        self.is_going_away = False
        self.streams: dict[Any, None] = {}

    def __repr__(self) -> str:
        client, server = self.ends
        return f"<Connection {self.number} {client.process.name} → {server.process.name}>"

    # ---- frames

    def transmit(
        self, way: int, order: Ordered, size: int, receive: Callable[..., object], *args: Any
    ) -> None:
        """Send a frame. If it arrives, `receive(*args)` runs in the process at the other end."""
        if not self.ends[way].is_open or self.is_broken:
            return
        link, network = self.links[way], self.network
        if link.loss and network.random.random() < link.loss:
            network.counts["lost"] += 1
            self.break_(silent=network.random.random() < link.silent)
        elif link.is_cut:
            self.held[way].append((order, size, receive, args))
        else:
            self._send(way, order, size, receive, args, 0.0)

    def _send(
        self,
        way: int,
        order: Ordered,
        size: int,
        receive: Callable[..., object],
        args: tuple[Any, ...],
        more_s: float,
    ) -> None:
        link, loop = self.links[way], self.network.loop
        at = loop.now + link.delay(self.network.random) + more_s
        if link.bytes_per_s is not None:
            link.free_at = max(link.free_at, loop.now) + size / link.bytes_per_s
            at += link.free_at - loop.now
        order.last_at = at = max(at, order.last_at)
        self.last_at[way] = max(at, self.last_at[way])
        loop.schedule(at, self.ends[1 - way].process, self._arrive, way, receive, args)

    def _arrive(self, way: int, receive: Callable[..., object], args: tuple[Any, ...]) -> None:
        end = self.ends[1 - way]
        if end.is_open and not self.is_silent:
            self.network.counts["frames"] += 1
            loop = self.network.loop
            loop.trace(self.number, way, receive.__name__)
            receive(*args)

    # ---- ends

    def close(
        self, side: int, reason: str = "Connection reset by peer", *, in_order: bool = False
    ) -> None:
        """Close one end. The other end learns of it after one delay or, if `in_order`, after every
        frame sent before."""
        end = self.ends[side]
        if not end.is_open:
            return
        end.is_open = False
        if end.doom is not None:
            end.doom.cancel()
            end.doom = None
        if self.held[side] and not in_order and self.network.random.random() < 0.5:
            self.held[side].clear()  # otherwise TCP keeps sending it
        self.network.forget(self, end.process)
        if not self.is_silent and self.ends[1 - side].is_open:
            self._say_closed(side, reason, self.last_at[side] if in_order else 0.0)

    def _say_closed(self, side: int, reason: str, not_before: float) -> None:
        link = self.links[side]
        if link.is_cut:
            self.unsaid[side] = reason
            return
        at = max(self.network.loop.now, not_before) + link.delay(self.network.random)
        self.network.loop.schedule(
            at, self.ends[1 - side].process, self._hear_closed, 1 - side, reason
        )

    def _hear_closed(self, side: int, reason: str) -> None:
        """One end learns that the connection is closed."""
        end = self.ends[side]
        if end.is_open:
            self.network.loop.trace(self.number, "closed", side, reason)
            self.close(side)
            end.closed(self, reason)

    def break_(self, *, silent: bool = False) -> None:
        """Break the connection; if `silent`, neither end learns of it. Frames sent from now on are
        lost: TCP delivers no byte after a missing one."""
        self.is_broken = True
        if silent:
            self.network.counts["half-open"] += 1
            self.is_silent = True
            self.look()
            return
        self.network.counts["resets"] += 1
        for side in (CLIENT, SERVER):
            at = self.network.loop.now + self.links[1 - side].delay(self.network.random)
            self.network.loop.schedule(
                at, self.ends[side].process, self._hear_closed, side, "Connection reset by peer"
            )

    # ---- faults

    def healed(self, way: int) -> None:
        """Send the frames that waited for a cut to heal."""
        held, self.held[way][:] = list(self.held[way]), []
        if held and not self.is_silent:
            more_s = self.network.random.random() * REPEATED_S
            for order, size, receive, args in held:
                self._send(way, order, size, receive, args, more_s)
        reason, self.unsaid[way] = self.unsaid[way], None
        if reason is not None and not self.is_silent:
            self._say_closed(way, reason, self.last_at[way])

    def look(self) -> None:
        """Start or cancel each end's time-out, after a change in whether its pings are
        answered."""
        is_cut = self.is_silent or self.links[0].is_cut or self.links[1].is_cut
        for side in (CLIENT, SERVER):
            end, other = self.ends[side], self.ends[1 - side]
            if not end.is_open:
                continue
            if not (is_cut or other.process.gate is not None):
                if end.doom is not None:
                    end.doom.cancel()
                    end.doom = None
            elif end.doom is None:
                time_s, timeout_s = end.keepalive
                rest_s = time_s * self.network.random.random() + timeout_s
                at = self.network.loop.now + min(rest_s, TCP_GIVES_UP_S)
                end.doom = self.network.loop.schedule(at, end.process, self._give_up, side)

    def _give_up(self, side: int) -> None:
        self.ends[side].doom = None
        if self.ends[side].is_open:
            self.network.counts["given up"] += 1
            self._hear_closed(side, "keepalive watchdog timeout")


class Network:
    """All links and connections of a simulation.

    Attributes:
        default: the initial state of every link; change it before processes connect.
        window_bytes: HTTP/2's flow-control window: bytes of a stream in transit or unread.
        write_buffer_bytes: bytes that a writer may buffer beyond the window.
        counts: events: frames, resets, half-open, given up, lost, duplicates, lost replies.
    """

    def __init__(self, loop: VirtualLoop, random: Random | None = None) -> None:
        self.loop: Final = loop
        self.random: Final = random or Random(f"network of {loop.seed}")
        self.default = Link()
        self.window_bytes = 4 * 1024 * 1024
        self.write_buffer_bytes = 0
        self.counts: Counter[str] = Counter()
        self._links: dict[tuple[str, str], Link] = {}
        self._vanished: dict[str, None] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._listeners: dict[str, Listener] = {}
        self._ports: Counter[str] = Counter()
        self._connections: dict[Process, dict[Connection, None]] = {}
        self._dials: dict[_Dial, None] = {}
        self._number = 0
        self._addresses: dict[str, str] = {}

    # ---- the interface to tests

    def link(self, sender: str | Process, receiver: str | Process) -> Link:
        """The link from one process to another."""
        way = _name(sender), _name(receiver)
        link = self._links.get(way)
        if link is None:
            link = self._links[way] = replace(self.default, free_at=0.0)
        return link

    def each_link(self) -> Iterable[tuple[tuple[str, str], Link]]:
        """Every link, with the names of its ends."""
        return list(self._links.items())

    def name(self, name: str, addresses: Sequence[str]) -> None:
        """Define what dns:///`name` resolves to from now on; `name` is host:port, or a host for
        any port. Undefined names resolve to themselves."""
        self._names[name] = tuple(addresses)

    def cut(self, one: str | Process, other: str | Process, *, both_ways: bool = True) -> None:
        """Block all traffic from one to the other, and back, until `heal`."""
        self.link(one, other).is_cut = True
        if both_ways:
            self.link(other, one).is_cut = True
        self._look(one, other)

    def partition(self, some: Iterable[str | Process], others: Iterable[str | Process]) -> None:
        """Cut every link between the two groups."""
        others = list(others)
        for one in some:
            for other in others:
                self.cut(one, other)

    def heal(self, one: str | Process, other: str | Process) -> None:
        """Restore both directions."""
        for sender, receiver in ((one, other), (other, one)):
            link = self.link(sender, receiver)
            if link.is_cut:
                link.is_cut = False
                for connection in self._between(one, other):
                    way = int(connection.links[SERVER] is link)
                    connection.healed(way)
        self._look(one, other)
        for dial in list(self._dials):
            dial.again()

    def heal_all(self) -> None:
        """Heal every cut."""
        for (sender, receiver), link in list(self._links.items()):
            if link.is_cut:
                self.heal(sender, receiver)

    def reset(self, one: str | Process, other: str | Process) -> None:
        """Break the connections between two processes; both ends get a reset."""
        for connection in self._between(one, other):
            connection.break_()

    def half_open(self, one: str | Process, other: str | Process) -> None:
        """Break the connections between two processes without a reset: calls hang until their
        deadlines, or until keepalive closes the connection. New connections work."""
        for connection in self._between(one, other):
            connection.break_(silent=True)

    def vanish(self, process: Process) -> None:
        """Cut a process's power: it dies, its connections send no reset, and attempts to connect
        get no answer until a process of its name listens again."""
        for connection in list(self._connections.get(process, ())):
            connection.break_(silent=True)
        self._vanished[process.name] = None
        process.kill()

    def connections(self) -> list[Connection]:
        """Connections with at least one open end."""
        return list(dict.fromkeys(each for of in self._connections.values() for each in of))

    # ---- the interface to channels and servers

    def resolve(self, process: Process, target: str) -> tuple[str, ...]:
        """Resolve a target: host:port, dns:///host:port, or ipv4:one,two."""
        for scheme in ("dns:///", "dns:", "ipv4:", "ipv6:", "passthrough:///"):
            if target.startswith(scheme):
                target = target.removeprefix(scheme)
                break
        found: list[str] = []
        for each in target.split(","):
            host, _, port = each.rpartition(":")
            if each in self._names:
                found += self._names[each]
            elif host in self._names:
                found += (f"{address}:{port}" for address in self._names[host])
            elif host in LOCAL:
                found.append(f"{process.host}:{port}")
            else:
                found.append(each)
        return tuple(found)

    def listen(self, address: str, listener: Listener) -> int:
        """Accept connections. Returns the port, or 0 if it is taken.

        Args:
            address: host:port; port 0 picks a free one.
        """
        host, _, named = address.rpartition(":")
        host = listener.process.host if host in LOCAL else host
        port = int(named)
        if not port:
            self._ports[host] += 1
            port = 20_000 + self._ports[host]
        if f"{host}:{port}" in self._listeners:
            return 0
        self._listeners[f"{host}:{port}"] = listener
        self._vanished.pop(listener.process.name, None)
        self._watch(listener.process)
        return port

    def deafen(self, listener: Listener) -> None:
        """Stop accepting connections."""
        for address, each in list(self._listeners.items()):
            if each is listener:
                del self._listeners[address]

    def listener(self, address: str) -> Listener | None:
        """The server at an address."""
        return self._listeners.get(address)

    def dial(
        self,
        process: Process,
        address: str,
        options: Mapping[str, Any],
        timeout_s: float,
        made: Callable[[Connection], object],
        failed: Callable[[str], object],
    ) -> _Dial:
        """Connect. Calls `made` or `failed`, in the process."""
        self._watch(process)
        dial = _Dial(self, process, address, options, timeout_s, made, failed)
        dial.again()
        return dial

    def ip(self, host: str) -> str:
        """A host's IP address."""
        if host not in self._addresses:
            count = len(self._addresses) + 1
            self._addresses[host] = f"10.0.{count // 250}.{count % 250 + 1}"
        return self._addresses[host]

    # ---- internals

    def _watch(self, process: Process) -> None:
        if process in self._connections:
            return
        self._connections[process] = {}
        process.at_end.append(lambda: self._process_ended(process))
        process.at_pause.append(lambda _: self._process_paused(process))

    def _process_ended(self, process: Process) -> None:
        for address, listener in list(self._listeners.items()):
            if listener.process is process:
                del self._listeners[address]
        for connection in list(self._connections.pop(process, ())):
            for side in (CLIENT, SERVER):
                if connection.ends[side].process is process:
                    connection.close(side)

    def _process_paused(self, process: Process) -> None:
        for connection in list(self._connections.get(process, ())):
            connection.look()

    def connected(self, address: str, client: End, server: End, listener: Listener) -> Connection:
        """Register a new connection."""
        self._number += 1
        connection = Connection(self, self._number, address, client, server, listener)
        for end in (client, server):
            self._connections.setdefault(end.process, {})[connection] = None
        return connection

    def forget(self, connection: Connection, process: Process) -> None:
        """Remove a connection from a process, after its end closed."""
        of = self._connections.get(process)
        if of is not None:
            of.pop(connection, None)

    def _between(self, one: str | Process, other: str | Process) -> list[Connection]:
        names = {_name(one), _name(other)}
        return [
            connection
            for connection in self.connections()
            if {end.process.name for end in connection.ends} == names
        ]

    def _look(self, one: str | Process, other: str | Process) -> None:
        for connection in self._between(one, other):
            connection.look()


class _Dial:
    """An attempt to connect: one delay to the server, one back."""

    __slots__ = (
        "_address",
        "_failed",
        "_is_over",
        "_made",
        "_network",
        "_options",
        "_process",
        "_timer",
        "_under_way",
    )

    def __init__(
        self,
        network: Network,
        process: Process,
        address: str,
        options: Mapping[str, Any],
        timeout_s: float,
        made: Callable[[Connection], object],
        failed: Callable[[str], object],
    ) -> None:
        self._network = network
        self._process = process
        self._address = address
        self._options = options
        self._made = made
        self._failed = failed
        self._is_over = False
        self._under_way = False
        network._dials[self] = None
        self._timer = network.loop.schedule(
            network.loop.now + timeout_s, process, self._fail, "connection attempt timed out"
        )

    def cancel(self) -> None:
        """Abandon the attempt."""
        self._is_over = True
        self._timer.cancel()
        self._network._dials.pop(self, None)

    def again(self) -> None:
        """Try, unless an attempt is in progress."""
        if self._is_over or self._under_way:
            return
        if not self._process.is_alive:
            self.cancel()
            return
        network = self._network
        listener = network.listener(self._address)
        peer = listener.process.name if listener else self._address.rpartition(":")[0]
        there, back = network.link(self._process, peer), network.link(peer, self._process)
        if there.is_cut or back.is_cut or (listener is None and peer in network._vanished):
            return  # until the cut heals or the timer fires
        self._under_way = True
        at = network.loop.now + there.delay(network.random)
        if listener is None:
            at += back.delay(network.random)
            network.loop.schedule(at, self._process, self._fail, "Connection refused")
        else:
            network.loop.schedule(at, listener.process, self._accept, listener)
            listener.process.at_end.append(self._refused)

    def _refused(self) -> None:
        """The server died before it accepted."""
        if not self._is_over:
            network = self._network
            at = network.loop.now + network.default.delay(network.random)
            network.loop.schedule(at, self._process, self._fail, "Connection refused")

    def _accept(self, listener: Listener) -> None:
        """Runs in the server's process."""
        listener.process.at_end.remove(self._refused)
        network = self._network
        back = network.link(listener.process, self._process)
        if self._is_over or not self._process.is_alive:
            return
        if back.is_cut:
            self._under_way = False
            return
        at = network.loop.now + back.delay(network.random)
        if network.listener(self._address) is not listener:
            network.loop.schedule(at, self._process, self._fail, "Connection refused")
            return
        connection = network.connected(
            self._address,
            End(self._process, self._options, time_s=float("inf")),
            End(listener.process, listener.options, time_s=7200.0),
            listener,
        )
        connection.ends[SERVER].closed = lambda connection, _: listener.closed(connection)
        if not listener.accept(connection):
            connection.close(SERVER)
            network.loop.schedule(at, self._process, self._fail, "Connection refused")
            return
        network.loop.schedule(at, self._process, self._answered, connection)

    def _answered(self, connection: Connection) -> None:
        """Runs in the client's process."""
        if self._is_over:
            connection.close(CLIENT)
            return
        self.cancel()
        if connection.ends[SERVER].is_open:
            connection.network.loop.trace(connection.number, "connected", self._address)
            self._made(connection)
        else:
            connection.close(CLIENT)
            self._failed("Connection reset by peer")

    def _fail(self, reason: str) -> None:
        if not self._is_over:
            self.cancel()
            self._failed(reason)


def _name(of: str | Process) -> str:
    return of.name if isinstance(of, Process) else of
