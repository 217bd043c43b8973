"""A real Kubernetes control plane on one machine, for the tests and the demo.

No mock of an API server refuses a bad object with the sentence the real one uses, so this package
runs the real one: etcd and kube-apiserver, and where they are asked for kube-controller-manager,
kube-scheduler and kwok, all of them built from their public Go modules by the Go compiler that is
already on the machine. Nothing in here is shipped.

* :mod:`controlplane.catalog` says which tools there are, and how each is built and recognised;
* :mod:`controlplane.build` finds a tool or builds it, once, into a folder of the user's cache;
* :mod:`controlplane.launcher` starts and stops a control plane (:class:`ControlPlane`);
* :mod:`controlplane.supervisor` ends its processes when the one that started them is gone;
* :mod:`controlplane.api` is a small HTTP client for readiness checks and for the cleaning up
  between tests.

Standard library only.
"""

from controlplane.build import ToolError, tool_path
from controlplane.launcher import ControlPlane, ControlPlaneError

__all__ = ["ControlPlane", "ControlPlaneError", "ToolError", "tool_path"]
