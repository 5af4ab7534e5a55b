"""As much of a Kubernetes API server as kubectl needs for JobSets and the logs of their pods."""

from __future__ import annotations

import json
import shutil
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

NAMESPACE = "team"
_GROUP = "jobset.x-k8s.io"
_VERSION = f"{_GROUP}/v1alpha2"
_GROUP_VERSION = {"groupVersion": _VERSION, "version": "v1alpha2"}
_VERBS = ["create", "delete", "get", "list"]


def _resources(version: str, name: str, kind: str) -> dict[str, Any]:
    resource = {"name": f"{name}s", "singularName": name, "namespaced": True, "kind": kind, "verbs": _VERBS}
    return {"kind": "APIResourceList", "groupVersion": version, "resources": [resource]}


_DISCOVERY: dict[str, dict[str, Any]] = {
    "/version": {"major": "1", "minor": "32", "gitVersion": "v1.32.4"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [
        {"name": _GROUP, "versions": [_GROUP_VERSION], "preferredVersion": _GROUP_VERSION}]},
    "/api/v1": _resources("v1", "pod", "Pod"),
    f"/apis/{_VERSION}": _resources(_VERSION, "jobset", "JobSet"),
    # kubectl leaves it to a server that says so to look at the fields of what it creates.
    "/openapi/v3": {"paths": {f"apis/{_VERSION}": {"serverRelativeURL": f"/openapi/v3/apis/{_VERSION}"}}},
    f"/openapi/v3/apis/{_VERSION}": {"openapi": "3.0.0", "info": {"title": "", "version": ""}, "paths": {
        f"/apis/{_VERSION}/namespaces/{{namespace}}/jobsets/{{name}}": {"patch": {
            "parameters": [{"name": "fieldValidation", "in": "query"}],
            "x-kubernetes-group-version-kind": {"group": _GROUP, "version": "v1alpha2", "kind": "JobSet"}}}}},
}  # fmt: skip


@dataclass(kw_only=True)
class Kubernetes:
    """A cluster with one namespace.

    Each look at its pods finds the next of `phases`, and a job is over when all logs have been read.
    """

    config: Path
    lines: dict[str, str]  # by pod: what it prints
    phases: list[str]
    terminating: tuple[str, ...] = ()  # pods that are asked to end
    jobsets: dict[str, dict[str, Any]] = field(default_factory=dict)
    queries: dict[str, dict[str, list[str]]] = field(default_factory=dict)  # by pod: of the last look at its log

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> dict[str, Any] | str | None:
        """Give an object, or the text of a log; None: there is no such thing."""
        words = path.strip("/").split("/")
        if "namespaces" in words and NAMESPACE not in words:
            return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": []} if words[-1] == "pods" else None
        if "jobsets" in words:
            if method == "POST":
                job = json.loads(body)
                job["metadata"] |= {"namespace": NAMESPACE, "uid": str(uuid.uuid4())}
                return self.jobsets.setdefault(job["metadata"]["name"], {**job, "status": {}})
            take = self.jobsets.pop if method == "DELETE" else self.jobsets.get
            return take(words[-1], None)
        if words[-1] == "pods":
            phase = self.phases.pop(0) if len(self.phases) > 1 else self.phases[0]
            pods = [self._pod(name, phase) for name in self.lines] if phase else []
            return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": pods}
        if words[-1] == "log":
            self.queries[words[-2]] = query
            if self.queries.keys() == self.lines.keys():
                self._complete()
            return "" if "sinceTime" in query else self.lines[words[-2]]
        return _DISCOVERY.get(path)

    def _pod(self, name: str, phase: str) -> dict[str, Any]:
        container, deleted = {"name": "runner", "image": "i"}, {"deletionTimestamp": "2026-11-22T09:00:00Z"}
        metadata = {"name": name, "namespace": NAMESPACE, **(deleted if name in self.terminating else {})}
        return {
            "kind": "Pod", "apiVersion": "v1", "metadata": metadata,
            "spec": {"containers": [container]}, "status": {"phase": phase},
        }  # fmt: skip

    def _complete(self) -> None:
        for job in self.jobsets.values():
            job["status"] = {"conditions": [{"type": "Completed", "status": "True"}]}


def missing_for_kubectl() -> str | None:
    """Say what this machine lacks to ask a cluster; None when it lacks nothing."""
    return None if shutil.which("kubectl") else "kubectl missing: kubernetes.io/docs/tasks/tools"


@contextmanager
def start_kubernetes(folder: Path, lines: dict[str, str], phases: list[str]) -> Iterator[Kubernetes]:
    """Answer kubectl, told of it by KUBECONFIG, until the block ends."""
    known = Kubernetes(config=folder / "kubeconfig", lines=lines, phases=phases)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            found = known.answer(self.command, asked.path, parse_qs(asked.query), body)
            kind, said = "application/json", json.dumps(found)
            if isinstance(found, str):
                kind, said = "text/plain", found
            if found is None:
                said = json.dumps({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound",
                                   "message": f"{asked.path} not found", "code": 404})  # fmt: skip
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(said.encode())

        do_POST = do_DELETE = do_GET

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        context = {"cluster": "here", "user": "here"}
        known.config.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": address}}],
            "contexts": [{"name": "here", "context": {**context, "namespace": NAMESPACE}},
                         {"name": "empty", "context": context}],
            "users": [{"name": "here", "user": {}}],
        }))  # fmt: skip
        try:
            yield known
        finally:
            server.shutdown()
