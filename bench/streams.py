"""Time reading from slow remote stores, and writing to them, against a bare client with 64 requests; write it as JSON.

    python bench/streams.py [--runs 3] [--gb 0.65] [--folder DIR] [--out bench/results/streams.json]

The store is a server on loopback with a latency and a limited speed of each connection, so that only concurrency
helps. The output is a folder in memory, if /dev/shm is there. `hub` is compared with `hf download` too, whose files are
left whole. A first run of each compares the result with the source.

What this machine can do at most is measured, too: those with BLAKE3 also hash each file and write it to memory, or read
it from a folder, as a pack has to on the same cores, and check nothing. `bare client, SHA-256` hashes each file, as
the hub's listing requires, and `bare httpx client` reads from the hub with huggingface_hub's own client, and keeps
nothing. The peer of `bucket to bucket` reads with 64 requests and sends with 64 others, in objects of 8 MiB.
`cpu_s_per_gb` is that of the client's process, without the server's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import measure
from checkpoints import llama_of, write_checkpoint

NUM_STREAMS = 64
BARE, BARE_PUT, BARE_SHA = "bare client", "bare client, PUTs", "bare client, SHA-256"
BARE_COPY = "bare client, GETs and PUTs"
WHOLE, WHOLE_PUT, WHOLE_COPY = (f"bare client, BLAKE3, {what}" for what in ("files", "PUTs of files", "GETs and PUTs"))
REQUEST_NBYTES = 8 << 20
LINKS = {"40 ms, 8 MB/s": (0.04, 8e6), "5 ms, 1 GB/s": (0.005, 1e9)}
PAUSE_S = 2.0


def main() -> None:
    parser = measure.options_of(__doc__, gb=0.65, runs=3)
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-streams-") as scratch:
        root = Path(scratch, "root")
        config = llama_of(options.gb * 1e9 / 2, 1024, 8)
        nbytes = write_checkpoint(root / "model", config, num_shards=4)
        write_checkpoint(root / "shuffled", config, num_shards=4, shuffled=True)
        for name, (latency_s, bytes_per_s) in LINKS.items():
            with serve(root, latency_s, bytes_per_s) as port:
                found[name] = compare(root, Path(scratch), port, options.runs)
    result = {
        "what": f"{nbytes / 1e6:.0f} MB of a Llama in 4 shards packed for 4 stages from a server on loopback; MB/s of "
        f"the median, and ratios within a turn to a bare obstore client with {NUM_STREAMS} GETs of 8 MiB at a time",
        **measure.circumstances(),
        "turns": options.runs,
        "links": found,
    }
    measure.write_result(result, options.out)


def compare(root: Path, scratch: Path, port: int, runs: int) -> dict[str, object]:
    """Measure all contenders at one link."""
    out = Path("/dev/shm" if Path("/dev/shm").is_dir() else scratch, f"bench-streams-{os.getpid()}")
    endpoint = f"http://127.0.0.1:{port}"
    environment = {
        **os.environ, "PYTHONPATH": str(measure.ROOT), "AWS_ENDPOINT_URL": endpoint, "AWS_SKIP_SIGNATURE": "true",
        "AWS_REGION": "x", "AWS_ALLOW_HTTP": "true", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
        "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HOME": str(scratch / "hub"),
    }  # fmt: skip
    for source in ("model", "shuffled"):
        check(f"s3://bench/{source}", root / source, out, environment)
    contenders = {
        BARE: partial(bare, port),
        BARE_SHA: partial(bare, port, _BARE, "sha256"),
        "bare httpx client": partial(bare, port, _BARE_HTTPX),
        "bucket": partial(pack, "s3://bench/model", out, environment, port),
        "bucket, tensors shuffled over shards": partial(pack, "s3://bench/shuffled", out, environment, port),
        "hub": partial(pack, "hf://bench/model", out, environment, port),
        "hf download": partial(download, out, environment),
        WHOLE: partial(bare, port, _BARE, "blake3", str(out)),
        BARE_PUT: partial(bare, port, _BARE_PUT),
        WHOLE_PUT: partial(bare, port, _BARE_PUT, str(root / "model")),
        BARE_COPY: partial(bare, port, _BARE_COPY),
        WHOLE_COPY: partial(bare, port, _BARE_COPY, "blake3"),
        "local to bucket": partial(send, str(root / "model"), environment, port),
        "bucket to bucket": partial(send, "s3://bench/model", environment, port),
    }
    turns = measure.take_turns(contenders, runs, pause_s=PAUSE_S)
    found = {name: [turn[name] for turn in turns] for name in contenders}
    speeds = {name: [turn["mb_per_s"] for turn in of_name] for name, of_name in found.items()}
    return {
        name: {
            "mb_per_s": round(statistics.median(speeds[name])),
            "of_bare_client": measure.median_ratio(speeds[name], speeds[peer_of(name)], 2),
            "of_one_with_blake3": measure.median_ratio(speeds[name], speeds[whole_peer_of(name)], 2),
            **(
                {"of_bare_client_sha256": measure.median_ratio(speeds[name], speeds[BARE_SHA], 2)}
                if name == "hub"
                else {}
            ),
            **{key: max(turn[key] for turn in found[name]) for key in found[name][0] if key != "mb_per_s"},
        }
        for name in contenders
    }


def peer_of(name: str) -> str:
    if name in (BARE_COPY, WHOLE_COPY, "bucket to bucket"):
        return BARE_COPY
    return BARE_PUT if name.endswith(("PUTs", "PUTs of files", "to bucket")) else BARE


def whole_peer_of(name: str) -> str:
    """Return the bare client that does what a pack has to: it also hashes, and writes or reads files."""
    return {BARE: WHOLE, BARE_PUT: WHOLE_PUT, BARE_COPY: WHOLE_COPY}[peer_of(name)]


def check(source: str, local: Path, out: Path, environment: Mapping[str, str]) -> None:
    """Check the result first: the packed tensors equal the source's."""
    command = [*measure.RESHARD, "pack", source, "--layout", "pp=4", "--out", str(out), "--no-sync"]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    measure.run_quietly([*measure.RESHARD, "verify", str(out), "--against", str(local)])
    shutil.rmtree(out)


def pack(source: str, out: Path, environment: Mapping[str, str], port: int) -> dict[str, float]:
    """Pack in a fresh process, whose imports are not counted; everything else is."""
    found = counted(environment, port, source, str(out))
    shutil.rmtree(out)
    return found


def send(source: str, environment: Mapping[str, str], port: int) -> dict[str, float]:
    """Pack into a new prefix of the bucket."""
    return counted(environment, port, source, f"s3://bench/out-{uuid.uuid4().hex}")


def download(out: Path, environment: Mapping[str, str]) -> dict[str, float]:
    found = child(environment, _DOWNLOAD, str(out))
    shutil.rmtree(out)
    return found


def bare(port: int, script: str | None = None, *args: str) -> dict[str, float]:
    return child({**os.environ, "HF_HUB_OFFLINE": "0"}, script or _BARE, str(port), *args)


def counted(environment: Mapping[str, str], port: int, source: str, out: str) -> dict[str, float]:
    """Pack, and count how often the bytes were read and the requests."""
    before = counts(port)
    found = child(environment, _PACK, source, out)
    sent_nbytes, num_requests = (now - then for now, then in zip(counts(port), before, strict=True))
    nbytes = found["mb_per_s"] * found["wall_s"] * 1e6
    return found | {"times_read": round(sent_nbytes / nbytes, 3), "requests": num_requests}


def child(environment: Mapping[str, str], script: str, *args: str) -> dict[str, float]:
    """Run a script in a process, and return what it measured: speed, seconds, processor time and peak memory."""
    environment = {name: value for name, value in environment.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", script, *args], env=environment, check=True, stdout=subprocess.PIPE)
    nbytes, wall_s, cpu_s, peak_kib = map(float, done.stdout.split()[-4:])
    return {
        "mb_per_s": nbytes / wall_s / 1e6,
        "wall_s": round(wall_s, 3),
        "cpu_s_per_gb": round(cpu_s / nbytes * 1e9, 2),
        "peak_mb": round(peak_kib / 1e3),
    }


def counts(port: int) -> tuple[int, int]:
    """Return the bytes that the server has sent of files, and the requests that it had."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/counts") as answer:
        sent_nbytes, num_requests = map(int, answer.read().split())
    return sent_nbytes, num_requests


_BEGIN = """
import resource
began_s, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
"""
_END = """
wall_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_SELF)
cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
print(nbytes, wall_s, cpu_s, after.ru_maxrss)
"""
_PACK = f"""
import sys, time
import reshard, reshard.copy.bucket, reshard.packing.pack, obstore.store, stores.hub.store
{_BEGIN}
nbytes = reshard.pack(sys.argv[1], sys.argv[2], "pp=4", sync=False).nbytes
{_END}"""
_DOWNLOAD = f"""
import sys, time
from pathlib import Path
from huggingface_hub import snapshot_download
{_BEGIN}
snapshot_download("bench/model", local_dir=sys.argv[1], max_workers=8)
nbytes = sum(path.stat().st_size for path in Path(sys.argv[1]).glob("*.safetensors"))
{_END}"""
_BARE = f"""
import hashlib, os, shutil, sys, time
from concurrent.futures import ThreadPoolExecutor
import obstore
from blake3 import blake3
from obstore.store import S3Store
{_BEGIN}
options = dict(skip_signature=True, region="x", virtual_hosted_style_request=False)
options |= dict(endpoint="http://127.0.0.1:" + sys.argv[1], client_options={{"allow_http": True}})
store = S3Store("bench", prefix="model", **options)
files = [file for page in store.list() for file in page]
size = {REQUEST_NBYTES}
pieces = [[(file["path"], at, min(at + size, file["size"])) for at in range(0, file["size"], size)] for file in files]
get = lambda piece: obstore.get_range(store, piece[0], start=piece[1], end=piece[2])
def take(number, requests):
    hasher, nbytes = (blake3() if "blake3" in sys.argv else hashlib.sha256()), 0
    file = open(f"{{sys.argv[3]}}/{{number}}" if "blake3" in sys.argv else os.devnull, "wb", 0)
    while requests:
        data = requests.pop(0).result()
        nbytes += len(data)
        if len(sys.argv) > 2:
            hasher.update(data)
        if "blake3" in sys.argv:
            file.write(data)
    return nbytes
if "blake3" in sys.argv:
    os.mkdir(sys.argv[3])
with ThreadPoolExecutor({NUM_STREAMS}) as pool, ThreadPoolExecutor(os.cpu_count()) as takers:
    requests = [[pool.submit(get, piece) for piece in of_file] for of_file in pieces]
    nbytes = sum(takers.map(take, range(len(requests)), requests))
{_END}
if "blake3" in sys.argv:
    shutil.rmtree(sys.argv[3])
"""
_BARE_COPY = f"""
import sys, time
from concurrent.futures import ThreadPoolExecutor
import obstore
from blake3 import blake3
from obstore.store import S3Store
{_BEGIN}
options = dict(skip_signature=True, region="x", virtual_hosted_style_request=False)
options |= dict(endpoint="http://127.0.0.1:" + sys.argv[1], client_options={{"allow_http": True}})
source, target = (S3Store("bench", prefix=prefix, **options) for prefix in ("model", "put"))
files = [file for page in source.list() for file in page]
size = {REQUEST_NBYTES}
pieces = [(file["path"], at, min(at + size, file["size"])) for file in files for at in range(0, file["size"], size)]
get = lambda piece: obstore.get_range(source, piece[0], start=piece[1], end=piece[2])
def put(number, got):
    data = got.result()
    if "blake3" in sys.argv:
        blake3(data)
    obstore.put(target, str(number), data, use_multipart=False)
    return len(data)
with ThreadPoolExecutor({NUM_STREAMS}) as getters, ThreadPoolExecutor({NUM_STREAMS}) as putters:
    requests = [getters.submit(get, piece) for piece in pieces]
    nbytes = sum(putters.map(put, range(len(pieces)), requests))
{_END}"""
_BARE_HTTPX = f"""
import sys, time
from concurrent.futures import ThreadPoolExecutor
from huggingface_hub import get_session
hub = "http://127.0.0.1:" + sys.argv[1]
{_BEGIN}
files = get_session().get(hub + "/api/models/bench/model?blobs=true").json()["siblings"]
size = {REQUEST_NBYTES}
pieces = [(file["rfilename"], at, file["size"]) for file in files for at in range(0, file["size"], size)]
def get(piece):
    name, begin, end = piece[0], piece[1], min(piece[1] + size, piece[2])
    url, headers = hub + "/bench/model/resolve/main/" + name, {{"Range": f"bytes={{begin}}-{{end - 1}}"}}
    with get_session().stream("GET", url, headers=headers) as answer:
        return sum(map(len, answer.iter_raw()))
with ThreadPoolExecutor({NUM_STREAMS}) as pool:
    nbytes = sum(pool.map(get, pieces))
{_END}"""
_BARE_PUT = f"""
import os, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import obstore
from blake3 import blake3
from obstore.store import S3Store
options = dict(skip_signature=True, region="x", virtual_hosted_style_request=False)
options |= dict(endpoint="http://127.0.0.1:" + sys.argv[1], client_options={{"allow_http": True}})
store, size = S3Store("bench", prefix="put", **options), {REQUEST_NBYTES}
same = bytes(size)
{_BEGIN}
paths = [path for folder in sys.argv[2:] for path in Path(folder).glob("*.safetensors")]
files = [open(path, "rb", 0) for path in paths]
pieces = [(file.fileno(), at) for file, path in zip(files, paths) for at in range(0, path.stat().st_size, size)]
def put(number):
    data = same
    if pieces:
        data = os.pread(pieces[number][0], size, pieces[number][1])
        blake3(data)
    obstore.put(store, str(number), data, use_multipart=False)
    return len(data)
with ThreadPoolExecutor({NUM_STREAMS}) as pool:
    nbytes = sum(pool.map(put, range(len(pieces) or {NUM_STREAMS + NUM_STREAMS // 4})))
{_END}"""


@contextlib.contextmanager
def serve(root: Path, latency_s: float, bytes_per_s: float) -> Iterator[int]:
    """Run the server in a process; yield its port."""
    script = str(Path(__file__).with_name("slow_store.py"))
    command = [sys.executable, script, str(root), "--latency", str(latency_s), "--rate", str(bytes_per_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield int(server.stdout.readline())
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
