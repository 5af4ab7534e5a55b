"""The part of the hub's protocol that huggingface_hub writes with: repositories, branches, large files, commits.

Large files go to another host, in one piece or in parts. A commit is applied whole or not at all, and names its parent.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    from tests.servers.hub import Handler

    Base = Handler
else:
    Base = object

_GITATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


class WritingRoutes(Base):
    """The routes of POST and PUT."""

    def do_POST(self) -> None:
        if not self.begin():
            return
        routes: dict[str, Callable[..., None]] = {
            r"/api/repos/create": self.create_repo,
            r"/api/validate-yaml": self.validate_card,
            r"/api/models/([^/]+/[^/]+)/branch/([^/]+)": self.create_branch,
            r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)": self.preupload,
            r"/api/models/([^/]+/[^/]+)/commit/([^/]+)": self.commit,
            r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch": self.batch,
            r"/lfs/([0-9a-f]{64})/complete": self.complete,
        }
        for pattern, route in routes.items():
            if match := re.fullmatch(pattern, self.url.path):
                route(*map(unquote, match.groups()))
                return
        self.refuse(404, "no such route")

    def do_PUT(self) -> None:
        if not self.begin():
            return
        match = re.fullmatch(r"/lfs/([0-9a-f]{64})(?:/([0-9]+))?", self.url.path)
        assert match is not None, self.url.path
        if match[2] is None:
            self.store(match[1], self.sent)
        else:
            self.hub.parts[match[1], int(match[2])] = self.sent
            self.answer(200, b"", {"ETag": f'"{hashlib.md5(self.sent).hexdigest()}"'})

    def create_repo(self) -> None:
        asked = self.document
        name = f"{asked.get('organization') or 'member'}/{asked['name']}"
        if not self.may_write(name):
            return
        if self.hub.repo(name) is not None:
            self.refuse(409, "You already created this model repo")
            return
        is_private = asked.get("private") is True or asked.get("visibility") == "private"
        self.hub.push(name, {".gitattributes": _GITATTRIBUTES}, private=is_private)
        self.answer_json({"url": f"{self.hub.endpoint}/{name}", "name": name, "id": "0"})

    def create_branch(self, name: str, branch: str) -> None:
        if (repo := self.writable(name)) is None:
            return
        if branch in repo.refs:
            self.refuse(409, "Reference already exists")
            return
        repo.refs[branch] = repo.refs[str(self.document.get("startingPoint", "main"))]
        self.answer_json({})

    def preupload(self, name: str, branch: str) -> None:
        if (repo := self.writable(name)) is None:
            return
        here = repo.commits[repo.refs[branch]]
        ignored = [line for line in self.document.get("gitIgnore", self.hub.gitignore).split() if line]
        files = []
        for file in self.document["files"]:
            path, stored = file["path"], here.get(file["path"])
            is_large = path.endswith(".safetensors")
            digest = None if stored is None else hashlib.sha256(stored.data).hexdigest() if is_large else stored.git
            should_ignore = any(path.endswith(line.lstrip("*")) for line in ignored)
            mode = "lfs" if is_large else "regular"
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": should_ignore, "oid": digest})
        self.answer_json({"files": files})

    def batch(self, name: str) -> None:
        if self.writable(name) is None:
            return
        objects = [self.batch_entry(entry["oid"], entry["size"]) for entry in self.document["objects"]]
        self.answer_json({"transfer": "basic", "objects": objects})

    def batch_entry(self, oid: str, nbytes: int) -> dict[str, Any]:
        entry = {"oid": oid, "size": nbytes}
        if self.hub.large(oid) is not None:
            return entry
        place = self.hub.endpoint.replace("127.0.0.1", "localhost") + f"/lfs/{oid}"
        if self.hub.part_nbytes is None or nbytes <= self.hub.part_nbytes:
            return {**entry, "actions": {"upload": {"href": place + self.hub.upload_query}}}
        num_parts = -(-nbytes // self.hub.part_nbytes)
        parts = {f"{number:05}": f"{place}/{number}{self.hub.upload_query}" for number in range(1, num_parts + 1)}
        header = {"chunk_size": str(self.hub.part_nbytes), **parts}
        return {**entry, "actions": {"upload": {"href": f"{place}/complete", "header": header}}}

    def complete(self, oid: str) -> None:
        parts = [self.hub.parts[oid, part["partNumber"]] for part in self.document["parts"]]
        self.store(oid, b"".join(parts))

    def store(self, oid: str, data: bytes) -> None:
        if hashlib.sha256(data).hexdigest() != oid:
            self.refuse(400, "The content does not have this SHA-256")
            return
        self.hub.keep(oid, data)
        self.answer(200, b"")

    def validate_card(self) -> None:
        is_bad = "license: [" in self.document["content"]
        self.answer_json({"errors": [{"message": "unclosed list"}] if is_bad else [], "warnings": []}, 400 * is_bad)

    def commit(self, name: str, branch: str) -> None:
        if (repo := self.writable(name)) is None:
            return
        lines = [json.loads(line) for line in self.sent.splitlines()]
        parent = repo.refs[branch]
        if lines[0]["value"].get("parentCommit", parent) != parent:
            self.refuse(412, "A commit has happened since. Please refresh and try again.")
            return
        files = {path: file.data for path, file in repo.commits[parent].items()}
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                data = self.hub.large(value["oid"])
                if data is None:
                    self.refuse(400, f"{value['path']} was not uploaded")
                    return
                files[value["path"]] = data
            else:
                assert line["key"] == "deletedFile"
                del files[value["path"]]
        self.hub.messages.append(lines[0]["value"]["summary"])
        commit = self.hub.push(name, files, ref=branch, parent=parent)
        self.answer_json({"commitUrl": f"{self.hub.endpoint}/{name}/commit/{commit}", "commitOid": commit})

    # Who may write, and what was sent

    @property
    def document(self) -> Any:
        return json.loads(self.sent)

    def writable(self, name: str) -> Any:
        """Return a repository that the token may write; None where that was refused."""
        return self.hub.repo(name) if self.find(name, "main") and self.may_write(name) else None

    def may_write(self, name: str) -> bool:
        from tests.servers.hub import MEMBER, STRANGER

        if self.token not in (MEMBER, STRANGER):
            self.refuse(401, "Invalid credentials in Authorization header")
        elif self.token != MEMBER:
            self.refuse(403, f"You don't have the rights to write to {name}")
        else:
            return True
        return False

    def answer_json(self, document: Any, status: int = 0) -> None:
        self.answer(status or 200, json.dumps(document).encode())
