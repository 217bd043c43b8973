"""`make demo`: three nodes, one policy, live traffic, on one machine.

* :mod:`demo.stage` starts the real control plane, the operator and three agents, and ends them;
* :mod:`demo.traffic` plays an engine on each node and verifies every byte;
* :mod:`demo.watching` samples what the nodes say and hold;
* :mod:`demo.screen` shows it, as a live table or as plain lines;
* :mod:`demo.story` is the order of events, and :mod:`demo.promises` what must hold;
* :mod:`demo.plot` draws the end of the story.
"""
