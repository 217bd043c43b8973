"""The order of events, from an empty machine to an empty machine.

1. A control plane, CRDs, nodes, operator and agents come up.
2. A policy is applied with kubectl; traffic begins once it is in force on all nodes.
3. A third of the way, an edited policy is applied under traffic: smaller L0, larger L1. What is
   measured: the time until all nodes report the new revision, that no agent restarts, that no
   request fails.
4. After another third the edit is taken back. This time the engines hold their breath for the
   moment, so that it is the edit alone that moves pages: all of them must still be there.
5. The end: promises, a plot, and everything that was started is gone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvtier_agent.replay.sessions import SessionSettings, SessionTraffic
from kvtier_agent.replay.trace import Request, read_trace

from demo import promises as rules
from demo.promises import Edit, Promise
from demo.screen import Screen
from demo.stage import NODES, DemoError, Stage
from demo.traffic import BLOCK_TOKENS, NodeTraffic, route
from demo.watching import Frame, Watch, condition

HERE = Path(__file__).parent
POLICY = HERE / "policy.yaml"
EDITED = HERE / "policy-edited.yaml"


@dataclass(frozen=True, slots=True)
class Script:
    """How the demo is played.

    Attributes:
        seconds: of traffic.
        trace: a file to take the traffic from; None = generated sessions.
        out: folder of the plot.
        pace: trace seconds per second.
        seed: of the generated traffic and of the pages.
    """

    seconds: float
    trace: Path | None
    out: Path
    pace: float
    seed: int


@dataclass(frozen=True, slots=True)
class Ending:
    """What came of it."""

    promises: list[Promise]
    facts: list[tuple[str, str]]


def play(script: Script, screen: Screen) -> Ending:
    """The whole story. Raises DemoError when it cannot go on."""
    began = time.monotonic()
    shares = _shares(script, screen)
    stage = Stage(screen.say)
    with stage:
        stage.start()
        applied = time.monotonic()
        stage.apply(POLICY)
        first = stage.wait_in_force()
        screen.say(
            f"kubectl apply policy.yaml: revision {first[:10]} in force on all nodes after "
            f"{time.monotonic() - applied:.2f} s"
        )
        with ExitStack() as stack:
            traffic = {
                node: NodeTraffic(node, stage.socket(node), share, script.pace, script.seed)
                for node, share in zip(NODES, shares, strict=True)
            }
            watch = Watch(stage, traffic)
            stack.callback(_stop, traffic, watch)
            for one in traffic.values():
                one.start()
            watch.start()
            screen.say("traffic has begun on all nodes")
            watch.mark("policy")
            edit = _watched(script, screen, stage, traffic, watch, first)
        kept = rules.judge({node: one.figures() for node, one in traffic.items()}, edit)
        frames, marks = watch.frames, watch.marks
        facts = _facts(frames, stage)
    plot = script.out / "demo.png"
    # Drawing waits until nothing runs any more: it takes a second of a whole core.
    from demo.plot import draw

    draw(frames, marks, plot)
    left = stage.left_behind()
    kept.append(
        Promise("everything it started is gone at the end", ", ".join(left) or "gone", not left)
    )
    facts += [("plot", str(plot)), ("the whole demo took", f"{time.monotonic() - began:.0f} s")]
    return Ending(kept, facts)


def _watched(
    script: Script,
    screen: Screen,
    stage: Stage,
    traffic: Mapping[str, NodeTraffic],
    watch: Watch,
    first: str,
) -> Edit:
    """Traffic, with an edit of the policy and its taking back in between."""
    part = script.seconds / 3
    with screen.live():
        _look(part, screen, stage, traffic, watch)
        boots = _boots(stage)
        watch.mark("edit")
        second, first_seconds = _edit(screen, stage, EDITED, first)
        _look(part, screen, stage, traffic, watch)
        with ExitStack() as breath:
            for one in traffic.values():
                breath.enter_context(one.held_back())
            for one in traffic.values():
                one.settle()
            before = {node: one.held() for node, one in traffic.items()}
            watch.mark("revert")
            _, second_seconds = _edit(screen, stage, POLICY, second)
            for one in traffic.values():
                one.settle()
            after = {node: one.still_held(before[node]) for node, one in traffic.items()}
        _look(part, screen, stage, traffic, watch)
    return Edit((first_seconds, second_seconds), before, after, boots, _boots(stage))


def _edit(screen: Screen, stage: Stage, policy: Path, revision: str) -> tuple[str, float]:
    """Apply a policy while `revision` is in force: the new revision, and how long it took."""
    began = time.monotonic()
    stage.apply(policy)
    new = stage.wait_in_force(other_than=revision)
    seconds = time.monotonic() - began
    screen.say(
        f"kubectl apply {policy.name}: revision {new[:10]} in force on all nodes after "
        f"{seconds:.2f} s"
    )
    return new, seconds


def _look(
    seconds: float, screen: Screen, stage: Stage, traffic: Mapping[str, NodeTraffic], watch: Watch
) -> None:
    """Show frames for some time, and see that everything still runs."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(min(0.25, max(0.0, end - time.monotonic())))
        stage.check()
        for broken in (watch.broken, *(one.broken for one in traffic.values())):
            if broken is not None:
                raise DemoError(f"traffic or watch ended: {broken!r}") from broken
        if watch.frames:
            screen.show(watch.frames[-1])


def _stop(traffic: Mapping[str, NodeTraffic], watch: Watch) -> None:
    watch.stop()
    for one in traffic.values():
        one.stop()


def _boots(stage: Stage) -> dict[str, str]:
    nodes = stage.nodes()
    return {n: str(nodes.get(n, {}).get("status", {}).get("bootID", "")) for n in NODES}


def _shares(script: Script, screen: Screen) -> list[Iterator[Request]]:
    """Each node's requests."""
    if script.trace is not None:
        trace = read_trace(script.trace, block_tokens=BLOCK_TOKENS)
        for bad in trace.bad_lines[:3]:
            screen.say(f"{script.trace}: {bad}")
        screen.say(f"traffic from {script.trace}: {len(trace.requests):,} requests")
        return [iter(share) for share in route(trace.requests, len(NODES))]
    screen.say("traffic from a generator of multi-turn agent and chat sessions")
    return [
        SessionTraffic(SessionSettings(seed=script.seed + number)).requests()
        for number in range(len(NODES))
    ]


def _facts(frames: list[Frame], stage: Stage) -> list[tuple[str, str]]:
    if not frames:
        return []
    status = stage.policy().get("status", {})
    ready = condition(status, "Ready")
    facts = [("the policy says", f"Ready={ready.get('status')}, {ready.get('message', '')}")]
    for node in frames[-1].nodes:
        total = node.total
        facts.append(
            (
                node.node,
                f"{total.requests:,} requests, {total.blocks:,} blocks: "
                f"{100 * total.hits / max(1, total.blocks):.1f} % hits",
            )
        )
    return facts
