// Publish to a topic, each message once.
//
//     node publish.mjs LEDGER TOPIC PRODUCER [--checksums] < messages
//
// Messages come as JSON lines, {"sequenceId", "payload"} and perhaps "key" and "properties", the
// sequence id as text. Each is answered by {"sequenceId", "status", "position"}. Send a message again,
// in this process or in another one, and it is a DUPLICATE: nothing is stored twice. With --checksums,
// entries carry a CRC-32C, which the ledger checks before it stores them.

import { randomBytes } from 'node:crypto';

import {
  Entry,
  SeqgateError,
  areProperties,
  connect,
  crc32c,
  errorOfCall,
  isId,
  isText,
  isTextOrAbsent,
  linesIn,
  pause,
  program,
  say,
  textOf,
} from './seqgate.mjs';

const REQUEST_BYTES_MAX = 1024 * 1024;

/** What puts the stream on hold; SKIPPED is what came after it. */
const NOT_YET = ['FAILED', 'SKIPPED'];

class Producer {
  #home;
  #address;
  #open;
  #checksums;
  #client;
  #call;
  #responses;
  #opened;
  #requestId = 0n;

  constructor(address, topic, name, checksums) {
    this.#home = this.#address = address;
    // With an instance of its own, a new stream replaces this producer's old one, and no other's.
    this.#open = { topic, producerName: name, instance: randomBytes(16) };
    this.#checksums = checksums;
  }

  /** Publish messages in their order, and answer each when it is durable. */
  async send(messages) {
    let left = messages.map((message) => this.#publication(message));
    for (let attempt = 0; left.length > 0; ) {
      const before = left.length;
      let trouble;
      try {
        if (!this.#call) await this.#connect();
        trouble = await this.#round(left);
      } catch (error) {
        trouble = this.#disconnected(error);
      }
      // What nobody answered, and what was not stored for now, goes again, in order.
      left = left.filter((publication) => !publication.isDone);
      attempt = left.length < before ? 0 : attempt + 1;
      if (trouble && left.length > 0) await pause(attempt, trouble);
    }
  }

  /** Say that nothing more comes. */
  async close() {
    this.#call?.end();
    while (this.#call && !(await this.#responses.next()).done);
    this.#client?.close();
  }

  #publication({ sequenceId, payload, key, properties }) {
    const bytes = Buffer.from(payload);
    const metadata = {
      producerName: this.#open.producerName,
      sequenceId,
      publishTime: String(Date.now()),
      partitionKey: key,
      properties,
      payloadCrc32c: this.#checksums ? crc32c(bytes) : undefined,
    };
    const entries = [{ metadata, payload: bytes }];
    return { sequenceId, entries, size: Entry.serialize(entries[0]).length, isDone: false };
  }

  async #connect() {
    this.#client = connect('LedgerService', this.#address);
    this.#call = this.#client.publish();
    this.#responses = this.#call[Symbol.asyncIterator]();
    this.#call.write({ open: this.#open });
    this.#opened = (await this.#response()).opened;
  }

  async #response() {
    const { value, done } = await this.#responses.next();
    if (done) throw Object.assign(new Error('the service ended the stream'), { code: 14, details: 'ended' });
    return value;
  }

  /** After what error the same may be sent again on another stream. Throws the others. */
  #disconnected(error) {
    const why = errorOfCall(error);
    this.#call?.cancel();
    this.#client.close();
    this.#call = undefined;
    if (why.owner) this.#address = why.owner;
    else if (why.isAway) this.#address = this.#home;
    else throw why;
    return why;
  }

  /** Send publications, as many at a time as the window takes, until each is answered. Returns early,
   * with the reason, when the stream is on hold. */
  async #round(publications) {
    const unanswered = new Map();
    let next = 0, bytes = 0, trouble, draining = false;
    for (;;) {
      const parcel = [];
      for (let size = 0; !trouble && !draining && next < publications.length; next++) {
        const publication = publications[next];
        const isFull =
          unanswered.size >= this.#opened.windowMessages ||
          bytes + publication.size > this.#opened.windowBytes ||
          size + publication.size > REQUEST_BYTES_MAX;
        if (isFull && unanswered.size > 0) break;
        const requestId = String(++this.#requestId);
        // The first of a round ends the hold of the one before, if there is one.
        parcel.push({ requestId, entries: publication.entries, resume: next === 0 });
        unanswered.set(requestId, publication);
        bytes += publication.size;
        size += publication.size;
      }
      if (parcel.length > 0) this.#call.write({ publications: { publications: parcel } });
      if (unanswered.size === 0) return trouble;

      const response = await this.#response();
      draining ||= response.response === 'draining'; // what was sent is still answered
      for (const receipt of response.receipts?.receipts ?? []) {
        const publication = unanswered.get(receipt.requestId);
        unanswered.delete(receipt.requestId);
        bytes -= publication.size;
        const status = receipt.status.replace('RECEIPT_STATUS_', '');
        const error = receipt.error && new SeqgateError(receipt.error);
        if (NOT_YET.includes(status)) {
          trouble = error ?? trouble;
        } else {
          publication.isDone = true;
          const position = receipt.position && textOf(receipt.position);
          say({ sequenceId: publication.sequenceId, status, position, reason: error?.reason });
        }
      }
    }
  }
}

const COMMAND = {
  usage: 'node publish.mjs LEDGER TOPIC PRODUCER [--checksums] < messages',
  least: 3,
  options: { checksums: { type: 'boolean', default: false } },
};
const MESSAGE = { sequenceId: isId, payload: isText, key: isTextOrAbsent, properties: areProperties };

await program(COMMAND, async ([address, topic, name], { checksums }) => {
  const producer = new Producer(address, topic, name, checksums);
  for await (const lines of linesIn(MESSAGE)) await producer.send(lines);
  await producer.close();
});
