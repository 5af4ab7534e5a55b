"""A store with a slow network: a folder as an S3 bucket and as repositories of a hub.

Each answer has a latency, each connection a limited speed. Of what is put, small objects are kept; others are counted
and thrown away.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

_PIECE_NBYTES = 256 << 10
_COMMIT = "c" * 40
_TIME = "2026-01-01T00:00:00.000Z"


class Store:
    """The objects of one bucket named `bench`, below the keys that their paths in `root` are."""

    def __init__(self, root: Path, latency_s: float, bytes_per_s: float) -> None:
        self.root, self.latency_s, self.bytes_per_s = root, latency_s, bytes_per_s
        self.put: dict[str, tuple[int, str]] = {}
        self.kept: dict[str, bytes] = {}
        self.digests = {path: _digest(path) for path in root.rglob("*") if path.is_file()}
        self.sent_nbytes = self.num_requests = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := (await reader.readline()).decode().strip():
                method, target, _ = line.split(" ", 2)
                headers = {}
                while header := (await reader.readline()).decode().strip():
                    name, _, value = header.partition(":")
                    headers[name.lower()] = value.strip()
                self.num_requests += target != "/counts"
                await asyncio.sleep(self.latency_s)
                await self._answer(method, target, headers, reader, writer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(
        self, method: str, target: str, headers: Mapping[str, str], reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:  # fmt: skip
        split = urlsplit(target)
        query = parse_qs(split.query, keep_blank_values=True)
        key = unquote(split.path).removeprefix("/bench").lstrip("/")
        if method == "GET" and split.path == "/counts":
            _send(writer, 200, {}, f"{self.sent_nbytes} {self.num_requests}".encode())
        elif split.path.startswith("/api/models/bench/"):
            parts = split.path.split("/")
            found = self._tree(parts[4]) if "tree" in parts[5:] else self._repository(parts[4])
            _send(writer, 200, {"Content-Type": "application/json"}, json.dumps(found).encode())
        elif "/resolve/" in split.path:  # of /bench/REPOSITORY/resolve/COMMIT/NAME
            repository, _, name = key.partition("/resolve/")
            await self._read(method, f"{repository}/{name.partition('/')[2]}", headers, writer)
        elif method == "GET" and not key:
            _send(writer, 200, {}, self._list(query.get("prefix", [""])[0]).encode())
        elif method in ("GET", "HEAD"):
            await self._read(method, key, headers, writer)
        elif method == "PUT":
            await self._receive(key, query, int(headers["content-length"]), reader, writer)
        elif method == "POST":
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            if "uploads" in query:
                text = f"<InitiateMultipartUploadResult><Bucket>bench</Bucket><Key>{escape(key)}</Key>"
                _send(writer, 200, {}, (text + "<UploadId>1</UploadId></InitiateMultipartUploadResult>").encode())
            elif "delete" in query:
                names = re.findall("<Key>(.*?)</Key>", body.decode())
                for name in names:
                    self.put.pop(unescape(name), None)
                gone = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
                _send(writer, 200, {}, f"<DeleteResult>{gone}</DeleteResult>".encode())
            else:
                assert body
                text = f'<CompleteMultipartUploadResult><Key>{escape(key)}</Key><ETag>"1"</ETag>'
                _send(writer, 200, {}, (text + "</CompleteMultipartUploadResult>").encode())
        else:
            _send(writer, 204, {}, b"")

    def _list(self, prefix: str) -> str:
        files = sorted(path for path in self.root.rglob("*") if path.is_file())
        rows = {path.relative_to(self.root).as_posix(): (path.stat().st_size, self.digests[path]) for path in files}
        found = "".join(
            f'<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>"{etag}"</ETag>'
            f"<LastModified>{_TIME}</LastModified></Contents>"
            for key, (size, etag) in sorted((rows | self.put).items())
            if key.startswith(prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>"

    def _tree(self, name: str) -> list[dict[str, Any]]:
        entries = []
        for file in self._repository(name)["siblings"]:
            entry = {"type": "file", "path": file["rfilename"], "size": file["size"], "oid": file["blobId"]}
            if "lfs" in file:
                entry["lfs"] = {"oid": file["lfs"]["sha256"], "size": file["size"], "pointerSize": 130}
            entries.append(entry)
        return entries

    def _repository(self, name: str) -> dict[str, Any]:
        """Return the hub's listing of a repository, at the only commit that there is."""
        siblings = []
        for path in sorted((self.root / name).iterdir()):
            size, digest = path.stat().st_size, self.digests[path]
            file: dict[str, Any] = {"rfilename": path.name, "size": size, "blobId": digest[:40]}
            if path.suffix == ".safetensors":
                file["lfs"] = {"sha256": digest, "size": size, "pointerSize": 130}
            siblings.append(file)
        return {"_id": "0", "id": f"bench/{name}", "sha": _COMMIT, "siblings": siblings}

    async def _read(self, method: str, key: str, headers: Mapping[str, str], writer: asyncio.StreamWriter) -> None:
        path = self.root / key
        if key in self.put:
            size, etag = self.put[key]
            answer = {"ETag": f'"{etag}"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
            if method == "HEAD":
                _head(writer, 200, answer, size)
                return
            answer["Content-Range"] = f"bytes 0-{size - 1}/{size}"
            _send(writer, 206, answer, self.kept[key])
            return
        if not path.is_file():
            _send(writer, 404, {}, b"<Error><Code>NoSuchKey</Code></Error>" if method == "GET" else b"")
            return
        size = path.stat().st_size
        begin, end, status = 0, size, 200
        answer = {
            "ETag": f'"{self.digests[path]}"',
            "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
            "X-Repo-Commit": _COMMIT,
        }
        if (asked := headers.get("range")) is not None:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end, status = int(first), min(size, int(last) + 1), 206
            answer["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        _head(writer, status, answer, end - begin if method == "GET" else size)
        if method == "HEAD":
            return
        loop = asyncio.get_running_loop()
        begun, sent = loop.time(), 0
        with path.open("rb") as file:
            file.seek(begin)
            while sent < end - begin:
                writer.write(file.read(min(_PIECE_NBYTES, end - begin - sent)))
                sent += min(_PIECE_NBYTES, end - begin - sent)
                await writer.drain()
                await asyncio.sleep(max(0.0, begun + sent / self.bytes_per_s - loop.time()))
        self.sent_nbytes += end - begin

    async def _receive(
        self, key: str, query: Mapping[str, list[str]], nbytes: int, reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:  # fmt: skip
        loop = asyncio.get_running_loop()
        begun, received, small = loop.time(), 0, b""
        while received < nbytes:
            piece = await reader.readexactly(min(_PIECE_NBYTES, nbytes - received))
            received += len(piece)
            if nbytes < 1 << 20:
                small += piece
            await asyncio.sleep(max(0.0, begun + received / self.bytes_per_s - loop.time()))
        if "partNumber" in query:
            self.put[key] = (self.put.get(key, (0, ""))[0] + nbytes, "1")
            etag = "1"
        else:
            etag = hashlib.md5(small).hexdigest()
            self.put[key], self.kept[key] = (nbytes, etag), small
        _send(writer, 200, {"ETag": f'"{etag}"'}, b"")


def _digest(path: Path) -> str:
    """Return what the hub lists: the SHA-256 of a large file, git's SHA-1 of a small one."""
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _head(writer: asyncio.StreamWriter, status: int, headers: Mapping[str, str], nbytes: int) -> None:
    lines = [f"HTTP/1.1 {status} -", *(f"{name}: {value}" for name, value in headers.items())]
    writer.write("\r\n".join([*lines, f"Content-Length: {nbytes}", "", ""]).encode())


def _send(writer: asyncio.StreamWriter, status: int, headers: Mapping[str, str], body: bytes) -> None:
    _head(writer, status, headers, len(body))
    writer.write(body)


async def _main(store: Store) -> None:
    server = await asyncio.start_server(store.serve, "127.0.0.1", 0, limit=1 << 20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--latency", type=float, default=0.04, help="seconds before each answer")
    parser.add_argument("--rate", type=float, default=8e6, help="bytes per second of a connection")
    given = parser.parse_args()
    asyncio.run(_main(Store(given.root, given.latency, given.rate)))
