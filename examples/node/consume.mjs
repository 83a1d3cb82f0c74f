// Consume a subscription: messages come in order per key, and are acknowledged.
//
//     node consume.mjs DISPATCHER TOPIC SUBSCRIPTION [COUNT]
//
// Prints each message as a JSON line, and ends after COUNT of them; without COUNT, never. Any number
// of these share the subscription, each with keys of its own. A message comes again when a consumer dies before its acknowledgement is durable: an
// effect that must happen once is stored together with the message's position.

import zlib from 'node:zlib';

import {
  Failure,
  Misuse,
  SeqgateError,
  connect,
  errorOfCall,
  pause,
  program,
  readBatch,
  say,
  textOf,
} from './seqgate.mjs';

const PERMITS = 100; // messages that may be on their way to us

const DECOMPRESS = {
  COMPRESSION_TYPE_UNSPECIFIED: (bytes) => bytes,
  COMPRESSION_TYPE_ZLIB: zlib.inflateSync,
  COMPRESSION_TYPE_ZSTD: zlib.zstdDecompressSync,
};

/** The messages of an entry: one, or those of a batch that are not acknowledged already. */
function messagesOf({ metadata, payload, position, acknowledged, attempts }) {
  if (metadata.uuid) throw new Failure(`${textOf(position)} is a part of a large message`);
  const decompress = DECOMPRESS[metadata.compression];
  if (!decompress) throw new Failure(`${textOf(position)} needs ${metadata.compression}`);
  const bytes = decompress(payload);
  const common = { position: textOf(position), producer: metadata.producerName, attempts };
  if (!metadata.numMessagesInBatch) {
    const { sequenceId, partitionKey: key, properties } = metadata;
    return [{ ...common, sequenceId, key, properties, payload: bytes.toString() }];
  }
  let sequenceId = BigInt(metadata.sequenceId);
  return readBatch(bytes)
    .map((message, index) => {
      if (index > 0) sequenceId += BigInt(metadata.sequenceIdSteps[index - 1] ?? 1);
      const { partitionKey: key, properties } = message.metadata;
      return { ...common, index, sequenceId: String(sequenceId), key, properties, payload: message.payload.toString() };
    })
    .filter(({ index }) => !acknowledged.includes(index));
}

/** Consume at an instance until nothing is `left`. Throws what ends the stream before. */
async function consume(address, topic, subscription, progress) {
  const client = connect('DispatcherService', address);
  const call = client.consume();
  try {
    const options = { type: 'SUBSCRIPTION_TYPE_KEY_SHARED' };
    call.write({ subscribe: { topic, subscription, options, createAt: { earliest: {} } } });
    const permit = (messages) => messages > 0 && call.write({ permit: { messages } });
    permit(Math.min(PERMITS, progress.left));
    const unsettled = new Map(); // how many messages a request acknowledges
    let epoch, requestId = 0, leaving = false;
    let wanted = Math.max(0, progress.left - PERMITS); // and not permitted yet
    for await (const response of call) {
      if (response.subscribed) epoch = response.subscribed.epoch;
      // Each message is done when it has been printed, so there is never one to drop or to return
      // when the service says `revoked` or `moved`.
      for (const delivery of response.deliveries?.deliveries ?? []) {
        const messages = messagesOf(delivery);
        say(...messages);
        unsettled.set(String(++requestId), messages.length);
        call.write({ acknowledge: { requestId, epoch, settlements: [{ delivery: delivery.delivery }] } });
        permit(Math.min(messages.length, wanted));
        wanted = Math.max(0, wanted - messages.length);
      }
      if (response.settled) {
        const { error, requestId: request, outcomes } = response.settled;
        if (error) throw new SeqgateError(error);
        // STALE: it does not count, and the message comes again, here or elsewhere.
        if (outcomes.every((outcome) => outcome === 'SETTLE_OUTCOME_DONE')) progress.left -= unsettled.get(request);
        else permit(unsettled.get(request));
        unsettled.delete(request);
      }
      if (response.sought) permit(Math.min(PERMITS, progress.left)); // those before are gone
      if (!leaving && (progress.left <= 0 || response.draining)) {
        leaving = true;
        call.write({ leave: {} }); // what was acknowledged before is made durable
        call.end();
      }
    }
  } finally {
    call.cancel();
    client.close();
  }
}

const COMMAND = { usage: 'node consume.mjs DISPATCHER TOPIC SUBSCRIPTION [COUNT]', least: 3, most: 4 };

await program(COMMAND, async ([home, topic, subscription, count]) => {
  if (count !== undefined && !/^[1-9]\d{0,8}$/.test(count)) throw new Misuse(COMMAND.usage, `${count} is no count`);
  const progress = { left: Number(count ?? Infinity) };
  let address = home;
  for (let attempt = 0; progress.left > 0; attempt++) {
    const before = progress.left;
    try {
      await consume(address, topic, subscription, progress);
    } catch (error) {
      const why = errorOfCall(error);
      if (!why.owner && !why.isAway) throw why;
      address = why.owner || home; // another instance has the subscription, or is to be found anew
      if (progress.left < before) attempt = 0;
      await pause(attempt, why);
    }
  }
});
