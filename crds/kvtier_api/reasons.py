"""The reasons that conditions of both kinds give, and what to do about each.

One enum, so that a reason is spelled the same by operator and agent, in alerts and in the
runbooks. ``message`` is a template for ``str.format`` with the named fields; a writer may put a
more exact sentence in its place. ``runbook`` is one line: what to do.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class About(NamedTuple):
    message: str
    runbook: str


class Reason(StrEnum):
    """Condition reasons. The value is the word that stands in the object, equal to the name."""

    about: About

    def __new__(cls, word: str, message: str, runbook: str) -> Reason:
        member = str.__new__(cls, word)
        member._value_ = word
        member.about = About(message, runbook)
        return member

    def say(self, **fields: object) -> str:
        """The message with its fields filled in. A missing field raises ``KeyError``."""
        return self.about.message.format(**fields)

    # -- both kinds: Ready
    InForce = (
        "InForce",
        "revision {revision} is in force",
        "Nothing to do.",
    )
    PartlyApplied = (
        "PartlyApplied",
        "revision {revision} is in force except {fields}, which cannot be obeyed here",
        "Where the engine owns L0, fields about L0 have no effect and are listed even if the "
        "policy does not write them: nothing to do. page.tokens: start engines with the policy's "
        "page size, or write theirs.",
    )

    # -- KVTierPolicy: Ready, Reconciling
    NoNodesSelected = (
        "NoNodesSelected",
        "no node matches the selector {selector}",
        "Compare spec.nodeSelector with `kubectl get nodes --show-labels`.",
    )
    Superseded = (
        "Superseded",
        "other policies rule all {count} nodes that nodeSelector matches: {policies}",
        "Raise spec.priority, or narrow a selector; status.supersededBy says who rules which node.",
    )
    RollingOut = (
        "RollingOut",
        "{updated} of {selected} nodes have revision {revision}",
        "Wait. If it lasts, look for nodes that are not Ready: `kubectl get ktn`.",
    )
    NodesNotReady = (
        "NodesNotReady",
        "{count} of {selected} nodes are not ready: {nodes}",
        "`kubectl describe ktn NODE` says why; look at the agent's log on that node.",
    )
    NodesStale = (
        "NodesStale",
        "{count} of {selected} nodes have not reported for three intervals: {nodes}",
        "Is the agent's Pod on that node running, and does it reach the API server? If no agent is "
        "meant to run there, narrow spec.nodeSelector.",
    )
    Paused = (
        "Paused",
        "rollout.paused is true: {count} of {selected} nodes do not get revision {desired}, "
        "which the spec asks for",
        "Set spec.rollout.paused to false to let the new revision out.",
    )
    ReconcilePaused = (
        "ReconcilePaused",
        "the annotation kvtier.io/reconcile: paused is set; nothing is written for this policy",
        "Remove the annotation kvtier.io/reconcile from the policy when you are done.",
    )
    Settled = (
        "Settled",
        "nothing to do",
        "Nothing to do.",
    )
    Deleting = (
        "Deleting",
        "the policy is being deleted",
        "Nothing to do; nodes keep serving what they hold for the grace period.",
    )

    # -- KVTierPolicy: Stalled
    InvalidSpec = (
        "InvalidSpec",
        "the spec breaks a rule, {problem}; revision {active} stays in force",
        "`kvtier policy validate FILE` lists every problem and says what to write instead.",
    )
    NodesCannotApply = (
        "NodesCannotApply",
        "{count} nodes cannot apply revision {revision}: {nodes}",
        "`kubectl describe ktn NODE` says which field cannot be applied there and why.",
    )
    RevisionConflict = (
        "RevisionConflict",
        "revision {name} exists with other content",
        "The ControllerRevision was made by hand or by another version: delete it, the operator "
        "writes it again. If there are 3 revisions of one generation, two versions of the operator "
        "run: stop one, then delete the surplus.",
    )
    Progressing = (
        "Progressing",
        "not stalled",
        "Nothing to do.",
    )

    # -- KVTierNode: Ready
    Starting = (
        "Starting",
        "the agent is starting: {step}",
        "Wait. If it lasts, look at `/readyz` of the agent and at its log.",
    )
    Stopping = (
        "Stopping",
        "the agent is stopping",
        "Nothing to do; engines recompute until the next agent is up.",
    )
    NoPolicy = (
        "NoPolicy",
        "no policy rules this node; pages are served for another {seconds} s, none are admitted",
        "Apply a KVTierPolicy whose nodeSelector matches the node, or nothing if this is meant.",
    )
    MemoryCut = (
        "MemoryCut",
        "a client cut the shared memory of {tiers} short: what lay there are misses",
        "Note who maps the file (`fuser -v`), then restart the agent on the node.",
    )
    TwoAgents = (
        "TwoAgents",
        "another agent, boot ID {boot_id}, reports for this node too; what stands here is of the "
        "one that wrote last",
        "Find the second agent (two DaemonSets, one started by hand, two machines with one "
        "--node-name) and stop it.",
    )
    Unhealthy = (
        "Unhealthy",
        "{loop} is not alive: {error}",
        "The agent restarts what it can; look at its log, then at the node.",
    )

    # -- KVTierNode: Clamped
    MemoryLimit = (
        "MemoryLimit",
        "L1 is {actual} instead of {wanted}: the Pod's memory limit is {limit}, 2 GiB of which "
        "are kept free",
        "Raise the agent's memory (chart value), or lower tiers.dram.",
    )
    SharedMemory = (
        "SharedMemory",
        "L1 is {actual} instead of {wanted}: {directory} has {free} free",
        "Enlarge /dev/shm of the node (where agent.sharedMemory.hostPath is empty: agent.memory) "
        "and restart the agent, or lower tiers.dram.",
    )
    PageTable = (
        "PageTable",
        "{tier} is {actual} instead of {wanted}: --max-pages {limit} leaves no more records",
        "Raise the agent's --max-pages, or make pages larger; each record takes 128 bytes of "
        "shared memory.",
    )
    FrozenTooLarge = (
        "FrozenTooLarge",
        "frozen prefix {prefix} may keep {actual} instead of {wanted}: all of them may take 90 % "
        "of {tier}",
        "Lower maxSize of frozenPrefixes, or make the tier larger: tiers.hbm, or tiers.dram where "
        "the engine owns L0.",
    )
    NotClamped = (
        "NotClamped",
        "tiers have the sizes that the policy asks for",
        "Nothing to do.",
    )

    # -- KVTierNode: Stalled (the last good revision stays in force)
    InvalidRevision = (
        "InvalidRevision",
        "revision {revision} is not valid: {problem}",
        "Operator and agent disagree about the API: upgrade the older of the two. An agent that "
        "runs alone: mend the policy file, `kvtier policy validate FILE`.",
    )
    UnknownFields = (
        "UnknownFields",
        "the agent does not know {fields}",
        "The agent is older than the policy's fields: upgrade the agent.",
    )
    VolumeUnknown = (
        "VolumeUnknown",
        "volume {volume} is not mapped on this node",
        "Add it to the chart's volumes (or --volume {volume}=DIR), or remove it from "
        "tiers.nvme.volumes.",
    )
    VolumeUnusable = (
        "VolumeUnusable",
        "volume {volume} cannot be used: {problem}",
        "Make the directory exist on a file system of its own, writable for the agent. If a newer "
        "agent wrote it: go back to that one, or empty the folder.",
    )
    VolumeFull = (
        "VolumeFull",
        "volume {volume} has {free} free, below its reserve of {reserve}",
        "Free space on the volume, or lower tiers.nvme.size.",
    )
    VolumeReadOnly = (
        "VolumeReadOnly",
        "volume {volume} is read-only",
        "Look for errors of the drive (`dmesg`); remount it, or take it out of tiers.nvme.volumes.",
    )
    VolumeInUse = (
        "VolumeInUse",
        "another agent holds the lock on volume {volume}",
        "Stop the other agent on this node; one folder serves one agent.",
    )
    OutOfMemory = (
        "OutOfMemory",
        "{tier} cannot be made {wanted}: {problem}",
        "Lower the tier's size, or free memory on the node. For vLLM: agent.l0: engine.",
    )
    Applied = (
        "Applied",
        "the revision asked for is in force",
        "Nothing to do.",
    )
