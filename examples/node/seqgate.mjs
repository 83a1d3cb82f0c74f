// What the examples share: the protos, connections, errors with their reason, arguments and input.

import { fileURLToPath } from 'node:url';
import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';

import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';

const folder = (path) => fileURLToPath(new URL(path, import.meta.url));

// `longs: String`: a sequence id may be above 2^53, where numbers of JavaScript have gaps. As text it
// comes and goes undamaged; to count with it, make a BigInt of it.
const definitions = protoLoader.loadSync(
  [
    ...['dispatcher', 'entry', 'ledger'].map((name) => `seqgate/api/${name}/v1/${name}.proto`),
    'seqgate/api/internal/dedup/v1/writer.proto',
    'google/rpc/error_details.proto',
  ],
  {
    includeDirs: [folder('../../protos')],
    longs: String,
    enums: String,
    defaults: true,
    oneofs: true, // response.response is the name of the one field that is set
  },
);
const api = grpc.loadPackageDefinition(definitions).seqgate.api;

const MESSAGE_BYTES_MAX = 64 * 1024 * 1024;
const CALL_TIMEOUT_MS = 10_000;
const FIRST_CONNECTION_MS = 10_000;
const OPTIONS = {
  'grpc.initial_reconnect_backoff_ms': 50,
  'grpc.max_reconnect_backoff_ms': 1_000,
  'grpc.keepalive_time_ms': 10_000,
  'grpc.keepalive_timeout_ms': 5_000,
  'grpc.max_receive_message_length': MESSAGE_BYTES_MAX,
};

/** A client for DedupWriterService, LedgerService or DispatcherService at an address, host:port. (With
 * TLS: grpc.credentials.createSsl in place of createInsecure.) */
export function connect(service, address) {
  const versions = {
    DedupWriterService: api.internal.dedup,
    LedgerService: api.ledger,
    DispatcherService: api.dispatcher,
  };
  return new versions[service].v1[service](address, grpc.credentials.createInsecure(), OPTIONS);
}

/** Wait until a server accepts a connection. Throws a Failure. */
async function reached(address) {
  const client = new grpc.Client(address, grpc.credentials.createInsecure(), OPTIONS);
  const error = await new Promise((resolve) => client.waitForReady(Date.now() + FIRST_CONNECTION_MS, resolve));
  client.close();
  if (error) throw new Failure(`no service at ${address} within ${FIRST_CONNECTION_MS / 1_000} s`);
}

/** The answer of a unary call. Throws a SeqgateError. */
export function ask(client, method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, { deadline: Date.now() + CALL_TIMEOUT_MS }, (error, answer) => {
      if (error) reject(errorOfCall(error));
      else resolve(answer);
    });
  });
}

/** The same, and again for as long as the service is away. Only for what is safe to repeat. */
export async function askUntilAnswered(client, method, request) {
  for (let attempt = 0; ; attempt++) {
    try {
      return await ask(client, method, request);
    } catch (error) {
      if (!error.isAway) throw error;
      await pause(attempt, error);
    }
  }
}

/** Wait before another attempt: longer each time, a part of it by chance, and as long as the service
 * asks for. */
export async function pause(attempt, error) {
  const backoffMs = Math.min(50 * 2 ** attempt, 2_000) * (0.5 + Math.random() / 2);
  await sleep(Math.max(backoffMs, error.retryAfterMs));
}

// ---- errors

const STATUS = definitions['google.rpc.Status'];
const ERROR_INFO = definitions['google.rpc.ErrorInfo'];
const RETRY_INFO = definitions['google.rpc.RetryInfo'];

const AWAY = [grpc.status.UNAVAILABLE, grpc.status.DEADLINE_EXCEEDED, grpc.status.CANCELLED];

/** What a service refused, and why. */
export class SeqgateError extends Error {
  /** @param status a google.rpc.Status: that of a call, or one inside a stream's message. */
  constructor(status) {
    let reason = '', details = {}, retryAfterMs = 0;
    for (const { type_url: type, value } of status.details) {
      if (type.endsWith('/google.rpc.ErrorInfo')) {
        ({ reason, metadata: details } = ERROR_INFO.deserialize(value));
      } else if (type.endsWith('/google.rpc.RetryInfo')) {
        const { seconds, nanos } = RETRY_INFO.deserialize(value).retryDelay;
        retryAfterMs = Number(seconds) * 1_000 + nanos / 1e6;
      }
    }
    super(`${reason || grpc.status[status.code]}: ${status.message}`);
    this.code = status.code;
    /** For programs; '' when the error is gRPC's own. */
    this.reason = reason;
    /** Fields that belong to the reason. */
    this.details = details;
    this.retryAfterMs = retryAfterMs;
  }

  /** Whether the same request may be answered later. */
  get isAway() {
    return AWAY.includes(this.code);
  }

  /** The address of the instance that has what was asked for; '' when this is another error. */
  get owner() {
    return this.reason === 'NOT_OWNER' ? this.details.owner ?? '' : '';
  }
}

/** How a call ended, as a SeqgateError: the details are in a trailer of the call. */
export function errorOfCall(error) {
  const [trailer] = error.metadata?.get('grpc-status-details-bin') ?? [];
  if (trailer) return new SeqgateError(STATUS.deserialize(trailer));
  if (typeof error.code !== 'number') return error; // ours, not an answer
  return new SeqgateError({ code: error.code, message: error.details, details: [] });
}

/** What a person has to correct, in one sentence. */
export class Failure extends Error {}

// ---- entries

/** A seqgate.api.ledger.v1.Entry from and to bytes. */
export const Entry = definitions['seqgate.api.ledger.v1.Entry'];

const SingleMessageMetadata = definitions['seqgate.api.entry.v1.SingleMessageMetadata'];

/** The messages of a batch, as {metadata, payload}: see entry.proto. */
export function readBatch(bytes) {
  const messages = [];
  for (let at = 0; at < bytes.length; ) {
    const start = at + 4 + bytes.readUInt32BE(at);
    const metadata = SingleMessageMetadata.deserialize(bytes.subarray(at + 4, start));
    at = start + metadata.payloadSize;
    messages.push({ metadata, payload: bytes.subarray(start, at) });
  }
  return messages;
}

/** A time in milliseconds since 1970 as a google.protobuf.Timestamp. */
export const timestamp = (ms) => ({ seconds: String(Math.floor(ms / 1_000)), nanos: (ms % 1_000) * 1e6 });

/** A position as text. */
export const textOf = ({ ledgerId, entryId }) => `${ledgerId}:${entryId}`;

const CRC32C = Uint32Array.from({ length: 256 }, (_, byte) => {
  for (let bit = 0; bit < 8; bit++) byte = (byte >>> 1) ^ (byte & 1 ? 0x82f63b78 : 0);
  return byte;
});

/** CRC-32C (Castagnoli) of bytes; zlib's crc32 is another one. */
export function crc32c(bytes) {
  let crc = ~0;
  for (const byte of bytes) crc = (crc >>> 8) ^ CRC32C[(crc ^ byte) & 0xff];
  return ~crc >>> 0;
}

// ---- programs

/** Run a program with its arguments, the first of which is a service's address. If something is wrong
 * with them, or goes wrong, the process ends with one sentence.
 * @param usage the command. @param least the fewest arguments. @param most the most.
 * @param options those of parseArgs. @param run gets an array of arguments, and the options. */
export async function program({ usage, least, most = least, options = {} }, run) {
  process.stdout.on('error', fail);
  try {
    const { positionals, values } = argumentsOf(usage, options);
    if (positionals.length < least || positionals.length > most) throw new Misuse(usage);
    if (!/.:\d+$/.test(positionals[0])) throw new Misuse(usage, `${positionals[0]} is no host:port`);
    await reached(positionals[0]);
    await run(positionals, values);
  } catch (error) {
    fail(error);
  }
}

/** Arguments that a program does not take. */
export class Misuse extends Failure {
  constructor(usage, why) {
    super(why ? `${why}; usage: ${usage}` : `usage: ${usage}`);
  }
}

function argumentsOf(usage, options) {
  try {
    return parseArgs({ allowPositionals: true, options });
  } catch (error) {
    throw new Misuse(usage, error.message.split('.')[0]);
  }
}

function fail(error) {
  const isOurs = error instanceof Failure || error instanceof SeqgateError;
  // A system call's error, of a file say, has a code, too. Another one is a mistake in the program.
  process.stderr.write(`${isOurs || typeof error.code === 'string' ? error.message : error.stack}\n`);
  process.exit(error instanceof Misuse ? 2 : 1);
}

/** What is sent as JSON lines over standard input: an array for each chunk that arrives.
 * @param fields what a line must have: functions by name, of a value, that return what is wrong. */
export async function* linesIn(fields) {
  let rest = '';
  let number = 0;
  for await (const chunk of process.stdin.setEncoding('utf8')) {
    const lines = (rest + chunk).split('\n');
    rest = lines.pop();
    yield* parsed(lines);
  }
  if (rest) yield* parsed([rest]);

  function* parsed(lines) {
    const values = [];
    let wrong;
    for (const line of lines) {
      number++;
      const [value, fault] = valueOf(line, fields);
      if ((wrong = fault)) break;
      values.push(value);
    }
    if (values.length > 0) yield values;
    if (wrong) throw new Failure(`line ${number} of the input ${wrong}`);
  }
}

/** The value of a line, and what is wrong with it. */
function valueOf(line, fields) {
  let value;
  try {
    value = JSON.parse(line);
  } catch {
    return [undefined, 'is not JSON'];
  }
  if (value === null || typeof value !== 'object') return [undefined, 'is not an object'];
  for (const [name, isRight] of Object.entries(fields)) {
    if (!isRight(value[name])) return [undefined, `has no valid "${name}": ${JSON.stringify(value[name])}`];
  }
  return [value];
}

export const isText = (value) => typeof value === 'string';

/** Whether a value is a sequence id, as text. The services judge whether it is too large. */
export const isId = (value) => isText(value) && /^\d{1,20}$/.test(value) && BigInt(value) < 2n ** 64n;

export const isTextOrAbsent = (value) => value === undefined || isText(value);

export const areProperties = (value) =>
  value === undefined || (value !== null && typeof value === 'object' && Object.values(value).every(isText));

/** Write objects as JSON lines to standard output. */
export function say(...objects) {
  process.stdout.write(objects.map((each) => `${JSON.stringify(each)}\n`).join(''));
}
