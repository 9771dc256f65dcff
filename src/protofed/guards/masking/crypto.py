"""The cryptography of a secure sum: every primitive is a library's.

Shamir's shares come from the inside of Flower 1.41.0; where it changes, a secure sum does not begin, or a secret that
was put together is found wrong (`joined_secret`). It is imported where it is used: see `prepare_flower`.
"""

import hashlib
from collections.abc import Callable
from itertools import combinations, islice
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from protofed.errors import BadMessage

KEY_BYTES = 32
SHARE_BYTES = 52
"""Of a secret of 32 bytes: Flower's position of 4 bytes, and three blocks of 16."""
WORDS: dict[int, np.dtype[Any]] = {32: np.dtype("<u4"), 64: np.dtype("<u8")}
"""Numbers are masked modulo 2^32, or 2^64."""

_HASH = ec.ECDSA(hashes.SHA384())
_NONCE = bytes(12)
_STREAM_START = bytes(16)
_MOST_TRIES = 500

Words = NDArray[Any]


def signature(key: ec.EllipticCurvePrivateKey, text: bytes) -> bytes:
    """The signature of a site's identity."""
    return key.sign(text, _HASH)


def is_signed(key: ec.EllipticCurvePublicKey, signed: bytes, text: bytes) -> bool:
    """Whether the holder of the identity has signed this text."""
    try:
        key.verify(signed, text, _HASH)
    except InvalidSignature:
        return False
    return True


def agreed_key(own: X25519PrivateKey, other: bytes, purpose: bytes) -> bytes:
    """The key that two sites have in common, for one purpose; a BadMessage where the other's key is none."""
    try:
        secret = own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:  # of small order: whatever is agreed upon with it is known to all
        raise BadMessage("a public key of a secure sum is not valid") from None
    return HKDF(hashes.SHA256(), KEY_BYTES, None, purpose).derive(secret)


def public_part(key: X25519PrivateKey) -> bytes:
    """What others may see of a key."""
    return key.public_key().public_bytes_raw()


def sealed(key: bytes, content: bytes, context: bytes) -> bytes:
    """Encrypted and authenticated. A key is agreed upon for one message in one direction, so it needs no nonce."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, content, context)


def unsealed(key: bytes, content: bytes, context: bytes) -> bytes | None:
    """What was sealed; None where somebody else did, or in another context."""
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, content, context)
    except InvalidTag:
        return None


def keystream(seed: bytes, like: Words, purpose: bytes) -> Words:
    """As many words, and such words, as in `like`, which nobody without the seed can tell from random ones."""
    key = HKDF(hashes.SHA256(), KEY_BYTES, None, purpose).derive(seed)
    stream = Cipher(algorithms.ChaCha20(key, _STREAM_START), mode=None).encryptor().update(bytes(like.nbytes))
    return np.frombuffer(stream, dtype=like.dtype)


def commitment(label: bytes, secret: bytes) -> bytes:
    """Tells whether a secret was put together rightly, and nothing else about one of 32 random bytes."""
    return hashlib.sha256(b"commitment" + label + secret).digest()


def split_secret(secret: bytes, threshold: int, number: int) -> list[bytes]:
    """Shares of which any `threshold` give the secret, and fewer nothing."""
    from flwr.common.secure_aggregation.crypto.shamir import create_shares

    return create_shares(secret, threshold, number)


def joined_secret(shares: list[bytes], threshold: int, is_right: Callable[[bytes], bool]) -> bytes | None:
    """The secret; where some shares are wrong, from those that are not; None where no choice of them is right."""
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares

    for chosen in islice(combinations(shares, threshold), _MOST_TRIES):
        try:
            secret = combine_shares(list(chosen))
        except ValueError:
            continue
        if len(secret) == KEY_BYTES and is_right(secret):
            return secret
    return None
