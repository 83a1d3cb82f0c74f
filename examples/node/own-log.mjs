// A log of one's own, with each message in it exactly once.
//
//     node own-log.mjs DEDUP TOPIC FILE < messages
//
// The log is a file of JSON lines. Messages come as JSON lines, {"producer", "sequenceId", "payload"},
// the sequence id as text; each is answered by {"producer", "sequenceId", "verdict"} once it is
// durable. Send all of it twice, kill this at any point and send everything again: the dedup service
// says what is new, and this says to the dedup service what it has stored.
//
//     Admit      which of these are new?
//     append     those, and flush them to the disk
//     Confirm    the log has them
//
// Killed between the first two: the next process rolls back what was admitted. Killed between the
// last two, or when Redis was lost: the service answers Behind, and is told what the log has.

import { open } from 'node:fs/promises';
import { createServer } from 'node:net';
import { resolve } from 'node:path';

import {
  Failure,
  SeqgateError,
  ask,
  askUntilAnswered,
  connect,
  isId,
  isText,
  linesIn,
  pause,
  program,
  say,
  timestamp,
} from './seqgate.mjs';

const CLAIMS_MAX = 1_000; // in a call; the service takes 10,000
const PAGE_MAX = 10_000; // entries in a confirmation
const BEGINNING = '{"epoch":"'; // of the file

/** The file. A line is an entry, {"producer", "sequenceId", "payload", "time"}, or {"epoch"}: where a
 * process began. An entry's position is the epoch, and its place after that line. */
class Log {
  #file;
  entries = [];
  epoch = 0n;

  /** Begin a new epoch. What a process before this one wrote in part is cut off; what it wrote and
   * did not flush is flushed. */
  static async open(path) {
    const log = new Log();
    log.#file = await open(path, 'a+');
    const text = await log.#file.readFile();
    if (!text.toString().startsWith(BEGINNING.slice(0, text.length))) {
      throw new Failure(`${path} is no log of this program`);
    }
    const end = text.lastIndexOf('\n') + 1;
    const lines = text.toString('utf8', 0, end).split('\n').slice(0, -1);
    lines.forEach((line, at) => log.#add(parse(line, `line ${at + 1} of ${path}`)));
    await log.#file.truncate(end);
    await log.append([{ epoch: String(log.epoch + 1n) }]);
    return log;
  }

  /** Append lines, durably. */
  async append(lines) {
    await this.#file.appendFile(lines.map((line) => `${JSON.stringify(line)}\n`).join(''));
    await this.#file.datasync();
    for (const line of lines) this.#add(line);
  }

  #add(line) {
    if (line.epoch !== undefined) {
      this.epoch = BigInt(line.epoch);
      this.next = 0;
    } else {
      this.entries.push({ ...line, position: { ledgerId: String(this.epoch), entryId: String(this.next++) } });
    }
  }

  /** The position of the last entry; undefined: there is none. */
  get tail() {
    return this.entries.at(-1)?.position;
  }

  /** The place in `entries` after a position. */
  after(position) {
    if (!position) return 0;
    const at = this.entries.findLastIndex((each) => compare(each.position, position) <= 0);
    return at + 1;
  }
}

function parse(line, place) {
  try {
    return JSON.parse(line);
  } catch {
    throw new Failure(`${place} is damaged`);
  }
}

function compare(one, other) {
  const order = BigInt(one.ledgerId) - BigInt(other.ledgerId) || BigInt(one.entryId) - BigInt(other.entryId);
  return Number(order > 0n) - Number(order < 0n);
}

/** The one who asks, for one log. */
class Deduplication {
  #client;
  #topic;
  #log;
  #revision;

  constructor(address, topic, log) {
    this.#client = connect('DedupWriterService', address);
    this.#topic = topic;
    this.#log = log;
  }

  close() {
    this.#client.close();
  }

  #request(fields = {}) {
    const writer = { incarnation: '1', epoch: String(this.#log.epoch), position: this.#log.tail };
    return { topic: this.#topic, writer, ...fields };
  }

  /** Withdraw what was admitted and is not in the log, and confirm what is. */
  async takeOver() {
    const answer = await askUntilAnswered(this.#client, 'rollback', this.#request());
    this.#revision = answer.rolledBack?.revision;
    if (answer.behind) await this.confirm(answer.behind.confirmed);
  }

  /** Tell what the log has after a position, page by page. */
  async confirm(after) {
    for (let from = this.#log.after(after); from < this.#log.entries.length; ) {
      const page = this.#log.entries.slice(from, from + PAGE_MAX);
      const producers = Map.groupBy(page, (entry) => entry.producer);
      const confirmation = {
        after: this.#log.entries[from - 1]?.position,
        through: page.at(-1).position,
        producers: [...producers].map(([producerName, entries]) => ({
          producerName,
          highestSequenceIds: entries.map((entry) => entry.sequenceId),
          lastAppendTime: timestamp(entries.at(-1).time),
        })),
        entryCount: page.length,
        entriesRemaining: this.#log.entries.length - from - page.length,
      };
      const answer = await askUntilAnswered(this.#client, 'confirm', this.#request({ confirmation }));
      this.#revision = answer.confirmed?.revision;
      from = answer.behind ? this.#log.after(answer.behind.confirmed) : from + page.length;
    }
  }

  /** Messages with their verdicts, in their order: [{message, verdict}]. */
  async admit(messages) {
    const producers = Map.groupBy(messages, (message) => message.producer);
    const claims = [...producers].map(([producerName, own]) => ({
      producerName,
      sequenceIds: own.map((message) => message.sequenceId),
    }));
    for (let attempt = 0; ; attempt++) {
      const request = this.#request({ claims });
      // When an answer is lost, the state is not at this revision any more, and says so.
      request.writer.revision = this.#revision;
      let answer;
      try {
        answer = await ask(this.#client, 'admit', request);
      } catch (error) {
        if (!(error instanceof SeqgateError && error.isAway)) throw error;
        await pause(attempt, error);
        continue;
      }
      if (answer.verdicts) {
        this.#revision = answer.verdicts.revision;
        const verdicts = new Map();
        [...producers.values()].forEach((own, at) => {
          own.forEach((message, place) => verdicts.set(message, answer.verdicts.producers[at].verdicts[place]));
        });
        return messages.map((message) => ({ message, verdict: verdicts.get(message).replace('CLAIM_VERDICT_', '') }));
      }
      if (answer.behind) await this.confirm(answer.behind.confirmed);
      else await this.takeOver(); // Changed
    }
  }
}

/** Store what is new of some messages, and answer each. */
async function store(messages, log, deduplication) {
  for (let waiting = messages; waiting.length > 0; ) {
    const judged = await deduplication.admit(waiting);
    const added = judged.filter(({ verdict }) => verdict === 'NEW');
    const before = log.tail;
    if (added.length > 0) {
      const time = Date.now();
      const entry = ({ message: { producer, sequenceId, payload } }) => ({ producer, sequenceId, payload, time });
      await log.append(added.map(entry));
      await deduplication.confirm(before); // it could ride on the next Admit
    }
    // A second copy waits for the first one, and what follows it waits, too. (PARTIAL is for batches,
    // and the other verdicts for chunks.)
    const isOpen = ({ verdict }) => verdict === 'IN_FLIGHT' || verdict === 'HELD';
    for (const each of judged) {
      const { verdict, message: { producer, sequenceId } } = each;
      if (!isOpen(each)) say({ producer, sequenceId, verdict });
    }
    waiting = judged.filter(isOpen).map(({ message }) => message);
  }
}

/** Refuse to run beside another process with this file. The kernel lets go of the name when this
 * process ends, however it does. (Linux; elsewhere, lock as the platform can.) */
async function lock(path) {
  const server = createServer().unref();
  await new Promise((resolve, reject) => {
    server.once('error', (error) => {
      reject(error.code === 'EADDRINUSE' ? new Failure(`another process writes ${path}`) : error);
    });
    server.listen(`\0seqgate-own-log:${path}`, resolve);
  });
}

const MESSAGE = { producer: isText, sequenceId: isId, payload: isText };

await program({ usage: 'node own-log.mjs DEDUP TOPIC FILE < messages', least: 3 }, async ([address, topic, path]) => {
  await lock(resolve(path));
  const log = await Log.open(path);
  const deduplication = new Deduplication(address, topic, log);
  await deduplication.takeOver();
  for await (const lines of linesIn(MESSAGE)) {
    for (let from = 0; from < lines.length; from += CLAIMS_MAX) {
      await store(lines.slice(from, from + CLAIMS_MAX), log, deduplication);
    }
  }
  deduplication.close();
});
