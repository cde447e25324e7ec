"""The checksum of everything in a store: XXH3 with 128 bits.

Of the hashes at hand it is the only one faster than a disk (measured on one core of the build
machine: xxh3_128 9.6 GB/s, crc32 2.6, blake2b 0.42, sha256 0.20), and 128 bits are enough to name
content. It guards against accidents, not against an attacker.
"""

import xxhash

NAME = "xxh3_128"
Digest = xxhash.xxh3_128
DIGEST_BYTES = 16


def new() -> Digest:
    return Digest()


def of(data: bytes | memoryview) -> str:
    """Hexadecimal digest of some bytes."""
    return xxhash.xxh3_128_hexdigest(data)
