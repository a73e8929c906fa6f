"""The ciphers of streams, and the handshake that gives each connection its own keys.

The ciphers are those of libsodium, the library that also encrypts ZeroMQ's connections and is therefore in
the process already. Where ZeroMQ uses another library, there are no ciphers.

A worker and a server share a secret. The keys of a connection are derived from random bytes of both, so they
are new even if an attacker repeats recorded bytes. Both prove that they have the secret before any data.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from .native._streams import Cipher

SECRET_BYTES = SALT_BYTES = PROOF_BYTES = 32

_LIBRARY = re.compile(r" (/\S*/libsodium[^/\s]*\.so[^/\s]*)$", re.MULTILINE)
#: By their numbers in the handshake, in order of preference; each has keys of 32 bytes.
_NAMES = {3: "aegis256", 1: "aes256gcm", 2: "chacha20poly1305_ietf"}
_PERSON = b"kvstore streams"


class AeadFunctions(NamedTuple):
    """Addresses of a cipher's functions, and sizes of their arguments."""

    encrypt: int
    decrypt: int
    hash: int
    nonce_bytes: int
    tag_bytes: int


@functools.cache
def available_ciphers() -> tuple[int, ...]:
    """Return the numbers of the ciphers that this process has, in order of preference."""
    return tuple(_find_aeads())


def choose_cipher(offered: Sequence[int]) -> int | None:
    """Choose among the ciphers of the other side; None: this process has none of them."""
    return next((one for one in available_ciphers() if one in offered), None)


@functools.cache
def _find_aeads() -> dict[int, AeadFunctions]:
    """Find the functions of each cipher, in the library that zmq has loaded."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = sorted(set(_LIBRARY.findall(maps.read())))
    except OSError:
        return {}
    for path in paths:
        try:
            library = ctypes.CDLL(path)
            if library.sodium_init() < 0:
                continue
            return {
                number: _load_aead(library, name)
                for number, name in _NAMES.items()
                if _has_cipher(library, name)
            }
        except (OSError, AttributeError):  # a library without these functions
            continue
    return {}


def _has_cipher(library: ctypes.CDLL, name: str) -> bool:
    """Return whether a cipher is available; without AES instructions, AES is slow and leaks by its timing."""
    if not hasattr(library, f"crypto_aead_{name}_encrypt_detached"):
        return False
    return not name.startswith("ae") or library.crypto_aead_aes256gcm_is_available() == 1


def _load_aead(library: ctypes.CDLL, name: str) -> AeadFunctions:
    prefix = f"crypto_aead_{name}"
    sizes = [getattr(library, f"{prefix}_{what}") for what in ("keybytes", "npubbytes", "abytes")]
    for size in sizes:
        size.restype = ctypes.c_size_t
    key_bytes, nonce_bytes, tag_bytes = (size() for size in sizes)
    if key_bytes != 32:
        raise AttributeError(prefix)
    wanted = (f"{prefix}_encrypt_detached", f"{prefix}_decrypt_detached", "crypto_generichash")
    first, second, third = (ctypes.cast(getattr(library, one), ctypes.c_void_p).value or 0 for one in wanted)
    return AeadFunctions(first, second, third, nonce_bytes, tag_bytes)


class StreamHandshake:
    """Keys and proofs of one connection.

    Parameters
    ----------
    secret : bytes
        The secret that only the worker and the server know.
    hello : bytes
        All bytes that the worker has sent: the token of the secret, the cipher, and its salt.
    salt : bytes
        The server's salt.
    cipher : int
        The number of the cipher in `hello`.
    """

    def __init__(self, secret: bytes, hello: bytes, salt: bytes, cipher: int) -> None:
        self._cipher = cipher
        # Both salts have a fixed length, so different pairs of them give different texts.
        self._key = hashlib.blake2b(hello + salt, key=secret, digest_size=32, person=_PERSON).digest()

    def server_proof(self) -> bytes:
        """Return the proof for the worker that the server has the secret."""
        return self._derive_key(b"proof of the server")

    def worker_proof(self) -> bytes:
        """Return the proof for the server that the worker has the secret."""
        return self._derive_key(b"proof of the worker")

    def server_cipher(self) -> Cipher:
        """Return the cipher of the server's end."""
        return self._make_cipher(b"to the worker", b"to the server")

    def worker_cipher(self) -> Cipher:
        """Return the cipher of the worker's end."""
        return self._make_cipher(b"to the server", b"to the worker")

    def _make_cipher(self, goes: bytes, comes: bytes) -> Cipher:
        return Cipher(_find_aeads()[self._cipher], self._derive_key(goes), self._derive_key(comes))

    def _derive_key(self, purpose: bytes) -> bytes:
        return hashlib.blake2b(purpose, key=self._key, digest_size=32, person=_PERSON).digest()
