"""Makes the key of an entry's metadata, under which a chain's decision is cached."""

from typing import Any

from seqgate.services.filter.core.chain import Chain, Key, ReadKey
from seqgate.services.runtime.projection import field_readers, properties_reader


def reader_of(chain: Chain) -> ReadKey:
    digest = chain.digest
    properties = properties_reader(chain.names) if chain.reads_properties else lambda _: ()
    if not chain.fields:

        def read_properties(metadata: Any) -> Key:
            return digest, properties(metadata)

        return read_properties

    fields = field_readers(chain.fields)

    def read(metadata: Any) -> Key:
        return (digest, properties(metadata), *[field(metadata) for field in fields])

    return read
