"""What a test does with a control plane: put objects in, look at them, leave nothing behind.

:class:`Kube` is the object behind the fixture ``kube``. It speaks to the API server as the
administrator. Tests share one control plane, because starting one takes two seconds; so after each
test everything is deleted that was not there before it, whatever made it (:class:`Sweeper`).
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from controlplane.api import ApiClient, ApiError, Object
from controlplane.launcher import ControlPlane

Found = TypeVar("Found")
Key = TypeVar("Key")

_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
_MANAGER = "kvtier-tests"
_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


def eventually(
    condition: Callable[[], Found], *, what: str, timeout: float = 15.0, every: float = 0.05
) -> Found:
    """The first true value that ``condition`` returns; AssertionError after ``timeout`` seconds.

    An AssertionError or ApiError that it raises counts as "not yet" and is shown at the end.
    """
    deadline = time.monotonic() + timeout
    last: object = None
    while True:
        try:
            last = found = condition()
            if found:
                return found
        except (AssertionError, ApiError, OSError) as error:
            last = error
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what}; at last: {last!r}")
        time.sleep(every)


class Resources:
    """What kinds of objects the API server has, and under which path each is found."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api
        self._paths: dict[tuple[str, str], tuple[str, bool]] = {}
        self._names: dict[str, tuple[str, str]] = {}
        self.sweepable: dict[str, str] = {}
        """Path of the list -> group, for everything that can be listed and deleted."""

    def refresh(self) -> None:
        self._paths.clear()
        self._names.clear()
        self.sweepable.clear()
        seen: set[tuple[str, str]] = set()
        for root in ("/api", "/apis"):
            for group in self._api.request("GET", root, accept=_DISCOVERY)["items"]:
                name = group.get("metadata", {}).get("name", "")
                for version in group["versions"]:
                    self._add(name, version["version"], version.get("resources", []), seen)

    def _add(
        self,
        group: str,
        version: str,
        resources: Iterable[Object],
        seen: set[tuple[str, str]],
    ) -> None:
        api_version = f"{group}/{version}" if group else version
        base = f"/apis/{api_version}" if group else f"/api/{version}"
        for resource in resources:
            plural, kind = resource["resource"], resource["responseKind"]["kind"]
            self._paths.setdefault(
                (api_version, kind), (f"{base}/@{plural}", resource["scope"] == "Namespaced")
            )
            for name in (plural, f"{plural}.{group}", *resource.get("shortNames", [])):
                self._names.setdefault(name, (api_version, kind))
            # The preferred version comes first, and one is enough to see every object.
            if (group, plural) not in seen and {"list", "delete"} <= set(resource["verbs"]):
                seen.add((group, plural))
                self.sweepable[f"{base}/{plural}"] = group

    def kind(self, name: str) -> tuple[str, str]:
        """apiVersion and kind of a resource given as ``nodes``, ``ktp``, ``leases.<group>``."""
        return self._known(self._names, name)

    def path(
        self, api_version: str, kind: str, name: str = "", namespace: str | None = None
    ) -> str:
        """Where an object is (or, without a name, the list); ``default`` is the usual namespace."""
        pattern, namespaced = self._known(self._paths, (api_version, kind))
        place = f"namespaces/{namespace or 'default'}/" if namespaced else ""
        return pattern.replace("@", place) + (f"/{name}" if name else "")

    def _known(self, table: dict[Key, Found], key: Key) -> Found:
        # A kind that has just been defined takes a moment to be announced.
        deadline = time.monotonic() + 10.0
        while key not in table:
            self.refresh()
            if key in table:
                break
            if time.monotonic() > deadline:
                raise AssertionError(f"the API server has no {key}")
            time.sleep(0.1)
        return table[key]


class Kube:
    """Objects of a running control plane, for tests; ``resource`` is a plural or short name."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.api = plane.api()
        self.resources = Resources(self.api)

    @property
    def kubeconfig(self) -> Path:
        return self.plane.kubeconfig

    def kubectl(
        self,
        *arguments: str,
        input: str | None = None,
        kubeconfig: Path | None = None,
        check: bool = True,
        timeout: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        return self.plane.kubectl(
            *arguments, input=input, kubeconfig=kubeconfig, check=check, timeout=timeout
        )

    def explain(self, path: str) -> str:
        """What ``kubectl explain`` tells of a field of a type that may just have been defined.

        A type's schema is published a moment after it is established and its objects are served.
        """

        def told() -> str:
            done = self.kubectl("explain", path, check=False)
            assert done.returncode == 0, done.stderr
            return done.stdout

        return eventually(told, what=f"the schema of {path}")

    def apply(self, *objects: Object) -> list[Object]:
        """Server-side apply as a user would (kubectl's field manager); what the server has now."""
        return [self.api.apply(self._path_of(item), item, manager="kubectl") for item in objects]

    def apply_status(self, item: Object) -> Object:
        """Server-side apply of the status subresource."""
        return self.api.apply(f"{self._path_of(item)}/status", item, manager="test")

    def get(self, resource: str, name: str, namespace: str | None = None) -> Object:
        """The object; raises :class:`controlplane.api.ApiError` (404) if there is none."""
        return self.api.get(self.resources.path(*self.resources.kind(resource), name, namespace))

    def find(self, resource: str, name: str, namespace: str | None = None) -> Object | None:
        """The object, or None."""
        return self.api.find(self.resources.path(*self.resources.kind(resource), name, namespace))

    def list(self, resource: str, namespace: str | None = None) -> list[Object]:
        path = self.resources.path(*self.resources.kind(resource), namespace=namespace)
        return list(self.api.get(path)["items"])

    def delete(self, resource: str, name: str, namespace: str | None = None) -> None:
        """Delete an object; nothing to delete is no error."""
        path = self.resources.path(*self.resources.kind(resource), name, namespace)
        _unless_missing(lambda: self.api.request("DELETE", path))

    def eventually(
        self, condition: Callable[[], Found], *, what: str, timeout: float = 15.0
    ) -> Found:
        return eventually(condition, what=what, timeout=timeout)

    def define(self, definitions: Iterable[Object]) -> None:
        """Make these CRDs what the API server has, and wait until it serves them.

        One that has been changed since is deleted first, so that nothing of the change stays.
        """
        for crd in definitions:
            path = f"{_CRDS}/{crd['metadata']['name']}"
            found = self.api.find(path)
            if found is not None and not _untouched(found):
                self.api.request("DELETE", path)
                eventually(partial(self._gone, path), what=f"{path} is gone")
            self.api.apply(path, crd, manager=_MANAGER)
            eventually(partial(self._served, path), what=f"{path} is served")

    def _gone(self, path: str) -> bool:
        return self.api.find(path) is None

    def _served(self, path: str) -> bool:
        crd = self.api.get(path)
        conditions = crd.get("status", {}).get("conditions") or []
        if not any(c["type"] == "Established" and c["status"] == "True" for c in conditions):
            return False
        spec = crd["spec"]
        version = next(v["name"] for v in spec["versions"] if v["served"])
        return (
            self.api.find(f"/apis/{spec['group']}/{version}/{spec['names']['plural']}") is not None
        )

    def _path_of(self, item: Object) -> str:
        metadata = item["metadata"]
        return self.resources.path(
            item["apiVersion"], item["kind"], metadata["name"], metadata.get("namespace")
        )


def _untouched(crd: Object) -> bool:
    """Whether nobody but :meth:`Kube.define` has written to a CRD, and it only once."""
    metadata = crd["metadata"]
    writers = {
        entry["manager"]
        for entry in metadata.get("managedFields", [])
        if entry.get("subresource") != "status"
    }
    return (
        "deletionTimestamp" not in metadata
        and metadata["generation"] == 1
        and writers == {_MANAGER}
    )


class Sweeper:
    """Deletes what came into a control plane (one that records writes) after this object was made.

    What that is, its audit log says: lists of all there is, before and after every test, would
    keep an API server busier than the tests do.
    """

    # Kept by the API server itself: one APIService per API group, one lease per server.
    _SKIPPED_GROUPS = frozenset({"apiregistration.k8s.io", "flowcontrol.apiserver.k8s.io"})
    _SKIPPED_NAMESPACES = frozenset({"kube-node-lease", "kube-public"})

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        # A line may get into the log after the object can be seen: what counts is when the server
        # received the request. It runs on this machine: one clock.
        self._since = datetime.now(UTC)
        self._mark = kube.plane.audit_log.stat().st_size

    def sweep(self, *, passes: int = 20) -> None:
        """Delete it all; AssertionError if something keeps coming back."""
        left: list[str] = []
        for _ in range(passes):
            new = self._new()
            if not new:
                return
            # Namespaces last: their contents go one by one, nobody here empties them.
            new.sort(key=lambda entry: entry[0].endswith("/namespaces"))
            left = [self._delete(path, item) for path, item in new]
            time.sleep(0.02)
        raise AssertionError(f"these come back after they were deleted: {', '.join(left)}")

    def _created(self) -> dict[tuple[str, str], set[str]]:
        """(group, resource) -> names, "" for one that the server chose."""
        found: dict[tuple[str, str], set[str]] = {}
        for event in self._kube.plane.audit_events(self._mark):
            status = event.get("responseStatus", {}).get("code")
            received = datetime.fromisoformat(event["requestReceivedTimestamp"])
            ref = event.get("objectRef", {})
            if status == 201 and received >= self._since and not ref.get("subresource"):
                kind = (ref.get("apiGroup", ""), ref["resource"])
                found.setdefault(kind, set()).add(ref.get("name", ""))
        return found

    def _new(self) -> list[tuple[str, Object]]:
        created = self._created()
        if not created:
            return []
        self._kube.resources.refresh()
        found: list[tuple[str, Object]] = []
        for path, group in self._kube.resources.sweepable.items():
            names = created.get((group, path.rpartition("/")[2]))
            if names is None or group in self._SKIPPED_GROUPS:
                continue
            try:
                items = self._kube.api.request("GET", path, accept=_METADATA)["items"] or []
            except ApiError as error:
                # Announced a moment longer than it is served.
                if error.status in (404, 405):
                    continue
                raise
            found += [(path, item) for item in items if self._is_new(path, item, names)]
        return found

    def _is_new(self, path: str, item: Object, names: set[str]) -> bool:
        metadata = item["metadata"]
        namespace = metadata.get("namespace")
        if namespace in self._SKIPPED_NAMESPACES:
            return False
        if namespace == "kube-system" and path.endswith(("/leases", "/configmaps")):
            return False
        # A name that was used before: of another namespace, or of an object that was there.
        came = datetime.fromisoformat(metadata["creationTimestamp"]) >= self._since.replace(
            microsecond=0
        )
        return came and (metadata["name"] in names or "" in names)

    def _delete(self, path: str, item: Object) -> str:
        metadata, api = item["metadata"], self._kube.api
        namespace, name = metadata.get("namespace"), metadata["name"]
        place = path
        if namespace:
            base, _, plural = path.rpartition("/")
            place = f"{base}/namespaces/{namespace}/{plural}"
        where = f"{place}/{name}"
        if metadata.get("finalizers") and "customresourcedefinitions" not in path:
            release = {"metadata": {"finalizers": None}}
            _unless_missing(
                lambda: api.request(
                    "PATCH", where, release, content_type="application/merge-patch+json"
                )
            )
        options = {"gracePeriodSeconds": 0, "propagationPolicy": "Background"}
        _unless_missing(lambda: api.request("DELETE", where, options))
        if path.endswith("/namespaces"):
            empty = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            empty["spec"] = {"finalizers": []}
            _unless_missing(lambda: api.request("PUT", f"{where}/finalize", empty))
        return where


def _unless_missing(request: Callable[[], object]) -> None:
    try:
        request()
    except ApiError as error:
        # 409: a namespace that is being emptied, or an object that changed under us; both are
        # looked at again.
        if error.status not in (404, 409):
            raise
