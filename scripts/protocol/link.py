#!/usr/bin/env python3
"""The secure link of docs/protocol.md, written from that text alone, as a check on the Go side.

    link.py vectors FILE                      write the test vectors
    link.py dial HOST:PORT                    be a client: send messages, expect each back
    link.py serve                             be a server on a free port, printed first: send everything back

dial and serve take the secret from MLXCEL_CLUSTER_SECRET and say how it went as one line of JSON.
"""

import argparse
import hashlib
import hmac
import json
import os
import socket
import struct
import sys

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

PREFIX = b"mlxcel" + struct.pack("<H", 6)
HELLO, PROOF, VERDICT_BODY = 240, 32, 256
CLIENT, SERVER = 1, 2
ACCEPT, CAPACITY, REFUSED = 1, 2, 3
BUSY = 1
MAX_TEXT = 65536
REKEY = 1 << 20


class LinkError(Exception):
    """How a handshake or a connection ended."""


def derive(material, salt, purpose):
    return HKDF(hashes.SHA256(), 32, salt, b"mlxcel/6 " + purpose.encode()).derive(material)


def sign(secret, purpose, transcript):
    return hmac.new(derive(secret, None, purpose), transcript, hashlib.sha256).digest()


def encode_hello(sender, identity, nonce, share):
    node, cluster, version = (identity[k].encode() for k in ("node", "cluster", "version"))
    return PREFIX + struct.pack(
        "<BBBBB3x32s32s64s64s32s", sender, identity["role"], len(node), len(cluster), len(version), nonce, share, node, cluster, version
    )


def decode_hello(wire, sender):
    if wire[:6] != PREFIX[:6]:
        raise LinkError("not a peer")
    if wire[:8] != PREFIX:
        raise LinkError("protocol version %d" % struct.unpack_from("<H", wire, 6))
    _, role, n, c, v, nonce, share, node, cluster, version = struct.unpack_from("<BBBBB3x32s32s64s64s32s", wire, 8)
    identity = {"role": role, "node": node[:n].decode(), "cluster": cluster[:c].decode(), "version": version[:v].decode()}
    if encode_hello(sender, identity, nonce, share) != wire:
        raise LinkError("malformed hello")
    return identity, share


def encode_verdict(code, text):
    kind = ACCEPT if code == 0 else CAPACITY if code == BUSY else REFUSED
    return struct.pack("<BBBx252s", kind, code, len(text.encode()), text.encode())


def traffic_keys(secret, shared, transcript):
    material = derive(secret, None, "traffic") + shared
    salt = hashlib.sha256(transcript).digest()
    return derive(material, salt, "client to server"), derive(material, salt, "server to client")


class Stream:
    """One direction's records."""

    def __init__(self, key, rekey):
        self.key, self.rekey, self.number = key, rekey, 0

    def _next(self):
        if self.number and self.number % self.rekey == 0:
            self.key = derive(self.key, None, "next key")
        nonce = struct.pack("<4xQ", self.number)
        self.number += 1
        return AESGCM(self.key), nonce

    def seal(self, text):
        aead, nonce = self._next()
        header = struct.pack("<I", len(text))
        return header + aead.encrypt(nonce, text, header)

    def open(self, header, sealed):
        aead, nonce = self._next()
        try:
            return aead.decrypt(nonce, sealed, header)
        except InvalidTag:
            raise LinkError("forged record") from None


class Link:
    """A secured connection."""

    def __init__(self, sock, peer, inward, outward):
        self.sock, self.peer, self.inward, self.outward, self.rest = sock, peer, inward, outward, b""

    def write(self, data):
        for at in range(0, len(data), MAX_TEXT):
            self.sock.sendall(self.outward.seal(data[at : at + MAX_TEXT]))

    def close(self):
        self.sock.sendall(self.outward.seal(b""))
        self.sock.shutdown(socket.SHUT_WR)

    def read(self):
        """The text of the next record, b"" at the peer's close."""
        header = receive(self.sock, 4)
        (n,) = struct.unpack("<I", header)
        if n > MAX_TEXT:
            raise LinkError("record too long")
        return self.inward.open(header, receive(self.sock, n + 16))

    def read_full(self, n):
        while len(self.rest) < n:
            text = self.read()
            if not text:
                raise LinkError("closed early")
            self.rest += text
        data, self.rest = self.rest[:n], self.rest[n:]
        return data


def receive(sock, n):
    data = b""
    while len(data) < n:
        part = sock.recv(n - len(data))
        if not part:
            raise LinkError("ended after %d of %d bytes" % (len(data), n))
        data += part
    return data


def receive_hello(sock, sender):
    prefix = receive(sock, 8)
    rest = b"" if prefix != PREFIX else receive(sock, HELLO - 8)
    return prefix + rest


def client(sock, secret, identity, rekey):
    private = X25519PrivateKey.generate()
    transcript = encode_hello(CLIENT, identity, os.urandom(32), private.public_key().public_bytes_raw())
    sock.sendall(transcript)
    hello = receive_hello(sock, SERVER)
    peer, share = decode_hello(hello, SERVER)
    transcript += hello
    proof = sign(secret, "client proof", transcript)
    sock.sendall(proof)
    transcript += proof
    try:
        body = receive(sock, VERDICT_BODY)
    except LinkError:
        raise LinkError("secret differs") from None
    transcript += body
    if not hmac.compare_digest(receive(sock, PROOF), sign(secret, "server verdict", transcript)):
        raise LinkError("forged verdict")
    kind, code, n, text = struct.unpack("<BBBx252s", body)
    if encode_verdict(code, text[:n].decode()) != body:
        raise LinkError("malformed verdict")
    if kind != ACCEPT:
        raise LinkError("refused %d: %s" % (code, text[:n].decode()))
    shared = private.exchange(X25519PublicKey.from_public_bytes(share))
    to_server, to_client = traffic_keys(secret, shared, transcript)
    return Link(sock, peer, Stream(to_client, rekey), Stream(to_server, rekey))


def server(sock, secret, identity, rekey, code, text):
    transcript = receive_hello(sock, CLIENT)
    peer, share = decode_hello(transcript, CLIENT)
    private = X25519PrivateKey.generate()
    hello = encode_hello(SERVER, identity, os.urandom(32), private.public_key().public_bytes_raw())
    sock.sendall(hello)
    transcript += hello
    want = sign(secret, "client proof", transcript)
    proof = receive(sock, PROOF)
    if not hmac.compare_digest(proof, want):
        raise LinkError("secret differs")
    body = encode_verdict(code, text)
    transcript += proof + body
    sock.sendall(body + sign(secret, "server verdict", transcript))
    if code:
        raise LinkError("refused it")
    shared = private.exchange(X25519PublicKey.from_public_bytes(share))
    to_server, to_client = traffic_keys(secret, shared, transcript)
    return Link(sock, peer, Stream(to_server, rekey), Stream(to_client, rekey))


def pattern(n):
    return bytes((i * 131 + n) % 251 for i in range(n))


def dial(args, secret, identity):
    host, _, port = args.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        link = client(sock, secret, identity, args.rekey)
        for n in (1, 100, 8192, MAX_TEXT, MAX_TEXT + 1, 300000):
            link.write(pattern(n))
            if link.read_full(n) != pattern(n):
                raise LinkError("another message came back")
        link.close()
        if link.rest or link.read():
            raise LinkError("no close came back")
        return link.peer


def serve(args, secret, identity):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        listening.settimeout(20)
        sock, _ = listening.accept()
    with sock:
        sock.settimeout(20)
        link = server(sock, secret, identity, args.rekey, args.refuse, args.text)
        while text := link.read():
            link.write(text)
        link.close()
        return link.peer


def vectors():
    """A whole conversation with fixed random numbers: nothing in it depends on the day."""
    fixed = lambda name: hashlib.sha256(b"mlxcel test vector: " + name.encode()).digest()
    secret = fixed("secret").hex().encode()
    ends = {}
    for name, sender, identity in (
        ("client", CLIENT, {"role": 1, "node": "coordinator", "cluster": "größe", "version": "v0.8.0"}),
        ("server", SERVER, {"role": 2, "node": "stage-0", "cluster": "größe", "version": "v0.8.0"}),
    ):
        private = X25519PrivateKey.from_private_bytes(fixed(name + " private"))
        share = private.public_key().public_bytes_raw()
        nonce = fixed(name + " nonce")
        ends[name] = {"identity": identity, "nonce": nonce, "private": private, "share": share, "hello": encode_hello(sender, identity, nonce, share)}
    hellos = ends["client"]["hello"] + ends["server"]["hello"]
    proof = sign(secret, "client proof", hellos)
    verdicts = []
    for code, text in ((0, ""), (BUSY, "serving another coordinator"), (3, "cluster “a” here, “b” there"), (200, "x" * 252)):
        body = encode_verdict(code, text)
        verdicts.append({"code": code, "text": text, "wire": (body + sign(secret, "server verdict", hellos + proof + body)).hex()})
    transcript = hellos + proof + encode_verdict(0, "")
    shared = ends["client"]["private"].exchange(X25519PublicKey.from_public_bytes(ends["server"]["share"]))
    to_server, to_client = traffic_keys(secret, shared, transcript)
    rekey = 3
    texts = [b"C", b"second", pattern(300), b"first under the second key", b"\0" * 16, pattern(17), b"third key", b""]
    directions = {}
    for name, key in (("client_to_server", to_server), ("server_to_client", to_client)):
        stream = Stream(key, rekey)
        directions[name] = {"key": key.hex(), "records": [{"text": t.hex(), "wire": stream.seal(t).hex()} for t in texts]}
    return {
        "secret": secret.hex(),
        "purpose": "beacon",
        "purpose_key": derive(secret, None, "beacon").hex(),
        "ends": {
            name: {k: v if isinstance(v, dict) else (v.private_bytes_raw() if k == "private" else v).hex() for k, v in end.items()}
            for name, end in ends.items()
        },
        "client_proof": proof.hex(),
        "verdicts": verdicts,
        "shared": shared.hex(),
        "rekey_every": rekey,
        "directions": directions,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("vectors").add_argument("file")
    for name in ("dial", "serve"):
        command = commands.add_parser(name)
        command.add_argument("--rekey", type=int, default=REKEY, help="records under one key")
        command.add_argument("--node", default="python")
        if name == "dial":
            command.add_argument("address")
        else:
            command.add_argument("--refuse", type=int, default=0, help="code of the refusal")
            command.add_argument("--text", default="", help="of the refusal")
    args = parser.parse_args()
    if args.command == "vectors":
        with open(args.file, "w", encoding="utf-8") as out:
            json.dump(vectors(), out, indent=1, ensure_ascii=False)
            out.write("\n")
        return
    identity = {"role": 3, "node": args.node, "cluster": "test", "version": "v0.8.0"}
    try:
        peer = (dial if args.command == "dial" else serve)(args, os.environ["MLXCEL_CLUSTER_SECRET"].encode(), identity)
        print(json.dumps({"peer": peer}))
    except (LinkError, OSError) as err:
        print(json.dumps({"error": str(err)}))
        sys.exit(1)


main()
